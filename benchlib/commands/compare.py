"""``benchlib compare``: read the sides, compare each with the first or all by price, show it in the terminal, as JSON or as a page."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from pydantic import BaseModel
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from benchlib.commands import user_errors
from benchlib.core import text
from benchlib.core.errors import UserError
from benchlib.core.files import output_path
from benchlib.core.terminal import console as terminal_console
from benchlib.core.terminal import stacked, table
from benchlib.core.text import quantity
from benchlib.judge.compare import Argument, Contrast, Row, contrast, read_argument
from benchlib.judge.cost import Worth, parse_deadline, worths
from benchlib.judge.prices import parse
from benchlib.results.verdict import EXIT_FAIL, EXIT_NOTHING_TO_COMPARE, EXIT_PASS
from benchlib.show import cost, markup

COLOURS = {"regression": "bold red", "worse": "red", "better": "green", "undecided": "yellow", "differs": "yellow"}
TONES = {"regression": "bad", "worse": "warn", "better": "good", "undecided": "warn", "differs": "warn"}
MARKS = {
    "regression": "✗",
    "worse": "▼",
    "better": "▲",
    "undecided": "≈",
    "differs": "≠",
    "no difference found": "=",
    "higher": "↑",
    "lower": "↓",
}
STAR = (
    "* from one run per side: the spread between unchanged runs is assumed and not measured, so the difference may be "
    "the run's and not the machine's. Compare several runs per side, or measure the spread with `benchlib calibrate`."
)
LOOKS = {"✓": "bold green", "≈": "yellow", "": "none"}  # of the best by price
_TERMINAL = {"bad": "bold red", "warn": "bold yellow", "good": "bold green", "calm": "bold"}
_WIDE = 130  # columns that the whole table takes
_FIRST, _EACH = 26, 26  # columns of a table by price: names, each machine
_WIDTH = 150  # where the output is no terminal, which would fold at 80


def compare(arguments: Sequence[str]) -> tuple[list[Contrast], list[str]]:
    """Compare each argument with the first, benchmark by benchmark; return the contrasts and notes on what was excluded.

    Raises ``UserError`` for fewer than two arguments, for one that cannot be read, and for two without a benchmark in
    common: different benchmarks measure different things.
    """
    if len(arguments) < 2:
        raise UserError("compare needs two or more of: a run folder, a folder of runs, a report.html, a baseline")
    reference, *others = [read_argument(argument) for argument in arguments]
    contrasts = []
    notes = [f"{argument.text}, excluded: {line}" for argument in (reference, *others) for line in argument.excluded]
    for other in others:
        common = [name for name in reference.sets if name in other.sets]
        if not common:
            raise UserError(
                f"{reference.text} has runs of {_benchmarks(reference)}, {other.text} of {_benchmarks(other)}: different "
                "benchmarks measure different things; compare runs of one"
            )
        contrasts += [contrast(reference.sets[name], other.sets[name]) for name in common]
        for name in sorted(reference.sets.keys() ^ other.sets.keys()):
            notes.append(f"{name}: only {(reference if name in reference.sets else other).text} has runs of it")
    return contrasts, list(dict.fromkeys(notes))


def _benchmarks(argument: Argument) -> str:
    return " and ".join(sorted(argument.sets))


def exit_code(contrasts: Sequence[Contrast], strict: bool) -> int:
    """Return 1 where comparable sides show a regression, with ``strict`` 3 where sides are not comparable, else 0."""
    if any(item.regressions for item in contrasts):
        return EXIT_FAIL
    return EXIT_NOTHING_TO_COMPARE if strict and not all(item.comparable for item in contrasts) else EXIT_PASS


def to_json(name: str, items: Sequence[BaseModel], notes: Sequence[str]) -> str:
    """Return the whole comparison as JSON."""
    rows = [item.model_dump(mode="json") for item in items]
    content = {"schema_version": 1, name: rows, "notes": list(notes)}
    return json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False)


def shown(contrast: Contrast, all_metrics: bool) -> list[Row]:
    """Return the rows that are shown: metrics with a limit, key numbers and regressions; all where there are none."""
    chosen = [row for row in contrast.rows if all_metrics or row.headline or row.word == "regression"]
    return chosen or contrast.rows


def change_text(row: Row) -> str:
    """Write a change: ``0.952`` for a ratio, ``-1.2 s`` for a difference."""
    if row.change is None:
        return ""
    return f"{row.change:.3f}" if row.kind == "ratio" else _signed(row.change, row.unit)


def interval_text(row: Row) -> str:
    """Write the 98% interval; '' where too few samples give none."""
    if row.low is None or row.high is None or row.basis == "none":
        return ""
    if row.kind == "ratio":
        return f"{row.low:.3f} to {row.high:.3f}"
    return f"{_signed(row.low, '')} to {_signed(row.high, '')}"


def band_text(row: Row) -> str:
    """Write the A/A band, within which 95% of the changes between unchanged runs lie."""
    if row.change is None:
        return ""
    if row.band is None:
        return "unknown"
    return text.band_text(row.band, row.kind)


def word_text(row: Row) -> str:
    """Write the word for a metric; a star where the spread between runs is not known."""
    return row.word + ("*" if _starred(row) else "")


def _starred(row: Row) -> bool:
    return row.basis in ("samples", "default") and row.word in ("worse", "better", "differs", "higher", "lower")


def star_note(rows: Sequence[Row]) -> str:
    """Return what the star in a table of these rows means; '' where none has one."""
    return STAR if any(_starred(row) for row in rows) else ""


def _signed(amount: float, unit: str) -> str:
    return f"{'+' if amount >= 0 else '-'}{quantity(abs(amount), unit)}"


def side_text(contrast: Contrast) -> tuple[str, str]:
    """Name both sides, with the run's name where a side has one, else with how many it has."""
    names = []
    for side in (contrast.reference, contrast.other):
        runs = side.runs[0] if len(side.runs) == 1 else f"{len(side.runs)} runs"
        names.append(side.label if runs in side.label else f"{side.label} ({runs})")
    return names[0], names[1]


