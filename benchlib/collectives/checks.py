"""What a collectives run is judged by: right results, possible numbers, targets, budget and baseline."""

from typing import Any

from benchlib.bandwidth import NO_LIMIT
from benchlib.baselines import Comparison, regression_checks
from benchlib.checks import (
    Check,
    Status,
    agreement_check,
    budget_check,
    fact_check,
    finite_check,
    limit_check,
    rule_check,
)
from benchlib.collectives.config import CollectivesConfig
from benchlib.collectives.sizes import size_text
from benchlib.impossible import own
from benchlib.impossible.numbers import Numbers
from benchlib.impossible.own_series import series_claims
from benchlib.impossible.rules import RULES
from benchlib.metrics import derived, not_available
from benchlib.regression import RegressionLimit
from benchlib.results import Result, Run

# The rules that a check of its own shows; "numbers agree" stands for all others.
SHOWN = ("right results", "busbw below the links", "possible values")
ALL_REDUCE_SHARE = 0.15  # of the accepted bandwidth that may be lost; other operations are measured for a shorter time
BANDWIDTH_SHARE = 0.25
LATENCY_SHARE = 0.5  # a few microseconds of the scheduler are a large part of it
LATENCIES = ("allreduce_latency_us", "send_recv_latency_us", "barrier_latency_us")
LEAST_TIME = 0.5  # of what a series was to get; with less, its p95 and p99 are those of a handful of rounds
NAMED = 3  # of the wrong cases that are told one by one


def limits(run: Run) -> list[RegressionLimit]:
    """Return how much worse each metric may get than the baseline."""
    assert run.result is not None
    found = []
    for metric in run.result.metrics:
        if metric.name.endswith(("_busbw_gbps", "_socket_share")) or metric.name == "gradient_allreduce_gbps":
            share = ALL_REDUCE_SHARE if "allreduce" in metric.name else BANDWIDTH_SHARE
            found.append(RegressionLimit(metric=metric.name, share=share))
        elif metric.name in LATENCIES:
            found.append(RegressionLimit(metric=metric.name, share=LATENCY_SHARE))
    return found


def checks(run: Run, comparison: Comparison) -> list[Check]:
    """Judge a run that has a result."""
    config, result = run.config, run.result
    assert isinstance(config, CollectivesConfig) and result is not None
    numbers = Numbers.of(result, run.samples, config)
    return [
        _right(result),
        _verified(result),
        _possible(numbers),
        finite_check(result),
        agreement_check(own.own_claims(numbers), SHOWN),
        _same_gradients(result),
        _whole_plan(result),
        *_targets(config, result),
        budget_check(run, result.value("total_s") or 0.0),
        *regression_checks(run, limits(run), comparison),
    ]


def _right(result: Result) -> Check:
    """Name the first wrong cases with the rank: a speed of wrong results is none."""
    wrong, checked = int(result.facts["wrong_elements"]), int(result.facts["checked_elements"])
    # The rows of the series are counted anew: the total must not be able to hide them.
    wrong = max(wrong, sum(int(row.get("wrong_elements") or 0) for row in result.tables.get("series", [])))
    rows = result.tables.get("wrong", [])
    told = "; ".join(f"{row['case']}: {row['wrong_elements']:,} wrong, {row['first']}" for row in rows[:NAMED])
    more = f"; and {len(rows) - NAMED} more cases" if len(rows) > NAMED else ""
    return fact_check(
        "right results",
        "Is every element of every run what it has to be, on every rank?",
        wrong == 0,
        f"{wrong:,} wrong elements of {checked:,} compared" + (f": {told}{more}" if told else ""),
        limit="= 0",
        value=float(wrong),
        unit="elements",
    )


def _verified(result: Result) -> Check:
    """Check that nothing was timed without being compared."""
    rows = [row for row in result.tables.get("series", []) if row["operation"] != "barrier"]
    without = [row for row in rows if not row.get("checked_elements")]
    reason = f"{len(rows) - len(without):,} of {len(rows):,} series were compared whole, after every run"
    if without:
        first = without[0]
        reason += f"; not {first['operation']} {first['variant']} {first['dtype']} at {first['bytes']:,} bytes"
    return fact_check("all verified", "Was every timed result also compared?", bool(rows) and not without, reason)


