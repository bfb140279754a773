"""How many steps a training takes, and the learning rate of each of them."""

import math
from dataclasses import asdict, dataclass
from typing import Any

from benchlib.batches import samples_of, steps_per_epoch
from benchlib.squad.config import SquadConfig

# Share of the time that is left which a cut training plans to use: a neighbour on the machine may slow it down.
CUT_MARGIN = 0.9
LEAST_STEPS = 2  # of a cut training: one step shows no falling loss


@dataclass(frozen=True)
class Plan:
    """``total_steps`` is what the config's epochs ask for, ``planned_steps`` what this run does.

    ``epoch_share`` is the share of the samples of ``total_steps`` that ``planned_steps`` see, ``samples`` those samples,
    ``step_s`` the seconds per step that were measured before the decision (0: not measured).
    """

    total_steps: int
    planned_steps: int
    epoch_share: float
    samples: int
    step_s: float
    reason: str

    def as_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)


def total_steps(config: SquadConfig, features: int) -> int:
    """Return the optimizer steps of the whole training."""
    return max(1, math.ceil(config.epochs * steps_per_epoch(features, config.global_batch)))


def make_plan(config: SquadConfig, features: int, step_s: float, left_s: float) -> Plan:
    """Decide how many steps fit into ``left_s`` seconds at ``step_s`` seconds a step, within ``max_steps``.

    The schedule of the learning rate is built on what is decided here, so that a cut training still warms up and decays.
    """
    total = total_steps(config, features)
    planned, reason = total, "the whole training fits the budget"
    if config.max_steps and config.max_steps < planned:
        planned, reason = config.max_steps, f"max_steps = {config.max_steps} ends the training early"
    if step_s * planned > left_s:
        fitting = max(LEAST_STEPS, int(CUT_MARGIN * left_s / step_s))
        if fitting < planned:
            reason = f"{planned:,} steps of {step_s:.3g} s need {step_s * planned:,.0f} s, but {max(left_s, 0):,.0f} s of the budget are left for them: cut to {fitting:,}"
            planned = fitting
    samples = samples_of(planned, features, config.global_batch)
    return Plan(total, planned, samples / samples_of(total, features, config.global_batch), samples, step_s, reason)


def learning_rate(step: int, planned_steps: int, peak: float, warmup_ratio: float) -> float:
    """Return the rate of step 0 to ``planned_steps - 1``: a linear rise, then a linear fall; above 0 in every step.

    The usual formula gives the first step of a warm-up the rate 0, and a step more than planned as well; here both
    ends of the slopes lie outside of the training.
    """
    warmup = int(planned_steps * warmup_ratio)
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    return peak * max(0, planned_steps - step) / (planned_steps - warmup)
