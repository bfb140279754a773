"""What differs between two sets of runs: metrics with ratios and intervals, factors, and whether that is a regression.

A set is what an argument of ``benchlib compare`` names: a run folder, a folder of runs (all complete runs of one fingerprint
are one set), a shared report, a baseline's file or the first digits of its key.

A difference is called a regression, worse or better only where the sets are comparable, that is where tier and fingerprint
are the same. The same work on other hardware or versions is higher or lower; elsewhere ratios are shown without a word.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from benchlib.benchmarks import loadable, of_run
from benchlib.core.errors import UserError
from benchlib.core.files import read_json
from benchlib.core.machine import hardware
from benchlib.core.text import moment, quantity
from benchlib.judge import baselines
from benchlib.judge.baselines import differences
from benchlib.judge.calibration import load_calibration
from benchlib.judge.change import Change, Kind, Spread
from benchlib.judge.checks import Check, Status
from benchlib.judge.regression import RegressionLimit, Side, chance_of_each, check_of, difference, side_of
from benchlib.results.metrics import Direction, Metric
from benchlib.results.record import Record
from benchlib.results.run import PARTS, fingerprint_key, is_run
from benchlib.results.shared import load_runs

_KEY = re.compile(r"[0-9a-f]{4,12}\Z")
# Factors of the fingerprint that leave the work the same.
PLACE = ("backend", "nodes", "cpu", "memory_gib", "devices", "benchlib", "torch", "transformers")
NEUTRAL = {"ratio": 1.0, "difference": 0.0}
Word = Literal[
    "regression", "worse", "better", "differs", "no difference found", "undecided", "no interval",
    "only one side", "higher", "lower", "",
]  # fmt: skip


@dataclass(frozen=True)
class RunSet:
    """Runs of one benchmark, tier and fingerprint. ``label`` is the argument that named them."""

    label: str
    runs: tuple[Record, ...]

    @property
    def first(self) -> Record:
        """The first run, which has benchmark, tier and fingerprint of all."""
        return self.runs[0]


@dataclass
class Argument:
    """What one argument stands for: a set of runs for each benchmark, and the excluded runs with the reason."""

    text: str
    sets: dict[str, RunSet] = field(default_factory=dict)
    excluded: list[str] = field(default_factory=list)


def read_argument(text: str) -> Argument:
    """Read what ``text`` names. Raises ``UserError`` where that is nothing, damaged, or of several fingerprints."""
    kept, excluded = _complete(text)
    argument = Argument(text, excluded=excluded)
    for benchmark in dict.fromkeys(run.benchmark for run in kept):
        members = tuple(run for run in kept if run.benchmark == benchmark)
        _require_one_fingerprint(text, benchmark, members)
        argument.sets[benchmark] = RunSet(text, members)
    return argument


def read_kinds(text: str) -> tuple[list[RunSet], list[str]]:
    """Read what ``text`` names as one set for each benchmark, tier and fingerprint, and why other runs are excluded.

    Raises ``UserError`` where it names nothing or is damaged.
    """
    kept, excluded = _complete(text)
    groups: dict[tuple[str, ...], list[Record]] = {}
    for run in kept:
        groups.setdefault((run.benchmark, run.tier, fingerprint_key(run.fingerprint)), []).append(run)
    return [RunSet(text, tuple(members)) for members in groups.values()], excluded


def _complete(text: str) -> tuple[list[Record], list[str]]:
    """Return the complete runs that ``text`` names, each once, and the reasons why others are excluded."""
    runs, kept, excluded = _runs(text), list[Record](), list[str]()
    for run in runs:
        original = next((other.run for other in kept if run.is_copy_of(other)), "")
        if not run.complete or run.word == "DAMAGED":
            excluded.append(f"{run.run}: {_why(run)}")
        elif original:  # counted as a second run it would make the spread between runs look smaller than it is
            excluded.append(f"{run.run}: a copy of {original}")
        else:
            kept.append(run)
    if not kept:
        raise UserError(
            f"{text} has no complete run to compare: " + "; ".join(excluded[:5])
            if len(runs) > 1
            else f"{text} is not a complete run: {_why(runs[0])}"
        )
    return kept, excluded


def _runs(text: str) -> list[Record]:
    path = Path(text)
    if path.is_file() and path.suffix == ".json":
        # A file of a run folder stands for its run; any other JSON has to be a baseline.
        if path.name in PARTS and is_run(path.parent):
            return load_runs(path.parent)
        content = read_json(path)
        about = content.get("metadata") if isinstance(content, dict) and "format" in content else None
        benchmark = of_run(str(about.get("benchmark"))) if isinstance(about, dict) else None
        if benchmark and (read := benchmark.part("export", "read", None)):
            return [read(content, str(path))]  # a file that the benchmark's own export wrote
        return baselines.load_baseline(path).runs
    if not path.exists() and _KEY.match(text):
        return baselines.by_key(text).runs
    return load_runs(path)


def _why(run: Record) -> str:
    return f"{run.word}: {run.sentence}" if run.word != "PASS" else "its result is not complete"


def _require_one_fingerprint(text: str, benchmark: str, runs: Sequence[Record]) -> None:
    groups: dict[tuple[str, str], list[Record]] = {}
    for run in runs:
        groups.setdefault((run.tier, fingerprint_key(run.fingerprint)), []).append(run)
    if len(groups) == 1:
        return
    largest, *_ = kinds = sorted(groups.values(), key=len, reverse=True)
    lines = []
    for members in kinds:
        run, first = members[0], largest[0]
        factors = [f"{name} {here}" for name, here, _ in differences(run.fingerprint, first.fingerprint)[:3]]
        factors += [f"tier {run.tier}"] if run.tier != first.tier else []
        lines.append("  " + _listed([run.run for run in members]) + (f" ({', '.join(factors)})" if factors else ""))
    raise UserError(
        f"{text} holds {benchmark} runs of {len(groups)} kinds that cannot be compared with each other; name the runs of one:\n"
        + "\n".join(lines)
    )


def _listed(names: Sequence[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


class Row(BaseModel):
    """One metric in both sets. ``change`` is other / reference, or other - reference for the kind ``difference``.

    ``low`` to ``high`` is its 98% interval, ``band`` the A/A band, None where no spread between runs is known; ``basis`` what
    the interval rests on (see ``benchlib.judge.change.Change``); ``gate`` what the benchmark's regression check says. ``word``
    is '' where nothing may be said.
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
    """Something that differs. ``decides`` says whether it makes the sets incomparable."""

    model_config = ConfigDict(frozen=True)

    name: str
    reference: str
    other: str
    decides: bool


