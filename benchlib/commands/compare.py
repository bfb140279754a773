"""``benchlib compare``: read the sides, compare each with the first or all by price, show it in the terminal, as JSON or as a page."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich.text import Text

from benchlib.commands.output import say, show_table
from benchlib.core.terminal import stacked
from benchlib.judge.compare import Contrast, Line, Row, compare, line
from benchlib.judge.cost import Worth, parse, parse_deadline, worths
from benchlib.results.verdict import EXIT_FAIL, EXIT_NOTHING_TO_COMPARE, EXIT_PASS
from benchlib.show.exports import put

LOOKS = {  # of a word: its mark and tone in a page, its colour in a terminal
    "regression": ("✗", "bad", "bold red"),
    "worse": ("▼", "warn", "red"),
    "better": ("▲", "good", "green"),
    "undecided": ("≈", "warn", "yellow"),
    "differs": ("≠", "warn", "yellow"),
    "no difference found": ("=", "calm", "dim"),
    "higher": ("↑", "calm", "dim"),
    "lower": ("↓", "calm", "dim"),
}
STAR = (
    "* from one run per side: the spread between unchanged runs is assumed and not measured, so the difference may be "
    "the run's and not the machine's. Compare several runs per side, or measure the spread with `benchlib calibrate`."
)
BEST = {"✓": "bold green", "≈": "yellow", "": "none"}  # by price
TONES = {"bad": "bold red", "warn": "bold yellow", "good": "bold green", "calm": "bold"}


def star_note(rows: Sequence[Row]) -> str:
    return STAR if any(row.starred for row in rows) else ""


def summaries(contrasts: Sequence[Contrast]) -> dict[str, list[Line]]:
    """Return a line a benchmark for each side that is compared in several or differs in speed."""
    sides: dict[str, list[Line]] = {}
    for item in contrasts:
        sides.setdefault(item.other.label, []).append(line(item))
    return {label: lines for label, lines in sides.items() if lines[1:] or lines[0].word in ("faster", "slower")}


def show(contrasts: Sequence[Contrast], notes: Sequence[str], all_metrics: bool) -> None:
    """Print the comparison: metrics with a limit, key numbers and regressions; all where there are none, or with ``all_metrics``."""
    for label, lines in summaries(contrasts).items():
        say((f"All benchmarks of {label}", "bold"))
        show_table(
            {
                "benchmark": row.benchmark,
                "speed": stacked(row.word, row.speed),
                "times as fast": stacked(row.ratio, row.interval),
                "computes": row.computes,
            }
            for row in lines
        )
        say()
    for item in contrasts:
        say(f"{item.benchmark}, {item.tier}", style="bold")
        for what, side in (("reference", item.reference), ("compared ", item.other)):
            facts = f"{', '.join(dict.fromkeys(side.verdicts))}  {' and '.join(side.machines)}"
            say(f"  {what}  {side}  ", (facts, "dim"))
        rows = [row for row in item.rows if all_metrics or row.headline or row.word == "regression"] or item.rows
        say()
        _show_metrics(rows)
        if hidden := len(item.rows) - len(rows):
            say(f"{hidden} more metric{'s' * (hidden != 1)} with --all-metrics", style="dim")
        for title, decides in (("Not comparable because of", True), ("Also different", False)):
            factors = [factor for factor in item.factors if factor.decides == decides]
            if factors:
                say("\n", (title, "bold"))
                show_table({"factor": f.name, "reference": f.reference, "compared": f.other} for f in factors)
        say("\n", (item.sentence, TONES[item.tone]))
        if note := star_note(rows):
            say(note, style="dim")
        say()
    for note in notes:
        say(note, style="yellow")


def _show_metrics(rows: Sequence[Row]) -> None:
    table = [
        {
            "metric": stacked(row.metric, f"{row.reference} → {row.other}"),
            "ratio, 98% interval": stacked(*row.written[:2]),
            "limit, A/A band": stacked(row.limit, row.written[2]),
            "result": Text(row.word + "*" * row.starred, LOOKS.get(row.word, ("", "", "dim"))[2]),
        }
        for row in rows
    ]
    show_table(table, whole=("ratio, 98% interval", "limit, A/A band", "result"))


def html(contrasts: Sequence[Contrast], notes: Sequence[str]) -> str:
    from benchlib.show import markup

    tops = summaries(contrasts)
    return markup.page("compare.html.j2", tops=tops, contrasts=contrasts, notes=notes, star_note=star_note, looks=LOOKS)


def show_worth(items: Sequence[Worth], notes: Sequence[str]) -> None:
    """Print the comparison by price: the answers, then the table."""
    from benchlib.show import cost  # with matplotlib

    for item in items:
        say(f"{item['benchmark']}, {item['tier']}", style="bold")
        for answer in item["answers"]:
            colour = {None: "dim", True: "green", False: "yellow"}[answer["certain"]]
            say("\n", (answer["question"], f"bold {colour}"), f" {answer['sentence']}", fold=True)
        labels = [machine["label"] for machine in item["machines"]]
        rows = [{"": name} | dict(zip(labels, map(_worth_cell, cells), strict=True)) for name, cells in cost.rows(item)]
        say()
        show_table(rows, right=labels)
        for name, values in item["differences"].items():
            say(f"The work differs in {name}: {' / '.join(values)}", style="yellow", fold=True)
        for words in item["notes"]:
            say(words, style="dim", fold=True)
        say()
    for words in notes:
        say(words, style="yellow")


def _worth_cell(cell: Any) -> Text:
    return stacked(Text(" ".join(filter(None, cell[:2])), BEST[cell.mark]), cell.below)


@click.command()
@click.argument("sides", nargs=-1, metavar="REFERENCE OTHER...")
@click.option("--all-metrics", is_flag=True, help="Show all metrics, not only key numbers and those with a limit.")
@click.option("--json", "as_json", is_flag=True, help="Print the whole comparison as JSON.")
@click.option("--html", "path", type=click.Path(dir_okay=False, path_type=Path), help="Write a page to share.")
@click.option("--strict", is_flag=True, help="Exit with 3 if sides are not comparable.")
@click.option(
    "--cost",
    "prices",
    default="",
    metavar="3.00,spot",
    help="Compare by price: USD per device hour of each side, in their order; on-demand or spot takes params/prices.yaml.",
)
@click.option("--deadline", default="", metavar="8h", help="Which machine is the cheapest within this time?")
def verb(sides: tuple[str, ...], prices: str, deadline: str, path: Path | None, **options: Any) -> None:
    """Compare runs with the first one. Each side is a run folder, a folder of runs, a report.html, a bench_*.json or a baseline.

    All complete runs of a folder are one side. Exit code 1: a metric got worse than its benchmark allows. With --cost or
    --deadline machines are compared by time, price and energy instead.
    """
    items: Any  # of one kind or the other, as are the functions that take them
    by_price, as_json, code = bool(prices or deadline), options["as_json"], EXIT_PASS
    if by_price:
        items, notes = worths(sides, parse(prices or "on-demand"), parse_deadline(deadline) if deadline else None)
    else:
        items, notes = compare(sides)
        if any(item.regressions for item in items):
            code = EXIT_FAIL
        elif options["strict"] and not all(item.comparable for item in items):
            code = EXIT_NOTHING_TO_COMPARE
    if path:
        from benchlib.show import cost

        text = cost.page(items, notes) if by_price else html(items, notes)
        written = put(text, str(path), "page")
    if as_json:
        content = {"worth": items} if by_price else {"contrasts": [item.plain() for item in items]}
        text = json.dumps(
            {"schema_version": 1, **content, "notes": notes}, indent=2, ensure_ascii=False, allow_nan=False
        )
        click.echo(text)
    elif by_price:
        show_worth(items, notes)
    else:
        show(items, notes, options["all_metrics"])
    if path:
        click.echo(written, err=as_json)
    sys.exit(code)
