"""How metrics went over the stored runs: levels, changes between them, runs outside the band; and a verdict on all that.

A series is one benchmark, tier and backend with one config on one kind of hardware (the fingerprint without versions), so
a new driver or a new torch shows as a change, with its name. Runs whose numbers are not normal are excluded and listed with
the reason: runs that broke, were skipped or are damaged, copies, and those with an injected slow-down.

A history gets a verdict of its own, from checks that look at whole series instead of one run against a baseline: does the
newest run lie within its band, and did a level get worse while nothing that is recorded changed?
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import NormalDist

import numpy as np

from benchlib.benchmarks import BENCHMARKS, spec_of
from benchlib.config.schema import nearest
from benchlib.core.errors import UserError
from benchlib.core.files import home, outputs
from benchlib.core.text import quantity, shortened
from benchlib.judge.changepoints import MIN_LEVEL_RUNS, Level, Levels, levels
from benchlib.judge.checks import Ask, Check, Status, Verdict, verdict_of
from benchlib.judge.regression import CHANCE, FALSE_ALARMS, RegressionLimit, moved, ruling, scale_of, spread_about
from benchlib.results.metrics import Direction
from benchlib.results.record import Record, load, load_all, store_folders
from benchlib.results.run import no_runs

DEMO = "notebooks/demo-runs"  # runs of the kit, below its home
SERIES = 12  # examined, those with the newest runs
LOOKBACK_RUNS = 10  # before a change, whose facts are no news
POSITION_TOLERANCE = 2  # runs by which the place of a change may be off
COUNTED = ("PASS", "FAIL", "AMBIGUOUS")
MIN_DECLINE_RUNS, DECLINE_RUNS = 8, 10  # that a steady decline shows in
DECLINE_P = 0.01  # false alarms of a series of which nothing changes


@dataclass(frozen=True)
class LevelChange:
    """A change of level at ``run``, the first run of the new one. ``ratio`` is after / before, None where before is 0.

    ``word`` is better, worse or other (a metric without a better side); ``factors`` are (name, before, after) of what
    else changed between the runs at that place: versions, driver, system, host.
    """

    run: Record
    index: int
    before: float
    after: float
    ratio: float | None
    word: str
    factors: Sequence[tuple[str, str, str]] = ()


@dataclass(frozen=True)
class Trend:
    """A metric over the runs of a series that have it, the oldest first. ``outside`` are indices of runs off the band."""

    metric: str
    label: str
    unit: str
    direction: Direction
    runs: list[Record]
    values: list[float]
    levels: Levels
    changes: list[LevelChange]
    outside: list[int]

    @property
    def last(self) -> Record:
        return self.runs[-1]

    @property
    def side(self) -> str:
        """How the newest run lies to its band: ``within``, or ``better``, ``worse`` or ``other`` outside it."""
        last = len(self.values) - 1
        return (
            _word(self.values[-1], self.levels.levels[-1].median, self.direction) if last in self.outside else "within"
        )


def series(runs: Iterable[Record]) -> dict[str, list[Record]]:
    """Return the runs by series, in their order; excluded ones are left out."""
    groups: dict[str, list[Record]] = {}
    for run in runs:
        if not exclusion(run):
            groups.setdefault(run.series, []).append(run)
    return groups


def exclusion(run: Record) -> str:
    """Return why a run is excluded from trends; '' where it is not."""
    if run.problems:
        return "; ".join(run.problems)
    if run.copy_of:
        return f"copy of {run.copy_of}"
    if run.injected:
        return f"a slow-down of {run.injected:.0%} was injected into it"
    if run.word not in COUNTED:
        return run.sentence
    return "" if run.series else "this version cannot read its config or its machine"


def key_metrics(runs: Sequence[Record]) -> list[str]:
    """Return the names of the key numbers of a series' newest run, in the order of the report."""
    newest = runs[-1]
    return list(spec_of(newest.benchmark).first(metric.name for metric in newest.measured))


def spanned(low: float, high: float, unit: str, between: str = " to ") -> str:
    """Write two values with their unit once, or with one each where the unit takes a prefix."""
    first = unit if unit == "FLOP/s" else ""
    return f"{quantity(low, first)}{between}{quantity(high, unit)}"