class Named(BaseModel):
    """A set of runs by its label, its runs' names, their verdicts and their machines."""

    model_config = ConfigDict(frozen=True)

    label: str
    runs: list[str]
    verdicts: list[str]
    machines: list[str]

    @classmethod
    def of(cls, runs: RunSet) -> "Named":
        """Return the names of a set."""
        return cls(
            label=runs.label,
            runs=[run.run for run in runs.runs],
            verdicts=[run.word for run in runs.runs],
            machines=list(dict.fromkeys(filter(None, map(_machine, runs.runs)))),
        )


def _machine(run: Record) -> str:
    """Return host and hardware of a run; a baseline keeps the hardware only."""
    parts = hardware(run.machine, run.backend)
    return parts or "; ".join(filter(None, (run.fingerprint.get("cpu"), run.fingerprint.get("devices"))))


class Contrast(BaseModel):
    """A set of runs against the reference, in one benchmark. ``same``: both are the same runs."""

    benchmark: str
    tier: str
    reference: Named
    other: Named
    comparable: bool
    same: bool = False
    sentence: str
    rows: list[Row]
    factors: list[Factor]
    notes: list[str]

    @property
    def heading(self) -> str:
        """The benchmark and its tier, or both tiers where they differ."""
        tiers = next(((row.reference, row.other) for row in self.factors if row.name == "tier"), (self.tier,))
        return f"{self.benchmark}, {' beside '.join(tiers)}"

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


