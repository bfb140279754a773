"""What a run of the serving benchmark states: its metrics, tables and facts. Rates are in 1/s, times as their names say.

r_i is the rate of worker i alone, n_i the queries that it answered in the joint run of N queries, all at equal concurrency
per worker. A joint run cannot be shorter than N / sum(r_i), the ideal; an equal split cannot be shorter than
(N / workers) / min(r_i). Both are predicted in each round from its own r_i, before its joint runs, and stand in the events;
``mode=distributed`` takes for r_i the rates of the joint run before. What a weighted run takes beyond the ideal, T - N / sum(r_i), is the sum of

    split        max(n_i / r_i) - N / sum(r_i)     somebody got more than its share; the last queries are never even
    dispatcher   time that a slot of the last worker stood empty while queries waited, per slot
    slowness     the rest: workers that answer more slowly together than alone, as on one machine
"""

import statistics
from typing import Any

from benchlib.benchmarks.serving.bench import Bench, Row
from benchlib.results.metrics import Metric, derived, measured, not_available
from benchlib.workloads.llm.load import memory_of

HOUR_S = 3600


def metrics(bench: Bench, startup_s: float, total_s: float) -> list[Metric]:
    """Return all metrics; those that depend on the work end with its scope."""
    config, scope, workers = bench.config, bench.scope, len(bench.urls)
    rates = [row["samples_per_s"] for row in bench.together]
    tokens = [row["tokens_per_s"] for row in bench.together]
    sums = [sum(values) for values in zip(*bench.alone, strict=True)] if config.mode != "distributed" else []
    shares = [joint / alone for joint, alone in zip(rates, sums, strict=True)] if rates and sums and workers > 1 else []
    together = f"{workers} workers together, {config.concurrency} at once each, by round"
    both = "mode = both measures it"
    missing = "one worker: there is nothing to scale" if workers == 1 else both
    of_rounds = "rate of all together over the sum of each alone, in the same round"
    made = [
        derived(f"{name}_{scope}", values, unit, "higher", why)
        if values
        else not_available(f"{name}_{scope}", unit, "higher", absent)
        for name, values, unit, why, absent in (
            ("samples_per_s_all", rates, "queries/s", together, both),
            ("tokens_per_s_all", tokens, "tokens/s", "completed new tokens of these runs", both),
            ("samples_per_s_sum", sums, "queries/s", "sum of each worker alone, by round", both),
            ("scaling_efficiency", shares, "ratio", of_rounds, missing),
        )
    ]
    made += _at_knee(bench)
    made += memory_of(bench.says, f"_{scope}")
    why = "processor time of the dispatcher per query"
    made.append(measured(f"dispatcher_cpu_ms_{scope}", bench.cpu_ms, "ms", "lower", reason=why))
    if late := [row["late_p99_ms"] for row in bench.sweep if row["late_p99_ms"] is not None]:
        why = "the latest p99 of all open loops"
        made.append(derived(f"client_late_p99_ms_{scope}", max(late), "ms", "lower", why))
    if best := rates or ([statistics.mean(values) for values in bench.alone] if workers == 1 else []):
        hours = [config.project_samples / value / HOUR_S for value in best]
        why = f"{config.project_samples:,} such samples / rate; start-up is apart, and the run's end, where slots stand empty, is in it"
        made.append(derived(f"projected_hours_{scope}", hours, "h", "lower", why))
    why = "from the start of a worker until it takes requests"
    made.append(
        measured("worker_startup_s", bench.pool.ready_s, "s", "lower", reason=why)
        if bench.pool
        else not_available("worker_startup_s", "s", "lower", "the workers were there before")
    )
    return [*made, measured("startup_s", startup_s, "s", "lower"), measured("total_s", total_s, "s", "lower")]


def _at_knee(bench: Bench) -> list[Metric]:
    config, knee, scope = bench.config, bench.knee, bench.scope
    rate, goodput = f"knee_per_s_{scope}", f"goodput_at_knee_per_s_{scope}"
    times = {name: f"{name}_at_knee_ms_{scope}" for name in ("ttft", "tpot")}
    if knee is None:
        why = "no rate met the limits in the longer run" if bench.sweep else "mode = single raises no load"
        why = "undecided: the client was late" if bench.sweep and bench.sweep[-1]["client"] else why
        made = [not_available(name, "queries/s", "higher", why) for name in (rate, goodput)]
        return made + [not_available(name, "ms", "lower", why) for name in times.values()]
    limits = f"p{config.percentile:g} of TTFT < {config.ttft_ms:g} ms and of TPOT < {config.tpot_ms:g} ms"
    n = f"{knee['queries']} queries"
    made = [
        derived(rate, knee["rate"], "queries/s", "higher", f"highest rate with {limits}, confirmed by {n}"),
        derived(goodput, knee["goodput_per_s"], "queries/s", "higher", f"queries within both limits, {n}"),
    ]
    for name, whole in times.items():
        values = [1e3 * value for value in bench.knee_samples[name]]
        made.append(measured(whole, values, "ms", "lower", reason=f"median of {n}; open loop, from the schedule on"))
        for part in (90, 99):
            why = f"of {n}" + (": the largest" if part == 99 and len(values) <= 100 else "")
            made.append(derived(f"{name}_p{part}_at_knee_ms_{scope}", knee[f"{name}_p{part}_ms"], "ms", "lower", why))
    return made


