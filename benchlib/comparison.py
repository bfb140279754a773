"""What differs between two sides: metrics with ratios and intervals, factors, and whether that is a regression.

A difference is called a regression, worse or better only where the sides are comparable, that is where tier and fingerprint
are the same. Elsewhere the ratios are shown and no word is said.
"""

from collections.abc import Iterator, Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict

from benchlib import baselines
from benchlib.baselines import differences
from benchlib.calibration import Calibration, load_calibration
from benchlib.change import Change, Kind, change
from benchlib.checks import Check, Status
from benchlib.circumstances import circumstances
from benchlib.labels import HEADLINES
from benchlib.metrics import Direction, Metric, quantity
from benchlib.record import RunRecord, side_of
from benchlib.regression import RegressionLimit, Side, kind_of, regression_check
from benchlib.results import fingerprint_key
from benchlib.sides import Compared

Word = Literal[
    "regression",
    "worse",
    "better",
    "differs",
    "no difference found",
    "within the limit",
    "undecided",
    "no interval",
    "only one side",
    "",
]
NEUTRAL = {"ratio": 1.0, "difference": 0.0}


class Row(BaseModel):
    """One metric on both sides. ``change`` is other / reference, or other - reference for the kind ``difference``.

    ``low`` to ``high`` is its 98 % interval, ``band`` the A/A band, None where no spread between runs is known; ``basis`` what
    the interval rests on (see ``benchlib.change.Change``); ``gate`` what the benchmark's regression check says. ``word`` is ''
    where nothing may be said.
    """

    model_config = ConfigDict(frozen=True)

    metric: str
    unit: str
    direction: Direction
    reference: str
    other: str
    kind: Kind = "ratio"
    change: float | None = None
    low: float | None = None
    high: float | None = None
    band: float | None = None
    basis: str = ""
    limit: str = ""
    gate: Status | None = None
    word: Word = ""
    reason: str = ""
    headline: bool = False


class Factor(BaseModel):
    """Something that differs. ``decides`` says whether it makes the sides incomparable."""

    model_config = ConfigDict(frozen=True)

    name: str
    reference: str
    other: str
    decides: bool


class Told(BaseModel):
    """A side for the reader."""

    model_config = ConfigDict(frozen=True)

    label: str
    runs: list[str]
    verdicts: list[str]


class Contrast(BaseModel):
    """One side against the reference, in one benchmark. ``same``: both sides are the same runs."""

    benchmark: str
    tier: str
    reference: Told
    other: Told
    comparable: bool
    same: bool = False
    sentence: str
    rows: list[Row]
    factors: list[Factor]
    notes: list[str]

    @property
    def regressions(self) -> list[Row]:
        """The metrics that got worse than the benchmark's limit allows."""
        return [row for row in self.rows if row.word == "regression"]

    @property
    def tone(self) -> str:
        """How it is shown: bad, warn (something is open), good, or calm where there was nothing to compare."""
        if self.regressions:
            return "bad"
        if not self.comparable or any(row.word == "undecided" for row in self.rows):
            return "warn"
        return "calm" if self.same or not any(row.limit for row in self.rows) else "good"


def contrast(reference: Compared, other: Compared) -> Contrast:
    """Compare two sides of one benchmark."""
    factors = [*_deciding(reference, other), *_worth_knowing(reference, other)]
    decisive = [factor.name for factor in factors if factor.decides]
    same = _same_runs(reference, other)
    rows = [_unmoved(row) if same else row for row in _rows(reference, other, comparable=not decisive)]
    return Contrast(
        benchmark=other.benchmark,
        tier=other.tier,
        reference=_told(reference),
        other=_told(other),
        comparable=not decisive,
        same=same,
        sentence=_same_sentence(other) if same else _sentence(rows, decisive),
        rows=rows,
        factors=factors,
        notes=[] if same else _notes(reference, other),
    )


def _same_runs(reference: Compared, other: Compared) -> bool:
    return {run.run for run in reference.runs} == {run.run for run in other.runs}


def _same_sentence(side: Compared) -> str:
    what = f"{side.runs[0].run} is the same run" if len(side.runs) == 1 else f"The same {len(side.runs)} runs are"
    return f"{what} on both sides: nothing to compare."


def _unmoved(row: Row) -> Row:
    """Return the row of a metric against itself: no interval and no gate, which would speak of noise."""
    if row.change is None:
        return row
    none = {"low": None, "high": None, "gate": None, "basis": "none", "reason": ""}
    return row.model_copy(update=none | {"word": "no difference found"})


def _told(side: Compared) -> Told:
    return Told(label=side.label, runs=[run.run for run in side.runs], verdicts=[run.word for run in side.runs])


def _sentence(rows: Sequence[Row], decisive: Sequence[str]) -> str:
    if decisive:
        named = ", ".join(decisive[:4]) + (f" and {len(decisive) - 4} more" if len(decisive) > 4 else "")
        return f"Not comparable: {named} {'differs' if len(decisive) == 1 else 'differ'}; ratios are shown, no verdict."
    regressions = [row.metric for row in rows if row.word == "regression"]
    limited = [row for row in rows if row.limit]
    if regressions:
        return f"{len(regressions)} regression{'s' * (len(regressions) > 1)}: {', '.join(regressions)}."
    if not limited:
        return "Comparable, but no metric with a limit has a value on both sides."
    open_ = [row.metric for row in limited if row.gate == "AMBIGUOUS"]
    rest = f" Noise leaves {len(open_)} undecided, repeat the runs: {', '.join(open_)}." if open_ else ""
    return f"No regression found in {len(limited)} metric{'s' * (len(limited) > 1)} with a limit.{rest}"


