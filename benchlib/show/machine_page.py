"""One page for a machine: is this stack right, fast and worth its price? From the runs of one tier.

The page is the notebook ``95_machine_page``, executed over these runs; here is what it shows. What differs comes first, and
each row links to the report of its run.
"""

import html
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from benchlib.benchmarks import BENCHMARKS, loadable, spec_of
from benchlib.config.schema import read_params, tier_names
from benchlib.core.definitions import share_text
from benchlib.core.errors import UserError
from benchlib.core.files import home
from benchlib.core.text import badness, capitalized, counted, duration, look, quantity
from benchlib.judge.baselines import injected
from benchlib.judge.checks import Ask, Check, Status, verdict_of
from benchlib.judge.compare import RunSet
from benchlib.judge.cost import HOUR_S, Machine, listed_price
from benchlib.judge.reference_values import Compared, compared
from benchlib.judge.regression import NOTICED
from benchlib.judge.trends import choose_store
from benchlib.results.record import Record, load, load_all, store_folders
from benchlib.results.run import Run
from benchlib.show.notebook import Cell, Shown
from benchlib.show.widgets import headless

NAME, NOTEBOOK = "report.html", "machine.ipynb"  # of the page, in the folder of the runs
DEMO = "notebooks/demo-machine"  # of the kit: the runs of one quick tier
DEMO_USD = 0.1  # per hour of the machine of the demo runs, assumed: nobody offers it
GIVEN = "given"  # where a price is from that was named
VALUES = 3  # of a reference that a row shows
MILLION = 1e6
STATUS: dict[str, Status] = {"PASS": "PASS", "AMBIGUOUS": "AMBIGUOUS", "SKIPPED": "SKIPPED"}  # others are a FAIL
Row = dict[str, Any]


@dataclass(frozen=True)
class Page:
    """What the page of a machine states; each list is a table, ``Row`` by ``Row``."""

    folder: Path
    runs: list[Record]
    word: str
    sentence: str
    hardware: str
    right: list[Row]
    fast: list[Row]
    peaks: str
    worth: list[Row]
    price: tuple[float, str] | None
    undone: list[Row]
    demo: bool = False


def newest(folder: Path) -> list[Path]:
    """Return the newest run of each benchmark in the folder of a tier's day, in the order of the benchmarks.

    One that was changed on purpose, or that was skipped, counts where there is no other.
    """
    paths = [path for path in folder.iterdir() if path.is_dir() and (path / "config.json").exists()]
    stored = [run for run in load_all(folder, paths) if not run.copy_of]
    stored.sort(key=lambda run: run.word != "SKIPPED" and not (run.fingerprint and injected(Run(run.folder))))
    runs = {run.benchmark: Path(run.folder) for run in stored}
    return [runs[name] for name in BENCHMARKS if name in runs]


def read(folder: str, usd_per_hour: float, runs: Sequence[str] = ()) -> Page:
    """Read the page of a tier's day: '' takes the newest of the outputs, and the demo runs of the kit if there are none.

    ``runs`` are the run folders to show, by default the newest of each benchmark. Raises ``UserError`` for a folder without a run.
    """
    store, demo = choose_store()
    if demo and not folder:
        return replace(_demo(), demo=True)
    days = sorted({path.parent for path in store_folders(store)}, key=lambda day: (day.name[-8:], day.stat().st_mtime))
    chosen = Path(folder).expanduser() if folder else days[-1]
    folders = list(map(Path, runs)) or (newest(chosen) if chosen.is_dir() else [])
    if not folders:
        raise UserError(f"folder = {folder!r}: holds no run; name the day of a tier, such as outputs/quick-20261126")
    return replace(content(folders, usd_per_hour or None), folder=chosen)


def _demo() -> Page:
    """Read the demo runs of the kit, at an assumed price."""
    (day,) = (home() / DEMO).glob("quick-*")
    page = content(newest(day), DEMO_USD)
    return replace(page, price=(DEMO_USD, "assumed: nobody offers this machine"))


def content(folders: Sequence[Path], usd_per_hour: float | None = None) -> Page:
    """Read runs of one tier. ``usd_per_hour`` is the price of a device (of a CPU the machine), else that of the price sheet counts."""
    runs = [load(folder) for folder in folders]
    whole = [run for run in runs if run.complete and not run.problems]
    right, fast = list[Row](), list[Row]()
    for run in runs:
        verified, values, about = list[str](), list[Compared](), {"run": run}
        if run in whole:
            verified, qualities, reached = spec_of(run.benchmark).page(stored := Run(run.folder))
            values = sorted(compared(stored, qualities), key=lambda value: value.agrees)  # what differs first
            fast += [item | {"work": capitalized(item["work"])} | about for item in reached]
        right.append(about | {"verified": "; ".join(verified), "values": values})
    right.sort(key=lambda row: (badness(row["run"].word), all(value.agrees for value in row["values"])))
    fast.sort(key=lambda row: row["share"] is None)
    devices = (name for run in whole for name in run.device_names)
    price = (usd_per_hour, GIVEN) if usd_per_hour else listed_price(devices)
    of_machine = [number for run in whole if run.benchmark == "machine" for number in run.key_numbers]
    bounds = [f"{label} {metric.text}" for label, metric in of_machine if metric.name != "total_s"]
    return Page(
        folder=folders[0].parent if folders else Path(),
        runs=runs,
        word=min((run.word for run in runs if run.word != "SKIPPED"), key=badness, default="SKIPPED"),
        sentence=_sentence(right, fast),
        hardware=runs[0].hardware if runs else "",
        right=right,
        fast=fast,
        peaks="; ".join(bounds),
        worth=list(_worth(whole, price[0])) if price else [],
        price=price,
        undone=list(_undone(runs)),
    )