def trend(metric: str, runs: Sequence[Record]) -> Trend | None:
    """Return the trend of a metric over the runs of one series; None where no run has it."""
    pairs = [(run, item) for run in runs for item in run.measured if item.name == metric]
    if not pairs:
        return None
    members, values, newest = [run for run, _ in pairs], [item.value or 0.0 for _, item in pairs], pairs[-1][1]
    split = levels(values)
    outside = [
        index
        for level in split.levels
        for index in range(level.start, level.end)
        if level.low < level.high and not level.low <= values[index] <= level.high
    ]
    changes = []
    for old, new in itertools.pairwise(split.levels):
        ratio, word = new.median / old.median if old.median else None, _word(new.median, old.median, newest.direction)
        factors = _factors(members, new.start)
        changes.append(LevelChange(members[new.start], new.start, old.median, new.median, ratio, word, factors))
    return Trend(
        metric,
        spec_of(members[-1].benchmark).label(metric),
        newest.unit,
        newest.direction,
        members,
        values,
        split,
        changes,
        outside,
    )


def _word(new: float, old: float, direction: Direction) -> str:
    return "other" if direction == "none" else "better" if (new > old) == (direction == "higher") else "worse"


def _factors(runs: list[Record], index: int) -> list[tuple[str, str, str]]:
    """Return what is new at a change: facts with a value that the runs before it did not have.

    So hosts that alternate are no factor. Noise may move the place of a change, so the ``POSITION_TOLERANCE`` runs on its two
    sides may be on either.
    """
    before = runs[max(0, index - POSITION_TOLERANCE - LOOKBACK_RUNS) : max(1, index - POSITION_TOLERANCE)]
    for after in runs[index : index + POSITION_TOLERANCE]:
        names = [name for name, value in after.setup.items() if all(run.setup.get(name) != value for run in before)]
        if names:
            return [(name, before[-1].setup.get(name, "absent"), after.setup[name]) for name in names]
    return []


@dataclass(frozen=True)
class Filter:
    """What is asked for. An empty text asks for everything; ``machine`` is a part of a host's or a processor's name.

    ``metric`` is the beginning of a metric's name, '' the key numbers.
    """

    benchmark: str = ""
    tier: str = ""
    machine: str = ""
    metric: str = ""

    def __post_init__(self) -> None:
        if self.benchmark and self.benchmark not in BENCHMARKS:
            raise UserError(f"unknown benchmark {self.benchmark!r}: {nearest(self.benchmark, BENCHMARKS)}")

    def takes(self, run: Record) -> bool:
        return (
            self.benchmark in ("", run.benchmark)
            and self.tier in ("", run.tier)
            and self.machine.casefold() in f"{run.host} {run.hardware}".casefold()
        )


@dataclass(frozen=True)
class History:
    """The runs of a store that were asked for, the oldest first; ``stored`` is how many the store holds in all."""

    store: Path
    demo: bool
    asked: Filter
    stored: int
    runs: list[Record] = field(repr=False)

    @cached_property
    def series(self) -> list[list[Record]]:
        """The runs of each series, the series with the newest run first; at most ``SERIES``."""
        return sorted(series(self.runs).values(), key=lambda members: members[-1].started_at, reverse=True)[:SERIES]

    @cached_property
    def trends(self) -> list[Trend]:
        all_trends = (trend(name, members) for members in self.series for name in self._metrics(members))
        return [item for item in all_trends if item]

    def _metrics(self, members: list[Record]) -> list[str]:
        if not self.asked.metric:
            return key_metrics(members)
        names = dict.fromkeys(metric.name for run in members for metric in run.measured)
        return [name for name in names if name.startswith(self.asked.metric)]

    @property
    def excluded(self) -> list[tuple[Record, str]]:
        return [(run, why) for run in self.runs if (why := exclusion(run))]


def choose_store(store: str = "") -> tuple[Path, bool]:
    """Return the store that is meant, and whether it is the kit's demo store.

    '' takes the folder of the runs (``outputs``), and the demo store where that holds none.
    """
    if store:
        folder = Path(store).expanduser()
        if not folder.is_dir():
            raise UserError(f"store = {store!r}: no such folder (looked in {Path.cwd()})")
        return folder, False
    empty = next(store_folders(outputs()), None) is None
    return (home() / DEMO if empty else outputs()), empty


