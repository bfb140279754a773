"""A spec: all that a benchmark states, said once; and what follows from it for the report, the gate and the notebook."""

import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from benchlib.core.errors import UserError, explained
from benchlib.core.events import Event, Moment
from benchlib.core.stats import percentile, percentile_interval
from benchlib.core.stats import summary as spread
from benchlib.judge.baselines import Comparison, regression_checks
from benchlib.judge.checks import VALUES, agreement_check, budget_check, finite_check
from benchlib.judge.checks import Check as Judged
from benchlib.judge.impossible.claim import Claim, in_its_unit
from benchlib.judge.impossible.own import Numbers
from benchlib.judge.numbers import judged
from benchlib.judge.published import Measured, device_name, summary
from benchlib.judge.reference_values import Quality, reference_checks
from benchlib.judge.regression import RegressionLimit
from benchlib.results.metrics import Direction, measured, not_available
from benchlib.results.metrics import Metric as Stated
from benchlib.results.run import Result, Run, Tables, save_result
from benchlib.spec.charts import Chart
from benchlib.spec.checks import Check, judge
from benchlib.spec.tables import MISSING, Col, Ref, Row, Rows, Table, cols, fields, split_samples, with_samples

if TYPE_CHECKING:
    import pandas


def run_table(*more: Col) -> Table:
    """Return the table ``run``: what there is one of. The first columns are those that every run has."""
    times = [Col("startup_s", "s", "start-up"), Col("total_s", "s", "time of the run")]
    return Table("run", "the run", [*times, *cols("collective layout device threads torch"), *more])


def run_metrics(run: Table) -> "list[Metric]":
    """Return the metrics that every run has."""
    total = Metric("total_s", run["total_s"], "Whole run", better="lower", headline=True)
    return [Metric("startup_s", run["startup_s"], "Start-up", better="lower"), total]


@dataclass(frozen=True)
class Metric:
    """A number that is compared between runs. A name with columns in braces makes a metric for each row.

    Of a column of samples the value is their average with its interval, or a ``percentile`` (0.99, by its ``definition``)
    with that of its order statistics; ``ends`` are the columns with the interval of one number. ``basis`` says what it is of, a format string over the
    row. ``may_lose`` is the share of the baseline that may be lost, ``amount`` so many of its unit. ``headline`` shows it
    first. ``unless`` returns why a row does not count; such a metric is not available.
    """

    name: str
    of: Ref
    label: str = ""
    basis: str = ""
    better: Direction = "none"
    may_lose: float | None = None
    amount: float | None = None
    headline: bool = False
    unless: Callable[[Row, Rows], str] = lambda row, run: ""
    definition: Callable[[Sequence[float], float], float] = percentile
    percentile: float | None = None
    ends: tuple[Ref, Ref] | None = None

    def rows(self, run: Rows) -> Iterator[tuple[str, Row]]:
        """Yield the name of each metric with its row; of several rows of one name the first counts."""
        named: dict[str, Row] = {}
        for row in self.of.table.rows(run):
            words = {name: re.sub(r"\W", "_", str(self.of.table[name].raw(row, run))) for name in fields(self.name)}
            named.setdefault(self.name.format_map(words), row)
        yield from named.items()

    def state(self, name: str, row: Row, run: Rows) -> Stated:
        """Return the metric of a row: measured, derived, or not available for the reason that the row states."""
        unit, samples = self.of.col.stated_unit, self.of.numbers(row, run)
        if reason := self.unless(row, run) or ("" if samples else self.of.why(row)):
            return not_available(name, unit, self.better, reason)
        computed = self.of.col.of is not None if self.of.col.derived is None else self.of.col.derived
        derived, basis = computed or bool(self.ends or self.percentile), self.of.table.text(self.basis, row, run)
        kind = self.of.col.average
        stated = measured(name, samples or math.nan, unit, self.better, derived=derived, reason=basis, average=kind)
        if stated.value is None or not (self.ends or self.percentile):
            return stated
        low, high = [end.finite(row, run) for end in self.ends or ()] or percentile_interval(
            samples, self.percentile or 0
        )
        value = self.definition(samples, self.percentile) if self.percentile else stated.value
        return stated.model_copy(update={"stored": value, "ci_low": low, "ci_high": high, "samples": []})

    @functools.cached_property
    def pattern(self) -> re.Pattern[str]:
        return re.compile(re.sub(r"\\{(\w+)\\}", r"(?P<\1>\\w*)", re.escape(self.name)))


