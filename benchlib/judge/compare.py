"""What differs between two sets of runs: metrics with ratios and intervals, factors, and whether that is a regression.

A set is what an argument of ``benchlib compare`` names: a run folder, a folder of runs (all complete runs of one fingerprint
are one set), a shared report, a run that was exported as JSON, a baseline's file or the first digits of its key.

A difference is called a regression, worse or better only where the sets are comparable, that is where tier and fingerprint
are the same. The same work on other hardware or versions is higher or lower; elsewhere ratios are shown without a word.
"""

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from benchlib.benchmarks import loadable, spec_of
from benchlib.config.schema import build
from benchlib.core.errors import UserError
from benchlib.core.files import read_json
from benchlib.core.text import counted, listing, quantity, shortened
from benchlib.judge import baselines
from benchlib.judge.baselines import differences
from benchlib.judge.calibration import load_calibration
from benchlib.judge.checks import Check, Status
from benchlib.judge.reference_values import Quality
from benchlib.judge.regression import (
    LEVEL,
    NOTICED,
    Change,
    Spread,
    chance_of_each,
    difference,
    is_timed,
    regression_check,
    side_of,
)
from benchlib.results.metrics import Direction
from benchlib.results.record import NAMING, Record
from benchlib.results.shared import load_runs

_KEY = re.compile(r"[0-9a-f]{4,12}\Z")
# Factors of the fingerprint that leave the work the same.
PLACE = ("backend", "nodes", "cpu", "memory_gib", "devices", "benchlib", "torch", "transformers")

STARRED = ("worse", "better", "differs", "higher", "lower")


@dataclass(frozen=True)
class RunSet:
    """Runs of one benchmark, tier and fingerprint. ``label`` is the argument that named them."""

    label: str
    runs: tuple[Record, ...]

    @property
    def first(self) -> Record:
        return self.runs[0]

    @property
    def names(self) -> list[str]:
        return [run.run for run in self.runs]

    @property
    def verdicts(self) -> list[str]:
        return [run.word for run in self.runs]

    @property
    def machines(self) -> list[str]:
        # A baseline keeps the hardware only.
        parts = [run.components or [run.fingerprint.get(name, "") for name in ("cpu", "devices")] for run in self.runs]
        return list(filter(None, dict.fromkeys("; ".join(filter(None, names)) for names in parts)))

    def notes(self, name: str) -> list[str]:
        """Say under a name what limits the speeds: a slow-down on purpose, and others that took the processors."""
        share, others = (max(getattr(run, part) for run in self.runs) for part in ("injected", "others"))
        slowed = f"{name} was made {share:.0%} slower on purpose (planted_slowdown)."
        busy = f"Others took up to {others:.0%} of the processors of {name}: its speeds are what the rest gave."
        return [slowed] * (share > 0) + [busy] * (others >= NOTICED)

    def __str__(self) -> str:
        runs = self.names[0] if len(self.runs) == 1 else counted(len(self.runs), "run")
        return self.label if runs in self.label else f"{self.label} ({runs})"

    def plain(self) -> dict[str, Any]:
        return {"label": self.label, "runs": self.names, "verdicts": self.verdicts, "machines": self.machines}


def read_argument(text: str) -> tuple[dict[str, RunSet], list[str]]:
    """Read what ``text`` names: the complete runs of each benchmark, which are of one kind, and why others are excluded.

    Raises ``UserError`` where that is nothing, damaged, or of several kinds.
    """
    groups, excluded = dict[str, list[Record]](), list[str]()
    for run in _runs(text):
        members = groups.setdefault(run.benchmark, [])
        original = next((other.run for other in members if run.is_copy_of(other)), "")
        if not run.complete or run.word == "DAMAGED":
            why = f"{run.word}: {run.sentence}" if run.word != "PASS" else "its result is not complete"
            excluded.append(f"{run.run}: {why}")
        elif original:  # counted as a second run it would make the spread between runs look smaller than it is
            excluded.append(f"{run.run}: a copy of {original}")
        else:
            for name, here, there in _apart(run, members[0])[:1] if members else ():
                apart = f"{name} is {here} in {run.run}, {there} in {members[0].run}"
                raise UserError(f"{text} holds {run.benchmark} runs of several kinds: {apart}; name the runs of one")
            members.append(run)
    sets = {benchmark: RunSet(text, tuple(members)) for benchmark, members in groups.items() if members}
    if not sets:
        raise UserError(f"{text} has no complete run to compare: {'; '.join(excluded[:5])}")
    return sets, excluded


