"""How much a metric changed between two sets of runs, how sure that is, and whether the regression gate lets it pass.

Two kinds of noise count. Within a run the samples scatter; neighbours in a series that resemble each other count as the fewer
samples that they stand for. Between runs the whole run shifts (another host, another memory layout, a neighbour): no number
of samples inside one run shows that, only repeated runs do. The interval is the wider of the two.

A neighbour that comes and goes lowers the throughput of a run. It does not lower the rate of the windows that it left alone, the
undisturbed level; slower code lowers both. Throughput of many windows is judged by both (``judged``).

Two or three runs hardly tell their own spread: Student's t with two degrees of freedom is 7. So the spread borrows: from a
calibration, from other stored runs of the same kind, and as long as these have fewer than ``DEFAULT_DOF`` degrees of freedom
from a stated default, as in the moderated variance of G. K. Smyth, "Linear models and empirical Bayes methods", 2004:
s² = sum(dof s²) / sum(dof).

All arithmetic is done on a :class:`Scale`: in logarithms for ratios, else in the metric's unit.
"""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist
from typing import Any, Final, Literal, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from benchlib.core.errors import UserError
from benchlib.core.files import read_model, write_json
from benchlib.core.stats import (
    MIN_FOR_INTERVAL,
    Average,
    average,
    average_end,
    finite,
    median_ends,
    thinned,
    undisturbed,
)
from benchlib.core.text import counted, quantity
from benchlib.judge.changepoints import Levels
from benchlib.results.metrics import Direction, Metric
from benchlib.results.metrics import RegressionLimit as RegressionLimit
from benchlib.results.record import KEPT_SAMPLES, Record
from benchlib.results.run import Run, fingerprint_key
from benchlib.results.verdict import GATE, Check, Status

# Two-sided: a change that is not there lies beyond either end in at most 1% of the comparisons.
GATE_CONFIDENCE = 0.98
CHANCE = (1 - GATE_CONFIDENCE) / 2
# The share of unchanged repeats whose ratio lies within the A/A band.
BAND_COVERAGE = 0.95
# Two runs tell next to nothing of the spread between runs (Student's t is 31.8 there): without a default their interval would
# leave everything open. They widen the A/A band only; from three runs on the interval counts them.
MIN_DOF = 2
# The default fills up what is known to this many degrees of freedom: t is 3.1 then, and runs replace it one by one.
DEFAULT_DOF = 6
# For the reach of a FAIL at least so many: by t of 6 the chance of one of 20 metrics is 9 standard errors away, and one accepted
# run would let a loss of 30% FAIL in 2% of runs instead of 58%.
REACH_DOF = 10

normal = NormalDist().inv_cdf
Basis = Literal["runs", "default", "samples", "none"]


@dataclass(frozen=True)
class Scale:
    """What values are compared on. ``to`` takes a value there; a difference there is a change, and ``back`` returns what readers
    see of it: a ratio, or an amount in the metric's unit.
    """

    name: Literal["ratio", "difference"]
    to: Callable[[Any], Any]
    back: Callable[[float], float]

    def size(self, move: float) -> float:
        """Return how large a change is for a reader: 0.2 for a ratio of 0.8, the amount of a difference."""
        return abs(self.back(move) - self.back(0.0))

    def size_text(self, size: float, unit: str, digits: int = 0) -> str:
        return f"{size:.{digits}%}" if self is LOG else quantity(size, unit)

    def text(self, move: float, unit: str) -> str:
        """Write a change: ``0.952`` for a ratio, ``-1.2 s`` for a difference."""
        return f"{self.back(move):.3f}" if self is LOG else f"{'+' if move >= 0 else '-'}{quantity(abs(move), unit)}"


LOG = Scale("ratio", np.log, lambda move: math.exp(max(-700.0, min(move, 700.0))))
LINEAR = Scale("difference", np.asarray, float)


@dataclass(frozen=True)
class Spread:
    """Standard deviation between unchanged runs, on a scale.

    ``dof`` are the degrees of freedom that it rests on: runs minus one for each set of runs. ``source`` says where it comes from.
    """

    s: float
    dof: int
    source: str = ""

    def band_text(self, scale: Scale, unit: str = "") -> str:
        """Write the A/A band, in which 95% of the changes between two unchanged runs lie: 1.96 * sqrt(2) * s, both vary."""
        move = normal((1 + BAND_COVERAGE) / 2) * math.sqrt(2) * self.s
        if scale is LINEAR:
            return f"±{quantity(move, unit)}"
        return f"{math.expm1(-move):.1%} to +{math.expm1(move):.1%}"


