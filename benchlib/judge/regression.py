"""The regression gate: how much worse than the accepted runs a metric may get, judged by a ratio and its interval."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import RootModel

from benchlib.core.files import read_model, write_json
from benchlib.core.stats import thinned
from benchlib.core.text import quantity
from benchlib.judge.change import CHANCE, Change, Faster, Kind, Reading, Spread, change, reading
from benchlib.judge.changepoints import Disturbance
from benchlib.results.metrics import Direction, Metric
from benchlib.results.metrics import RegressionLimit as RegressionLimit
from benchlib.results.record import KEPT_SAMPLES, Record
from benchlib.results.run import Result, Run
from benchlib.results.verdict import GATE, Check, Status

TIMED = ("s", "ms", "us", "Gbps")  # units that a slow-down changes, beside all rates
SIZES = ("B", "MB", "GB", "GiB", "bytes")
TWICE = 2.0  # times the limit: a loss of which has to be excluded for a PASS
REPEATS = "repeats.json"
FALSE_ALARMS = 0.0015  # of the unchanged runs of a benchmark, whichever metric it is: 1 in 80 nights of eight of them
OTHERS = 3.0  # what others can explain of a slow-down is this many standard deviations between runs
_EDGE = 1e-9  # of what is compared: 0.9 - 0.8 misses 0.1 by rounding, and a boundary value passes


@dataclass(frozen=True)
class Side:
    """A metric in one or more runs: ``runs`` holds the samples of each, ``others`` the share of the processors that others
    took meanwhile, of the median run; 0 where nobody tells."""

    metric: Metric
    runs: tuple[tuple[float, ...], ...]
    others: float = 0.0

    @classmethod
    def of(cls, metric: Metric, samples: Iterable[float] = ()) -> "Side":
        """Make the side of one run; a run without stored samples counts with its value."""
        values = () if metric.fault else tuple(samples) or ((metric.value,) if metric.value is not None else ())
        return cls(metric, (values,) if values else ())

    def readings(self, kind: Kind) -> list[Reading]:
        """Return what each run says on the scale of the gate, a disturbed one by its undisturbed part."""
        return [reading(run, kind, faster(self.metric)) for run in self.runs]

    def undisturbed(self) -> "Side":
        """Return the same side without the runs whose level shifted; all of them where each did."""
        kept = tuple(run for run in self.runs if reading(run, "difference", faster(self.metric)).disturbed is None)
        return replace(self, runs=kept) if kept else self

    def value(self, kind: Kind) -> float:
        """Return the (geometric, for ratios) mean of the runs' values."""
        mean = float(np.mean([item.value for item in self.readings(kind)]))
        return math.exp(mean) if kind == "ratio" else mean

    def text(self, kind: Kind) -> str:
        """The value with its unit, and of how many runs where there are several."""
        if len(self.runs) == 1 and not self.readings(kind)[0].disturbed:
            return self.metric.text
        runs = f" ({len(self.runs)} runs)" if len(self.runs) > 1 else " undisturbed"
        return f"{quantity(self.value(kind), self.metric.unit)}{runs}"


def side_of(records: Sequence[Record], name: str) -> Side | None:
    """Return one side of a comparison from several runs; None where none of them has the metric.

    Runs in which the metric has no value do not count, unless none has one. A series that is not finite counts with its value.
    """
    having = [(record, metric) for record in records if (metric := record.metric(name)) is not None]
    having = [pair for pair in having if pair[1].value is not None] or having[-1:]
    kept = [(metric, thinned(record.samples.get(name, []), KEPT_SAMPLES)) for record, metric in having]
    sides = [Side.of(metric, values if all(map(math.isfinite, values)) else ()) for metric, values in kept]
    others = float(np.median([record.others for record, _ in having])) if having else 0.0
    return Side(having[-1][1], tuple(run for side in sides for run in side.runs), others) if having else None


def kind_of(limit: RegressionLimit, *values: float) -> Kind:
    """Return the scale to compare on: ratios, but differences for points and for values near or below zero."""
    return "difference" if limit.amount is not None or min(values) <= 0 else "ratio"