def _apart(here: Record, there: Record) -> list[tuple[str, str, str]]:
    """Return (name, here, there) of what makes two runs incomparable: the tier and the factors of the fingerprint."""
    tiers = [("tier", here.tier, there.tier)] if here.tier != there.tier else []
    return tiers + differences(here.fingerprint, there.fingerprint)


def _runs(text: str) -> list[Record]:
    path = Path(text)
    if path.is_file() and path.suffix == ".json":
        content = read_json(path)
        if isinstance(content, dict) and (form := content.get("format")):
            readers = {name: read for one in loadable() for name, read in one.part("export", "READERS", {}).items()}
            if form in readers:
                return [readers[form](path)]
        return baselines.load_baseline(path).runs
    if not path.exists() and _KEY.match(text):
        return baselines.by_key(text).runs
    return load_runs(path)


@dataclass(frozen=True)
class Row:
    """One metric in both sets. ``change`` is other / reference, or other - reference for the kind ``difference``; ``written`` are
    it, its interval and the A/A band for a reader.

    ``low`` to ``high`` is its 98% interval, ``basis`` what that rests on (see ``benchlib.judge.regression.Change``), ``gate`` what
    the benchmark's regression check says. ``word`` is '' where nothing may be said.
    """

    metric: str
    unit: str
    direction: Direction
    reference: str
    other: str
    kind: Literal["ratio", "difference"] = "ratio"
    before: float | None = None
    after: float | None = None
    change: float | None = None
    low: float | None = None
    high: float | None = None
    written: tuple[str, str, str] = ("", "", "")
    basis: str = ""
    limit: str = ""
    gate: Status | None = None
    word: str = ""
    reason: str = ""
    headline: bool = False

    @property
    def starred(self) -> bool:
        """Whether its word rests on an assumed spread between runs."""
        return self.basis in ("samples", "default") and self.word in STARRED


@dataclass(frozen=True)
class Factor:
    """Something that differs. ``decides`` says whether it makes the sets incomparable."""

    name: str
    reference: str
    other: str
    decides: bool


@dataclass(frozen=True)
class Contrast:
    """A set of runs against the reference, in one benchmark."""

    benchmark: str
    tier: str
    reference: RunSet
    other: RunSet
    comparable: bool
    same_work: bool
    sentence: str
    rows: list[Row]
    factors: list[Factor]

    def plain(self) -> dict[str, Any]:
        parts = {"rows": list(map(asdict, self.rows)), "factors": list(map(asdict, self.factors))}
        return vars(self) | {"reference": self.reference.plain(), "other": self.other.plain()} | parts

    @property
    def regressions(self) -> list[Row]:
        return [row for row in self.rows if row.word == "regression"]

    @property
    def tone(self) -> str:
        """How it is shown: bad, warn (something is open), good, or calm where there was nothing to compare."""
        if self.regressions:
            return "bad"
        if not self.comparable or any(row.word == "undecided" for row in self.rows):
            return "warn"
        return "calm" if not any(row.limit for row in self.rows) else "good"


class Line(NamedTuple):
    """One benchmark of two sides in a line: how many times as fast the other side is, its interval, and what it computes."""

    benchmark: str
    word: str
    speed: str = ""
    ratio: str = ""
    interval: str = ""
    computes: str = "not known"


def line(item: Contrast) -> Line:
    """Say of a benchmark whether the other side is faster, and whether it computes the same."""
    spec, name = spec_of(item.benchmark), item.benchmark
    if not item.same_work:
        decisive = shortened([factor.name for factor in item.factors if factor.decides], 3)
        return Line(name, f"not comparable because of {decisive}")
    qualities = [(row, spec.metric(row.metric).of.col.quality) for row in item.rows if spec.metric(row.metric)]
    both = [(row, least) for row, least in qualities if least is not None and None not in (row.before, row.after)]
    apart = [row for row, least in both if abs((row.after or 0.0) - (row.before or 0.0)) > least]
    count, differing = len(both), [f"{spec.label(row.metric)} {row.reference} → {row.other}" for row in apart]
    if not count:  # it states no such metric: its rows have the values
        count, differing = _of_rows(item)
    computes = f"the same ({counted(count, 'value')})" if count else "not known"
    if differing:
        computes = f"differs: {shortened(differing, 2)}"
    timed = [row for row in item.rows if row.kind == "ratio" and row.change and is_timed(row.unit)]
    # Those of the whole run hold its start-up and say less.
    timed = [row for row in timed if row.direction != "none" and row.metric not in ("total_s", "startup_s")]
    if not timed:
        return Line(name, "no speed on both sides", computes=computes)
    rate = f"{spec.rate or '?'}_"
    row = min(timed, key=lambda row: (not f"{row.metric}_".startswith(rate), not row.limit, not row.headline))
    ends = [row.change, row.low, row.high]
    ratio, low, high = (end or 0.0 for end in ends)
    if row.direction == "lower":
        ratio, low, high = 1 / ratio, 1 / high, 1 / low
    word, interval = "no interval", ""
    if row.basis != "none":
        word = "no difference found" if low <= 1 <= high else "faster" if low > 1 else "slower"
        interval = f"{low:.3g} to {high:.3g}"
    return Line(name, word, spec.label(row.metric), f"{ratio:.3g}", interval, computes)


