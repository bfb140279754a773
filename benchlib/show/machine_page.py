"""One page for a machine: is this stack right, fast and worth its price? From the runs of one tier.

What differs stands first. Each row links to the report of its run.
"""

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchlib.benchmarks import BENCHMARKS, loadable, spec_of
from benchlib.config.schema import read_params, tier_names
from benchlib.core.definitions import share_text
from benchlib.core.errors import UserError
from benchlib.core.files import write_text
from benchlib.core.text import badness, capitalized, counted, duration, quantity
from benchlib.judge.baselines import injected
from benchlib.judge.checks import Ask, Check, Status, verdict_of
from benchlib.judge.compare import RunSet
from benchlib.judge.cost import HOUR_S, Machine, listed_price
from benchlib.judge.reference_values import Compared, compared
from benchlib.judge.regression import NOTICED
from benchlib.judge.trends import choose_store
from benchlib.results.record import Record, load, load_all, store_folders
from benchlib.results.run import Run
from benchlib.show.lines import link
from benchlib.show.notebook import Shown

NAME = "report.html"
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


def read(folder: str, usd_per_hour: float) -> Page:
    """Read the page of a tier's day: '' takes the newest of the outputs, and the demo runs of the kit where there are none.

    Raises ``UserError`` for a folder that holds no run.
    """
    store, demo = choose_store()
    days = sorted({path.parent for path in store_folders(store)}, key=lambda day: (day.name[-8:], day.stat().st_mtime))
    chosen = Path(folder).expanduser() if folder else days[-1]
    if not chosen.is_dir() or not (runs := newest(chosen)):
        raise UserError(f"folder = {folder!r}: holds no run; name the day of a tier, such as outputs/quick-20261126")
    return replace(content(runs, usd_per_hour or None), demo=demo and not folder)


def content(folders: Sequence[Path], usd_per_hour: float | None = None) -> Page:
    """Read runs of one tier. ``usd_per_hour`` is the price of a device (of a CPU the machine), else that of the price sheet counts."""
    runs = [load(folder) for folder in folders]
    whole = [run for run in runs if run.complete and not run.problems]
    right, fast = list[Row](), list[Row]()
    for run in runs:
        verified, values, about = list[str](), list[Compared](), {"run": run, "link": link(run, 1)}
        if run in whole:
            verified, qualities, reached = spec_of(run.benchmark).page(stored := Run(run.folder))
            values = sorted(compared(stored, qualities), key=lambda value: value.agrees)  # what differs first
            fast += [item | {"work": capitalized(item["work"])} | about for item in reached]
        right.append(about | {"verified": "; ".join(verified), "values": values})
    right.sort(key=lambda row: (badness(row["run"].word), all(value.agrees for value in row["values"])))
    fast.sort(key=lambda row: row["share"] is None)
    devices = (name for run in whole for name in run.device_names)
    price = (usd_per_hour, "given") if usd_per_hour else listed_price(devices)
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
            yield {"work": work, "rate": metric.text, "usd": quantity(usd, "USD"), "link": link(run, 1)}


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
        command = f'benchlib baseline accept {os.path.relpath(place)}/BENCHMARK-* --reason "first"'
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
    """Return what the notebook shows."""
    right = [
        {"benchmark": row["run"].benchmark, "verified": row["verified"], "value": value.name if value else ""}
        | {"here": value.here.text if value else "", "reference": value.text if value else "none"}
        | {"verdict": row["run"].word}
        for row in page.right
        for value in row["values"] or [None]
    ]
    heads = {"work": "work", "rate": "rate", "of": "of", "says": "what holds it back"}
    fast = [{"share": _share(row)} | {head: row[name] for name, head in heads.items()} for row in page.fast]
    worth = [{"work": row["work"], "rate": row["rate"], "price": row["usd"]} for row in page.worth]
    place = "the demo runs of the kit" if page.demo else str(page.folder)
    return Shown(
        asked={"folder": place, "USD per device hour": f"{page.price[0]:g}" if page.price else "none"},
        tables={"right": right, "fast": fast, "worth": worth, "not done": page.undone},
        figures={"fast": lambda: [_picture(page.fast)]},
        reading=[page.sentence, *[f"This machine: {page.peaks}."] * bool(page.peaks)],
        provenance=[
            {name: getattr(run, name) for name in ("run", "benchmark", "hardware")}
            | {"benchlib": run.setup.get("benchlib", "")}
            for run in page.runs
        ],
        judge=lambda: verdict_of([_answer(run) for run in page.runs], remedy=""),
    )


def _answer(run: Record) -> Check:
    ask, status = Ask(run.benchmark, "Did the run pass?", "target"), STATUS.get(run.word, "FAIL")
    return ask.answer(status, run.sentence, gates=status != "SKIPPED")


def _share(row: Row) -> str:
    if row["share"] is None:
        return "–"
    ends = f" ({share_text(row['low'])} to {share_text(row['high'])})" if row["low"] is not None else ""
    return share_text(row["share"]) + ends


def _picture(rows: Sequence[Row]) -> Any:
    """Draw what was reached beside the bounds that were measured, a bar a row."""
    import pandas as pd

    from benchlib.show import figures as on
    from benchlib.show.light import seaborn

    bounded = [row for row in rows if row["share"] is not None]
    if not bounded:
        return on.placeholder("No bound was measured.")
    frame = pd.DataFrame(bounded).astype({"share": float, "low": float, "high": float})

    def paint(axes: Any, frame: Any) -> None:
        seaborn.barplot(x=frame["share"], y=frame.index, orient="h", color=on.SERIES[0], saturation=1, ax=axes)
        axes.hlines(frame.index, frame["low"], frame["high"], color=on.TEXT, linewidth=1.4)
        on.label_rows(axes, frame["work"].tolist())
        for place, right in frame[["share", "high"]].max(axis=1).items():
            on.note(axes, share_text(frame["share"][place]), (right, place), (5, 0), fontsize=8)
        axes.axvline(1.0, color=on.MUTED, linewidth=1, linestyle=on.DASHED)
        axes.set_xlim(0, 1.15 * max(1.0, frame["share"].max()))

    least = min(bounded, key=lambda row: row["share"])
    alt = "; ".join(f"{row['work']}: {_share(row)} {row['of']}" for row in bounded)
    title = f"{least['work']} is farthest from its bound: {share_text(least['share'])}"
    return on.draw(on.Drawing(frame, paint, x="share of the measured bound", alt=f"{alt}."), title, on.DPI)


def render(folder: Path, folders: Sequence[Path] | None = None, usd_per_hour: float | None = None) -> Path:
    """Write the page of the runs of ``folder``, the day of a tier: those given, else the newest of each benchmark."""
    from benchlib.show import markup

    page = content(newest(folder) if folders is None else folders, usd_per_hour)
    path = folder / NAME
    write_text(
        path,
        markup.page(
            "machine.html.j2", page=page, share_text=share_text, values=VALUES, counted=counted, duration=duration
        ),
    )
    return path