def contrast(reference: RunSet, other: RunSet) -> Contrast:
    """Compare two sets of runs of one benchmark."""
    factors = [*_deciding(reference, other), *_worth_knowing(reference, other)]
    decisive = [factor.name for factor in factors if factor.decides]
    same_work = all(name in PLACE for name in decisive)
    rows = list(_rows(reference, other, not decisive, same_work))
    old, new = ({run.run for run in side.runs} for side in (reference, other))
    same, shared, notes = old == new, sorted(old & new), list[str]()
    if same:
        rows = [_unmoved(row) for row in rows]
        what = f"{other.first.run} is the same run" if len(new) == 1 else f"The same {len(new)} runs are"
        sentence = f"{what} on both sides: nothing to compare."
    else:
        sentence = _sentence(rows, decisive, same_work)
        if shared:
            are = "is" if len(shared) == 1 else "are"
            notes = [f"{', '.join(shared)} {are} on both sides: a run does not differ from itself."]
    return Contrast(
        benchmark=other.first.benchmark,
        tier=other.first.tier,
        reference=Named.of(reference),
        other=Named.of(other),
        comparable=not decisive,
        same=same,
        sentence=sentence,
        rows=rows,
        factors=factors,
        notes=notes,
    )


def _unmoved(row: Row) -> Row:
    """Return the row of a metric against itself: no interval and no gate, which would speak of noise."""
    if row.change is None:
        return row
    none = {"low": None, "high": None, "gate": None, "basis": "none", "reason": ""}
    return row.model_copy(update=none | {"word": "no difference found"})


def _sentence(rows: Sequence[Row], decisive: Sequence[str], same_work: bool) -> str:
    if decisive:
        differ = "differs" if len(decisive) == 1 else "differ"
        what = "Same work, but" if same_work else "Not comparable:"
        return f"{what} {_listed(decisive, 4)} {differ}; ratios are shown, no verdict."
    regressions = [row.metric for row in rows if row.word == "regression"]
    limited = [row for row in rows if row.limit]
    if regressions:
        return f"{len(regressions)} regression{'s' * (len(regressions) > 1)}: {', '.join(regressions)}."
    if not limited:
        return "Comparable, but no metric with a limit has a value on both sides."
    open_ = [row.metric for row in limited if row.gate == "AMBIGUOUS"]
    rest = f" Noise leaves {len(open_)} undecided, repeat the runs: {', '.join(open_)}." if open_ else ""
    return f"No regression found in {len(limited)} metric{'s' * (len(limited) > 1)} with a limit.{rest}"


def _rows(reference: RunSet, other: RunSet, comparable: bool, same_work: bool) -> Iterator[Row]:
    limits = {limit.metric: limit for side in (reference, other) for limit in side.runs[-1].limits}
    old, new = reference.runs, other.runs
    spreads = _known_spreads(other.runs[-1], limits.values(), [*old, *new]) if comparable else {}
    chance = chance_of_each(limits.values(), new[-1].metrics)
    for name in dict.fromkeys(metric.name for record in (*old, *new) for metric in record.metrics):
        sides = side_of(old, name), side_of(new, name)
        row = _row(name, limits.get(name), *sides, comparable, same_work, spreads.get(name), chance)
        if row is not None:
            yield row


def _known_spreads(run: Record, limits: Iterable[RegressionLimit], counted: Sequence[Record]) -> dict[str, Spread]:
    """Return what a calibration tells of a run, and the runs beside it, as its own verdict does."""
    calibration = load_calibration(baselines.folder(), run.benchmark, run.tier, fingerprint_key(run.fingerprint))
    return baselines.known_spreads(run, limits, calibration, counted)


def _row(
    name: str,
    limit: RegressionLimit | None,
    old: Side | None,
    new: Side | None,
    comparable: bool,
    same_work: bool,
    known: Spread | None,
    chance: float,
) -> Row | None:
    measured = [side for side in (new, old) if side is not None]
    if not any(side.runs or side.metric.provenance != "not_available" for side in measured):
        return None  # neither side could measure it
    headline = limit is not None or _is_headline(name)
    if old is None or new is None or not old.runs or not new.runs:
        row = _one_sided(measured[0].metric, old, new, headline)
        if limit is not None and comparable and new is not None and new.metric.fault:
            why = f"{name} is {new.metric.fault}, which is no number to compare"
            row = row.model_copy(update={"word": "regression", "reason": why})
        return row
    result = difference(limit, new, old, known, chance)
    kind, check = result.kind, check_of(limit, new, old, result) if limit and comparable else None
    return Row(
        metric=name,
        unit=new.metric.unit,
        direction=new.metric.direction,
        reference=_value(old, kind),
        other=_value(new, kind),
        kind=kind,
        change=result.value,
        low=result.low,
        high=result.high,
        band=result.band if result.spread else None,
        basis=result.basis,
        limit=limit.text(new.metric.direction) if limit else "",
        gate=check.status if check else None,
        word=_word(result, new.metric.direction, check) if comparable else _side_word(result) if same_work else "",
        reason=check.reason if check else "",
        headline=headline,
    )