def show(contrasts: Sequence[Contrast], notes: Sequence[str], all_metrics: bool) -> None:
    """Print the comparison."""
    console = terminal_console()
    if not console.is_terminal:
        console.width = _WIDTH
    for item in contrasts:
        reference, other = side_text(item)
        console.print(f"[bold]{escape(item.heading)}[/]", soft_wrap=True)
        verdicts = [", ".join(dict.fromkeys(side.verdicts)) for side in (item.reference, item.other)]
        for side, name, verdict, machines in (
            ("reference", reference, verdicts[0], item.reference.machines),
            ("compared ", other, verdicts[1], item.other.machines),
        ):
            place = " and ".join(machines)
            console.print(f"  {side}  {escape(name)}  [dim]{escape(verdict)}  {escape(place)}[/]", soft_wrap=True)
        console.print()
        console.print(_metric_table(item, all_metrics, console.width))
        hidden = len(item.rows) - len(shown(item, all_metrics))
        if hidden:
            console.print(f"[dim]{hidden} more metric{'s' * (hidden != 1)} with --all-metrics[/]")
        for title, decides in (("Not comparable because of", True), ("Also different", False)):
            factors = [factor for factor in item.factors if factor.decides == decides]
            if factors:
                console.print(f"\n[bold]{title}[/]")
                console.print(
                    table({"factor": one.name, "reference": one.reference, "compared": one.other} for one in factors)
                )
        console.print(f"\n[{_TERMINAL[item.tone]}]{escape(item.sentence)}[/]", soft_wrap=True)
        for note in filter(None, (*item.notes, star_note(shown(item, all_metrics)))):
            console.print(f"[dim]{escape(note)}[/]", soft_wrap=True)
        console.print()
    for note in notes:
        console.print(f"[yellow]{escape(note)}[/]", soft_wrap=True)


def _metric_table(item: Contrast, all_metrics: bool, width: int) -> Table:
    """Return the table of metrics; a narrow terminal gets the same numbers on two lines a row."""
    rows = []
    for row in shown(item, all_metrics):
        change, interval, band = change_text(row), interval_text(row), band_text(row)
        cells: dict[str, str | Text]
        if width < _WIDE:
            cells = {
                "metric": stacked(row.metric, f"{row.reference} → {row.other}"),
                "ratio": stacked(change, interval),
                "limit": stacked(row.limit, band),
            }
        else:
            cells = {"metric": row.metric, "reference": row.reference, "compared": row.other, "ratio": change}
            cells |= {"98% interval": interval, "A/A band": band, "limit": row.limit}
        rows.append(cells | {"result": Text(word_text(row), COLOURS.get(row.word, "dim"))})
    numbers = ("reference", "compared", "ratio", "98% interval")
    return table(rows, right=numbers, whole=(*numbers, "A/A band", "limit", "result"))