def _notes(reference: Compared, other: Compared) -> list[str]:
    same = sorted({run.run for run in reference.runs} & {run.run for run in other.runs})
    are = "is" if len(same) == 1 else "are"
    return [f"{', '.join(same)} {are} on both sides: a run does not differ from itself."] if same else []


def _rows(reference: Compared, other: Compared, comparable: bool) -> Iterator[Row]:
    limits = {limit.metric: limit for limit in reference.runs[-1].limits}
    limits |= {limit.metric: limit for limit in other.runs[-1].limits}
    old, new = reference.records(), other.records()
    names = dict.fromkeys(metric.name for record in (*old, *new) for metric in record.metrics)
    calibration = _calibration(other) if comparable else None
    for name in names:
        row = _row(name, limits.get(name), old, new, comparable, calibration)
        if row is not None:
            yield row


def _calibration(side: Compared) -> Calibration | None:
    return load_calibration(baselines.folder(), side.benchmark, side.tier, fingerprint_key(side.fingerprint))


def _row(
    name: str,
    limit: RegressionLimit | None,
    old_runs: list[RunRecord],
    new_runs: list[RunRecord],
    comparable: bool,
    calibration: Calibration | None,
) -> Row | None:
    old, new = side_of(old_runs, name), side_of(new_runs, name)
    if not any(side and (side.runs or side.metric.provenance != "not_available") for side in (old, new)):
        return None  # neither side could measure it
    one = new or old
    assert one is not None
    headline = limit is not None or _is_headline(name)
    if old is None or new is None or not old.runs or not new.runs:
        return _one_sided(one.metric, old, new, headline)
    kind = kind_of(
        limit or RegressionLimit(metric=name, share=0), *(min(run) for side in (old, new) for run in side.runs)
    )
    known = calibration.spread(name) if calibration else None
    found = change(new.runs, old.runs, kind=kind, known=known)
    check = regression_check(limit, new, old, known) if limit and comparable else None
    return Row(
        metric=name,
        unit=new.metric.unit,
        direction=new.metric.direction,
        reference=quantity(old.value(kind), old.metric.unit),
        other=quantity(new.value(kind), new.metric.unit),
        kind=kind,
        change=found.value,
        low=found.low,
        high=found.high,
        band=found.band if found.spread else None,
        basis=found.basis,
        limit=limit.text(new.metric.direction) if limit else "",
        gate=check.status if check else None,
        word=_word(found, new.metric.direction, check) if comparable else "",
        reason=check.reason if check else "",
        headline=headline,
    )


def _is_headline(name: str) -> bool:
    prefixes = {prefix for names in HEADLINES.values() for prefix in names}
    return any(name == prefix or name.startswith(prefix + "_") for prefix in prefixes)


def _one_sided(metric: Metric, old: Side | None, new: Side | None, headline: bool) -> Row:
    def text(side: Side | None) -> str:
        return side.metric.text if side else "absent"

    lacking = new if new is not None and not new.runs else old if old is not None and not old.runs else None
    return Row(
        metric=metric.name,
        unit=metric.unit,
        direction=metric.direction,
        reference=text(old),
        other=text(new),
        word="only one side" if any(side and side.runs for side in (old, new)) else "",
        reason=lacking.metric.reason if lacking else "",
        headline=headline,
    )


def _word(found: Change, direction: Direction, check: Check | None) -> Word:
    """Return what may be said of a change between comparable sides."""
    if check is not None and check.status in ("FAIL", "AMBIGUOUS"):
        return "regression" if check.status == "FAIL" else "undecided"
    neutral = NEUTRAL[found.kind]
    if found.basis == "none" and found.value != neutral:
        # One number on each side: nothing tells noise from change, but a limit was kept or not.
        return "within the limit" if check is not None else "no interval"
    within = (
        1 / (1 + found.band) <= found.value <= 1 + found.band
        if found.kind == "ratio"
        else abs(found.value) <= found.band
    )
    if found.low <= neutral <= found.high or within:
        return "no difference found"
    if direction == "none":
        return "differs"
    return "better" if (found.value > neutral) == (direction == "higher") else "worse"


def _deciding(reference: Compared, other: Compared) -> list[Factor]:
    pairs = [("tier", reference.tier, other.tier)] if reference.tier != other.tier else []
    pairs += differences(reference.fingerprint, other.fingerprint)
    return [Factor(name=name, reference=here, other=there, decides=True) for name, here, there in pairs]


def _worth_knowing(reference: Compared, other: Compared) -> list[Factor]:
    """Return what differs without making the sides incomparable; what one side never recorded is not a difference."""
    here, there = (circumstances(side.runs) for side in (reference, other))
    return [
        Factor(name=name, reference=here[name], other=there[name], decides=False)
        for name in dict.fromkeys([*here, *there])
        if name in here and name in there and here[name] != there[name]
    ]