def _worth(runs: Sequence[Record], usd_per_hour: float) -> Iterator[Row]:
    """Yield what a million items of work cost at the rate that was measured."""
    for run in runs:
        machine = Machine(run.run, RunSet(run.run, (run,)), usd_per_hour)
        if machine.rate:
            metric = machine.rate.metric
            usd = usd_per_hour * machine.devices / HOUR_S * MILLION / (metric.value or math.nan)
            work = f"1 million {metric.unit.removesuffix('/s')}, {run.benchmark}"
            yield {"work": work, "rate": metric.text, "usd": quantity(usd, "USD"), "run": run}


def _undone(runs: Sequence[Record]) -> Iterator[Row]:
    """Yield what was not done, why, and the command that does it."""
    for run in runs:
        command = f"benchlib run {run.benchmark} --tier {run.tier}"
        if run.word == "SKIPPED":
            yield {"what": run.benchmark, "why": run.sentence, "command": "benchlib doctor"}
        for check in run.verdict.checks if run.verdict else []:
            if check.word == "INCOMPLETE":
                yield {"what": f"{run.benchmark}, {check.name}", "why": check.reason, "command": command}
    tier, ran = next((run.tier for run in runs), "quick"), {run.benchmark for run in runs}
    for benchmark in loadable():
        if benchmark.name not in ran:
            part = tier in tier_names() and benchmark.name in read_params("tiers", tier)
            larger = "nightly" if tier in ("smoke", "quick") and not part else tier
            command = f"benchlib run {benchmark.name} --tier {larger}"
            why = "no run among these" if part else f"not part of {tier}"
            yield {"what": benchmark.question, "why": why, "command": command}
    uncompared = [run for run in runs if run.verdict and any(c.status == "NO_BASELINE" for c in run.verdict.checks)]
    if uncompared:
        what = f"Speed against earlier runs, {counted(len(uncompared), 'benchmark')}"
        why, place = "no earlier run of this machine was accepted; of each benchmark", Path(uncompared[0].folder).parent
        near = place.resolve().is_relative_to(home())  # a page is made by a kernel in another folder than the reader's
        folder = place.resolve().relative_to(home()) if near else place.resolve()
        command = f'benchlib baseline accept {folder}/BENCHMARK-* --reason "first"'
        yield {"what": what, "why": why, "command": command}


def _sentence(right: Sequence[Row], fast: Sequence[Row]) -> str:
    """Say in a sentence or two what a reader needs who stops here."""
    wrong = [row["run"] for row in right if row["run"].word not in ("PASS", "SKIPPED")]
    agree = [all(value.agrees for value in row["values"]) for row in right if row["values"]]
    words = [f"{run.benchmark}: {run.sentence.rstrip('.')}" for run in wrong[:2]]
    words += [f"{len(wrong) - 2} more did not pass"] * (len(wrong) > 2)
    words += [f"{counted(sum(row['run'].word == 'PASS' for row in right), 'benchmark')} passed"] * (not wrong)
    words += [f"{sum(agree)} of {len(agree)} compute what the references say"] * bool(agree)
    if shares := [row for row in fast if row["share"] is not None]:
        least = min(shares, key=lambda row: row["share"])
        words.append(f"Farthest from its bound: {least['work']}, {share_text(least['share'])} {least['of']}")
    if (others := max((row["run"].others for row in right), default=0.0)) >= NOTICED:
        words.append(f"Others took up to {others:.0%} of the processors meanwhile: speeds are what the rest gave")
    return f"{'. '.join(words)}." if words else "There is no run to show."


def shown(page: Page) -> Shown:
    """Return what the notebook shows; the page is made of it."""
    tables = {
        "right": [_right(page, row) for row in page.right],
        "fast": [_fast(page, row) for row in page.fast],
        "worth": [_worth_row(page, row) for row in page.worth],
        "not done": [
            row | {"command": Cell(row["command"], _html("<code>{}</code>", row["command"]))} for row in page.undone
        ],
    }
    if page.price:
        price = f"Prices hold at {page.price[0]:.4g} USD per hour and device, {page.price[1]}."
    else:
        price = "No price is known for this machine: `benchlib page FOLDER --price 0.10` gives one, in USD per hour."
    place = "the demo runs of the kit" if page.demo else str(page.folder)
    return Shown(
        asked={
            "folder": place,
            "USD per device hour": f"{page.price[0]:g}" if page.price and page.price[1] == GIVEN else "none",
        },
        tables=tables,
        figures={},
        reading=[price, *[f"This machine: {page.peaks}."] * bool(page.peaks)],
        provenance=[
            {name: getattr(run, name) for name in ("run", "benchmark", "hardware")}
            | {"benchlib": run.setup.get("benchlib", "")}
            for run in page.runs
        ],
        judge=lambda: verdict_of([_answer(run) for run in page.runs], remedy=""),
        about=_about(page),
        word=page.word,
        sentence=page.sentence,
    )