def html(contrasts: Sequence[Contrast], notes: Sequence[str]) -> str:
    """Return the comparison as one page that needs nothing else, with the policy and the style of the reports."""
    words = {"change": change_text, "interval": interval_text, "band": band_text, "word": word_text}
    sides = [(item, *side_text(item)) for item in contrasts]
    looks = {"star_note": star_note, "tones": TONES, "marks": MARKS}
    return markup.page("compare.html.j2", contrasts=sides, notes=notes, **looks, **words)


def write_html(page: str, path: Path) -> None:
    """Write a page; a folder that is not there or a place that cannot be written is a ``UserError``."""
    if not path.parent.is_dir():
        raise UserError(f"--html {path}: there is no folder {path.parent}; make it first, or name one that exists")
    try:
        with output_path(path) as temporary:
            temporary.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from None


def show_worth(items: Sequence[Worth], notes: Sequence[str]) -> None:
    """Print the comparison by price: the answers, then the table, as many machines side by side as the terminal takes."""
    console = terminal_console()
    if not console.is_terminal:
        console.width = _WIDTH
    for item in items:
        console.print(f"[bold]{escape(item.benchmark)}, {escape(item.tier)}[/]")
        for answer in item.answers:
            colour = "dim" if answer.certain is None else "green" if answer.certain else "yellow"
            console.print(f"\n[bold {colour}]{escape(answer.question)}[/] {escape(answer.sentence)}")
        beside = max(1, (console.width - _FIRST) // _EACH)
        for start in range(0, len(item.machines), beside):
            console.print()
            console.print(_worth_table(item, range(start, min(start + beside, len(item.machines)))))
        for difference in item.differences:
            values = " / ".join(difference.values)
            console.print(f"[yellow]The work differs in {escape(difference.name)}: {escape(values)}[/]")
        for words in item.notes:
            console.print(f"[dim]{escape(words)}[/]")
        console.print()
    for words in notes:
        console.print(f"[yellow]{escape(words)}[/]", soft_wrap=True)


def _worth_table(item: Worth, shown: range) -> Table:
    rows = []
    for name, cells in cost.rows(item):
        row: dict[str, str | Text] = {"": name}
        for index in shown:
            cell = cells[index]
            value = Text(" ".join(filter(None, cell[:2])), LOOKS[cell.mark])
            row[item.machines[index].label] = stacked(value, cell.below)
        rows.append(row)
    return table(rows, right=[item.machines[index].label for index in shown])


@click.command()
@click.argument("sides", nargs=-1, metavar="REFERENCE OTHER...")
@click.option("--all-metrics", is_flag=True, help="Show all metrics, not only key numbers and those with a limit.")
@click.option("--json", "as_json", is_flag=True, help="Print the whole comparison as JSON.")
@click.option(
    "--html", "page", type=click.Path(dir_okay=False, path_type=Path), help="Write a page that can be shared."
)
@click.option("--strict", is_flag=True, help="Exit with 3 if sides are not comparable.")
@click.option(
    "--cost",
    "prices",
    multiple=True,
    metavar="NAME=3.00",
    help="Compare by price: USD per device hour by run, host or machine, or without names in the order of the sides; "
    "on-demand or spot takes params/prices.yaml. May be repeated.",
)
@click.option(
    "--deadline", default="", metavar="8h", help="With --cost: which machine is the cheapest within this time?"
)
@user_errors
def verb(
    sides: tuple[str, ...],
    all_metrics: bool,
    as_json: bool,
    page: Path | None,
    strict: bool,
    prices: tuple[str, ...],
    deadline: str,
) -> None:
    """Compare runs with the first one. Each side is a run folder, a folder of runs, a report.html or a baseline.

    All complete runs of a folder are one side. Exit code 1: a metric got worse than its benchmark allows. With --cost or
    --deadline machines are compared by time, price and energy instead.
    """
    items: Any  # of one kind or the other, as are the functions that take them
    by_price = bool(prices or deadline)
    if by_price:
        items, notes = worths(sides, parse(prices), parse_deadline(deadline) if deadline else None)
    else:
        items, notes = compare(sides)
    if page:
        write_html((cost.page if by_price else html)(items, notes), page)
    if as_json:
        click.echo(to_json("worth" if by_price else "contrasts", items, notes))
    elif by_price:
        show_worth(items, notes)
    else:
        show(items, notes, all_metrics)
    if page:
        click.echo(f"page: {page}", err=as_json)
    sys.exit(EXIT_PASS if by_price else exit_code(items, strict))