def pooled(*parts: Spread | None) -> Spread | None:
    """Return several estimates of one spread as one; None where there is none."""
    usable = [part for part in parts if part is not None and part.dof > 0]
    if not usable:
        return None
    dof = sum(part.dof for part in usable)
    sources = ", ".join(dict.fromkeys(part.source for part in usable if part.source))
    return Spread(math.sqrt(sum(part.s**2 * part.dof for part in usable) / dof), dof, sources)


def moderated(known: Spread | None, default: float | None, source: str = "default") -> Spread | None:
    """Return a spread of at least ``DEFAULT_DOF`` degrees of freedom: what is known, filled up with the default."""
    lacking = DEFAULT_DOF - (known.dof if known else 0)
    if default is None or lacking <= 0:
        return known
    return pooled(known, Spread(default, lacking, source))


def spread_about(levels: Levels, scale: Scale, value: float, source: str = "") -> Spread:
    """Return the spread of runs about their levels on another scale: levels of values above zero are compared in logarithms."""
    return Spread(levels.spread * (abs(value) if levels.ratio and scale is LINEAR else 1.0), levels.free, source)


@dataclass(frozen=True)
class Reading:
    """A run's average, on a scale, how far below and above it the interval within the run ends, and how many samples it has.

    ``level`` is the undisturbed one, in the unit, of enough rates of equal work.
    """

    value: float
    below: float
    above: float
    samples: int
    level: float | None = None


@functools.lru_cache(maxsize=4096)
def reading(samples: tuple[float, ...], scale: Scale = LOG, kind: Average = "median") -> Reading:
    """Read a run whose ``kind`` of average counts.

    Raises ``ValueError`` for no samples, samples that are not finite, and for a ratio of values that are not above zero.
    """
    values = finite(samples)
    if scale is LOG and values.min() <= 0:
        raise ValueError("a ratio needs values above zero")
    value, z = average(values.tolist(), kind), normal((1 + GATE_CONFIDENCE) / 2)
    if kind == "median":
        ends = median_ends(scale.to(values), z)
    else:
        ends = (average_end(values, z, kind) / (value if scale is LOG else 1.0),) * 2
    level = undisturbed(samples) if kind == "harmonic" else None
    return Reading(float(scale.to(value)), *ends, len(values), level)


def own_spread(*sides: Sequence[Reading]) -> Spread | None:
    """Return the spread between the runs of the sides, pooled; None where no side has two."""
    return pooled(
        *(
            Spread(float(np.std([item.value for item in side], ddof=1)), len(side) - 1, "the compared runs")
            for side in sides
            if len(side) > 1
        )
    )


def level_spread(levels: Sequence[float]) -> Spread | None:
    """Return the spread between the undisturbed levels of runs, in logarithms; None of fewer than two.

    A run that was disturbed throughout has its level far below: of three or more the lowest counts as the second lowest, and not as
    a degree of freedom (W. J. Dixon and J. W. Tukey, "Approximate behavior of the distribution of Winsorized t", Technometrics 10, 1968).
    """
    if len(levels) < 2:
        return None
    values, dof = np.sort(np.log(levels)), len(levels) - 1
    if dof > 1:
        values[0], dof = values[1], dof - 1
    return Spread(math.sqrt(float(np.square(values - values.mean()).sum()) / dof), dof, "the compared runs")


def medians_of(runs: int) -> float:
    """Return of how many runs the mean is as sure as the median of these, for normal noise."""
    return runs if runs < 3 else runs * 2 / math.pi