def _value(side: Side, kind: Kind) -> str:
    shifted = len(side.runs) == 1 and side.readings(kind)[0].disturbed
    return quantity(side.value(kind), side.metric.unit) + " undisturbed" * bool(shifted)


def _is_headline(name: str) -> bool:
    return any(name in benchmark.spec.first([name]) for benchmark in loadable())


def _one_sided(metric: Metric, old: Side | None, new: Side | None, headline: bool) -> Row:
    lacking = next((side for side in (new, old) if side is not None and not side.runs), None)
    return Row(
        metric=metric.name,
        unit=metric.unit,
        direction=metric.direction,
        reference=old.metric.text if old else "absent",
        other=new.metric.text if new else "absent",
        word="only one side" if any(side and side.runs for side in (old, new)) else "",
        reason=lacking.metric.reason if lacking else "",
        headline=headline,
    )


def _word(result: Change, direction: Direction, check: Check | None) -> Word:
    """Return what may be said of a change between comparable sets."""
    if check is not None and check.status in ("FAIL", "AMBIGUOUS"):
        return "regression" if check.status == "FAIL" else "undecided"
    neutral = NEUTRAL[result.kind]
    if result.basis == "none" and result.value != neutral:  # too few samples to tell noise from change
        return "no interval"
    if not result.sure:
        return "no difference found"
    if direction == "none":
        return "differs"
    return "better" if (result.value > neutral) == (direction == "higher") else "worse"


def _side_word(result: Change) -> Word:
    """Return what may be said of a change between the same work in two places: no gate, no better or worse."""
    neutral = NEUTRAL[result.kind]
    if result.basis == "none" and result.value != neutral:
        return "no interval"
    if not result.sure:
        return "no difference found"
    return "higher" if result.value > neutral else "lower"


def _deciding(reference: RunSet, other: RunSet) -> list[Factor]:
    here, there = reference.first, other.first
    pairs = [("tier", here.tier, there.tier)] if here.tier != there.tier else []
    pairs += differences(here.fingerprint, there.fingerprint)
    return [Factor(name=name, reference=old, other=new, decides=True) for name, old, new in pairs]


def _worth_knowing(reference: RunSet, other: RunSet) -> list[Factor]:
    """Return what differs without making the sets incomparable; what only one of them recorded is not a difference."""
    here, there = (environment(side.runs) for side in (reference, other))
    return [
        Factor(name=name, reference=value, other=there[name], decides=False)
        for name, value in here.items()
        if name in there and value != there[name]
    ]


def environment(runs: Sequence[Record]) -> dict[str, str]:
    """Return the environment of runs by name: recorded, not part of the fingerprint. Several values are listed."""
    values: dict[str, dict[str, None]] = {}
    for run in runs:
        for name, value in _environment(run).items():
            values.setdefault(name, {})[value] = None
    return {name: _listed(list(several)) for name, several in values.items()}


def _environment(run: Record) -> dict[str, str]:
    machine = run.machine
    facts = {"started": moment(run.started_at) if run.started_at else "unknown"}
    if machine:
        facts |= {name: str(machine.get(name) or "unknown") for name in ("host", "system")}
        loads = machine.get("load_average")
        facts["load average of 1 min"] = quantity(loads[0]) if loads else "unknown"
        known = {name: value for name, value in run.setup.items() if name not in ("host", "system")}
        facts |= {name if name.startswith("driver ") else f"version of {name}": value for name, value in known.items()}
    return facts | {
        f"config.{name}": str(value)
        for name, value in run.config.items()
        if f"config.{name}" not in run.fingerprint and name not in ("benchmark", "tier", "backend")
    }
