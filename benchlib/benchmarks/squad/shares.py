"""How many samples of a global batch each of several unlike ranks gets, and when that has to change. No torch.

The own work of a rank in a step with n samples of S tokens each, in m micro-batches, is taken to be

    t_r(n) = step_s + batch_s m + sample_s n + token_s n S        (without work a short pass remains)

and a step lasts as long as its slowest rank. Without the fixed parts the best split is the harmonic one, n_r = G v_r / sum(v)
for speeds v; ``optimum`` is that of whole samples and whole micro-batches that fit each rank's memory.

Letters: G samples of a global batch, W ranks, n samples of a rank, S tokens of a sample after padding, K steps.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveInt, model_validator

from benchlib.core.errors import UserError
from benchlib.core.files import read_model, write_json
from benchlib.core.text import seconds

FILE = "balance.json"
SCHEMA = 1
IDLE_TOKENS = 8  # of the pass of a rank without work, which still has to take part in the exchange
WINDOW = 8  # steps whose median tells a drift from noise
LEAST_GAIN = 0.1  # of a step's time that another split has to promise: of 2 equal ranks one became 22% slower
MOST_RANKS_SHOWN = 16


class Rank(BaseModel):
    """What a rank can do, and the ``samples`` of a whole global batch that it gets.

    ``work`` is how often it does its work on purpose. ``held_bytes`` are weights, gradients and optimizer state, ``token_bytes``
    what the backward pass keeps of each token, ``limit_bytes`` what both may fill; ``most`` is how many samples of the longest
    window fit one micro-batch beside what is held.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    device: str
    threads: PositiveInt
    precision: str
    work: PositiveInt = 1
    step_s: NonNegativeFloat = 0.0
    batch_s: NonNegativeFloat = 0.0
    sample_s: NonNegativeFloat = 0.0
    token_s: NonNegativeFloat = 0.0
    held_bytes: NonNegativeFloat = 0.0
    token_bytes: NonNegativeFloat = 0.0
    limit_bytes: NonNegativeFloat | None = None
    most: NonNegativeInt
    samples: NonNegativeInt = 0

    def micro_batches(self, samples: Any) -> Any:
        """Return into how many micro-batches ``samples`` are cut; a number or an array."""
        return -(-samples // max(1, self.most))

    def seconds(self, samples: Any, tokens: Any) -> np.ndarray:
        """Return the own work of a step with ``samples`` samples of ``tokens`` tokens in all; numbers or arrays."""
        samples = np.asarray(samples)
        busy = self.batch_s * self.micro_batches(samples) + self.sample_s * samples + self.token_s * np.asarray(tokens)
        idle = self.batch_s + self.sample_s + self.token_s * IDLE_TOKENS
        return self.step_s + np.where(samples > 0, busy, idle)

    def slower(self, factor: float) -> "Rank":
        """Return the same rank whose work takes ``factor`` times as long."""
        times = ("step_s", "batch_s", "sample_s", "token_s")
        return self.model_copy(update={name: getattr(self, name) * factor for name in times})


class Plan(BaseModel):
    """The split of each global batch from step ``from_step`` on (counted from 0), and why. ``tokens`` is S, a mean."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    schema_version: int = SCHEMA
    model: str
    max_length: PositiveInt
    global_batch: PositiveInt
    tokens: float = Field(gt=0)
    from_step: NonNegativeInt = 0
    reason: str = ""
    ranks: list[Rank]

    @model_validator(mode="after")
    def _shares_fit(self) -> "Plan":
        if (total := sum(self.shares)) != self.global_batch:
            raise ValueError(f"its shares {self.text} are {total} samples, its global batch has {self.global_batch}")
        for number, rank in enumerate(self.ranks):
            if rank.samples and not rank.most:
                raise ValueError(f"rank {number} gets {rank.samples} samples, and not one fits its memory")
        return self

    @property
    def shares(self) -> list[int]:
        """Samples of each rank in a whole global batch."""
        return [rank.samples for rank in self.ranks]

    @property
    def text(self) -> str:
        """The split in words: ``12+4``."""
        return written(self.shares)

    @property
    def step_s(self) -> float:
        """Expected own work of the slowest rank in a step."""
        return longest(self.ranks, self.shares, self.tokens)

    def split(self, samples: int) -> list[int]:
        """Return the shares of a batch, which may be the smaller last one of an epoch."""
        return self.shares if samples == self.global_batch else optimum(self.ranks, samples, self.tokens)

    def expected(self, samples: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Return the expected own work of each rank, (K, W) seconds, from (K, W) samples and tokens."""
        columns = [rank.seconds(samples[:, place], tokens[:, place]) for place, rank in enumerate(self.ranks)]
        return np.stack(columns, axis=1)

    def giving(self, shares: Sequence[int], **changes: Any) -> "Plan":
        """Return the plan with other shares, and whatever else changes; checked."""
        ranks = [
            rank.model_copy(update={"samples": share})
            for rank, share in zip(changes.pop("ranks", self.ranks), shares, strict=True)
        ]
        return Plan.model_validate({**dict(self), **changes, "ranks": ranks})


def written(shares: Sequence[int]) -> str:
    """Return shares in words: ``12+4``; of many ranks the first ones."""
    more = f"+… ({len(shares)} ranks)" if len(shares) > MOST_RANKS_SHOWN else ""
    return "+".join(map(str, shares[:MOST_RANKS_SHOWN])) + more


def longest(ranks: Sequence[Rank], shares: Sequence[int], tokens: float) -> float:
    """Return the expected seconds of a step with these shares: the own work of the slowest rank."""
    return max(float(rank.seconds(share, share * tokens)) for rank, share in zip(ranks, shares, strict=True))


def optimum(ranks: Sequence[Rank], samples: int, tokens: float) -> list[int]:
    """Return the shares of ``samples`` samples whose slowest rank is soonest done; whole samples, whole micro-batches.

    Raises ``UserError`` where no rank has memory for a sample. Exact: the time of a step is one of the (W, G + 1) times of
    its ranks, the smallest by which all samples are done.
    """
    if not any(rank.most for rank in ranks):
        raise UserError(_nothing_fits(ranks))
    counts = np.arange(samples + 1)
    # Never falling: a rank that could do more in less time may as well do less.
    times = np.array([np.maximum.accumulate(rank.seconds(counts, counts * tokens)) for rank in ranks])
    for place, rank in enumerate(ranks):
        if not rank.most:
            times[place, 1:] = np.inf

    def done(time: float) -> np.ndarray:
        """Return how many samples each rank has done by then, (W,)."""
        return np.maximum(np.array([np.searchsorted(row, time, side="right") for row in times]) - 1, 0)

    ends = np.unique(times[np.isfinite(times)])
    low, high = 0, len(ends) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if done(ends[middle]).sum() >= samples else (middle + 1, high)
    shares = done(ends[low])
    for _ in range(int(shares.sum()) - samples):  # the slowest ones give back what is too much
        held = np.where(shares > 0, times[np.arange(len(ranks)), shares], -1.0)
        shares[int(held.argmax())] -= 1
    return [int(share) for share in shares]


def harmonic_s(ranks: Sequence[Rank], samples: float, tokens: float) -> float:
    """Return the seconds of a step whose samples could be divided at will: a bound for every split.

    All working ranks end together: T = (G + sum(a / b)) / sum(1 / b) over those whose fixed part ``a`` is below T.
    """
    fixed = np.array([rank.step_s + rank.batch_s for rank in ranks if rank.most])
    each = np.array([rank.sample_s + rank.token_s * tokens for rank in ranks if rank.most])
    order = np.argsort(fixed, kind="stable")
    fixed, each = fixed[order], np.maximum(each[order], 1e-12)
    ends = (samples + np.cumsum(fixed / each)) / np.cumsum(1 / each)
    return float(ends.min())


def fitting(limit_bytes: float | None, held_bytes: float, token_bytes: float, length: int, samples: int) -> int:
    """Return how many samples of ``length`` tokens fit one micro-batch, at most ``samples``."""
    if limit_bytes is None:
        return samples
    return int(min(samples, max(0.0, limit_bytes - held_bytes) // max(token_bytes * length, 1.0)))


def _nothing_fits(ranks: Sequence[Rank]) -> str:
    limits = ", ".join(f"{(rank.limit_bytes or 0) / 1e9:.3g}" for rank in ranks)
    held = max(rank.held_bytes for rank in ranks) / 1e9
    return f"no rank has memory for one sample: weights, gradients and optimizer state hold {held:.3g} GB of {limits} GB: raise memory_limits_gb, or take a smaller model or max_length"


def replanned(plan: Plan, ratios: np.ndarray, from_step: int) -> Plan | None:
    """Return the plan that fits the speeds of the last steps, or None where the present one is good enough.

    ``ratios`` (K, W) are measured over expected own work of the steps under ``plan``, of which the last ``WINDOW`` count.
    """
    if len(ratios) < WINDOW:
        return None
    factors = np.median(ratios[-WINDOW:], axis=0)
    ranks = [rank.slower(float(factor)) for rank, factor in zip(plan.ranks, factors, strict=True)]
    shares = optimum(ranks, plan.global_batch, plan.tokens)
    before, after = (longest(ranks, item, plan.tokens) for item in (plan.shares, shares))
    if before < (1 + LEAST_GAIN) * after:
        return None
    changed = int(np.abs(np.log(factors)).argmax())
    reason = (
        f"rank {changed} took {factors[changed]:.2f} × the time that was expected of it over {WINDOW} steps: the split goes from "
        f"{plan.text} to {written(shares)}, and a step's own work should take {seconds(after)} instead of {seconds(before)}"
    )
    return plan.giving(
        shares, ranks=ranks, from_step=from_step, reason=reason + without_work(ranks, shares, plan.tokens)
    )


def without_work(ranks: Sequence[Rank], shares: Sequence[int], tokens: float) -> str:
    """Return why ranks get nothing, for the end of a plan's reason; '' where all get something or could."""
    pairs, parts = list(zip(ranks, shares, strict=True)), []
    step_s = max(float(rank.seconds(share, share * tokens)) for rank, share in pairs if share)
    for place, (rank, share) in enumerate(pairs):
        alone = float(rank.seconds(1, tokens))
        if not rank.most:
            parts.append(f"; rank {place} gets none: its memory does not hold one sample")
        elif not share and alone > step_s:
            parts.append(
                f"; rank {place} is hopeless: one sample alone would take it {seconds(alone)}, so it gets none"
            )
    return "".join(parts[:MOST_RANKS_SHOWN])


def difference(plan: Plan, other: Plan) -> str:
    """Return how a plan differs from the run that shall use it, whose speeds and shares do not count; '' where it fits."""
    pairs = [(name.replace("_", " "), getattr(plan, name), getattr(other, name)) for name in ("global_batch", "model", "max_length")]  # fmt: skip
    pairs.append(("number of ranks", len(plan.ranks), len(other.ranks)))
    for place, (mine, here) in enumerate(zip(plan.ranks, other.ranks, strict=False)):
        names = ("device", "threads", "precision", "work")
        pairs += [(f"{name} of rank {place}", getattr(mine, name), getattr(here, name)) for name in names]
    return "; ".join(f"{name}: the plan has {mine}, this run {here}" for name, mine, here in pairs if mine != here)


def load(path: Path | str) -> Plan:
    """Read a plan from its file or from the folder of the run that wrote it. Raises ``UserError``."""
    file = Path(path) / FILE if Path(path).is_dir() else Path(path)
    if not file.exists():
        raise UserError(
            f"balance = {path}: expected off, auto, or the plan of an earlier run: its folder, or its {FILE}"
        )
    return read_model(file, Plan, "a plan of this version", SCHEMA)


def save(run_dir: Path, plan: Plan) -> None:
    """Write a plan into a run folder."""
    write_json(run_dir / FILE, plan.model_dump(mode="json"))


def wait_parts(ranks: Sequence[Rank], samples: np.ndarray, tokens: np.ndarray, own: np.ndarray, step_s: np.ndarray) -> dict[str, float]:  # fmt: skip
    """Return where the time of a step goes beyond what a perfect split would take, seconds by part; they add up.

    ``samples``, ``tokens`` and ``own`` work are (K, W), ``step_s`` (K,): steps under one plan. ``perfect`` is the harmonic
    bound at the speeds that these steps showed, ``best`` the optimum of whole samples.
    """
    each = float(tokens.sum() / samples.sum())
    mean = own.mean(axis=0)
    expected = [float(rank.seconds(samples[:, place], tokens[:, place]).mean()) for place, rank in enumerate(ranks)]
    shown = [rank.slower(value / max(was, 1e-12)) for rank, value, was in zip(ranks, mean, expected, strict=True)]
    whole = round(float(samples.sum(axis=1).mean()))
    best = longest(shown, optimum(shown, whole, each), each)
    perfect = min(best, harmonic_s(shown, whole, each))
    return {
        "perfect": perfect,
        "best": best,
        "whole samples": best - perfect,
        "another split than the best": float(mean.max()) - best,
        "steps that differ": float(own.max(axis=1).mean() - mean.max()),
        "exchange and the rest": float(step_s.mean() - own.max(axis=1).mean()),
    }


def summary(plan: Plan) -> str:
    """Return a plan in a sentence."""
    parts = [
        f"{rank.samples} ({rank.micro_batches(rank.samples)} × {-(-rank.samples // rank.micro_batches(rank.samples))})"
        if rank.samples
        else "none"
        for rank in plan.ranks[:MOST_RANKS_SHOWN]
    ]
    return f"samples of a step by rank (micro-batches × size): {', '.join(parts)}; own work of {seconds(plan.step_s)} expected"