@dataclass(frozen=True)
class Change:
    """``move`` is new - old on the scale and ``least`` to ``most`` its 98% interval.

    ``basis`` says which noise the interval rests on: ``runs`` (between runs), ``default`` (between runs, but no run was there
    to tell it), ``samples`` (within one run on each side, the spread between runs is not known) or ``none`` (fewer than five
    samples in every run: what they scatter widens the interval, which holds the change less often than in 98%).
    ``spread`` is that between unchanged runs, None where it is not known. ``reach`` is how far unchanged runs lie apart with
    the probability ``chance`` of :func:`compared`, ``error`` the standard error between runs.
    """

    scale: Scale
    move: float
    least: float
    most: float
    basis: Basis
    spread: Spread | None
    reach: float = 0.0
    error: float = 0.0

    @property
    def sure(self) -> bool:
        return not self.least <= 0 <= self.most

    def ends(self, unit: str) -> str:
        return f"{self.scale.text(self.least, unit)} to {self.scale.text(self.most, unit)}"

    def text(self, unit: str) -> str:
        """Write the change with its interval: ``ratio 0.95, 98% interval 0.9 to 1.0``."""
        text, interval = "ratio " * (self.scale is LOG) + self.scale.text(self.move, unit), self.ends(unit)
        if self.basis != "none":
            return f"{text}, 98% interval {interval}"
        return text if self.least == self.most else f"{text}, {interval} by too few samples for an interval"


def compared(
    new: Sequence[Reading],
    old: Sequence[Reading] = (),
    scale: Scale = LOG,
    *,
    known: Spread | None = None,
    default: float | None = None,
    source: str = "default",
    chance: float = CHANCE,
) -> Change:
    """Compare two sides of runs; without ``old`` ones the change is the value of the new ones, with its interval.

    A side's value is the mean of its runs' values. ``known`` is a spread between runs measured elsewhere, ``default`` the one
    that is assumed as long as too few runs tell it, with its ``source``. Raises ``ValueError`` without new runs.
    """
    if not new:
        raise ValueError("a comparison needs at least one run on each side")
    (value, below, above), (old_value, old_below, old_above) = _mean(new), _mean(old)
    within = math.hypot(below, old_above), math.hypot(above, old_below)  # more of the old one is less of the change
    measured = pooled(known, own_spread(new, old))
    spread, runs = moderated(measured, default, source), (len(new), len(old))
    change = moved(scale, value - old_value, spread, runs, chance, within)
    basis: Basis = "runs" if measured else "default"
    if change.basis == "none":
        basis = "samples" if any(item.samples >= MIN_FOR_INTERVAL for item in (*new, *old)) else "none"
    return replace(change, basis=basis)


def _mean(side: Sequence[Reading]) -> list[float]:
    """Return the mean value of runs, and how far below and above it the interval within the runs ends."""
    levels = np.array([(item.value, item.below, item.above) for item in side] or np.zeros((1, 3)))
    return [float(levels[:, 0].mean()), *(np.linalg.norm(levels[:, 1:], axis=0) / len(levels)).tolist()]


def moved(
    scale: Scale,
    move: float,
    spread: Spread | None,
    runs: tuple[float, float],
    chance: float = CHANCE,
    within: tuple[float, float] = (0.0, 0.0),
) -> Change:
    """Return a move between the levels of so many new and old ``runs`` with its interval.

    It is the wider of Student's ``t * s * sqrt(1/r + 1/k)`` and the one ``within`` the runs, below and above.
    """
    basis: Basis = "none"
    half = reach = error = 0.0
    if spread is not None and spread.dof >= MIN_DOF:
        basis = "runs"
        error = spread.s * math.sqrt(sum(1 / count for count in runs if count))
        half, reach = student(spread.dof) * error, student(max(spread.dof, REACH_DOF), chance) * error
    least, most = move - max(half, within[0]), move + max(half, within[1])
    return Change(scale, move, least, most, basis, spread, reach, error)


@functools.lru_cache(maxsize=256)
def student(dof: int, chance: float = CHANCE) -> float:
    """Return what Student's t exceeds with the probability ``chance``; the default belongs to the gate's confidence."""
    from scipy.special import stdtrit

    return float(stdtrit(dof, 1 - chance))


LEVEL = ", undisturbed"  # ends the name by which the spread of a metric's undisturbed level is known
TIMED = ("s", "ms", "us", "Gbps")  # units that a slow-down changes, beside all rates
SIZES = ("B", "MB", "GB", "GiB", "bytes")
TWICE = 2.0  # times the limit: a loss of which has to be excluded for a PASS
POWER = 0.99
REPEATS = "repeats.json"
SCHEMA: Final = 3  # of files of runs
FALSE_ALARMS = 0.0015  # of the unchanged runs of a benchmark, whichever metric it is: 1 in 80 nights of eight of them
FOREIGN_LOAD_SIGMAS = 3.0  # standard deviations between runs that a slow-down by others counts as
NOTICED = 0.15  # share of the processors that others took, from which the assumed spread follows it
_EDGE = 1e-9  # of what is compared: 0.9 - 0.8 misses 0.1 by rounding, and a boundary value passes


