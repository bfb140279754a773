"""The runs that a history is asked about: which store, which filters, their trends, and what is to be said of them.

A history gets a verdict of its own, from checks that look at whole series instead of one run against a baseline: does the
newest run lie within its band, and did a level get worse while nothing that is recorded changed?
"""

import datetime
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from benchlib.benchmarks import BENCHMARKS
from benchlib.config.schema import nearest
from benchlib.core.errors import UserError
from benchlib.core.files import home, outputs
from benchlib.core.text import quantity
from benchlib.judge import trends
from benchlib.judge.changepoints import COVERAGE, SHORTEST
from benchlib.judge.checks import Check, Verdict, verdict_of
from benchlib.judge.trends import Trend, spanned
from benchlib.results import store as history
from benchlib.results.store import StoredRun

SERIES = 12  # looked at, those with the newest runs


def demo_store() -> Path:
    """Return the folder of real runs that comes with the kit."""
    return home() / "notebooks" / "demo-runs"


@dataclass(frozen=True)
class Filter:
    """What is asked for. An empty text asks for everything; ``machine`` is a part of a host's or a processor's name.

    ``metric`` is the beginning of a metric's name, '' the key numbers. Days are written YYYY-MM-DD and both count.
    """

    benchmark: str = ""
    tier: str = ""
    machine: str = ""
    metric: str = ""
    first_day: str = ""
    last_day: str = ""

    def __post_init__(self) -> None:
        for name in ("first_day", "last_day"):
            text = getattr(self, name)
            try:
                datetime.date.fromisoformat(text or "2000-01-01")
            except ValueError:
                raise UserError(f"{name} = {text!r}: expected a day such as 2026-11-21") from None
        if self.benchmark and self.benchmark not in BENCHMARKS:
            raise UserError(f"unknown benchmark {self.benchmark!r}: {nearest(self.benchmark, BENCHMARKS)}")

    def takes(self, run: StoredRun) -> bool:
        """Tell whether a run is asked for."""
        day = run.moment.strftime("%Y-%m-%d")
        return (
            self.benchmark in ("", run.benchmark)
            and self.tier in ("", run.tier)
            and self.machine.casefold() in f"{run.host} {run.hardware}".casefold()
            and (self.first_day or day) <= day <= (self.last_day or day)
        )


@dataclass(frozen=True)
class Past:
    """The runs of a store that were asked for, the oldest first; ``stored`` is how many the store holds in all."""

    store: Path
    demo: bool
    asked: Filter
    stored: int
    runs: list[StoredRun] = field(repr=False)

    @cached_property
    def series(self) -> list[list[StoredRun]]:
        """The runs of each series, the series with the newest run first; at most ``SERIES``."""
        found = trends.series(self.runs).values()
        return sorted(found, key=lambda members: members[-1].started, reverse=True)[:SERIES]

    @cached_property
    def trends(self) -> list[Trend]:
        """The trends of the metrics that were asked for, series by series."""
        found = (trends.trend(name, members) for members in self.series for name in self._metrics(members))
        return [trend for trend in found if trend]

    def _metrics(self, members: list[StoredRun]) -> list[str]:
        if not self.asked.metric:
            return trends.key_metrics(members)
        names = dict.fromkeys(metric.name for run in members for metric in run.metrics)
        return [name for name in names if name.startswith(self.asked.metric)]

    @property
    def left_out(self) -> list[tuple[StoredRun, str]]:
        """The runs that take no part in trends, with the reason."""
        return [(run, why) for run in self.runs if (why := trends.left_out(run))]


def choose(store: str, **asked: str) -> tuple[Path, bool, Filter]:
    """Return the store that is meant, whether it is the kit's demo store, and the filter.

    '' takes the folder of the runs (``outputs``), and the demo store where that holds none.
    """
    if store:
        folder = Path(store).expanduser()
        if not folder.is_dir():
            raise UserError(f"store = {store!r}: no such folder (looked in {Path.cwd()})")
        return folder, False, Filter(**asked)
    empty = next(iter(history.run_folders(outputs())), None) is None
    return (demo_store() if empty else outputs()), empty, Filter(**asked)


def read(store: Path, demo: bool, asked: Filter) -> Past:
    """Read a store. A filter that no run passes is a ``UserError`` that says what there is."""
    found = history.read(store)
    runs = [run for run in found if asked.takes(run)]
    if found and not runs:
        words = (sorted({run.benchmark for run in found}), sorted({run.tier for run in found}))
        there = f"benchmarks {', '.join(words[0][:8])}; tiers {', '.join(words[1][:8])}"
        wanted = ", ".join(f"{name} {value}" for name, value in vars(asked).items() if value)
        days = f"days {found[0].moment:%Y-%m-%d} to {found[-1].moment:%Y-%m-%d}"
        raise UserError(
            f"none of the {len(found):,} runs in {store} is asked for ({wanted}): there are {there}; {days}"
        )
    past = Past(store, demo, asked, len(found), runs)
    if runs and asked.metric and not past.trends:
        names = sorted({metric.name for run in runs for metric in run.metrics})
        raise UserError(f"no run has a metric that begins with {asked.metric!r}: {nearest(asked.metric, names)}")
    return past


