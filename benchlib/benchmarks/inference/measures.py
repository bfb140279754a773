"""What a test means: whether it is valid, in our own eyes beside LoadGen's, and its metrics. No torch.

All numbers come from the raw samples of queries; those of LoadGen stand beside them.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchlib.benchmarks.inference.config import InferenceConfig
from benchlib.benchmarks.inference.rules import INVALID, Rule, lg_scenario
from benchlib.config import addresses
from benchlib.core.early_stopping import queries_needed
from benchlib.core.events import Event
from benchlib.core.stats import resampled
from benchlib.results.metrics import Metric, derived, measured, most_memory, not_available
from benchlib.workloads.llm import queries
from benchlib.workloads.llm.load import client_late, memory_of

WINDOWS = 10  # of equal time, whose spread gives the interval of a rate
RATE_SHARE = 1.2  # by which LoadGen's completed rate may exceed the one from raw samples
Events = Sequence[Event]
NotSeen = Mapping[str, str]  # why a sensor says nothing, by kind of sensor
BUSY = 0.9  # of a core: a client that only sends and computes nothing is late above it


@dataclass(frozen=True)
class Tested:
    """A performance test that ended: its raw samples, LoadGen's values, the rule it ran under, and facts of its process."""

    scenario: str
    table: np.ndarray
    log: Mapping[str, Any]
    rule: Rule
    repeated: int
    errors: Sequence[str]
    facts: Mapping[str, Any]
    computes: bool  # whether the engine computes in the process of the test

    @property
    def limits_s(self) -> dict[str, float]:
        """The limits of a query's latencies."""
        limits = {"ttft": self.rule.ttft_s, "tpot": self.rule.tpot_s}
        return {name: value for name, value in limits.items() if value is not None}

    @property
    def samples_per_s(self) -> float:
        """Completed queries over the time to the last completion."""
        done = queries.completed(self.table)
        return len(done) / queries.span_s(done) if len(done) else 0.0

    @property
    def stated_per_s(self) -> float | None:
        """LoadGen's own rate."""
        value = self.log.get("result_samples_per_second", self.log.get("result_completed_samples_per_sec"))
        return float(value) if isinstance(value, (int, float)) else None


def why_invalid(test: Tested) -> list[str]:
    """Return why a test is not valid, each with what would make it so; empty for a valid one.

    VALID takes that LoadGen says so, no error in its log, no failed query, counts and times that are possible, and a client
    that was not late.
    """
    table, log = test.table, test.log
    done = queries.completed(table)
    reasons = _loadgen_reasons(test)
    if errors := int(log.get("num_errors", 0)):
        shown = f" (the first: {log['errors'][0][:160]})" if log.get("errors") else ""
        reasons.append(f"LoadGen logged {errors:,} errors and may say VALID all the same{shown}: mend the engine")
    if failed := int(table["failed"].sum()):
        shown = f" (the first: {test.errors[0][:160]})" if test.errors else ""
        what = "LoadGen counts them as answered, in its rate and its percentiles"
        reasons.append(f"{failed:,} of {len(table):,} queries failed{shown}: {what}")
    if test.repeated:
        reasons.append(f"{test.repeated:,} first tokens or completions came twice: an engine completes a query once")
    paced = lg_scenario(test.scenario) == "Server"
    per_query = 1 if paced else int(log.get("generated_samples_per_query", 1))
    issued = int(log.get("result_query_count", 0)) * per_query
    if issued and issued != len(table):
        reasons.append(f"LoadGen counts {issued:,} samples, the client {len(table):,}: run it again")
    reasons += _impossible_times(test, done)
    limit_s = test.rule.ttft_s if test.rule.ttft_s is not None else math.inf
    if paced and (late := client_late(table, limit_s)):
        reasons.append(f"{late}: give the driver a core of its own, or lower server_qps")
    share = float(test.facts.get("driver_cpu_share", 0))
    if not test.computes and share > BUSY:
        reasons.append(f"the client used {100 * share:.0f}% of a core and may have been late: use a faster machine")
    stated = test.stated_per_s
    # LoadGen takes the failed for answered.
    counted = test.samples_per_s * len(table) / len(done) if len(done) else math.inf
    if stated and stated > RATE_SHARE * counted:
        reasons.append(
            f"LoadGen states {stated:.4g} samples/s, the raw samples give {test.samples_per_s:.4g}: it counts up to the end of "
            "the last issued query; use the rate of the raw samples and a longer run"
        )
    return reasons