@dataclass(frozen=True)
class Published:
    """A column whose numbers stand beside published figures of ``quantity``, in the unit of the registry.

    ``label`` is a format string over the row, ``conditions`` returns under which ones it was measured, by the names of
    ``assets/references.yaml``.
    """

    quantity: str
    of: Ref
    label: str
    conditions: Callable[[Row, Rows], Mapping[str, Any]]


@dataclass(frozen=True)
class Show:
    """A table for readers: ``columns`` of a selection, else all; with ``across`` one column for each value of that column.

    ``make`` returns the rows in place of all that.
    """

    heading: str
    table: Table
    columns: str = ""
    across: str = ""
    make: Callable[[Rows], list[dict[str, str]]] | None = None

    def rows(self, run: Rows) -> list[dict[str, str]]:
        """Return the rows as texts by heading."""
        if self.make:
            return self.make(run)
        refs = [self.table[name] for name in self.columns.split() or [col.name for col in self.table.cols]]
        rows = self.table.rows(run)
        if not self.across:
            return [{ref.col.heading: ref.text(row, run) for ref in refs} for row in rows]
        at, cell, lines = self.table[self.across], refs.pop(), dict[str, dict[str, str]]()
        heads = [at.text(row, run) for row in sorted(rows, key=lambda row: at.finite(row, run) or 0.0)]
        for row in rows:
            keys = {ref.col.heading: ref.text(row, run) for ref in refs}
            line = lines.setdefault(str(keys), keys | dict.fromkeys(heads, MISSING))
            line[at.text(row, run)] = cell.text(row, run)
        return list(lines.values())


@dataclass(frozen=True)
class Bound:
    """How near a rate comes to what the machine can do: a row of the page of a machine.

    ``work`` names what was done, ``of`` says what the ``share`` is of, or without one why no bound was measured, and ``says`` what
    holds the rate back: format strings over the row. The first row of the selection counts.
    """

    work: str
    rate: Ref
    share: Ref | None
    of: str
    says: str = ""

    def reached(self, run: Rows) -> dict[str, Any] | None:
        """Return texts and the share with the ends of its interval; None where the rate was not measured."""
        table = self.rate.table
        row = next((row for row in table.rows(run) if self.rate.finite(row, run) is not None), None)
        if row is None:
            return None
        words = {name: table.text(getattr(self, name), row, run) for name in ("work", "of", "says")}
        numbers = self.share.numbers(row, run) if self.share and self.share.finite(row, run) is not None else []
        share = spread(numbers, self.share.col.average) if self.share and numbers else (None, None, None)
        return words | {"rate": self.rate.text(row, run)} | dict(zip(("share", "low", "high"), share, strict=True))


def each(table: Table, form: str) -> Callable[[Rows], list[str]]:
    """Say a sentence, a format string over the columns, of each row of a selection."""
    return lambda run: [table.text(form, row, run) for row in table.rows(run)]