def _of_rows(item: Contrast) -> tuple[int, list[str]]:
    """Return how many values the rows of both sides have that any hardware computes, and which of them differ, with both."""
    sides = list[Mapping[str, Quality]]()
    for run in (*item.reference.runs[-1:], *item.other.runs[-1:]):
        with contextlib.suppress(UserError):  # a baseline keeps no config and no rows
            config = build(run.benchmark, run.config)
            sides.append(spec_of(run.benchmark).computed(config, run.result) if run.result else {})
    before, after = sides if len(sides) == 2 else ({}, {})
    common = [name for name in before if name in after]
    apart = [name for name in common if abs(after[name].value - before[name].value) > before[name].least]
    return len(common), [f"{name} {before[name].text} → {after[name].text}" for name in apart]


def compare(arguments: Sequence[str]) -> tuple[list[Contrast], list[str]]:
    """Compare each argument with the first, benchmark by benchmark; return the contrasts and notes on what was excluded.

    Raises ``UserError`` for fewer than two arguments, for one that cannot be read, and for two without a benchmark in common.
    """
    if len(arguments) < 2:
        raise UserError(
            "compare needs two or more of: a run folder, a folder of runs, a report.html, a bench_*.json, a baseline"
        )
    sides = [(argument, *read_argument(argument)) for argument in arguments]
    (first, reference, _), *others = sides
    contrasts = list[Contrast]()
    notes = [f"{argument}, excluded: {line}" for argument, _, excluded in sides for line in excluded]
    for argument, side, _ in sides:
        notes += [words for name, runs in side.items() for words in runs.notes(f"{argument}: {name}")]
    for argument, other, _ in others:
        common = [name for name in reference if name in other]
        if not common:
            kinds = f"{first} of {listing(sorted(reference))}, {argument} of {listing(sorted(other))}"
            raise UserError(
                f"runs of two kinds, {kinds}: different benchmarks measure different things; name runs of one"
            )
        equal = [name for name in common if common[1:] and _same_runs(reference[name], other[name])]
        notes += [f"{name}: the same runs on both sides" for name in equal]
        contrasts += [contrast(reference[name], other[name]) for name in common if name not in equal]
        for name in sorted(reference.keys() ^ other.keys()):
            notes.append(f"{name}: only {first if name in reference else argument} has runs of it")
    return contrasts, list(dict.fromkeys(notes))


def _same_runs(one: RunSet, other: RunSet) -> bool:
    alike = len(one.runs) == len(other.runs)
    return alike and all(any(run.is_copy_of(copy) for copy in other.runs) for run in one.runs)


def contrast(reference: RunSet, other: RunSet) -> Contrast:
    here, there = reference.first, other.first
    pairs = _apart(here, there)
    decisive = [name for name, _, _ in pairs]
    # What only one side recorded is no difference.
    seen, seen_there = environment(reference.runs), environment(other.runs)
    also = [(name, seen[name], seen_there[name]) for name in seen if seen[name] != seen_there.get(name, seen[name])]
    same_work = all(name in PLACE for name in decisive)
    rows = list(_rows(reference, other, not decisive, same_work))
    return Contrast(
        benchmark=there.benchmark,
        tier=there.tier,
        reference=reference,
        other=other,
        comparable=not decisive,
        same_work=same_work,
        sentence=_sentence(rows, decisive, same_work),
        rows=rows,
        factors=[Factor(*pair, decides=place < len(pairs)) for place, pair in enumerate([*pairs, *also])],
    )


