"""What a collectives run is judged by: right results, possible numbers, targets, budget and baseline."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchlib.benchmarks.collectives import nccl_tests
from benchlib.benchmarks.collectives.config import FASTER_FROM, FASTER_UP_TO, CollectivesConfig
from benchlib.core.definitions import BUS_FACTORS, NO_LIMIT, hidden_share, share_text, size_text
from benchlib.core.stats import LEAST_FOR_INTERVAL
from benchlib.core.text import quantity
from benchlib.judge.baselines import Comparison, regression_checks
from benchlib.judge.checks import (
    Ask,
    Check,
    agreement_check,
    asks,
    budget_check,
    findings_check,
    finite_check,
    limit_check,
)
from benchlib.judge.impossible.claim import Claim, Collective, Latency
from benchlib.judge.impossible.own import Numbers, OwnClaims
from benchlib.judge.impossible.rules import ask as ask_rule
from benchlib.judge.numbers import count, within
from benchlib.judge.published import Measured, device_name, summary
from benchlib.judge.regression import RegressionLimit
from benchlib.results.metrics import derived, not_available
from benchlib.results.run import Result, Run

# The rules that a check of its own shows; "numbers agree" stands for all others.
SHOWN = ("right results", "busbw below the links", "possible values")
ALL_REDUCE_SHARE = 0.15  # of the accepted bandwidth that may be lost; other operations are measured for a shorter time
BANDWIDTH_SHARE = 0.25
LATENCY_SHARE = 0.5  # a few microseconds of the scheduler are a large part of it
LATENCIES = ("allreduce_latency_us", "send_recv_latency_us", "barrier_latency_us")
LEAST_TIME = 0.5  # of what a series was to get; with less, its p95 and p99 are those of a handful of rounds
SHARED = ("all_reduce", "broadcast", "send_recv", "all_gather", "reduce_scatter")  # operations with a target share
NAMED = 3  # of the wrong cases that are named one by one


def lacks(table: str, row: Mapping[str, Any], column: str) -> bool:
    """Say whether a null has a reason, row by row as ``run``, ``limits``, ``metrics`` and ``extras`` write them."""
    match table:
        case "series":  # a barrier moves nothing; few rounds have no interval
            few = column in ("ci_low_us", "ci_high_us") and within(row["rounds"], LEAST_FOR_INTERVAL - 1)
            return few or (column in ("algbw_gbps", "busbw_gbps") and row["operation"] == "barrier")
        case "bounds":  # a claim is of any size and has no latency
            claim = column != "gbps" and row["provenance"] == "claimed"
            return claim or row["provenance"] == "not_available"
        case "shares":
            return column == "target"
        case "overlap":  # times of which one was disturbed give no share
            times = [row[name] for name in ("alone_us", "compute_us", "together_us")]
            return column == "hidden_share" and all(map(within, times)) and hidden_share(*times)[0] is None
        case "gradients":
            skipped = column == "max_difference" and row["status"] == "skipped"
            return skipped or (
                column == "gloo_difference" and (row["collective"] == "gloo" or row["status"] == "skipped")
            )
        case "fits":
            return column in ("alpha_us", "bandwidth_gbps", "half_bytes", "residual") and bool(row["reason"])
        case "crossover":
            return column == "bytes" and row["reason"] not in (FASTER_FROM, FASTER_UP_TO)
    return table == "nccl_tests"  # a file of others need not state more than its bandwidths


def refuse(config: CollectivesConfig) -> None:
    """Raise ``UserError`` for a file of nccl-tests results that cannot be read."""
    if config.nccl_tests:
        nccl_tests.read(Path(config.nccl_tests))


def missed(run: Run) -> dict[str, list[str]]:
    """Return the targets and libraries that could not be judged, by parameter; none of a run without a result."""
    config, result = run.config, run.result
    if result is None or not isinstance(config, CollectivesConfig):
        return {}
    names = {f"target_share_{operation}": f"{_words(operation)} share" for operation in SHARED}
    names["target_allreduce_gbps"] = "gradient all-reduce"
    skipped = [check.name for check in _targets(config, result) if check.word == "INCOMPLETE"]
    lost = {name: [f"= {getattr(config, name):g}"] for name, check in names.items() if check in skipped}
    compared = {row["collective"] for row in result.tables.get("gradients", []) if row["status"] == "compared"}
    return lost | {"compare_gradients": [name for name in config.compare_gradients if name not in compared]}


def limits(run: Run) -> list[RegressionLimit]:
    """Return how much worse each metric may get than the baseline."""
    assert run.result is not None
    limit_list = []
    for metric in run.result.metrics:
        if metric.name.endswith(("_busbw_gbps", "_socket_share")) or metric.name == "gradient_allreduce_gbps":
            share = ALL_REDUCE_SHARE if "allreduce" in metric.name else BANDWIDTH_SHARE
            limit_list.append(RegressionLimit(metric=metric.name, share=share))
        elif metric.name in LATENCIES:
            limit_list.append(RegressionLimit(metric=metric.name, share=LATENCY_SHARE))
    return limit_list


WITH_SWITCH = ("", "nccl", "rccl", "sharp")  # libraries in whose algorithms a switch may add


def claims(numbers: Numbers) -> Iterator[Claim]:
    """Yield a claim for each row of the table ``series`` and one for the buckets of gradients."""
    for row in numbers.rows("series"):
        times = {50.0: row.get("median_us"), 95.0: row.get("p95_us"), 99.0: row.get("p99_us")}
        percentiles = {key: 1e-6 * value for key, value in times.items() if value is not None}
        words = [*map(row.get, ("operation", "variant", "dtype", "reduction")), "in place" * bool(row.get("in_place"))]
        yield Claim(
            subject=f"{' '.join(str(word) for word in words if word)}, {size_text(row.get('bytes') or 0)}",
            collective=_exchange(numbers, row) if row.get("operation") in BUS_FACTORS else None,
            latencies=[Latency(name="time of a round", percentiles_s=percentiles)] if percentiles else [],
        )
    if (rate := numbers.value("gradient_allreduce_gbps")) is not None:
        buckets = {"operation": "all_reduce", "busbw_gbps": rate}
        yield Claim(subject="buckets of gradients", collective=_exchange(numbers, buckets))


def _exchange(numbers: Numbers, row: dict[str, Any]) -> Collective:
    bound, source = _claimed_limit(numbers, row["operation"])
    library, variant = str(numbers.facts.get("collective", "")), str(row.get("variant", ""))
    own = variant in ("ring", "tree", "rs_ag", "flat", "direct")
    algbw, busbw, median_us = (row.get(name) for name in ("algbw_gbps", "busbw_gbps", "median_us"))
    return Collective(
        operation=row["operation"],
        algorithm=variant if own else "" if library.lower() in WITH_SWITCH else library,
        size_bytes=row.get("bytes") or None,
        seconds=1e-6 * median_us if median_us is not None and algbw is not None else None,
        ranks=numbers.world_size,
        algbw_gbytes_per_s=algbw / 8 if algbw is not None else None,
        busbw_gbytes_per_s=busbw / 8 if busbw is not None else None,
        bound_gbytes_per_s=bound,
        bound_source=source,
        wrong_elements=row.get("wrong_elements"),
    )


def _claimed_limit(numbers: Numbers, operation: str) -> tuple[float | None, str]:
    """Return the most that the bus bandwidth of an operation can be in GB/s by the claimed link, and who claims it.

    Within a node the claim is of the links of one device, which carry what the bus bandwidth counts. Between nodes it is of
    all adapters of a node, and at least the traffic of an operation between nodes passes them: busbw over its factor, times
    the factor of as many ranks as there are nodes; in an all-to-all each rank of a node sends that. A message from rank 0
    to rank 1 stays within the first node. No claim: no limit; a measured copy is none, as caches and neighbours move it.
    """
    rows = [row for row in numbers.rows("bounds") if row.get("provenance") == "claimed"]
    if not rows:
        return None, ""
    gbytes_per_s, source = float(rows[0]["gbps"]) / 8, f"claimed: {rows[0].get('source') or 'link'}"
    nodes, nproc = (numbers.config.nnodes, numbers.config.nproc) if numbers.config else (1, numbers.world_size)
    if nodes == 1:
        return gbytes_per_s, source
    if operation == "send_recv" and nproc > 1:
        return None, ""
    factor, senders = BUS_FACTORS[operation], nproc if operation == "all_to_all" else 1
    return gbytes_per_s * factor(numbers.world_size) / factor(nodes) / senders, source


def checks(run: Run, comparison: Comparison) -> list[Check]:
    """Judge a run that has a result."""
    config, result = run.config, run.result
    assert isinstance(config, CollectivesConfig) and result is not None
    numbers = Numbers.of_run(run)
    stated = OwnClaims(numbers)
    return [
        _right(result),
        _verified(result),
        _possible(stated, numbers.world_size),
        finite_check(stated),
        agreement_check(stated, SHOWN),
        _same_gradients(config, result),
        _whole_plan(result),
        *_targets(config, result),
        budget_check(run),
        *regression_checks(run, limits(run), comparison),
    ]


@asks("right results", "Is every element of every result correct, on every rank?")
def _right(ask: Ask, result: Result) -> Check:
    """Name the first wrong cases with the rank: a speed of wrong results is none."""
    wrong, checked = (count(result.facts[name], name) for name in ("wrong_elements", "checked_elements"))
    # The rows of the series are counted anew: the total must not be able to hide them.
    wrong = max(wrong, sum(count(row["wrong_elements"], "wrong_elements") for row in _rows(result, "series")))
    rows = _rows(result, "wrong")
    details = "; ".join(f"{row['case']}: {row['wrong_elements']:,} wrong, {row['first']}" for row in rows[:NAMED])
    more = f"; and {len(rows) - NAMED} more cases" if len(rows) > NAMED else ""
    reason = f"{wrong:,} wrong elements of {checked:,} compared" + (f": {details}{more}" if details else "")
    return ask.fact(wrong == 0 < checked, reason, limit="= 0", value=float(wrong), unit="elements")


@asks("all verified", "Was every timed result also compared?")
def _verified(ask: Ask, result: Result) -> Check:
    """Check that nothing was timed without being compared."""
    rows = [row for row in _rows(result, "series") if row["operation"] != "barrier"]
    without = [row for row in rows if not count(row["checked_elements"], "checked_elements")]
    reason = f"{len(rows) - len(without):,} of {len(rows):,} series with data were compared whole, after every run"
    if without:
        first = without[0]
        reason += f"; not {first['operation']} {first['variant']} {first['dtype']} at {first['bytes']:,} bytes"
    return ask.fact(bool(rows) and not without, reason)


@asks("possible bandwidth", "Does no operation move more than the links are claimed to carry?")
def _possible(ask: Ask, stated: Sequence[Claim], ranks: int) -> Check:
    findings = ask_rule("busbw below the links", stated)
    failed = [pair for pair in findings if pair[1].status == "FAIL"]
    if not findings:
        unclaimed = "no profile of the machines claims what a link carries; set cluster=NAME or FILE"
        return ask.skipped("one rank has no bus" if ranks == 1 else unclaimed)
    subject, worst = max(failed or findings, key=lambda pair: pair[1].value or 0.0)
    check = findings_check(ask.name, ask.question, [worst], "")
    more = f" ({len(failed)} of {len(findings)} series)" if failed else ""
    return check.model_copy(update={"reason": f"{subject}: {check.reason}{more}"})


@asks("same gradients", "Does training over each library give the gradients of a single process?")
def _same_gradients(ask: Ask, config: CollectivesConfig, result: Result) -> Check:
    """Check the vendor-neutral claim on the libraries that are here; those that are not are named."""
    rows = _rows(result, "gradients")
    compared = [row for row in rows if row["status"] == "compared"]
    skipped = "; ".join(f"{row['collective']} skipped: {row['reason']}" for row in rows if row["status"] != "compared")
    named = {row["collective"] for row in rows}
    if missing := [name for name in config.compare_gradients if name not in named]:
        return ask.fact(False, f"no result of {', '.join(missing)}, which compare_gradients names")
    if not compared:
        return ask.skipped(skipped or "no library was named (compare_gradients)")
    names, worst = ["max_difference"], []
    for row in compared:
        worst.append(max(row[name] for name in names))
        if row["collective"] == "gloo":  # whatever follows was compared with gloo's run as well
            names.append("gloo_difference")
    differences = ", ".join(f"{row['collective']} {value:.2g}" for value, row in zip(worst, compared, strict=True))
    return ask.fact(
        all(within(value, row["tolerance"]) for value, row in zip(worst, compared, strict=True)),
        f"largest difference in fp64: {differences}" + (f"; {skipped}" if skipped else ""),
        limit=f"<= {compared[0]['tolerance']:g}",
        value=max(worst),
    )


@asks("whole plan", "Did everything that was planned fit the time?")
def _whole_plan(ask: Ask, result: Result) -> Check:
    """Tell what was cut. Series with less than half of their time are a part of what was asked for: that is no pass."""
    cut, shortened = result.facts["cut"], result.facts["shortened"]
    limit = f">= {LEAST_TIME:.0%} of its time"
    short = [f"{what} in {share:.0%} of their time" for what, share in shortened.items()]
    if cut:
        listed = "; ".join(cut[:NAMED]) + (f"; and {len(cut) - NAMED} more" if len(cut) > NAMED else "")
        return ask.skipped("; ".join([f"cut: {listed}", *short]), gates=True, limit=limit)
    listed = "; ".join([f"{len(_rows(result, 'series')):,} series and all limits", *short])
    if all(within(share, least=LEAST_TIME) for share in shortened.values()):
        return ask.fact(True, listed, limit=limit)
    return ask.skipped(listed, gates=True, limit=limit)


def _targets(config: CollectivesConfig, result: Result) -> list[Check]:
    limit = config.target_allreduce_gbps
    tier = f"the {config.tier} tier"
    source = f"target of {tier}" if limit is not None else f"{tier} sets no target for {config.backend}"
    question = "Do gradients travel fast enough, over all buckets of a step?"
    metric = result.metric("gradient_allreduce_gbps")
    return [
        limit_check("gradient all-reduce", question, metric, limit, source=source, strict=True),
        *_shares(config, result),
    ]


def _shares(config: CollectivesConfig, result: Result) -> list[Check]:
    """Judge each share that the config asks for, at each of its sizes; one that was not measured is not met."""
    asked = []
    for operation in SHARED:
        wanted = getattr(config, f"target_share_{operation}")
        if wanted is None:
            continue
        rows = [row for row in _rows(result, "shares") if row["operation"] == operation and row["target"]]
        question = f"Does {_words(operation)} reach its share of what raw sockets carry?"
        name = f"{_words(operation)} share"
        asked += [
            Ask(f"{name} at {size_text(row['bytes'])}", question, "target").by(_share, row, wanted) for row in rows
        ]
        if not rows:
            why = "no size of this run is large enough for the target, or the time did not hold it"
            metric = not_available("share", "", "higher", why)
            asked.append(limit_check(name, question, metric, wanted, source="set by hand"))
    return asked


def _words(operation: str) -> str:
    return operation.replace("_", "-")


def _share(ask: Ask, row: dict[str, Any], wanted: float) -> Check:
    metric = derived("share", row["share"], "", "higher")
    check = limit_check(ask.name, ask.question, metric, wanted, source=f"of {row['bound']}, measured in turns")
    how = f"median of the ratios of {row['rounds']} rounds"
    how += "; faster than the sockets, which are no limit here" if row["share"] > NO_LIMIT else ""
    return check.model_copy(update={"reason": f"{check.reason}: {how}"})


# What the numbers of a collectives run say, in sentences, each with its ratio to a bound.


Row = dict[str, Any]
# Shares of the raw sockets that a good library reaches, and from which size on; a run gates on them where it is asked to.
GOOD = {
    ("all_reduce", "library"): (0.8, 16 << 20),
    ("broadcast", "library"): (0.9, 64 << 20),
    ("send_recv", "library"): (0.9, 64 << 20),
    ("all_gather", "direct"): (0.6, 64 << 20),
    ("reduce_scatter", "direct"): (0.6, 64 << 20),
}
NAMES = {
    "ring": "the ring", "tree": "recursive doubling", "rs_ag": "reduce-scatter and all-gather", "flat": "gloo without groups",
}  # fmt: skip
HIGH_SKEW = 0.5  # of an operation's time, between the first and the last rank


def reading(run: Run) -> list[str]:
    """Return sentences about what was verified, which share of which limit was reached, and what takes the time."""
    config, result = run.config, run.result
    assert isinstance(config, CollectivesConfig) and result is not None
    sentences = [
        _verified_sentence(result),
        *_shares_sentence(result),
        _claimed(result),
        _latency(result),
        *_crossovers(result),
        _skew(result),
        _overlap(result),
        _missing(result),
        _cut(result),
        summary(run),
    ]
    return [sentence for sentence in sentences if sentence]


def _rows(result: Result, table: str) -> list[Row]:
    return result.tables.get(table, [])


def _word(operation: str) -> str:
    return operation.replace("_", "-").replace("send-recv", "send/recv")


def _verified_sentence(result: Result) -> str:
    checked, wrong = int(result.facts["checked_elements"]), int(result.facts["wrong_elements"])
    if not wrong:
        return f"Every one of the {checked:,} elements that were compared is right, bit by bit."
    first = next(iter(_rows(result, "wrong")), None)
    where = f", first in {first['case']}: {first['first']}" if first else ""
    return f"{wrong:,} of {checked:,} elements are wrong{where}: no speed of this run counts."


def _shares_sentence(result: Result) -> Iterator[str]:
    """Yield of each operation its share of the raw sockets at its largest size, beside the share that is expected.

    What is faster than the sockets has no limit in them, and its share does not say whether it is good.
    """
    rows = _rows(result, "shares")
    for key in dict.fromkeys((row["operation"], row["variant"]) for row in rows):
        row = max((row for row in rows if (row["operation"], row["variant"]) == key), key=lambda row: row["bytes"])
        variant = " (ours)" if key[1] == "direct" else ""
        text = f"The {_word(key[0])}{variant} reaches {share_text(row['share'])} of raw TCP bandwidth at {size_text(row['bytes'])}"
        good, least = GOOD.get(key, (None, 0))
        if row["share"] > NO_LIMIT:
            text += "; the library is faster than the sockets, which are no limit in this run"
        elif good is not None and row["bytes"] >= least:
            text += f"; {share_text(good)} expected"
        yield text + "."
    if rows:
        yield (
            "These shares are medians of the ratios of single rounds, in which operation and sockets take turns: they differ from "
            "the ratios of the medians by size, which are measured one after the other."
        )


def _claimed(result: Result) -> str:
    link = next((row for row in _rows(result, "bounds") if row["provenance"] == "claimed"), None)
    best = result.metric("allreduce_busbw_gbps")
    if link is None or best is None or best.value is None:
        return ""
    return f"The all-reduce reaches {share_text(best.value / link['gbps'])} of the {quantity(link['gbps'])} Gbps that the links claim ({link['source']})."


def _latency(result: Result) -> str:
    fit = next(
        (row for row in _rows(result, "fits") if (row["operation"], row["variant"]) == ("all_reduce", "library")), None
    )
    if fit is None:
        return ""
    if fit["alpha_us"] is None:
        return f"Start-up time and bandwidth of the all-reduce cannot be separated: {fit['reason']}."
    return (
        f"A line fitted to {fit['points']} sizes of the all-reduce gives {quantity(fit['alpha_us'], 'us')} to start, more than half of the time "
        f"below {size_text(fit['half_bytes'])} (n1/2); it misses the measured times by {fit['residual']:.0%}."
    )


def _crossovers(result: Result) -> Iterator[str]:
    for row in _rows(result, "crossover"):
        where = (
            f" {'from' if row['reason'] == FASTER_FROM else 'up to'} {size_text(row['bytes'])}" if row["bytes"] else ""
        )
        speed = "faster" if row["bytes"] else row["reason"]
        of = f" ({row['points']} sizes were timed)"
        yield f"Against the library's all-reduce {NAMES.get(row['algorithm'], row['algorithm'])} is {speed}{where}{of}."


def _skew(result: Result) -> str:
    rows = [
        row
        for row in _rows(result, "series")
        if row["median_us"] and row["bytes"] >= 1 << 20 and row["variant"] == "library"
    ]
    # Of a rooted operation the other ranks are done early by its nature.
    together = [row for row in rows if row["operation"] in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")]
    if not together:
        return ""
    worst = max(together, key=lambda row: row["skew_us"] / row["median_us"])
    share = worst["skew_us"] / worst["median_us"]
    sentence = f"Between the first and the last rank lie at most {share:.0%} of an operation's time ({_word(worst['operation'])}, {size_text(worst['bytes'])}"
    return (
        sentence + f"; rank {worst['slowest_rank']} is the last most often)." if share > HIGH_SKEW else sentence + ")."
    )


def _overlap(result: Result) -> str:
    rows = _rows(result, "overlap")
    if not rows:
        return ""
    groups: dict[str, list[str]] = {"": [], "slower": [], "disturbed": []}
    for row in rows:
        share, kind = hidden_share(row["alone_us"], row["compute_us"], row["together_us"])
        groups[kind].append(f"{_word(row['operation'])} {share:.0%}" if share is not None else _word(row["operation"]))
    text = ", ".join(groups[""]) or "none"
    text = f"Beside a computation this share of the shorter time is hidden at {size_text(rows[0]['bytes'])}: {text}."
    if groups["slower"]:
        text += f" Together slower than one after the other: {', '.join(groups['slower'])}."
    if groups["disturbed"]:
        text += f" Not known, since the time alone was disturbed: {', '.join(groups['disturbed'])}."
    return text


def _missing(result: Result) -> str:
    rows = _rows(result, "unsupported")
    if not rows:
        return ""
    reasons: dict[str, set[str]] = {}
    for row in rows:
        kind = " ".join(word for word in (_word(row["operation"]), row["reduction"], row["dtype"]) if word)
        reasons.setdefault(row["reason"], set()).add(kind)
    listed = "; ".join(f"{', '.join(sorted(kinds))} ({reason})" for reason, kinds in reasons.items())
    return f"Not supported by {result.facts['collective']}: {listed}."


def _cut(result: Result) -> str:
    cut = result.facts["cut"]
    short = [f"{what} {share:.0%}" for what, share in result.facts["shortened"].items()]
    sentence = f"The time did not hold all that was planned: {'; '.join(cut[:5])}. " if cut else ""
    sentence += f"To fit it, series were given a part of their time: {', '.join(short)}." if short else ""
    return sentence.strip()


# The values of a collectives run under the names and conditions of the published figures.


def published(run: Run) -> list[Measured]:
    """Return the all-reduce of the largest message: what is published of other operations the registry does not hold."""
    config, result = run.config, run.result
    assert isinstance(config, CollectivesConfig) and result is not None
    rate = result.value("allreduce_busbw_gbps")
    if rate is None:
        return []
    rows = [
        row
        for row in result.tables.get("series", [])
        if (row["operation"], row["variant"]) == ("all_reduce", "library")
    ]
    conditions = {
        "definition": "bus bandwidth",
        "devices": config.world_size,
        "nodes": config.nnodes,
        "message_bytes": max(row["bytes"] for row in rows),
    }
    return [
        Measured(
            "allreduce_gbps", "all-reduce", rate, device_name(run.machine, config.backend, config.nproc), conditions
        )
    ]
