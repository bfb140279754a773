"""What a result of the kit states in two places: ranks, steps, samples, checksums, times, and the scope in its names.

Only what both places hold is compared: older results lack facts, and a result without its folder has no config.
"""

import math
from collections.abc import Iterator
from typing import Any

from benchlib.judge.impossible import numbers as names
from benchlib.judge.impossible.claim import Restated
from benchlib.judge.impossible.numbers import Numbers
from benchlib.judge.impossible.restated_parity import restated_parity
from benchlib.judge.impossible.restated_series import restated_series

OF_SPEED = ("train_samples_per_s", "end_to_end_samples_per_s", "train_tokens_per_s", "step_s", "flops_per_s", "mfu")
OF_QUALITY = ("loss_first", "loss_final", "f1", "exact_match")
CLOCK_S = 1.0  # two readings of the wall clock, beside the 5 % of what is written after the last of them
CUT = "_cut"


def restated(numbers: Numbers) -> list[Restated]:
    """Return every pair that is there; one that follows from config and data is computed anew. A skipped run has none."""
    if not numbers.metrics:
        return []
    pairs = [
        *_ranks(numbers),
        *_steps(numbers),
        *_work(numbers),
        *_checksums(numbers),
        *_times(numbers),
        *_scopes(numbers),
        *restated_series(numbers),
        *restated_parity(numbers),
    ]
    return [
        Restated(name=name, stated=str(stated), other=str(other), source=source)
        for name, stated, other, source in pairs
    ]


Pair = tuple[str, Any, Any, str]


def _ranks(numbers: Numbers) -> Iterator[Pair]:
    result, config = numbers.result, numbers.config
    if result is not None and config is not None:
        for name in ("benchmark", "tier", "backend", "world_size"):
            yield name, getattr(result, name), getattr(config, name), "the config"
    ranks = result.world_size if result is not None else numbers.world_size
    seen, rows = numbers.facts.get("samples_seen"), numbers.tables.get("ranks")
    if isinstance(seen, list):
        yield "ranks", ranks, len(seen), "samples_seen, one entry a rank"
    if isinstance(rows, list) and rows:
        # A table of series has a row for each rank of each series.
        of_series = all(isinstance(row, dict) and "operation" in row for row in rows)
        count = len({row.get("rank") for row in rows}) if of_series else len(rows)
        yield "ranks", ranks, count, "the table of ranks"


def _steps(numbers: Numbers) -> Iterator[Pair]:
    planned, total, first = (numbers.count(name) for name in ("planned_steps", "total_steps", "steady_from_step"))
    losses, steady = numbers.metric("loss"), numbers.metric("step_s")
    resumed = numbers.count("resumed_step")
    restarted = bool(numbers.count("restarts")) and getattr(numbers.config, "max_restarts", 0) > 0
    if resumed is not None and getattr(numbers.config, "resume", None) == "" and not restarted:
        yield "resumed_step", resumed, 0, "the config, which resumes nothing"
    if planned is None:
        return
    if losses is not None and losses.name == "loss":
        yield "planned_steps", planned, losses.n, "the losses, one a step"
    if first is not None and steady is not None and steady.n:
        yield "steady_from_step", first, planned - steady.n + 1, "the step times"
    share = numbers.facts.get("epoch_share")
    if total is not None and isinstance(share, (int, float)):
        what = {True: "the whole training", False: "a part of the training"}
        yield "planned_steps of total_steps", what[planned >= total], what[share >= 1], "epoch_share"
        if planned > total:
            yield "planned_steps", planned, f"{total} at most", "total_steps"


def _work(numbers: Numbers) -> Iterator[Pair]:
    """Compute the plan anew from the features of the data: G samples a step, the last of an epoch with what is left."""
    features, config, share = numbers.facts.get("features"), numbers.config, numbers.facts.get("epoch_share")
    count = features.get("train") if isinstance(features, dict) else None
    batch, epochs = getattr(config, "global_batch", None), getattr(config, "epochs", None)
    planned = numbers.count("planned_steps")
    if not isinstance(count, int) or count < 1 or batch is None or epochs is None or planned is None:
        return
    total = max(1, math.ceil(epochs * math.ceil(count / batch)))

    def samples(steps: int) -> int:
        whole, rest = divmod(steps, math.ceil(count / batch))
        return whole * count + min(rest * batch, count)

    source = f"{count:,} features in batches of {batch:,}"
    if (stated := numbers.count("total_steps")) is not None:
        yield "total_steps", stated, total, f"{epochs:g} epoch{'s' * (epochs != 1)} of {source}"
    if (stated := numbers.count("samples_expected")) is not None:
        yield "samples_expected", stated, samples(planned), f"{planned:,} steps of {source}"
    if isinstance(share, (int, float)):
        yield (
            "epoch_share",
            f"{share:.6g}",
            f"{samples(planned) / samples(total):.6g}",
            f"{planned:,} of {total:,} steps",
        )


def _checksums(numbers: Numbers) -> Iterator[Pair]:
    stated, found = numbers.facts.get("checksums_equal"), numbers.facts.get("checksums")
    if not isinstance(stated, bool) or not isinstance(found, list) or not all(isinstance(row, list) for row in found):
        return
    ranks = numbers.result.world_size if numbers.result is not None else numbers.world_size
    words = {True: "equal", False: "different"}
    yield "checksums", words[stated], words[equal(found)], "the checksums themselves"
    for row in found:
        yield "ranks", ranks, len(row), "the checksums, one a rank"


def equal(checksums: list[list[Any]]) -> bool:
    """Tell whether all ranks had the same checksum in each comparison."""
    return all(len({str(value) for value in row}) == 1 for row in checksums)


def _times(numbers: Numbers) -> Iterator[Pair]:
    result = numbers.result
    if result is None or result.ended_at is None:
        return
    took, total = result.ended_at - result.started_at, numbers.value("total_s")
    order = {True: "after the start", False: "before the start"}
    yield "end of the run", order[took >= -CLOCK_S], order[True], "the order of times"
    if total is not None and took > 0 and result.status == "complete":
        near = abs(total - took) <= CLOCK_S + 0.05 * took
        yield "total_s", f"{total:.1f} s", f"{total if near else took:.1f} s", "started_at and ended_at"


def _scopes(numbers: Numbers) -> Iterator[Pair]:
    """A stand-in says so in the names of its metrics. Whether a training was cut is known by its share only."""
    every = [metric.name for metric in numbers.metrics]
    yield "metrics", len(every), len(set(every)), "their names, each of which stands once"
    config, share = numbers.config, numbers.facts.get("epoch_share")
    if config is None or not hasattr(config, "quality_scope"):
        return
    speed, quality = config.scope(), config.quality_scope()  # type: ignore[attr-defined]
    for metric in numbers.metrics:
        plain = names.base(metric.name)
        if plain not in OF_SPEED + OF_QUALITY:
            continue
        scope = speed if plain in OF_SPEED else quality
        if plain in OF_QUALITY and (share < 1 if isinstance(share, (int, float)) else metric.name.endswith(CUT)):
            scope += CUT
        yield "scope in names", metric.name, plain + scope, "the config"