@dataclass(frozen=True)
class Side:
    """A metric in one or more runs: ``runs`` holds the samples of each, ``others`` the share of the processors that others
    took meanwhile, of the median run; 0 if unknown. ``sensed`` says whether it is known of all runs."""

    metric: Metric
    runs: tuple[tuple[float, ...], ...]
    others: float = 0.0
    sensed: bool = False

    @classmethod
    def of(cls, metric: Metric, samples: Iterable[float] = ()) -> "Side":
        """Make the side of one run; a run without stored samples counts with its value."""
        values = () if metric.fault else tuple(samples) or ((metric.value,) if metric.value is not None else ())
        return cls(metric, (values,) if values else ())

    @property
    def lowest(self) -> float:
        return min(map(min, self.runs))

    def readings(self, scale: Scale) -> list[Reading]:
        return [reading(run, scale, self.metric.average) for run in self.runs]

    @functools.cached_property
    def levels(self) -> list[float]:
        """The undisturbed level of each run; empty unless all have one, of rates above zero."""
        levels = [item.level for item in self.readings(LOG) if item.level] if self.lowest > 0 else []
        return levels if len(levels) == len(self.runs) else []

    def values(self, scale: Scale) -> list[float]:
        return [scale.back(item.value) for item in self.readings(scale)]

    def value(self, scale: Scale) -> float:
        """Return the (geometric, for ratios) mean of the runs' values."""
        return scale.back(float(np.mean([item.value for item in self.readings(scale)])))

    def text(self, scale: Scale) -> str:
        if len(self.runs) == 1:
            return self.metric.text
        return f"{quantity(self.value(scale), self.metric.unit)} ({len(self.runs)} runs)"


def side_of(records: Sequence[Record], name: str) -> Side | None:
    """Return one side of a comparison from several runs; None where none of them has the metric.

    Runs in which the metric has no value do not count, unless none has one. A series that is not finite counts with its value.
    """
    having = [(record, metric) for record in records if (metric := record.metric(name)) is not None]
    having = [pair for pair in having if pair[1].value is not None] or having[-1:]
    if not having:
        return None
    runs = list[tuple[float, ...]]()
    for record, metric in having:
        samples = thinned(record.samples.get(name, []), KEPT_SAMPLES)
        runs += Side.of(metric, samples if all(map(math.isfinite, samples)) else ()).runs
    others = float(np.median([record.others for record, _ in having]))
    return Side(having[-1][1], tuple(runs), others, all(record.sensed for record, _ in having))


def deciding_spread(side: Side, scale: Scale) -> Spread | None:
    """Return the spread between the runs of a side by which it FAILs: of their undisturbed levels if they have them."""
    return level_spread(side.levels) if side.levels and scale is LOG else own_spread(side.readings(scale))


def scale_of(limit: RegressionLimit | None, *values: float) -> Scale:
    """Return what to compare on: ratios, but differences for points and for values near or below zero."""
    return LINEAR if min(values) <= 0 or (limit is not None and limit.amount is not None) else LOG


def allowed_loss(limit: RegressionLimit, scale: Scale, direction: Direction, old: float, times: float = 1.0) -> float:
    """Return how far ``times`` the limit lies from the baseline's value ``old``, on the scale."""
    amount = times * (limit.amount if limit.amount is not None else (limit.share or 0.0) * abs(old))
    bound = old - amount if direction == "higher" else old + amount
    return math.inf if scale is LOG and bound <= 0 else abs(float(scale.to(bound) - scale.to(old)))