def judge(past: Past) -> Verdict:
    """Check each series: its newest run, and its newest change of level."""
    if not past.runs:
        return verdict_of([], skipped=f"{past.store} holds no runs yet: `benchlib run quick` makes the first")
    checks = [_readable_check(past.runs)]
    for members in past.series:
        found = [trend for trend in past.trends if trend.last.series == members[-1].series]
        newest = members[-1]
        where = f"{newest.benchmark} {newest.tier}, {newest.hardware}, {newest.ranks} rank{'s' * (newest.ranks != 1)}"
        checks += [_level_check(where, found, len(members)), _newest_check(where, found, newest)]
    verdict = verdict_of(checks)
    if verdict.verdict == "AMBIGUOUS":  # the words for one run advise what a history cannot do
        names = ", ".join(check.name for check in checks if check.gates and check.status == "AMBIGUOUS")
        return verdict.model_copy(update={"sentence": f"Open: {names}."})
    return verdict


def _readable_check(runs: list[StoredRun]) -> Check:
    """Say which runs are damaged: what they would have shown stays open, but nothing got worse."""
    damaged = [run.name for run in runs if run.damaged]
    named = ", ".join(damaged[:3]) + (f" and {len(damaged) - 3} more" if len(damaged) > 3 else "")
    are = "is" if len(damaged) == 1 else "are"
    return Check(
        name="runs readable", kind="sanity", question="Can every stored run be read?",
        status="AMBIGUOUS" if damaged else "PASS", value=float(len(damaged)), limit="= 0",
        reason=f"{len(damaged)} of {len(runs)} {are} damaged: {named}; restore or delete {'it' if are == 'is' else 'them'}"
        if damaged else f"0 of {len(runs)} are damaged",
    )  # fmt: skip


def _level_check(where: str, found: Iterable[Trend], runs: int) -> Check:
    make = _check(f"level of {where}", "Did no level get worse without a cause that is recorded?")
    if runs < 2 * SHORTEST:
        return make("SKIPPED", f"{runs} runs; a change needs {SHORTEST} before and {SHORTEST} after it")
    worse = [(trend, trend.changes[-1]) for trend in found if trend.changes and trend.changes[-1].word == "worse"]
    said = [
        f"{trend.label} from {quantity(change.before)} to {quantity(change.after, trend.unit)} since {change.run.moment:%Y-%m-%d}"
        + (f" with {change.factors[0][0]} {change.factors[0][1]} → {change.factors[0][2]}" if change.factors else "")
        for trend, change in worse
    ]
    if any(not change.factors for _, change in worse):
        return make("FAIL", "; ".join(said))
    if worse:
        return make("AMBIGUOUS", f"a recorded change came with it: {'; '.join(said)}; accept it or go back")
    return make("PASS", f"no level got worse in {runs} runs")


def _newest_check(where: str, found: list[Trend], newest: StoredRun) -> Check:
    make = _check(f"newest run of {where}", "Does the newest run lie where unchanged runs lie?")
    shown = [t for t in found if t.last.path == newest.path and t.levels.levels[-1].low < t.levels.levels[-1].high]
    if not shown:
        return make("SKIPPED", "too few runs to say how much runs scatter")
    # Of twenty metrics one lies outside its band of 95 % by chance: together they are to keep that share.
    coverage = 1 - (1 - COVERAGE) / len(shown)
    off = []
    for trend in shown:
        low, high = trend.levels.limits(trend.levels.levels[-1], coverage)
        value = trend.values[-1]
        wrong = value > high if trend.direction == "lower" else value < low
        if wrong and trend.direction in ("lower", "higher"):
            off.append(f"{trend.label} {quantity(value, trend.unit)} outside {spanned(low, high, trend.unit)}")
    if off:
        return make("AMBIGUOUS", f"{'; '.join(off)}: repeat the run")
    return make(
        "PASS", f"{len(shown)} metrics lie within, or on the better side of, the band of {coverage:.1%} of runs"
    )


def _check(name: str, question: str) -> Callable[[str, str], Check]:
    def make(status: str, reason: str) -> Check:
        gates = status != "SKIPPED"
        return Check(
            name=name, kind="regression", question=question, status=status, reason=reason, source="history", gates=gates
        )  # type: ignore[arg-type]

    return make