def series(bench: Bench) -> dict[str, list[Row]]:
    """Return the tables: workers, scaling, splits, cost, load, closed loops, losses, requests in flight."""
    alone = [statistics.median(values) if values else None for values in bench.alone]
    joint = _middle(bench.together)
    workers = []
    for index, url in enumerate(bench.urls):
        row: Row = {"worker": index, "url": url}
        if bench.alone[index]:
            row["alone_per_s"] = alone[index]
        if joint:
            row |= {"answered": joint["given"][index], "share": joint["given"][index] / max(1, sum(joint["given"]))}
        shares = [prediction["weighted"]["shares"][index] for prediction in bench.predicted if prediction]
        if shares:
            row["predicted_share"] = statistics.median(shares)
        workers.append(row | bench.says[index])
    tables: dict[str, list[Row]] = {"workers": workers, "load": bench.sweep, "closed": bench.closed}
    tables |= {"losses": bench.losses, "inflight": bench.inflight}
    tables["splits"] = _splits(bench)
    if joint and all(alone):
        rates = [value for value in alone if value]
        tables["cost"] = _cost(bench, joint, rates)
        tables["scaling"] = _scaling(bench, rates)
    return tables


def _middle(rows: list[Row]) -> Row:
    """Return the run with the middle rate; of an even number the slower of both."""
    return sorted(rows, key=lambda row: row["samples_per_s"])[(len(rows) - 1) // 2] if rows else {}


def predict(rates: list[float], queries: int) -> dict[str, Row]:
    """Return what own rates say of a joint run before it: its rate, its time and the share of each worker, by split."""
    slowest, total = min(rates), sum(rates)
    even = [1 / len(rates)] * len(rates)
    return {
        split: {"samples_per_s": joint, "seconds": queries / joint, "shares": shares}
        for split, joint, shares in (
            ("weighted", total, [rate / total for rate in rates]), ("equal", len(rates) * slowest, even),
        )
    }  # fmt: skip


def _splits(bench: Bench) -> list[Row]:
    """Return the weighted and the equal split: what was predicted before each round, and what happened in it; medians."""
    rows = []
    for split, runs in (("weighted", bench.together), ("equal", bench.equal)):
        both = zip(bench.predicted, runs, strict=False)
        pairs = [(prediction[split]["seconds"], run) for prediction, run in both if prediction]
        if not pairs:
            continue
        ratios = [run["duration_s"] / predicted for predicted, run in pairs]
        row: Row = {"split": split, "queries": sum(runs[0]["given"])}
        row |= {"predicted_s": statistics.median(predicted for predicted, _ in pairs)}
        row |= {"measured_s": statistics.median(run["duration_s"] for _, run in pairs)}
        row |= {"measured_over_predicted": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}
        rows.append(row | {"samples_per_s": statistics.median(run["samples_per_s"] for _, run in pairs)})
    return rows


def _cost(bench: Bench, run: Row, rates: list[float]) -> list[Row]:
    """Return what the joint run took beyond the ideal, by cause, in seconds and as a share of the run."""
    given, total = run["given"], run["duration_s"]
    ideal = sum(given) / sum(rates)
    order = sorted(range(len(given)), key=lambda index: run["end_s"][index])
    first, last = order[0], order[-1]
    split = max(count / rate for count, rate in zip(given, rates, strict=True)) - ideal
    dispatcher = run["idle_slot_s"][last] / bench.config.concurrency
    parts = (
        ("ideal", ideal, "all queries at the sum of the workers' own rates"),
        ("split", split, f"uneven end: worker {last} finished last, worker {first} first"),
        ("dispatcher", dispatcher, f"a slot of worker {last} stood empty while queries waited"),
        ("slowness", total - ideal - split - dispatcher, "workers slower together than alone (below zero: faster)"),
    )
    return [{"part": name, "seconds": value, "share": value / total, "what": what} for name, value, what in parts]


def _scaling(bench: Bench, rates: list[float]) -> list[Row]:
    rows: list[Row] = [{"workers": 1, "samples_per_s": rates[0], "sum_of_alone_per_s": rates[0], "efficiency": 1.0}]
    joint = {**bench.groups, len(rates): [row["samples_per_s"] for row in bench.together]} if len(rates) > 1 else {}
    for size, values in sorted(joint.items()):
        alone = [sum(bench.alone[index][number] for index in range(size)) for number in range(len(values))]
        shares = [value / base for value, base in zip(values, alone, strict=True)]
        joint_per_s, alone_per_s, efficiency = map(statistics.median, (values, alone, shares))
        row = {"workers": size, "samples_per_s": joint_per_s, "sum_of_alone_per_s": alone_per_s}
        rows.append(row | {"efficiency": efficiency, "least": min(shares), "most": max(shares)})
    return rows


def facts(bench: Bench) -> dict[str, Any]:
    """Return counts and what is no number."""
    return {
        "issued": bench.issued, "failed": bench.failed, "repeated": bench.repeated, "errors": bench.errors,
        "workers": len(bench.urls), "engines": sorted({*bench.engines} - {""}), "recovery": bench.recovery,
        # Own workers share what this process has; others are machines of their own, of which this one knows no more.
        **({} if bench.pool else {"paid_devices": len(bench.urls)}),
    }  # fmt: skip
