"""How a metric went over the runs of a series: its levels, the changes between them, and runs outside the band.

A series is one benchmark, tier and backend with one config on one kind of hardware (the fingerprint without versions), so
a new driver or a new torch shows as a change, with its name. Runs whose numbers are no normal ones take no part and are
listed with the reason: runs that broke, were skipped or are damaged, copies, and those with a planted slow-down.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from benchlib.benchmarks import BENCHMARKS, view
from benchlib.core.text import quantity
from benchlib.judge.changepoints import Levels, levels
from benchlib.results.store import StoredRun

LONGEST = 1000  # runs of a series that are looked at, the newest: the search takes time with the square of their number
SHOWN = 4  # key numbers of a benchmark that has no list of its own
SEEN = 10  # runs before a change whose facts are no news
BLUR = 2  # runs by which the place of a change may be off
COUNTED = ("PASS", "FAIL", "AMBIGUOUS")


@dataclass(frozen=True)
class Change:
    """A change of level at ``run``, the first run of the new one. ``ratio`` is after / before, None where before is 0.

    ``word`` is better, worse or other (a metric without a better side); ``factors`` are (name, before, after) of what
    else changed between the runs at that place: versions, driver, system, host.
    """

    run: StoredRun
    index: int
    before: float
    after: float
    ratio: float | None
    word: str
    factors: list[tuple[str, str, str]] = field(default_factory=list)


@dataclass(frozen=True)
class Trend:
    """A metric over the runs of a series that have it, the oldest first. ``outside`` are indices of runs off the band."""

    metric: str
    label: str
    unit: str
    direction: str
    runs: list[StoredRun]
    values: list[float]
    levels: Levels
    changes: list[Change]
    outside: list[int]

    @property
    def last(self) -> StoredRun:
        """The newest run."""
        return self.runs[-1]

    def side(self, index: int) -> str:
        """Say how a run lies to its band: ``within``, or ``better``, ``worse`` or ``other`` outside it."""
        if index not in self.outside:
            return "within"
        return _word(self.values[index], self.levels.at(index).median, self.direction)


def series(runs: Iterable[StoredRun]) -> dict[str, list[StoredRun]]:
    """Return the runs that take part in trends by series, in their order."""
    groups: dict[str, list[StoredRun]] = {}
    for run in runs:
        if not left_out(run):
            groups.setdefault(run.series, []).append(run)
    return groups


def left_out(run: StoredRun) -> str:
    """Return why a run takes no part in trends; '' for one that does."""
    if run.damaged:
        return run.damaged
    if run.copy_of:
        return f"copy of {run.copy_of}"
    if run.planted:
        return f"a slow-down of {run.planted:.0%} was planted in it"
    if run.word not in COUNTED:
        return run.sentence or {"BROKEN": "it broke", "SKIPPED": "nothing ran"}.get(run.word, "it has not ended")
    return "" if run.series else "its config or its machine is not recorded as this version reads them"


def key_metrics(runs: Sequence[StoredRun]) -> list[str]:
    """Return the names of the key numbers of a series' newest run, in the order of the report."""
    newest = runs[-1]
    prefixes = view(newest.benchmark).headlines or [metric.name for metric in newest.metrics[:SHOWN]]
    found = [metric.name for metric in map(newest.metric, prefixes) if metric]
    return list(dict.fromkeys(found))


def label(metric: str, benchmark: str = "") -> str:
    """Return a metric's name for a reader, without its scope; without a benchmark in the words of the first that has any."""
    views = [view(benchmark)] if benchmark else [item.view for item in BENCHMARKS.values()]
    words = [own.label(metric) for own in views]
    return next((word for word in words if word != metric.replace("_", " ")), words[0])


def spanned(low: float, high: float, unit: str, between: str = " to ") -> str:
    """Write two values with their unit once, or with one each where the unit takes a prefix."""
    first = unit if unit == "FLOP/s" else ""
    return f"{quantity(low, first)}{between}{quantity(high, unit)}"


def trend(metric: str, runs: Sequence[StoredRun]) -> Trend | None:
    """Return the trend of a metric over the runs of one series; None where no run has it."""
    pairs = [(run, found) for run in runs for found in run.metrics if found.name == metric][-LONGEST:]
    if not pairs:
        return None
    members, values = [run for run, _ in pairs], [found.value for _, found in pairs]
    newest, split = pairs[-1][1], levels(values)
    outside = [
        index
        for level in split.levels
        for index in range(level.start, level.end)
        if level.low < level.high and not level.low <= values[index] <= level.high
    ]
    return Trend(
        metric,
        label(metric),
        newest.unit,
        newest.direction,
        members,
        values,
        split,
        _changes(members, split, newest.direction),
        outside,
    )


def _changes(runs: list[StoredRun], split: Levels, direction: str) -> list[Change]:
    changes = []
    for old, new in zip(split.levels, split.levels[1:], strict=False):
        ratio = new.median / old.median if old.median else None
        word, factors = _word(new.median, old.median, direction), _factors(runs, new.start)
        changes.append(Change(runs[new.start], new.start, old.median, new.median, ratio, word, factors))
    return changes


def _word(new: float, old: float, direction: str) -> str:
    if direction not in ("higher", "lower"):
        return "other"
    return "better" if (new > old) == (direction == "higher") else "worse"


def _factors(runs: list[StoredRun], index: int) -> list[tuple[str, str, str]]:
    """Return what is new at a change: facts with a value that the runs before it did not have.

    So hosts that take turns are no factor. Noise may move the place of a change, so the ``BLUR`` runs on its two sides
    may be on either.
    """
    before = runs[max(0, index - BLUR - SEEN) : max(1, index - BLUR)]
    for after in runs[index : index + BLUR]:
        names = [name for name, value in after.facts.items() if all(run.facts.get(name) != value for run in before)]
        if names:
            return [(name, before[-1].facts.get(name, "absent"), after.facts[name]) for name in names]
    return []