def _about(page: Page) -> list[str]:
    """Return what the page is on: machine, tier, backend, versions, day, and how long it took."""
    if not page.runs:
        return []
    first, versions = page.runs[0], page.runs[0].machine.get("versions", {})
    ends = [run.ended_at for run in page.runs if run.ended_at]
    took = f" in {duration(max(ends) - min(run.started_at for run in page.runs))}" if ends else ""
    return [
        page.hardware,
        f"{first.tier} tier",
        f"{first.backend}, {counted(max(run.ranks for run in page.runs), 'rank')}",
        f"torch {versions.get('torch', '?')}, transformers {versions.get('transformers', '?')}",
        f"{first.moment:%Y-%m-%d %H:%M}",
        f"{counted(len(page.runs), 'benchmark')}{took}",
    ]


def _html(form: str, *values: object) -> str:
    """Return HTML from a form with ``{}`` for each of the ``values``, which are escaped."""
    return form.format(*(html.escape(str(value), quote=True) for value in values))


def _linked(page: Page, row: Row, words: str, below: str = "") -> Cell:
    """Return words that link to the report of the row's run, from the folder of the page or from the open notebook."""
    name, report = _html("{}", words), row["run"].report
    if report:
        address = os.path.relpath(report, page.folder if headless() else Path.cwd())
        name = _html('<a href="{}">{}</a>', quote(os.fsencode(address)), words)
    return Cell(f"{words}, {below}" if below else words, name + _html("<br><small>{}</small>", below) * bool(below))


def _right(page: Page, row: Row) -> Row:
    run, values = row["run"], row["values"]
    verified, lines = [row["verified"]] if row["verified"] else [], list[Cell]()
    if run.word != "PASS":
        verified.append(run.sentence)
    for value in values[:VALUES]:
        here = f"{value.name} {value.here.text}"
        form = "{} <small>{}</small>" if value.agrees else "<b>≠ {}</b> <small>{}</small>"
        lines.append(Cell(f"{'' if value.agrees else '≠ '}{here} ({value.text})", _html(form, here, value.text)))
    if len(values) > VALUES:
        more = counted(len(values) - VALUES, "more value")
        lines.append(Cell(more, _html("<small>{}</small>", more)))
    if not values:
        lines.append(Cell("no reference", "<small>no reference</small>"))
    return {
        "benchmark": _linked(page, row, run.benchmark),
        "verified": Cell(" ".join(verified), "<br>".join(_html("{}", words) for words in verified)),
        "here, and the reference": Cell(
            "; ".join(line.text for line in lines), "<br>".join(line.page for line in lines)
        ),
        "verdict": Cell(
            run.word, _html('<span class="status {}">{} {}</span>', look(run.word).tone, look(run.word).mark, run.word)
        ),
    }


def _fast(page: Page, row: Row) -> Row:
    share = row["share"]
    if share is None:
        bar = Cell("–", "–")
    else:
        words = share_text(share)
        ends = f"{share_text(row['low'])} to {share_text(row['high'])}" if row["low"] is not None else ""
        meter = f'<meter min="0" max="1" value="{min(share, 1.0):.4f}">{words}</meter> <b>{words}</b>'
        bar = Cell(f"{words} ({ends})" if ends else words, meter + _html("<br><small>{}</small>", ends) * bool(ends))
    return {
        "work": _linked(page, row, row["work"], row["run"].benchmark),
        "rate": row["rate"].replace(" ", "\N{NO-BREAK SPACE}"),
        "share of the bound": bar,
        "of what, and what holds it back": "; ".join(filter(None, (row["of"], row["says"]))),
    }


def _worth_row(page: Page, row: Row) -> Row:
    return {"unit of work": _linked(page, row, row["work"]), "rate": row["rate"], "price": row["usd"]}


def _answer(run: Record) -> Check:
    ask, status = Ask(run.benchmark, "Did the run pass?", "target"), STATUS.get(run.word, "FAIL")
    return ask.answer(status, run.sentence, gates=status != "SKIPPED")


def render(folder: Path, folders: Sequence[Path] = (), usd_per_hour: float | None = None) -> Path:
    """Execute the notebook of the page over the runs of ``folder``, the day of a tier, and write it as ``report.html`` there.

    ``folders`` are the runs to show, by default the newest of each benchmark. Raises ``UserError`` if a cell fails.
    """
    from benchlib.show import report

    parameters = {"folder": str(folder.resolve()), "price": usd_per_hour or 0.0}
    parameters |= {"runs": [str(path.resolve()) for path in folders]}
    report.publish(home() / "notebooks" / "95_machine_page.ipynb", folder / NOTEBOOK, folder / NAME, parameters)
    return folder / NAME