def _possible(numbers: Numbers) -> Check:
    name, question = "possible bandwidth", "Does no operation move more than the memory can copy?"
    findings = [
        (claim.subject, finding)
        for claim in series_claims(numbers)
        for finding in RULES["busbw below the links"].judge(claim)
    ]
    failed = [(subject, finding) for subject, finding in findings if finding.status == "FAIL"]
    if failed:
        subject, finding = max(failed, key=lambda pair: pair[1].value or 0.0)
        check = rule_check(name, question, [finding])
        return check.model_copy(
            update={"reason": f"{subject}: {check.reason} ({len(failed)} of {len(findings)} series)"}
        )
    highest = max(findings, key=lambda pair: pair[1].value or 0.0, default=None)
    told = [highest[1]] if highest else []
    check = rule_check(name, question, told, missing="one rank has no bus, or no copy was measured")
    return check.model_copy(update={"reason": f"{highest[0]}: {check.reason}"}) if highest else check


def _same_gradients(result: Result) -> Check:
    """Check the vendor-neutral claim on the libraries that are here; those that are not are named."""
    name, question = "same gradients", "Does training over each library give the gradients of a single process?"
    rows = result.tables.get("gradients", [])
    compared = [row for row in rows if row["status"] == "compared"]
    skipped = "; ".join(f"{row['collective']} skipped: {row['reason']}" for row in rows if row["status"] != "compared")
    if not compared:
        reason = skipped or "no library was named (compare_gradients)"
        return Check(name=name, kind="sanity", question=question, status="SKIPPED", reason=reason, gates=False)
    worst = [max(row["max_difference"], row.get("gloo_difference") or 0.0) for row in compared]
    passed = all(value <= row["tolerance"] for value, row in zip(worst, compared, strict=True))
    told = ", ".join(f"{row['collective']} {value:.2g}" for value, row in zip(worst, compared, strict=True))
    return fact_check(
        name,
        question,
        passed,
        f"largest difference in fp64: {told}" + (f"; {skipped}" if skipped else ""),
        limit=f"<= {compared[0]['tolerance']:g}",
        value=max(worst),
    )


def _whole_plan(result: Result) -> Check:
    """Tell what was cut. Series with less than half of their time are a part of what was asked for: that is no pass."""
    cut, shortened = result.facts.get("cut") or [], result.facts.get("shortened") or {}
    name, question = "whole plan", "Did everything that was planned fit the time?"
    least, limit = min(shortened.values(), default=1.0), f">= {LEAST_TIME:.0%} of its time"
    short = [f"{what} in {share:.0%} of their time" for what, share in shortened.items()]
    if not cut:
        told = "; ".join([f"{len(result.tables.get('series', [])):,} series and all limits", *short])
        status: Status = "PASS" if least >= LEAST_TIME else "SKIPPED"
        return Check(name=name, kind="sanity", question=question, status=status, reason=told, limit=limit)
    told = "; ".join(cut[:NAMED]) + (f"; and {len(cut) - NAMED} more" if len(cut) > NAMED else "")
    reason = "; ".join([f"cut: {told}", *short])
    return Check(name=name, kind="sanity", question=question, status="SKIPPED", reason=reason, limit=limit)


def _targets(config: CollectivesConfig, result: Result) -> list[Check]:
    tier = f"target of the {config.tier} tier"
    limit = config.target_allreduce_gbps
    source = tier if limit is not None else f"the {config.tier} tier sets no target for {config.backend}"
    question = "Do gradients travel fast enough, over all buckets of a step?"
    metric = result.metric("gradient_allreduce_gbps")
    return [
        limit_check("gradient all-reduce", question, metric, limit, source=source, strict=True),
        *_shares(config, result),
    ]


def _shares(config: CollectivesConfig, result: Result) -> list[Check]:
    """Judge each share that the config asks for, at each of its sizes; one that was not measured is not met."""
    found = []
    for operation in ("all_reduce", "broadcast", "send_recv", "all_gather", "reduce_scatter"):
        wanted = getattr(config, f"target_share_{operation}")
        if wanted is None:
            continue
        rows = [row for row in result.tables.get("shares", []) if row["operation"] == operation and row["target"]]
        question = f"Does {operation.replace('_', '-')} reach its share of what raw sockets carry?"
        name = f"{operation.replace('_', '-')} share"
        found += [_share(f"{name} at {size_text(row['bytes'])}", question, row, wanted) for row in rows]
        if not rows:
            why = "no size of this run is large enough for the target, or the time did not hold it"
            metric = not_available("share", "", "higher", why)
            found.append(limit_check(name, question, metric, wanted, source="set by hand"))
    return found


def _share(name: str, question: str, row: dict[str, Any], wanted: float) -> Check:
    metric = derived("share", row["share"], "", "higher")
    check = limit_check(name, question, metric, wanted, source=f"of {row['bound']}, measured in turns")
    told = f"{row['busbw_gbps']:.3g} of {row['bound_gbps']:.3g} Gbps over {row['rounds']} rounds"
    told += "; faster than the sockets, which are no limit here" if row["share"] > NO_LIMIT else ""
    return check.model_copy(update={"reason": f"{check.reason}: {told}"})