def read_history(store: str = "", **wanted: str) -> History:
    """Read a store, as far as the fields of a filter ask for it. What no run passes is a ``UserError``."""
    (folder, demo), asked = choose_store(store), Filter(**wanted)
    stored = load_all(folder)
    runs = [run for run in stored if asked.takes(run)]
    if stored and not runs:
        words = ", ".join(f"{name} {value}" for name, value in wanted.items() if value)
        days = f"they are of {stored[0].moment:%Y-%m-%d} to {stored[-1].moment:%Y-%m-%d}"
        kinds = ", ".join(sorted({f"{run.benchmark} {run.tier}" for run in stored})[:8])
        raise UserError(f"none of the {len(stored):,} runs in {folder} is asked for ({words}): {days}, {kinds}")
    history = History(folder, demo, asked, len(stored), runs)
    if runs and asked.metric and not history.trends:
        names = sorted({metric.name for run in runs for metric in run.measured})
        raise UserError(f"no run has a metric that begins with {asked.metric!r}: {nearest(asked.metric, names)}")
    return history


def judge_history(history: History) -> Verdict:
    if not history.runs:
        return verdict_of([], skipped=no_runs(history.store))
    damaged, count = [run.run for run in history.runs if run.problems], len(history.runs)
    remedy = f": {shortened(damaged)}; restore or delete what is damaged" if damaged else ""
    reason = f"{len(damaged)} of {count} {'is' if len(damaged) == 1 else 'are'} damaged{remedy}"
    ask = Ask("runs readable", "Can every stored run be read?")
    checks = [ask.answer("AMBIGUOUS" if damaged else "PASS", reason, value=float(len(damaged)), limit="= 0")]
    for members in history.series:
        newest = members[-1]
        trends = [item for item in history.trends if item.last.series == newest.series]
        where = f"{newest.benchmark} {newest.tier}, {newest.hardware}, {newest.ranks} rank{'s' * (newest.ranks != 1)}"
        limits = {limit.metric: limit for limit in load(newest.folder).limits}
        checks += [
            _level_check(where, trends, len(members), limits),
            _newest_check(where, trends, newest, limits),
            _decline_check(where, trends, limits),
        ]
    verdict = verdict_of(checks, remedy="")
    if verdict.verdict == "PASS" and all(check.status == "SKIPPED" for check in checks[1:]):
        # That files can be read says nothing about what was measured.
        longest = max(map(len, history.series), default=0)
        reason = f"Too few runs: the longest series has {longest}; a change of level needs {2 * MIN_LEVEL_RUNS}."
        return verdict.model_copy(update={"verdict": "SKIPPED", "sentence": reason})
    return verdict


def _level_check(where: str, trends: Iterable[Trend], runs: int, limits: Mapping[str, RegressionLimit]) -> Check:
    """Judge the loss that the newest levels add up to by the gate's rule; a metric without a limit may lose nothing."""
    ask = Ask(f"level of {where}", "Did every level hold, unless a recorded change explains it?", "regression")
    if runs < 2 * MIN_LEVEL_RUNS:
        return ask.skipped(f"{runs} runs; a change needs {MIN_LEVEL_RUNS} before and {MIN_LEVEL_RUNS} after it")
    answers = list[tuple[Status, str]]()
    for trend in trends:
        lost, status = _lost(trend, limits)
        if not lost:
            continue
        values = f"{quantity(lost[-1].before)} to {quantity(lost[0].after, trend.unit)}"
        reason = f"{trend.label} from {values} since {lost[0].run.moment:%Y-%m-%d}"
        for name, before, after in lost[0].factors[:1]:
            reason += f" with {name} {before} → {after}"
        if status == "PASS":
            reason += ", within its limit"
        elif lost[0].factors:
            status, reason = "AMBIGUOUS", f"{reason}: a recorded change came with it, accept it or go back"
        elif status == "AMBIGUOUS":
            reason += ", which noise may explain: more runs decide it"
        answers.append((status, reason))
    return _worst(ask, answers, "no level got worse")


def _worst(ask: Ask, answers: Sequence[tuple[Status, str]], passed: str) -> Check:
    """Answer with the texts of the worst status."""
    status: Status = min((status for status, _ in answers), key=("FAIL", "AMBIGUOUS", "PASS").index, default="PASS")
    return ask.answer(status, "; ".join(text for word, text in answers if word == status) or passed)