def ruling(
    change: Change, limit: RegressionLimit, direction: Direction, old: float, spare: float = 0.0
) -> tuple[Status, str]:
    """Return what the gate, the history and a comparison say of a change, and why. ``old`` is the value of the reference.

    FAIL where the loss is beyond the limit, its interval excludes "no change", and it exceeds the change's ``reach``. PASS where
    nothing is lost, whatever the interval, and where the loss is within the limit, with so much to ``spare``, and its interval
    excludes twice the limit; else AMBIGUOUS. A boundary value passes.
    """
    sign = -1 if direction == "higher" else 1
    allowed, twice = (allowed_loss(limit, change.scale, direction, old, times) for times in (1.0, TWICE))
    lost = sign * change.move
    least, most = sorted((sign * change.least, sign * change.most))
    # Logarithms have a scale of their own, amounts have not.
    sizes = [1.0 if change.scale is LOG else abs(old), allowed, least, most]
    slack = _EDGE * max(abs(size) for size in sizes if math.isfinite(size))
    if lost <= 0:
        return "PASS", ""
    if lost <= allowed + slack:
        if most > twice + slack:
            return "AMBIGUOUS", "within the limit, but twice the limit is not excluded: too noisy to gate"
        if lost + spare > allowed + slack:
            return "AMBIGUOUS", "within the limit by less than noise"
        return "PASS", "surely worse, but within the limit" if least > 0 else ""
    if least <= 0:
        return "AMBIGUOUS", "beyond the limit, but noise may explain it"
    if lost <= change.reach:
        return "AMBIGUOUS", "beyond the limit, but among all metrics of a run one may be as far off by chance"
    return "FAIL", "beyond the limit, and noise does not explain it"


def judged(limit: RegressionLimit, new: Side, old: Side, whole: Change, level: Change) -> tuple[Status, str]:
    """Return what the gate says of a throughput by all work over all time and by its undisturbed level, and why.

    FAIL where the level FAILs, unless the throughput is above that of every accepted run; and where the throughput FAILs and others
    on the machine cannot be the reason. PASS where the level PASSes with a standard error to spare and the throughput is within the
    limit; else AMBIGUOUS.
    """
    value = old.value(LOG)
    by_level, why = ruling(level, limit, "higher", value, level.error)
    by_whole, reason = ruling(whole, limit, "higher", value)
    exact, _ = ruling(replace(whole, least=whole.move, most=whole.move), limit, "higher", value)
    if by_level == "FAIL" and new.value(LOG) < max(old.values(LOG)):
        return "FAIL", f"the undisturbed level is {why}"
    if by_whole == "FAIL" and alone(new, old):
        return "FAIL", reason
    if by_level == "FAIL":
        return "AMBIGUOUS", "the undisturbed level is beyond the limit, but no accepted run has a higher throughput"
    if exact != "PASS":
        return "AMBIGUOUS", "the throughput is beyond the limit: it stalls, or others used the machine"
    if by_level == "AMBIGUOUS":
        return by_level, f"the undisturbed level is {why}"
    return "PASS", reason if by_whole == "PASS" else ""


def alone(new: Side, old: Side) -> bool:
    """Tell whether others on the machine cannot be the reason why the new runs have less throughput.

    Sensors saw that nobody else took the processors; or every one of r new runs lies below every one of k accepted ones, and so many
    that chance, whatever it does to single runs, orders unchanged ones so in 1 of (r + k)! / (r! k!) cases: F. Wilcoxon, "Individual
    comparisons by ranking methods", Biometrics Bulletin 1, 1945.
    """
    if new.sensed and old.sensed:
        return max(new.others, old.others) < NOTICED
    orders = math.comb(len(new.runs) + len(old.runs), len(new.runs))
    return 1 / orders <= FALSE_ALARMS and max(new.values(LOG)) < min(old.values(LOG))


def is_timed(unit: str) -> bool:
    """Tell whether a metric of this unit is a speed or a time: what slows the machine changes it, and only to the worse."""
    return unit in TIMED or unit.endswith("/s")


def default_spread(metric: Metric, limit: RegressionLimit | None, scale: Scale, others: float = 0.0) -> float | None:
    """Return the spread between runs, on the scale, that is assumed while it is unknown; None where nothing may be assumed.

    A fifth of the limit for amounts (F1 with its limit of one point scatters by 0.2 with the seed). Where ``others`` take a
    share of the processors, a speed is lower by it, and how much they take is theirs to choose: a run without them counts as
    ``FOREIGN_LOAD_SIGMAS`` standard deviations away.
    """
    if scale is LINEAR:
        return limit.amount / 5 if limit and limit.amount is not None else None
    if limit is None and not is_timed(metric.unit):
        return None
    if metric.unit in SIZES:
        return 0.02
    alone = 0.10 if "_p9" in metric.name else 0.05
    slowed = is_timed(metric.unit) and metric.direction != "none"
    return max(alone, -math.log1p(-others) / FOREIGN_LOAD_SIGMAS) if slowed else alone