def _sentence(rows: Sequence[Row], decisive: Sequence[str], same_work: bool) -> str:
    if decisive:
        differ = "differs" if len(decisive) == 1 else "differ"
        what = "Same work, but" if same_work else "Not comparable:"
        return f"{what} {shortened(decisive, 4)} {differ}; ratios are shown, no verdict."
    regressions = [row.metric for row in rows if row.word == "regression"]
    limited = [row for row in rows if row.limit]
    if regressions:
        return f"{counted(len(regressions), 'regression')}: {', '.join(regressions)}."
    if not limited:
        return "Comparable, but no metric with a limit has a value on both sides."
    undecided = [row.metric for row in limited if row.gate == "AMBIGUOUS"]
    rest = f" Noise leaves {len(undecided)} undecided, repeat the runs: {', '.join(undecided)}." if undecided else ""
    return f"No regression found in {counted(len(limited), 'metric')} with a limit.{rest}"


def _rows(reference: RunSet, other: RunSet, comparable: bool, same_work: bool) -> Iterator[Row]:
    limits = {limit.metric: limit for side in (reference, other) for limit in side.runs[-1].limits}
    old, new = reference.runs, other.runs
    latest, spreads = new[-1], dict[str, Spread]()
    if comparable:  # what a calibration tells, and the runs beside this one, as in its own verdict
        calibration = load_calibration(baselines.folder(), latest.benchmark, latest.tier, latest.fingerprint)
        spreads = baselines.known_spreads(latest, limits.values(), calibration, [*old, *new])
    chance = chance_of_each(limits.values(), latest.metrics)
    for name in dict.fromkeys(metric.name for record in (*old, *new) for metric in record.metrics):
        before, after, limit = side_of(old, name), side_of(new, name), limits.get(name)
        sides = [side for side in (after, before) if side is not None]
        if all(not side.runs and side.metric.provenance == "not_available" for side in sides):
            continue  # neither side could measure it
        metric, spread, of_level = sides[0].metric, spreads.get(name), spreads.get(name + LEVEL)
        check = regression_check(limit, after, before, spread, chance, of_level) if limit and comparable else None
        row = Row(
            metric=name,
            unit=metric.unit,
            direction=metric.direction,
            reference=before.metric.text if before else "absent",
            other=after.metric.text if after else "absent",
            headline=limit is not None or name in spec_of(latest.benchmark).first([name]),
        )
        if not (before and after and before.runs and after.runs):
            word = "only one side" if any(side.runs for side in sides) else ""
            reason = next((side.metric.reason for side in sides if not side.runs), "")
            if check and check.status == "FAIL":  # it is no longer a number
                word, reason = "regression", check.reason
            yield replace(row, word=word, reason=reason)
            continue
        change = difference(limit, after, before, spread, chance)
        scale = change.scale
        values = before.value(scale), after.value(scale)
        yield replace(
            row,
            before=values[0],
            after=values[1],
            reference=quantity(values[0], metric.unit),
            other=quantity(values[1], metric.unit),
            kind=scale.name,
            change=scale.back(change.move),
            low=scale.back(change.least),
            high=scale.back(change.most),
            written=(
                scale.text(change.move, metric.unit),
                change.ends(metric.unit) if change.basis != "none" else "",
                change.spread.band_text(scale, metric.unit) if change.spread else "unknown",
            ),
            basis=change.basis,
            limit=limit.text(metric.direction) if limit else "",
            gate=check.status if check else None,
            reason=check.reason if check else "",
            word=_word(change, metric.direction, check, comparable) if comparable or same_work else "",
        )


def _word(change: Change, direction: Direction, check: Check | None, comparable: bool) -> str:
    """Return what may be said of a change; of the same work in two places neither better nor worse."""
    if check is not None and check.status in ("FAIL", "AMBIGUOUS"):
        return "regression" if check.status == "FAIL" else "undecided"
    if change.basis == "none" and change.move != 0:  # too few samples to tell noise from change
        return "no interval"
    if not change.sure:
        return "no difference found"
    if not comparable:
        return "higher" if change.move > 0 else "lower"
    if direction == "none":
        return "differs"
    return "better" if (change.move > 0) == (direction == "higher") else "worse"


def environment(runs: Sequence[Record]) -> dict[str, str]:
    """Return what is recorded of the environment of runs by name and no part of the fingerprint. Several values are listed."""
    values = dict[str, list[str]]()
    for run in runs:
        fields = {f"config.{name}": str(value) for name, value in run.config.items()}
        for name, text in (fields | run.setup).items():
            if name not in (*run.fingerprint, *(f"config.{name}" for name in NAMING)):
                values.setdefault(name, []).append(text)
    return {name: shortened(list(dict.fromkeys(texts))) for name, texts in values.items()}