def loss(result: Change, direction: Direction) -> tuple[float, float]:
    """Return the loss at the better and at the worse end of the interval, on a scale on which more is worse.

    The scale is the logarithm for ratios, the metric's unit for differences. Directions other than ``higher`` count as
    lower is better.
    """
    ends = (math.log(result.low), math.log(result.high)) if result.kind == "ratio" else (result.low, result.high)
    return (-ends[1], -ends[0]) if direction == "higher" else ends


def loss_of(result: Change, direction: Direction) -> float:
    """Return the loss of the value itself, on the scale of ``loss``; below zero where it is better."""
    value = math.log(result.value) if result.kind == "ratio" else result.value
    return -value if direction == "higher" else value


def allowed_loss(limit: RegressionLimit, kind: Kind, direction: Direction, old: float, times: float = 1.0) -> float:
    """Return a limit, or ``times`` of it, on the scale of ``loss``. ``old`` is the baseline's value."""
    if kind == "difference":
        return times * (limit.amount if limit.amount is not None else (limit.share or 0.0) * abs(old))
    share = times * (limit.share or 0.0)
    if direction == "higher":
        return -math.log1p(-share) if share < 1 else math.inf
    return math.log1p(share)


def ruling(
    loss: float | np.ndarray,
    least: float | np.ndarray,
    most: float | np.ndarray,
    allowed: float,
    twice: float,
    slack: float = 0.0,
) -> np.ndarray:
    """Return the status of losses, each with the better (``least``) and the worse (``most``) end of its interval.

    FAIL where the loss is beyond what is allowed and its interval excludes "no change"; PASS where it is within and its
    interval excludes ``twice`` the limit, and where nothing is lost, whatever the interval; else AMBIGUOUS. A boundary value
    passes.
    """
    beyond = np.greater(loss, allowed + slack)
    return np.select(
        [np.less_equal(loss, 0), beyond & np.greater(least, 0), beyond | np.greater(most, twice + slack)],
        ["PASS", "FAIL", "AMBIGUOUS"],
        "PASS",
    )


def status_of(result: Change, limit: RegressionLimit, direction: Direction, old: float) -> Status:
    """Return what the gate, the history and a comparison say of a change. ``old`` is the value of the reference.

    The rule is ``ruling``; for a FAIL the change has to exceed its ``reach`` too. A run whose level shifted has to get the same
    status by its undisturbed part as with all of it; else it is AMBIGUOUS.
    """
    allowed, twice = (allowed_loss(limit, result.kind, direction, old, times) for times in (1.0, TWICE))

    def status(of: Change) -> Status:
        lost, (least, most) = loss_of(of, direction), loss(of, direction)
        ends = min(least, lost - of.reach), most
        # Logarithms have a scale of their own, amounts have not.
        scale = 1.0 if of.kind == "ratio" else abs(old)
        finite = [abs(end) for end in (allowed, *ends) if math.isfinite(end)]
        return str(ruling(lost, *ends, allowed, twice, _EDGE * max(scale, *finite)))  # type: ignore[return-value]

    by_undisturbed = status(result)
    if result.disturbed and status(result.of_whole_runs()) != by_undisturbed:
        return "AMBIGUOUS"
    return by_undisturbed


def is_timed(unit: str) -> bool:
    """Tell whether a metric of this unit is a speed or a time: what slows the machine changes it, and only to the worse."""
    return unit in TIMED or unit.endswith("/s")


def faster(metric: Metric) -> Faster:
    """Return which way of a speed is better, '' for a metric that is none."""
    return metric.direction if is_timed(metric.unit) and metric.direction != "none" else ""


