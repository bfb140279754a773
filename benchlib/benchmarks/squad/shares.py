"""How many samples of a global batch each of several heterogeneous ranks gets, and when that has to change. No torch.

The own work of a rank in a step with n samples of S tokens each, in m micro-batches, is taken to be

    t_r(n) = step_s + batch_s m + sample_s n + token_s n S        (without work a short pass remains)

and a step lasts as long as its slowest rank. ``optimum`` is the split of whole samples and whole micro-batches that fit each
rank's memory whose slowest rank is soonest done.

Notation: G samples of a global batch, W ranks, n samples of a rank, S tokens of a sample after padding, K steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchlib.core.errors import UserError

IDLE_TOKENS = 8  # of the pass of a rank without work, which still has to take part in the exchange
WINDOW = 8  # steps whose median tells a drift from noise
MIN_GAIN = 0.1  # of a step's time that another split has to promise: of 2 equal ranks one became 22% slower


@dataclass(frozen=True)
class Member:
    """What a rank can do.

    ``held_bytes`` are weights, gradients and optimizer state, ``token_bytes`` what the backward pass keeps of each token,
    ``limit_bytes`` what both may fill; ``most`` is how many samples of the longest window fit one micro-batch beside what is held.
    """

    device: str = ""
    threads: int = 1
    step_s: float = 0.0
    batch_s: float = 0.0
    sample_s: float = 0.0
    token_s: float = 0.0
    held_bytes: float = 0.0
    token_bytes: float = 0.0
    limit_bytes: float | None = None
    most: int = 0

    def micro_batches(self, samples: Any) -> Any:
        """Return into how many micro-batches ``samples`` are cut; a number or an array."""
        return -(-samples // max(1, self.most))

    def seconds(self, samples: Any, tokens: Any) -> np.ndarray:
        """Return the own work of a step with ``samples`` samples of ``tokens`` tokens in all; numbers or arrays."""
        busy = self.batch_s * self.micro_batches(samples) + self.sample_s * samples + self.token_s * tokens
        idle = self.batch_s + self.sample_s + self.token_s * IDLE_TOKENS
        return self.step_s + np.where(samples > 0, busy, idle)

    def slower(self, factor: float) -> "Member":
        times = ("step_s", "batch_s", "sample_s", "token_s")
        return replace(self, **{name: getattr(self, name) * factor for name in times})


@dataclass(frozen=True)
class Split:
    """The ``shares`` of each whole global batch from step ``from_step`` on (counted from 0). ``tokens`` is S, a mean.

    A split that answers a drift names the rank that changed most, and by which ``factor``.
    """

    members: tuple[Member, ...]
    shares: list[int]
    tokens: float
    from_step: int = 0
    drifted: int | None = None
    factor: float | None = None

    @property
    def step_s(self) -> float:
        return longest(self.members, self.shares, self.tokens)

    def of(self, samples: int) -> list[int]:
        """Return the shares of a batch, which may be the smaller last one of an epoch."""
        return self.shares if samples == sum(self.shares) else optimum(self.members, samples, self.tokens)

    def expected(self, samples: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Return the expected own work of each rank, (K, W) seconds, from (K, W) samples and tokens."""
        columns = [member.seconds(samples[:, place], tokens[:, place]) for place, member in enumerate(self.members)]
        return np.stack(columns, axis=1)


def best_split(members: Sequence[Member], samples: int, tokens: float, **more: Any) -> Split:
    """Return the split of ``samples`` samples whose slowest rank is soonest done; raises as :func:`optimum`."""
    return Split(tuple(members), optimum(members, samples, tokens), tokens, **more)


def longest(members: Sequence[Member], shares: Sequence[int], tokens: float) -> float:
    """Return the expected seconds of a step with these shares: the own work of the slowest rank."""
    return max(float(member.seconds(share, share * tokens)) for member, share in zip(members, shares, strict=True))


def optimum(members: Sequence[Member], samples: int, tokens: float) -> list[int]:
    """Return the shares of ``samples`` samples whose slowest rank is soonest done; whole samples, whole micro-batches.

    Each sample in turn goes to the rank that is soonest done with it. Raises ``UserError`` where no rank has memory for one.
    """
    able = [place for place, member in enumerate(members) if member.most]
    if not able:
        limits = ", ".join(f"{(member.limit_bytes or 0) / 1e9:.3g}" for member in members)
        held = max(member.held_bytes for member in members) / 1e9
        raise UserError(
            f"no rank has memory for one sample: weights, gradients and optimizer state hold {held:.3g} GB of {limits} GB: "
            "raise memory_limits_gb, or take a smaller model or max_length"
        )
    counts, owners = (
        np.arange(1, samples + 1),
        np.repeat(able[::-1], samples),
    )  # of equal ends the last rank's comes first
    # Never falling: a rank that could do more in less time may as well do less.
    ends = [np.maximum.accumulate(members[place].seconds(counts, counts * tokens)) for place in able[::-1]]
    soonest = np.argsort(np.concatenate(ends), kind="stable")[:samples]
    return np.bincount(owners[soonest], minlength=len(members)).tolist()  # type: ignore[no-any-return]


def fitting(limit_bytes: float | None, held_bytes: float, token_bytes: float, length: int, samples: int) -> int:
    """Return how many samples of ``length`` tokens fit one micro-batch, at most ``samples``."""
    if limit_bytes is None:
        return samples
    return int(min(samples, max(0.0, limit_bytes - held_bytes) // max(token_bytes * length, 1.0)))


def replanned(split: Split, ratios: np.ndarray, from_step: int) -> Split | None:
    """Return the split that fits the speeds of the last steps, or None where the present one is good enough.

    ``ratios`` (K, W) are measured over expected own work of the steps under ``split``, of which the last ``WINDOW`` count.
    """
    if len(ratios) < WINDOW:
        return None
    factors = np.median(ratios[-WINDOW:], axis=0)
    members = [member.slower(float(factor)) for member, factor in zip(split.members, factors, strict=True)]
    drifted = int(np.abs(np.log(factors)).argmax())
    best = best_split(
        members, sum(split.shares), split.tokens, from_step=from_step, drifted=drifted, factor=float(factors[drifted])
    )
    gained = longest(members, split.shares, split.tokens) >= (1 + MIN_GAIN) * best.step_s
    return best if gained else None


def wait_parts(
    members: Sequence[Member], samples: np.ndarray, tokens: np.ndarray, own: np.ndarray, step_s: np.ndarray
) -> dict[str, float]:
    """Return what the time of a step consists of, seconds by part; they add up. ``best_s`` is the optimum of whole samples at
    the speeds that these steps showed.

    ``samples``, ``tokens`` and ``own`` work are (K, W), ``step_s`` (K,): steps under one split.
    """
    mean = own.mean(axis=0)
    expected = [float(member.seconds(samples[:, i], tokens[:, i]).mean()) for i, member in enumerate(members)]
    shown = [member.slower(value / max(was, 1e-12)) for member, value, was in zip(members, mean, expected, strict=True)]
    whole, each = round(float(samples.sum(axis=1).mean())), float(tokens.sum() / samples.sum())
    best = best_split(shown, whole, each).step_s
    return {
        "best_s": best,
        "other_split_s": float(mean.max()) - best,
        "differing_steps_s": float(own.max(axis=1).mean() - mean.max()),
        "exchange_s": float(step_s.mean() - own.max(axis=1).mean()),
    }
