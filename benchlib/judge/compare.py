"""The sides of a comparison: what an argument of ``benchlib compare`` stands for.

A run folder, a folder of runs (all complete runs of one fingerprint are one side), a shared report, a baseline's file or
the first digits of its key.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from benchlib.core.errors import UserError
from benchlib.core.text import HEADLINES, moment
from benchlib.judge import baselines
from benchlib.judge.baselines import Baseline, differences
from benchlib.judge.calibration import Calibration, load_calibration
from benchlib.judge.change import Change, Kind, change
from benchlib.judge.checks import Check, Status
from benchlib.judge.regression import RegressionLimit, RunRecord, Side, kind_of, regression_check, side_of
from benchlib.judge.snapshot import Snapshot, load
from benchlib.results.metrics import Direction, Metric, quantity
from benchlib.results.run import PARTS, Result, fingerprint_key, is_run

_KEY = re.compile(r"[0-9a-f]{4,12}\Z")


@dataclass(frozen=True)
class Compared:
    """One side: runs of one benchmark, tier and fingerprint. ``label`` is the argument that named them."""

    label: str
    runs: tuple[Snapshot, ...]

    @property
    def benchmark(self) -> str:
        """The benchmark of all of its runs."""
        return self.runs[0].benchmark

    @property
    def tier(self) -> str:
        """The tier of all of its runs."""
        return self.runs[0].tier

    @property
    def fingerprint(self) -> dict[str, str]:
        """What makes its runs comparable with each other."""
        return self.runs[0].fingerprint

    def records(self) -> list[RunRecord]:
        """Return its runs as the regression gate reads them: from folder, report or baseline with the same samples."""
        return [
            RunRecord(
                run=run.run,
                started_at=run.result.started_at,
                recorded_at=run.result.started_at,
                metrics=run.result.metrics,
                samples=run.thinned().samples,
            )
            for run in self.runs
            if run.result is not None
        ]


@dataclass
class Argument:
    """What one argument stands for: a side for each benchmark, and what was left out with the reason."""

    text: str
    sides: dict[str, Compared] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)


def read_argument(text: str) -> Argument:
    """Read what ``text`` names. Raises ``UserError`` where that is nothing, damaged, or of several fingerprints."""
    runs = _runs(text)
    found = Argument(text)
    found.left_out = [f"{run.run}: {_why(run)}" for run in runs if not run.complete]
    whole: list[Snapshot] = []
    for run in (run for run in runs if run.complete):
        twice = next((known.run for known in whole if known.config == run.config and known.result == run.result), "")
        if twice:  # counted as a second run it would make the spread between runs look smaller than it is
            found.left_out.append(f"{run.run}: a copy of {twice}")
        else:
            whole.append(run)
    if not whole:
        raise UserError(
            f"{text} has no complete run to compare: " + "; ".join(found.left_out[:5])
            if len(runs) > 1
            else f"{text} is no complete run: {_why(runs[0])}"
        )
    for benchmark in dict.fromkeys(run.benchmark for run in whole):
        members = tuple(run for run in whole if run.benchmark == benchmark)
        _one_fingerprint(text, benchmark, members)
        found.sides[benchmark] = Compared(text, members)
    return found


def _runs(text: str) -> list[Snapshot]:
    path = Path(text)
    if path.is_file() and path.suffix == ".json":
        # A file of a run folder stands for its run; any other JSON has to be a baseline.
        return (
            load(path.parent)
            if path.name in PARTS and is_run(path.parent)
            else _accepted(baselines.load_baseline(path))
        )
    if not path.exists() and _KEY.match(text):
        stored = [item for _, item in baselines.stored() if item.key.startswith(text)]
        if len(stored) != 1:
            raise UserError(f"{len(stored)} baselines begin with {text!r}: `benchlib baseline list` shows the keys")
        return _accepted(stored[0])
    return load(path)


def _accepted(baseline: Baseline) -> list[Snapshot]:
    """Return the runs of a baseline. It keeps no machine and no config, but what of them decides."""
    factors = baseline.fingerprint
    world = factors.get("world_size", "")
    return [
        Snapshot(
            run=record.run,
            benchmark=baseline.benchmark,
            tier=baseline.tier,
            backend=factors.get("backend", "?"),
            word="PASS",
            sentence=f"accepted: {record.reason}",
            started_at=record.started_at,
            result=Result(
                status="complete",
                benchmark=baseline.benchmark,
                tier=baseline.tier,
                backend=factors.get("backend", "?"),
                world_size=int(world) if world.isdigit() else 0,
                started_at=record.started_at,
                metrics=record.metrics,
            ),
            fingerprint=factors,
            samples=record.samples,
        )
        for record in baseline.runs
    ]


def _why(run: Snapshot) -> str:
    if run.problems:
        return "; ".join(run.problems)
    return run.sentence if run.word != "PASS" else "its result is not complete"


def _one_fingerprint(text: str, benchmark: str, runs: Sequence[Snapshot]) -> None:
    groups: dict[tuple[str, str], list[Snapshot]] = {}
    for run in runs:
        groups.setdefault((run.tier, fingerprint_key(run.fingerprint)), []).append(run)
    if len(groups) == 1:
        return
    kinds = sorted(groups.values(), key=len, reverse=True)
    first = kinds[0][0]
    lines = []
    for members in kinds:
        names = ", ".join(run.run for run in members[:3]) + (
            f" and {len(members) - 3} more" if len(members) > 3 else ""
        )
        factors = differences(members[0].fingerprint, first.fingerprint)
        told = [f"{name} {here}" for name, here, _ in factors[:3]]
        told += [f"tier {members[0].tier}"] if members[0].tier != first.tier else []
        lines.append(f"  {names}" + (f" ({', '.join(told)})" if told else ""))
    raise UserError(
        f"{text} holds {benchmark} runs of {len(groups)} kinds that cannot be compared with each other; name the runs of one:\n"
        + "\n".join(lines)
    )


# What was around a run and does not decide whether it is comparable: host, kernel, drivers, exact versions, load, time.


def circumstances(runs: Sequence[Snapshot]) -> dict[str, str]:
    """Return what was around the runs, by name; several values are listed."""
    gathered: dict[str, dict[str, None]] = {}
    for run in runs:
        for name, value in _of_run(run).items():
            gathered.setdefault(name, {})[value] = None
    return {
        name: ", ".join(list(values)[:3]) + (f" and {len(values) - 3} more" if len(values) > 3 else "")
        for name, values in gathered.items()
    }


def _of_run(run: Snapshot) -> dict[str, str]:
    machine = run.machine
    found = {"started": moment(run.started_at) if run.started_at else "unknown"}
    if machine:
        found |= {name: str(machine.get(name) or "unknown") for name in ("host", "system")}
        load = machine.get("load_average")
        found["load average of 1 min"] = quantity(float(load[0])) if isinstance(load, list) and load else "unknown"
        found |= {f"driver {name}": str(value) for name, value in _dict(machine.get("drivers")).items()}
        versions = _dict(machine.get("versions")) | _dict(_dict(machine.get("devices")).get("versions"))
        found |= {f"version of {name}": str(value) for name, value in versions.items()}
    return found | {
        f"config.{name}": str(value)
        for name, value in run.config.items()
        if f"config.{name}" not in run.fingerprint and name not in ("benchmark", "tier", "backend")
    }


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


# What differs between two sides: metrics with ratios and intervals, factors, and whether that is a regression.
#
# A difference is called a regression, worse or better only where the sides are comparable, that is where tier and fingerprint
# are the same. Elsewhere the ratios are shown and no word is said.


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
    the interval rests on (see ``benchlib.judge.change.Change``); ``gate`` what the benchmark's regression check says. ``word`` is ''
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