def _lost(trend: Trend, limits: Mapping[str, RegressionLimit]) -> tuple[list[LevelChange], Status]:
    """Return the changes for the worse that the newest level ends, the newest first, and what the gate says of their sum."""
    lost = list(itertools.takewhile(lambda change: change.word == "worse", reversed(trend.changes)))
    first, last = trend.levels.levels[-1 - len(lost)], trend.levels.levels[-1]
    return lost, _judged(trend, first, last.median, last.end - last.start, limits) if lost else "PASS"


def _decline_check(where: str, trends: Iterable[Trend], limits: Mapping[str, RegressionLimit]) -> Check:
    """Look for a metric that gets worse from run to run, too little each time to be a change of level.

    Kendall's test of rank order over the newest runs, one-sided, with pairs of one level alone, so that a single step is no
    decline; at ``DECLINE_P`` for all metrics of a series together, if their noise is independent. What surely lost more than
    its limit by its levels is judged there.
    """
    ask = Ask(f"decline of {where}", "Is no metric getting steadily worse?", "regression")
    shown = [item for item in trends if len(item.values) >= MIN_DECLINE_RUNS and item.direction != "none"]
    shown = [item for item in shown if min(item.values[-DECLINE_RUNS:]) > 0]
    if not shown:
        return ask.skipped(f"fewer than {MIN_DECLINE_RUNS} runs")
    least, failed = NormalDist().inv_cdf(1 - DECLINE_P / len(shown)), list[str]()
    for item in shown:
        start = max(0, len(item.values) - DECLINE_RUNS)
        worse = np.log(item.values) * (1 if item.direction == "lower" else -1)
        parts = [worse[max(level.start, start) : level.end] for level in item.levels.levels if level.end > start]
        order = sum(float(np.sign(part[at + 1 :] - part[at]).sum()) for part in parts for at in range(len(part)))
        spread = math.sqrt(sum(len(part) * (len(part) - 1) * (2 * len(part) + 5) / 18 for part in parts))
        if spread and (order - 1) / spread > least and _lost(item, limits)[1] != "FAIL":
            slope = float(np.median(np.diff(worse[start:])))
            step = abs(math.expm1(slope if item.direction == "lower" else -slope))
            ends = f"{quantity(item.values[start])} to {quantity(item.values[-1], item.unit)}"
            failed.append(f"{item.label} degrading by {step:.1%} a run: {ends}")
    return ask.fact(not failed, f"{'; '.join(failed) or 'none'} over the newest {DECLINE_RUNS} runs")


def _newest_check(where: str, trends: list[Trend], newest: Record, limits: Mapping[str, RegressionLimit]) -> Check:
    """Judge the metrics of the newest run that have a limit against the others of its level, by the gate's rule."""
    ask = Ask(f"newest run of {where}", "Is the newest run as good as the others of its level?", "regression")
    limited = [(item, item.levels.levels[-1]) for item in trends if item.last is newest and item.metric in limits]
    shown = [(item, level) for item, level in limited if level.low < level.high]
    if not shown:
        return ask.skipped("too few runs, or no metric with a limit")
    answers = list[tuple[Status, str]]()
    for trend, level in shown:
        value, limit = trend.values[-1], limits[trend.metric].text(trend.direction)
        status = _judged(trend, level, value, 1, limits, FALSE_ALARMS / len(shown))
        if status != "PASS":
            values = f"{quantity(value, trend.unit)}, limit {limit} of {quantity(level.median, trend.unit)}"
            answers.append((status, f"{trend.label} {values}" + ": repeat the run" * (status == "AMBIGUOUS")))
    return _worst(ask, answers, f"{len(shown)} metrics are within their limits")


def _judged(
    trend: Trend, level: Level, value: float, runs: int, limits: Mapping[str, RegressionLimit], chance: float = CHANCE
) -> Status:
    """Return what the gate's rule says of a value of ``runs`` runs against a level; ``chance`` as in ``compared``."""
    limit = limits.get(trend.metric) or RegressionLimit(metric=trend.metric, share=0)
    scale = scale_of(limit, level.median, value)
    others = max(1, level.end - level.start - (runs == 1))
    move = float(scale.to(value) - scale.to(level.median))
    change = moved(scale, move, spread_about(trend.levels, scale, level.median), (runs, others), chance)
    return ruling(change, limit, trend.direction, level.median)[0]