def _loadgen_reasons(test: Tested) -> list[str]:
    """Return why LoadGen calls the test INVALID: its own reason is often empty."""
    log, rule = test.log, test.rule
    if log.get("result_validity") == "VALID":
        return []
    reasons = []
    over = ~queries.meets(test.table, test.limits_s)
    late, share = int(over.sum()), rule.percentile / 100
    lower = "lower server_qps or speed the engine up" if test.limits_s else "speed the engine up"
    if log.get("result_min_duration_met") is False:
        fields = "expected_qps" if test.scenario == "Offline" else "min_queries"
        reasons.append(f"it was shorter than {rule.min_duration_s:g} s: raise {fields}, so that LoadGen sends more")
    if log.get("result_min_queries_met") is False:
        reasons.append(f"it had fewer than {rule.min_queries:,} queries: raise min_queries or the duration")
    if log.get("result_perf_constraints_met") is False:
        values = queries.times_s(queries.completed(test.table))
        limits = [
            f"{name.upper()} p{rule.percentile:g} is {1e3 * queries.percentile(values[name], share):.4g} ms"
            f" (limit {1e3 * limit:g} ms)"
            for name, limit in test.limits_s.items()
        ]
        reasons.append(f"latency limits are not met: {', '.join(limits) or 'see its summary'}; {lower}")
    if log.get("early_stopping_met") is False:
        count, least = len(test.table), queries_needed(share, late)
        allowed = (1 - share) * count
        if count >= queries_needed(share, 0) and late >= allowed:  # more queries would show the same
            most = f"p{rule.percentile:g} allows fewer than {allowed:.3g}"
            reasons.append(f"{late:,} of {count:,} queries were over a limit, {most}: {lower}")
        else:
            reasons.append(
                f"{count:,} queries, {late:,} of them over a limit, do not prove p{rule.percentile:g}: at least {least:,} are needed "
                f"with so many; raise min_queries to {least}" + (f", or {lower}" if late else "")
            )
    return [f"LoadGen: {reason}" for reason in reasons] or ["LoadGen calls it INVALID and does not say why"]


def _impossible_times(test: Tested, done: np.ndarray) -> list[str]:
    reasons = []
    short = int((done["tokens"] < 2).sum())
    if short:
        reasons.append(f"{short:,} answers have fewer than two tokens: time per output token is not defined for them")
    if test.scenario != "Offline":
        first, end = queries.ttft_s(done), queries.latency_s(done)
        if missing := int(np.isnan(first).sum()):
            reasons.append(f"{missing:,} queries had no first token: LoadGen counts their TTFT as zero")
        if wrong := int(((first <= 0) | (first > end)).sum()):
            when = "came before their query or after its end"
            reasons.append(f"{wrong:,} first tokens {when}: clocks or events were mixed up")
        many = done[done["tokens"] > 1]
        if zero := int((queries.tpot_s(many) <= 0).sum()):
            what = "no time per output token; the engine must report its first token"
            reasons.append(f"{zero:,} answers of several tokens came all at once: {what}")
    return reasons


def percentile_metric(name: str, samples: np.ndarray, share: float, unit: str, why: str) -> Metric:
    """Return a percentile as a metric with the 95% interval of its order statistics (binomial, no distribution assumed).

    An end whose order statistic would lie outside the samples is None: 64 samples bound their p99 from below only, since
    all of them lie under it with 0.99^64 = 53%. The upper end of p99 takes 368.
    """
    from scipy.stats import binom

    ordered, n = np.sort(samples), len(samples)
    if not n:
        return not_available(name, unit, "lower", f"no samples: {why}")
    low, high = (int(binom.ppf(part, n, share)) for part in (0.025, 0.975))
    ci_low, ci_high = float(ordered[low - 1]) if low else None, float(ordered[high]) if high < n else None
    value = queries.percentile(ordered, share)
    largest = "; the largest of them" if int(n * share) >= n - 1 else ""
    return Metric(
        name=name, value=value, unit=unit, direction="lower", provenance="derived", n=n, ci_low=ci_low, ci_high=ci_high,
        reason=f"sorted[int(n p)] of {n:,} completed queries{largest}" + ("; too few for an upper end" if high >= n else ""),
    )  # fmt: skip