def chance_of_each(limits: Iterable[RegressionLimit], metrics: Iterable[Metric]) -> float:
    """Return how often an unchanged metric may fail, so that no more than ``FALSE_ALARMS`` of runs fail in any (Bonferroni).

    A throughput counts twice: it is judged by its level, too.
    """
    measured = {metric.name: 1 + (metric.average == "harmonic") for metric in metrics if metric.value is not None}
    return FALSE_ALARMS / max(1, sum(measured.get(limit.metric, 0) for limit in limits))


def smallest_loss(limit: RegressionLimit, side: Side, measured: Spread | None, runs: int) -> float:
    """Return the loss, a share or an amount, that a single run FAILS with in 99% of comparisons with ``runs`` accepted ones.

    ``side`` are unchanged runs, ``measured`` the spread between them that is known, of the undisturbed level of those that have one,
    filled up with the default. The FAIL needs
    the loss beyond the limit and beyond t standard errors, of which what was measured scatters: the normal approximation of
    the noncentral t (N. L. Johnson and B. L. Welch, Biometrika 31, 1940).
    """
    scale, direction = scale_of(limit, side.lowest), side.metric.direction
    needed = allowed_loss(limit, scale, direction, side.value(scale))
    spread = moderated(measured, default_spread(side.metric, limit, scale, side.others))
    if spread is not None and spread.dof >= MIN_DOF:
        alike = medians_of(runs) if side.levels else runs
        error, sure, t = spread.s * math.sqrt(1 + 1 / alike), normal(POWER), student(spread.dof)
        scattering = math.sqrt(1 + t**2 * (measured.dof if measured else 0) / (2 * spread.dof**2))
        needed = max(needed + sure * error, error * (t + sure * scattering))
    return scale.size(-needed if direction == "higher" else needed)


def regression_check(
    limit: RegressionLimit,
    new: Side | None,
    old: Side | None,
    known: Spread | None = None,
    chance: float = CHANCE,
    known_level: Spread | None = None,
) -> Check:
    """Compare a metric with its baseline by ``ruling``, a throughput of enough windows by ``judged``; the direction is the metric's.

    ``known`` is the spread between unchanged runs that a calibration or other stored runs tell, ``known_level`` that of their
    undisturbed levels, ``chance`` the probability with which an unchanged metric may fail. A value that is not finite fails.
    """
    if not new or not old:
        which, metric = ("this run", new.metric) if new else ("the baseline", old.metric if old else None)
        assert metric is not None
        reason, value = f"only {which} has it ({metric.text})", metric.value if new else None
        return baseline_check(metric, status="NOT_COMPARABLE", reason=reason, value=value)
    metric = new.metric
    if metric.value is None and metric.provenance != "not_available":
        return baseline_check(metric, status="FAIL", reason=f"{metric.name} is {metric.fault}")
    for which, side in (("this run", new), ("the baseline", old)):
        if side.metric.value is None or not side.runs:
            reason = f"{which} has no value: {side.metric.reason}"
            return baseline_check(metric, status="NOT_COMPARABLE", reason=reason, value=metric.value)
    change = difference(limit, new, old, known, chance)
    scale, spread = change.scale, change.spread
    words = [f"{new.text(scale)} against {old.text(scale)}: {change.text(metric.unit)}"]
    if scale is LOG and metric.direction == "higher" and new.levels and old.levels:
        level = level_change(limit, new, old, known_level, chance)
        spread = level.spread
        words.append(f"undisturbed level {level.text(metric.unit)}")
        status, why = judged(limit, new, old, change, level)
    else:
        status, why = ruling(change, limit, metric.direction, old.value(scale))
    words.append(why)
    return baseline_check(
        metric,
        status=status,
        reason="; ".join(filter(None, words)) + ": repeat the run" * (status == "AMBIGUOUS" and len(new.runs) == 1),
        value=metric.value if len(new.runs) == 1 else new.value(scale),
        limit=f"{limit.text(metric.direction)} of {old.text(scale)}",
        source=f"baseline of {counted(len(old.runs), 'run')}; {spread_text(spread, scale, metric.unit)}",
    )


def difference(
    limit: RegressionLimit | None, new: Side, old: Side, known: Spread | None = None, chance: float = CHANCE
) -> Change:
    """Compare two sides that have values; without a limit as the metric's unit asks for."""
    scale = scale_of(limit, new.lowest, old.lowest)
    default, source = assumed(limit, new, old, scale)
    return compared(
        new.readings(scale), old.readings(scale), scale, known=known, default=default, source=source, chance=chance
    )