def default_spread(metric: Metric, limit: RegressionLimit | None, kind: Kind, others: float = 0.0) -> float | None:
    """Return the spread between runs that is assumed of a metric as long as nothing tells it; None where nothing may be.

    On the scale of the gate: logarithms for ratios, a fifth of the limit for amounts (F1 with its limit of one point scatters
    by 0.2 with the seed). Where ``others`` take a share of the processors, a speed is lower by it, and how much they take is
    theirs to choose: a run without them counts as ``OTHERS`` standard deviations away.
    """
    if kind == "difference":
        return limit.amount / 5 if limit and limit.amount is not None else None
    if limit is None and not is_timed(metric.unit):
        return None
    if metric.unit in SIZES:
        return 0.02
    own = 0.10 if metric.name.partition("_p9")[1] else 0.05
    return max(own, -math.log1p(-others) / OTHERS) if faster(metric) else own


def chance_of_each(limits: Iterable[RegressionLimit], metrics: Iterable[Metric]) -> float:
    """Return how often an unchanged metric may fail, so that no more than ``FALSE_ALARMS`` of runs fail in any (Bonferroni)."""
    measured = {metric.name for metric in metrics if metric.value is not None}
    return FALSE_ALARMS / max(1, sum(limit.metric in measured for limit in limits))


def regression_check(
    limit: RegressionLimit, new: Side, old: Side, known: Spread | None = None, chance: float = CHANCE
) -> Check:
    """Compare a metric with its baseline by ``status_of``; the direction is the metric's.

    ``known`` is the spread between unchanged runs that a calibration or other stored runs tell, ``chance`` the probability
    with which an unchanged metric may fail.
    """
    lacking = _no_value(new, old)
    if lacking is not None:
        return lacking
    return check_of(limit, new, old, difference(limit, new, old, known, chance))


def difference(
    limit: RegressionLimit | None, new: Side, old: Side, known: Spread | None = None, chance: float = CHANCE
) -> Change:
    """Compare two sides that have values; without a limit as the metric's unit asks for."""
    kind = kind_of(
        limit or RegressionLimit(metric=new.metric.name, share=0),
        *(min(run) for side in (new, old) for run in side.runs),
    )
    others = max(new.others, old.others)
    default = default_spread(new.metric, limit, kind, others)
    busy = default != default_spread(new.metric, limit, kind)
    source = f"default where others take {others:.0%} of the processors" if busy else "default"
    return change(
        new.runs,
        old.runs,
        kind=kind,
        known=known,
        default=default,
        source=source,
        faster=faster(new.metric),
        chance=chance,
    )


def check_of(limit: RegressionLimit, new: Side, old: Side, result: Change) -> Check:
    """Return the check of a change, with the words for a reader."""
    metric, kind = new.metric, result.kind
    reference = old.value(kind)
    status = status_of(result, limit, metric.direction, reference)
    return baseline_check(
        metric,
        status=status,
        reason=f"{new.text(kind)} against {old.text(kind)}: {_text(result, metric.unit)}"
        + _meaning(status, result, limit, metric.direction, reference),
        value=new.metric.value if len(new.runs) == 1 else new.value(kind),
        limit=f"{limit.text(metric.direction)} of {old.text(kind)}",
        source=_basis(result, metric.unit),
    )


def _meaning(status: Status, result: Change, limit: RegressionLimit, direction: Direction, old: float) -> str:
    """Say what an interval means for the limit: why a change fails, passes although it is worse, or stays open."""
    lost, shifts = loss_of(result, direction), "".join(f"; {shift_text(shift)}" for shift in result.disturbed)
    beyond = lost > allowed_loss(limit, result.kind, direction, old)
    least, most = loss(result, direction)
    if status == "FAIL":
        return f"{shifts}; beyond the limit, and no change is excluded"
    if status == "PASS":
        return shifts + ("; surely worse, but within the limit" if least > 0 else "")
    if beyond and least <= 0:
        why = "beyond the limit, but no change at all is not excluded"
    elif beyond and lost <= result.reach:
        why = "beyond the limit, but among all metrics of a run one may be as far off by chance"
    elif not beyond and most > allowed_loss(limit, result.kind, direction, old, TWICE):
        why = "within the limit, but twice the limit is not excluded: too noisy to gate"
    else:
        why = "the undisturbed part and the whole run disagree about the limit"
    return f"{shifts}; {why}" + (": repeat the run" if result.new_runs == 1 else "")


