"""The pictures of a training, in the order of the report."""

from collections.abc import Callable

from benchlib.benchmarks.squad import figures_unlike
from benchlib.show import training
from benchlib.show.figures import Picture

FIGURES: dict[str, Callable[..., Picture]] = {
    "loss-curve": training.loss_curve,
    "throughput": training.throughput,
    "step-times": training.step_times,
    "time-split": training.time_split,
    "memory": training.memory,
    "rank-skew": training.rank_skew,
    **figures_unlike.FIGURES,
}