def rate_metric(name: str, table: np.ndarray, weights: np.ndarray, unit: str, why: str) -> Metric:
    """Return what was completed over the time to the last completion, with the interval from ``WINDOWS`` windows of equal time."""
    span = queries.span_s(table) if len(table) else 0.0
    if not span > 0:
        return not_available(name, unit, "higher", "no query was completed")
    begin, total = float(np.min(queries.start_s(table))), float(weights.sum())
    counts, _ = np.histogram(table["last_s"], WINDOWS, (begin, begin + span), weights=weights)
    low, high = resampled([counts * WINDOWS / span], lambda data, axis: np.asarray(np.mean(data, axis=axis)), 0.95)
    value = total / span
    return Metric(
        name=name, value=value, unit=unit, direction="higher", provenance="derived", n=WINDOWS,
        ci_low=min(low, value), ci_high=max(high, value), reason=why,
    )  # fmt: skip


def not_measured(scenario: str, scope: str, why: str) -> list[Metric]:
    """Return the first metrics of a performance test that did not end."""
    end = f"_{scenario.lower()}{scope}"
    rates = [not_available(f"{kind}_per_s{end}", f"{kind}/s", "higher", why) for kind in ("samples", "tokens")]
    return [*rates, not_available(f"latency_s{end}", "s", "lower", why)]


def marked(metrics: Sequence[Metric], tests: Sequence[Mapping[str, Any]], scope: str) -> list[Metric]:
    """Return the metrics, those of an INVALID test with ``INVALID`` before their names: no key number, price or baseline takes them.

    ``tests`` are rows of the result. A peak that a whole run confirmed is no value of the test beside it.
    """
    ends = tuple(f"_{str(row['test']).lower()}{scope}" for row in tests if row["valid"] != "VALID")
    return [
        metric.model_copy(update={"name": INVALID + metric.name})
        if metric.name.endswith(ends) and metric.value is not None and not metric.name.startswith("peak_")
        else metric
        for metric in metrics
    ]


def metrics_of(test: Tested, config: InferenceConfig, events: Events, scope: str) -> list[Metric]:
    """Return the metrics of a performance test; ``scope`` ends their names, see ``InferenceConfig.scope``."""
    end = f"_{test.scenario.lower()}{scope}"
    done = queries.completed(test.table)
    failed = int(test.table["failed"].sum())
    of = f"of completed queries, {failed} failed" if failed else "completed / (last completion - first start)"
    rates = [
        rate_metric(f"samples_per_s{end}", done, np.ones(len(done)), "samples/s", of),
        rate_metric(f"tokens_per_s{end}", done, done["tokens"].astype(float), "tokens/s", of),
    ]
    streamed = test.scenario != "Offline"
    metrics = [*rates]
    for name, values in queries.times_s(done).items():
        if not streamed and name != "latency":
            continue
        raw = "raw samples; the value is their median"
        metrics.append(measured(f"{name}_s{end}", values.tolist(), "s", "lower", reason=raw))
        for part in (90, 99):
            tail = f"{name}_p{part}_s{end}"
            metrics.append(percentile_metric(tail, values, part / 100, "s", "no query was completed"))
    if streamed:
        good = int(queries.meets(test.table, test.limits_s).sum()) if test.limits_s else 0
        span = queries.span_s(done) if len(done) else 0.0
        within = " and ".join(f"{name.upper()} < {1e3 * limit:g} ms" for name, limit in test.limits_s.items())
        what = (f"goodput_per_s{end}", "queries/s", "higher")
        metrics.append(
            derived(what[0], good / span, what[1], "higher", f"queries that meet {within}, over the time")
            if within and span > 0
            else not_available(what[0], what[1], "higher", "the scenario has no latency limits")
        )
        late = queries.lateness_s(test.table)
        if len(late):
            metrics.append(percentile_metric(f"lateness_p99_s{end}", late, 0.99, "s", "nothing was scheduled"))
            planned = float(np.ptp(test.table["scheduled_s"])), float(np.ptp(test.table["issued_s"]))
            if min(planned) > 0:
                kept = "time that the schedule takes over the time in which the client sent it"
                metrics.append(derived(f"rate_kept{end}", planned[0] / planned[1], "ratio", "none", kept))
    share = "processor time of the test's process, engine included" if test.computes else "processor time of the client"
    metrics.append(measured(f"driver_cores{end}", float(test.facts["driver_cpu_share"]), "cores", "none", reason=share))
    resident = test.facts["resident_bytes"] / 1e9
    of = "the test's process, at the end"
    metrics.append(measured(f"resident_memory_gb{end}", resident, "GB", "lower", reason=of))
    if "dispatch" in test.facts:
        metrics += memory_of(test.facts["dispatch"]["workers"], end)
    else:
        held, why = test.facts["device_memory"]
        metrics.append(most_memory(f"device_memory_gb{end}", [held], "most that tensors held on the device", why))
    seen = _not_seen(config)
    metrics += _utilization(test, events, end, seen)
    return metrics + _energy_and_cost(test, config, events, end, rates[1], seen)