def shift_text(shift: Disturbance) -> str:
    """Say where the level of a run shifted, as shares of its samples."""
    places = " and ".join(f"{start / shift.n:.0%} to {end / shift.n:.0%}" for start, end in shift.parts)
    return f"its level shifted by {shift.ratio - 1:+.0%} from {places} of the samples"


def _no_value(new: Side, old: Side) -> Check | None:
    """Return the check of a side without a value, None where both have one. A value that is no number fails."""
    if new.runs and old.runs and new.metric.value is not None and old.metric.value is not None:
        return None
    if new.metric.value is None and new.metric.provenance != "not_available":
        return baseline_check(new.metric, status="FAIL", reason=f"{new.metric.name} is {new.metric.fault}")
    which, side = ("this run", new) if new.metric.value is None or not new.runs else ("the baseline", old)
    reason = f"{which} has no value: {side.metric.reason}"
    return baseline_check(new.metric, status="NOT_COMPARABLE", reason=reason, value=new.metric.value)


def _text(result: Change, unit: str) -> str:
    if result.kind == "ratio":
        text, interval = f"ratio {result.value:.3f}", f"{result.low:.3f} to {result.high:.3f}"
    else:
        text = _signed(result.value, unit)
        interval = f"{_signed(result.low, unit)} to {_signed(result.high, unit)}"
    if result.basis == "none":
        return text if result.low == result.high else f"{text}, {interval} by too few samples for an interval"
    return f"{text}, 98% interval {interval}"


def _basis(result: Change, unit: str) -> str:
    runs = f"baseline of {result.old_runs} run{'s' * (result.old_runs > 1)}"
    return f"{runs}; {spread_text(result.spread, result.kind, unit)}"


def spread_text(spread: Spread | None, kind: Kind, unit: str = "") -> str:
    """Write the spread between unchanged runs with its source."""
    if spread is None:
        return "the spread between runs is not known, accept --add and calibrate measure it"
    size = f"{spread.s:.1%}" if kind == "ratio" else quantity(spread.s, unit)
    return f"spread between runs {size}, from {spread.source or 'runs'}"


def _signed(amount: float, unit: str) -> str:
    return f"{'+' if amount >= 0 else '-'}{quantity(abs(amount), unit)}"


def baseline_check(metric: Metric, **fields: Any) -> Check:
    """Return a regression check of a metric; ``fields`` are those of ``Check`` beside name, kind, question and unit."""
    question = f"Is {metric.name} at least as good as the baseline?"
    common = {"name": f"{metric.name}{GATE}", "kind": "regression", "unit": metric.unit, "source": "baseline"}
    return Check(**{**common, "question": question, **fields})


def open_checks(
    limits: Iterable[RegressionLimit], result: Result, status: Literal["NO_BASELINE", "NOT_COMPARABLE"], reason: str
) -> list[Check]:
    """Make the regression checks of a run that has nothing to compare with."""
    metrics = [(limit, result.metric(limit.metric)) for limit in limits]
    return [
        baseline_check(
            metric,
            status=status,
            reason=f"measured {metric.text}; {reason}",
            value=metric.value,
            limit=limit.text(metric.direction),
        )
        for limit, metric in metrics
        if metric is not None and metric.value is not None
    ]


class Repeats(RootModel[list[Record]]):
    """``repeats.json``: the earlier repetitions that a run of ``--repeat N`` is judged together with.

    The records are copied, not linked: a run stays judged as it was when the folders of the others are gone.
    """


def repeats(run: Run) -> list[Record]:
    """Return the earlier repetitions of a run, the oldest first; none where it was not repeated."""
    path = run.path / REPEATS
    return read_model(path, Repeats, "the records of repetitions").root if path.exists() else []


def save_repeats(run_dir: Path | str, records: Sequence[Record]) -> None:
    """Write the earlier repetitions into the folder of the latest one."""
    write_json(Path(run_dir) / REPEATS, Repeats(list(records)).model_dump(mode="json"))