def level_change(
    limit: RegressionLimit, new: Side, old: Side, known: Spread | None = None, chance: float = CHANCE
) -> Change:
    """Compare the undisturbed levels of two sides that have them, by the medians of their runs."""
    sides = (new.levels, old.levels)
    spread = moderated(pooled(known, *map(level_spread, sides)), *assumed(limit, new, old, LOG))
    after, before = (float(np.median(np.log(levels))) for levels in sides)
    return moved(LOG, after - before, spread, (medians_of(len(new.runs)), medians_of(len(old.runs))), chance)


def assumed(limit: RegressionLimit | None, new: Side, old: Side, scale: Scale) -> tuple[float | None, str]:
    """Return the spread that is assumed as long as runs do not tell it, and how it is named."""
    others = max(new.others, old.others)
    default = default_spread(new.metric, limit, scale, others)
    busy = default != default_spread(new.metric, limit, scale)
    return default, f"default where others take {others:.0%} of the processors" if busy else "default"


def foreign_load(run: Record) -> list[str]:
    """Return a sentence where others took the processors while a run was going on."""
    words = f"Others took {run.others:.0%} of the processors while this ran: speeds are what the rest gave."
    return [words] if run.others >= NOTICED else []


def spread_text(spread: Spread | None, scale: Scale, unit: str = "") -> str:
    if spread is None:
        return "the spread between runs is not known, accept --add and calibrate measure it"
    return f"spread between runs {scale.size_text(spread.s, unit, 1)}, from {spread.source or 'runs'}"


def baseline_check(metric: Metric, **fields: Any) -> Check:
    """Return a regression check of a metric; ``fields`` are those of ``Check`` beside name, kind, question and unit."""
    question = f"Is {metric.name} at least as good as the baseline?"
    common = {"name": f"{metric.name}{GATE}", "kind": "regression", "unit": metric.unit, "source": "baseline"}
    return Check(**{**common, "question": question, **fields})


class KeptRuns(BaseModel):
    """A file of runs, the oldest first: accepted ones, those of a calibration or a reference, earlier repetitions.

    The records are copied, not linked: what was judged by them stays so when the folders of the runs are gone. ``limits`` are those
    that the runs were accepted with.
    """

    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="strings")

    schema_version: Literal[3] = SCHEMA
    runs: list[Record] = Field(min_length=1)
    limits: list[RegressionLimit] = []

    @property
    def latest(self) -> Record:
        return self.runs[-1]

    @property
    def key(self) -> str:
        return fingerprint_key(self.latest.fingerprint)

    def save(self, path: Path) -> Path:
        """Write the file; ``UserError`` for runs that it could not be read back with."""
        if lost := self.lost():
            raise UserError(f"{path} is not written: {lost}")
        write_json(path, {"schema_version": SCHEMA} | self.model_dump(mode="json", exclude_defaults=True))
        return path

    def lost(self) -> str:
        """Return which number the file lacks, '' for none: only complete runs are kept, so it was cut or edited."""
        for run in self.runs:
            if not run.metrics:
                return f"{run.run} has no metrics"
            for metric in run.metrics:
                if metric.fault:
                    return f"{metric.name} of {run.run} is {metric.fault}"
            for name, samples in run.samples.items():
                if run.metric(name) is None:
                    return f"{run.run} has samples of {name} without the metric"
                if not all(map(math.isfinite, samples)):
                    return f"a sample of {name} of {run.run} is not finite"
        gone = [limit.metric for limit in self.limits if side_of(self.runs, limit.metric) is None]
        return f"{gone[0]} has a limit, and no run has it" if gone else ""


Kept = TypeVar("Kept", bound=KeptRuns)


def read_runs(path: Path, kind: type[Kept], what: str) -> Kept:
    """Read a file of runs; ``UserError`` if it is cut, foreign, of a later schema, or lost a number."""
    kept = read_model(path, kind, what, SCHEMA)
    if lost := kept.lost():
        raise UserError(f"{path}: not {what} ({lost})")
    return kept


def repeats(run: Run) -> list[Record]:
    """Return the earlier repetitions of a run, the oldest first; none where it was not repeated."""
    path = run.path / REPEATS
    return read_runs(path, KeptRuns, "the records of repetitions").runs if path.exists() else []


def save_repeats(run_dir: Path | str, records: Sequence[Record]) -> None:
    KeptRuns(runs=list(records)).save(Path(run_dir) / REPEATS)