def _not_seen(config: InferenceConfig) -> dict[str, str]:
    """Return why sensors of this machine say nothing of what answered, by kind of sensor: the workers are elsewhere."""
    why = dict[str, str]()
    if config.workers:
        why["process"] = "the workers are no processes of this run; their /metrics say how busy they are"
    if any(not addresses.is_local(url) for url in config.workers):
        why["machine"] = "the workers are on other machines, and the sensors are those of the client's"
    return why


def _readings(test: Tested, events: Events, field: str) -> list[float]:
    """Return what a sensor said between LoadGen's power_begin and power_end."""
    began, ended = test.log.get("began"), test.log.get("ended")
    times, values = _series(events, field)
    return [value for time, value in zip(times, values, strict=True) if began and ended and began <= time <= ended]


def _series(events: Events, field: str) -> tuple[list[float], list[float]]:
    """Return times and readings of a sensor."""
    read = [event for event in events if event["kind"] == "sensor" and isinstance(event.get(field), (int, float))]
    return [float(event["t"]) for event in read], [float(event[field]) for event in read]


def _utilization(test: Tested, events: Events, end: str, not_seen: NotSeen) -> Iterator[Metric]:
    """Yield how busy device and processor were while queries were under way; a reading is of the time since the last one."""
    device = "the device; without one, of all cores of the machine"
    for name, field, kind, of in (
        ("device_utilization", "utilization_percent", "machine", device),
        ("cpu_utilization", "cpu_percent", "process", "the run's processes, 100 = one core"),
    ):
        if kind in not_seen:
            yield not_available(f"{name}{end}", "%", "none", not_seen[kind])
            continue
        values = _readings(test, events, field)
        yield (
            measured(f"{name}{end}", values, "%", "none", reason=f"{of}; readings between power_begin and power_end")
            if values
            else not_available(f"{name}{end}", "%", "none", "no reading of a sensor fell into the test: it was short")
        )


def _energy_j(events: Events, began: float | None, ended: float | None) -> float | None:
    """Return what an energy counter rose by between two moments; None without a reading before, after and not far from both."""
    times, joules = map(np.array, _series(events, "energy_j"))
    if began is None or ended is None or len(times) < 2 or min(times) > began or max(times) < ended:
        return None
    order = np.argsort(times)
    before, after = np.interp([began, ended], times[order], joules[order])
    return float(after - before)


def _energy_and_cost(
    test: Tested, config: InferenceConfig, events: Events, end: str, tokens_per_s: Metric, not_seen: NotSeen
) -> list[Metric]:
    name = f"energy_per_token_j{end}"
    sensors = (event["availability"] for event in reversed(events) if event["kind"] == "sensors")
    reasons: dict[str, str] = next(sensors, {})
    spent = _energy_j(events, test.log.get("began"), test.log.get("ended"))
    tokens = int(queries.completed(test.table)["tokens"].sum())
    missing = str(reasons.get("energy_j", "no readings of an energy counter before and after the test"))
    how = "counter of the device, interpolated at power_begin and power_end"
    energy = (
        derived(name, spent / tokens, "J", "lower", how)
        if spent and tokens and "machine" not in not_seen
        else not_available(name, "J", "lower", not_seen.get("machine", missing))
    )
    cost = f"usd_per_million_tokens{end}"
    if config.price_per_hour_usd is None or not tokens_per_s.value:
        return [energy, not_available(cost, "USD", "lower", "no price was given: set price_per_hour_usd")]
    value, price = config.price_per_hour_usd * 1e6 / 3600 / tokens_per_s.value, config.price_per_hour_usd
    return [energy, derived(cost, value, "USD", "lower", f"at {price:g} USD per hour, in this scenario")]