@dataclass(frozen=True)
class Spec:
    """All that a benchmark states. ``says`` are sentences of the reading.

    ``warnings`` say what limits the meaning of a result, ``refuse`` raises ``UserError`` for files that a valid config
    names and that cannot be used, ``missed`` returns by parameter what was not done. ``recorded(events)`` returns the
    rows that pictures of a run without a result can show. ``exports`` are formats of the benchmark alone: name, what it is,
    ``module:function``. ``rate`` makes its runs comparable by price (``benchlib.judge.cost``): the beginning of the name of the metric that counts items per second,
    ``energy`` that of the joules per item;
    ``verified`` says what was verified, ``bounds`` how near the speeds come to what the machine can do,
    ``whole`` whether a run did the work that its config says, without which its values are not compared with a reference;
    ``batch`` are the fields of its config whose product with the ranks is the effective batch, ``ways`` those that
    change how the work is done and not what is done; ``choices`` are the names that a parameter takes, with what each is.
    """

    tables: Sequence[Table]
    metrics: Sequence[Metric]
    checks: Sequence[Check]
    says: Sequence[Callable[[Rows], Iterable[str]]] = ()
    shows: Sequence[Show] = ()
    charts: Sequence[Chart] = ()
    warnings: Callable[[Rows], Iterable[str]] = lambda run: []
    published: Sequence[Published] = ()
    refuse: Callable[[Any], None] = lambda config: None
    missed: Callable[[Rows], Mapping[str, list[str]]] = lambda run: {}
    recorded: Callable[[Sequence[Event]], Tables] = lambda events: {}
    exports: Sequence[tuple[str, str, str]] = ()
    verified: Callable[[Rows], Iterable[str]] = lambda run: []
    bounds: Sequence[Bound] = ()
    whole: Callable[[Rows], bool] = lambda run: True
    rate: str = ""
    energy: str = ""
    batch: Sequence[str] = ()
    ways: Sequence[str] = ()
    choices: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def metric(self, name: str) -> Metric | None:
        """Return what declares a metric: of several names with columns in braces the one with most letters of its own."""
        matching = [metric for metric in self.metrics if metric.pattern.fullmatch(name)]
        return max(matching, key=lambda metric: len(re.sub(r"{\w+}", "", metric.name)), default=None)

    def label(self, name: str) -> str:
        metric = self.metric(name)
        match = metric.pattern.fullmatch(name) if metric and metric.label else None
        return metric.label.format_map(match.groupdict()) if metric and match else name.replace("_", " ")

    def first(self, names: Iterable[str]) -> dict[str, str]:
        """Return the words for the key metrics among ``names``, in the order of the spec."""
        places = {name: self.metrics.index(one) for name in names if (one := self.metric(name)) and one.headline}
        return {name: self.label(name) for name in sorted(places, key=places.__getitem__)}

    def stated(self, run: Rows) -> list[Stated]:
        """Return the metrics of a run, each once."""
        return [metric.state(name, row, run) for metric in self.metrics for name, row in metric.rows(run)]

    @functools.cached_property
    def limited(self) -> dict[str, Metric]:
        """The metrics with a limit, by their names without columns in braces."""
        limited = [metric for metric in self.metrics if (metric.may_lose, metric.amount) != (None, None)]
        return {re.sub(r"{\w+}", "", metric.name).strip("_"): metric for metric in limited}

    def limits(self, run: Run) -> list[RegressionLimit]:
        """Return how much worse each metric may get than the baseline."""
        assert run.result is not None
        return [
            RegressionLimit(metric=stated.name, share=metric.may_lose, amount=metric.amount)
            for stated in run.result.metrics
            if (metric := self.metric(stated.name)) in self.limited.values() and metric
        ]

    def judge(self, run: Run, comparison: Comparison) -> list[Judged]:
        """Judge a run by its own checks, by what all runs are judged by, and against the baseline."""
        assert run.result is not None
        stored = replace(Rows.of(run), comparison=comparison)
        (rows, faults), claims = judged(self.tables, stored), Numbers.of_run(run)
        faults += [f"{metric.name} is {metric.fault} in the metrics" for metric in run.result.metrics if metric.fault]
        asked = [check for check in self.checks if check.when(run.config)]
        shown = [*VALUES, *(check.rule for check in asked if check.rule)]
        return [
            *(answer for check in asked for answer in judge(check, rows, claims)),
            finite_check(claims, faults),
            agreement_check(claims, shown, self._disagreements(stored)),
            budget_check(run),
            *reference_checks(run, lambda: self.quality(stored)),
            *regression_checks(run, self.limits(run), comparison),
        ]

    def quality(self, run: Rows) -> dict[str, Quality]:
        """Return the finite numbers that are the same on any hardware, by their heading and, of several rows, the row's title."""
        values = dict[str, Quality]()
        for table in self.tables if self.whole(run) else ():
            rows = table.ran().rows(run)
            for col, row in ((col, row) for col in table.cols if col.quality is not None for row in rows):
                if (value := table[col.name].finite(row, run)) is not None:
                    name = f"{table.name_of(row, run)} {col.heading}" if rows[1:] else col.heading
                    values[name] = Quality(value, col.stated_unit.removesuffix("count"), col.quality or 0.0)
        return values

    def computed(self, config: Any, result: Result) -> dict[str, Quality]:
        """Return what a run computed, whatever the hardware: its quality, and how many elements of its exchanges were wrong."""
        run, role = Rows.bare(config, result), "collective.wrong_elements"
        refs = [table.ran()[col.name] for table in self.tables for col in table.cols if col.role == role]
        wrong = [count for ref in refs for row in ref.table.rows(run) if (count := ref.finite(row, run)) is not None]
        return self.quality(run) | ({"wrong elements": Quality(sum(wrong), "", 0.0)} if wrong else {})

    def disagreements(self, run: Run) -> list[str]:
        """Return which metrics are not what the rows give, with their raw samples: altered or left out."""
        return self._disagreements(Rows.of(run))

    def _disagreements(self, run: Rows) -> list[str]:
        try:
            derived = {metric.name: metric for metric in self.stated(run)}
        except ValidationError as error:
            return [f"its rows state an impossible metric: {explained(error)}"]
        wrong = [f"the row of the metric {name} is missing" for name in run.metrics if name not in derived]
        for name, metric in derived.items():
            value, stated = metric.value, run.metrics.get(name)
            if stated is None:
                wrong.append(f"the metric {name} is missing")
            elif (stated.value is None) != (value is None) or not math.isclose(stated.value or 0.0, value or 0.0):
                wrong.append(f"{name} is {stated.text}, its row says {metric.text}")
        return wrong

    def undone(self, run: Run) -> dict[str, list[str]]:
        """Return what the user may have asked for and the run did not do, by parameter: targets, and what the spec adds."""
        if run.result is None:
            return {}
        names = [check.name for check in _undecided(run) if check.status == "SKIPPED"]
        asked = {check.asked: check.name.split(" at {")[0] for check in self.checks if check.asked}
        lost = [field for field, start in asked.items() if any(name.startswith(start) for name in names)]
        return {field: [f"= {getattr(run.config, field):g}"] for field in lost} | dict(self.missed(Rows.of(run)))

    def reading(self, run: Run) -> list[str]:
        """Return the reasons of the checks that did not pass, then what the spec says, and the published figures."""
        rows, lines = Rows.of(run), [f"{check.name}: {check.reason}." for check in _undecided(run)]
        lines += [sentence for say in self.says for sentence in say(rows)]
        return [*lines, text] if (text := summary(run)) else lines

    def claims(self, numbers: Numbers) -> Iterator[Claim]:
        """Yield what the columns with roles state, one claim a row."""
        world = numbers.config.world_size if numbers.config else max(1, numbers.result.world_size)
        tables = with_samples({**numbers.result.tables, "run": [numbers.result.facts]}, numbers.samples)
        run = Rows(numbers.config, world, tables)
        for table in self.tables:
            refs = [table[col.name] for col in table.cols if col.role]
            for row in table.rows(run):
                cells = {
                    ref.col.role: in_its_unit(
                        ref.col.role, ref.col.unit, ref.raw(row, run), ref.numbers(row, run), ref.col.average
                    )
                    for ref in refs
                }
                if stated := {role: value for role, value in cells.items() if value is not None}:
                    more = table.claim(row, run) if table.claim else {}
                    yield Claim.of_roles(table.name_of(row, run), table.name, {**stated, **more})

    def page(self, run: Run) -> tuple[list[str], dict[str, Quality], list[dict[str, Any]]]:
        """Return what was verified, the values that are the same on any hardware, and how near each speed came to its bound."""
        rows = undamaged(run)
        reached = [item for bound in self.bounds if (item := bound.reached(rows))]
        return list(self.verified(rows)), self.quality(rows), reached

    def report(self, run: Run) -> dict[str, list[dict[str, str]]]:
        """Return the tables of the report, by heading; those without rows are left out."""
        return {heading: lines for heading, rows in self.frames(run).items() if (lines := rows())}

    def frames(self, run: Run) -> dict[str, Callable[[], list[dict[str, str]]]]:
        """Return the tables of the notebook by heading, each as a function that makes its rows."""
        rows = undamaged(run)
        return {show.heading: functools.partial(show.rows, rows) for show in self.shows}

    def results(self, run: Run) -> list[dict[str, Any]]:
        """Return the rows of the first table of the report as numbers and texts by column; None is missing."""
        shown, rows = self.shows[0], undamaged(run)
        refs = [shown.table[name] for name in shown.columns.split() or [col.name for col in shown.table.cols]]
        return [{ref.col.name: ref.value(row, rows) for ref in refs} for row in shown.table.rows(rows)]

    def figures(self) -> dict[str, Callable[..., Any]]:
        """Return the pictures by name, ``draw(run) -> Picture``."""
        return {chart.name: lambda run, chart=chart: chart.draw(self._drawn(run)) for chart in self.charts}  # type: ignore[misc]

    def drawn_from(self) -> dict[str, Callable[[Run], "pandas.DataFrame"]]:
        """Return by the name of each picture what gives the frame it is drawn from."""
        return {chart.name: lambda run, chart=chart: chart.frame(self._drawn(run)) for chart in self.charts}  # type: ignore[misc]

    def _drawn(self, run: Run) -> Rows:
        """Return the rows of a run for pictures: of one that left no result what its events recorded."""
        rows = undamaged(run)
        return rows if rows.tables else replace(rows, tables=self.recorded(run.events))

    def warned(self, config: Any, result: Result | None) -> list[str]:
        """Return what limits the meaning of a result; nothing where the run left none."""
        return list(self.warnings(Rows.bare(config, result))) if result else []

    def placed(self, run: Run) -> list[Measured]:
        """Return the values that stand beside published figures."""
        rows, device = Rows.of(run), device_name(run.machine, run.config.backend, run.config.nproc)
        return [
            Measured(
                item.quantity, item.of.table.text(item.label, row, rows), value, device, item.conditions(row, rows)
            )
            for item in self.published
            for row in item.of.table.rows(rows)
            if (value := item.of.finite(row, rows)) is not None
        ]

    def save(self, config: Any, run_dir: Path, began: Moment, tables: Mapping[str, Sequence[Row]]) -> None:
        """Write the result of a run from its rows: the metrics follow, raw samples go to ``samples.parquet``."""
        thin, samples = split_samples(self.tables, tables)
        facts = dict(thin["run"][0])
        result = Result.of(
            config,
            status="complete",
            started_at=began.wall,
            ended_at=began.wall + began.since(),
            metrics=self.stated(Rows(config, config.world_size, tables)),
            facts=facts,
            tables={name: rows for name, rows in thin.items() if name != "run"},
            notes=[f"Groups of the exchange: {facts['layout']}."] if facts.get("layout") else [],
        )
        save_result(run_dir, result, samples)


def _undecided(run: Run) -> list[Judged]:
    """Return the checks of a judged run that did not pass, those against the baseline left out."""
    checks, words = run.verdict.checks if run.verdict else [], ("FAIL", "AMBIGUOUS", "INCOMPLETE")
    return [check for check in checks if check.kind != "regression" and check.word in words]


def undamaged(run: Run) -> Rows:
    """Return the rows of a run; none where its files are damaged, which the report says elsewhere."""
    try:
        return Rows.of(run) if run.result else Rows(run.config, 1, {})
    except UserError:
        return Rows(None, 1, {})
