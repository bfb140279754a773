"""What a training on unlike ranks means: its checks and its reading. Nothing of it appears where the ranks share evenly."""

from collections.abc import Mapping
from typing import Any

from benchlib.benchmarks import BENCHMARKS
from benchlib.benchmarks.squad.config import SquadConfig
from benchlib.core.text import listing, seconds
from benchlib.judge.checks import Ask, Check, asks, limit_check
from benchlib.judge.numbers import count, within
from benchlib.results.run import Result

DISTANCE = 1.1  # times the best split; measured over many splits the two nearest to the best are within it
PREDICTED = 0.25  # of a rank's own work; beyond it the training plans again


def lacks(table: str, row: Mapping[str, Any], column: str) -> bool:
    """Say whether a null has a reason: a step before the plan, no whole step under the last one, no limit of memory."""
    if table == "unlike_steps":
        return column in ("expected_s", "samples") and within(row.get("step"), most=-1)
    taken = ("expected_s", "own_s", "idle_s")
    none = column in taken and all(row.get(name) is None for name in taken)
    return table == "unlike_ranks" and (none or column == "limit_gb")


def checks(config: SquadConfig, result: Result) -> list[Check]:
    """Judge split and mixed precision, as far as the run had them."""
    return [*_split(config, result), *([_curve(result)] if config.bf16_ranks else [])]


def _split(config: SquadConfig, result: Result) -> list[Check]:
    if config.balance == "off":
        return []
    question = "Is the own work of the slowest rank near that of the best split at the speeds measured?"
    # A plan of a file is what the user wants to see, and other splits are what it may be for.
    auto = config.balance == "auto"
    source = "set: what integers, drift and calibration may cost together"
    metric = result.metric("balance_distance")
    # Few steps under the last plan are no failure of what was asked for.
    gates = auto and not (metric and metric.provenance == "not_available")
    distance = limit_check("distance to the best split", question, metric, DISTANCE, source=source, kind="sanity", gates=gates)  # fmt: skip
    return [distance, _samples(result), _times(result)]


@asks("split as planned", "Did each rank train on the samples that its plan gives it?")
def _samples(ask: Ask, result: Result) -> Check:
    """Compare the last whole steps that the table has with the last plan: what was planned is what was done."""
    start, shares = result.tables["unlike_plans"][-1]["from_step"], list(result.facts["balance"]["shares"])
    by_step: dict[int, list[int]] = {}
    for row in result.tables["unlike_steps"]:
        if row["step"] >= start:
            by_step.setdefault(row["step"], []).append(count(row["samples"], "samples"))
    whole = {step: counts for step, counts in by_step.items() if sum(counts) == sum(shares)}
    wrong = [f"step {step}: {'+'.join(map(str, counts))}" for step, counts in whole.items() if counts != shares]
    if not whole:
        return ask.skipped("no whole step under the last plan")
    text = "+".join(map(str, shares))
    reason = f"{wrong[0]} instead of {text}" if wrong else f"{text} in {len(whole)} steps under the last plan"
    return ask.fact(not wrong, reason)


@asks("predicted times", "Does each rank take the time that its speed predicts?", kind="reference")
def _times(ask: Ask, result: Result) -> Check:
    """Compare predicted and measured own work of each rank; informative, since a neighbour moves it and the plan follows."""
    if not result.facts["balance"]["steps_of_last_plan"]:
        return ask.skipped("no whole step under the last plan")
    ratios = {row["rank"]: row["own_s"] / row["expected_s"] for row in result.tables["unlike_ranks"]}
    worst = max(ratios, key=lambda rank: abs(ratios[rank] - 1))
    check = ask.fact(
        within(ratios[worst], 1 + PREDICTED, 1 - PREDICTED),
        f"rank {worst} took {ratios[worst]:.2f} × what was predicted, the worst of {len(ratios)}",
        value=ratios[worst],
        limit=f"1 ± {PREDICTED}",
    )
    return check.model_copy(update={"gates": False, "source": "set: no more than neighbours on a machine cost"})


@asks("mixed precision", "Do ranks of bf16 beside ranks of fp32 follow the loss curve of fp32 alone?")
def _curve(ask: Ask, result: Result) -> Check:
    if result.facts["resumed_step"]:
        return ask.skipped("a continued training does not repeat the comparison")
    rows = result.tables["mixed_precision"]
    worst, limit = max(abs(row["mixed"] - row["fp32"]) for row in rows), curve_limit()
    text = f"losses of {len(rows)} steps from the same weights differ by at most {worst:.2g}"
    return ask.fact(within(worst, limit), text, limit=f"<= {limit:g}", value=worst)


def curve_limit() -> float:
    """Return parity's tolerance of a loss curve in bf16, whose reason is there."""
    return float(BENCHMARKS["parity"].part("tolerances", "limit")("cpu", "bf16", "loss curve").value)


def reading(config: SquadConfig, result: Result) -> list[str]:
    """Return sentences about the split, what it saves, the wait that is left and the plans made on the way."""
    sentences = config.on_purpose()
    rows, steps = result.tables.get("unlike_ranks", []), result.tables.get("unlike_steps", [])
    if not rows:
        return sentences
    shares = [
        f"rank {row['rank']} {row['samples']} ({row['samples'] / sum(item['samples'] for item in rows):.0%})"
        for row in rows
    ]
    sentences.append(f"Of each global batch the split gives {listing(shares)} samples.")
    even = [row["own_s"] for row in steps if row["step"] < 0]
    own = [row["own_s"] for row in rows if row["own_s"]]
    if even and own:
        sentences.append(f"The slowest rank works {seconds(max(own))} of a step; with even shares it took {seconds(max(even))} before the training.")  # fmt: skip
    wait = result.tables.get("unlike_wait", [])
    if wait:
        whole = sum(row["seconds"] for row in wait)
        parts = [f"{row['part']} {seconds(row['seconds'])}" for row in wait[1:]]
        sentences.append(
            f"A perfect split would take {seconds(wait[0]['seconds'])} of the {seconds(whole)} of a step; the rest: {listing(parts)}."
        )
    for number, plan in enumerate(result.tables.get("unlike_plans", [])):
        start = f"From step {plan['from_step'] + 1} on:" if number else f"The first split is {plan['shares']},"
        sentences.append(f"{start} {plan['why']}.")
    if (result.facts.get("balance") or {}).get("drifted"):
        sentences.append(
            "The speeds drifted away from the plan, which was kept because it comes from a file: balance=auto plans again."
        )
    return sentences
