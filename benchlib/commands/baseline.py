"""``benchlib baseline``: accept, list and show the runs that later ones are compared with."""

import sys
from collections.abc import Sequence
from pathlib import Path

import click

from benchlib.benchmarks import BENCHMARKS
from benchlib.commands.output import say, show_table
from benchlib.core.errors import UserError
from benchlib.core.text import counted, day
from benchlib.judge import baselines, reference_values
from benchlib.judge import verdict as judging
from benchlib.judge.calibration import load_calibration
from benchlib.judge.checks import save_verdict, verdict_of
from benchlib.judge.regression import LOG, TWICE, side_of
from benchlib.results.record import load
from benchlib.results.run import Run
from benchlib.results.verdict import EXIT_FAIL
from benchlib.show.digest import interval


@click.group()
def verb() -> None:
    """Accept, list and show baselines: the runs that later ones are compared with."""


@verb.command("accept")
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="RUN...")
@click.option("--reason", required=True, help="Why this run is the new normal; stored in the file.")
@click.option("--add", is_flag=True, help="Keep its runs as well: several show how much unchanged runs differ.")
@click.option("--if-improved", is_flag=True, help="Accept only where no gated metric gets worse.")
@click.option(
    "--reference", is_flag=True, help="Accept what RUN computed (losses, scores) for any machine, not its speed."
)
def _accept(runs: tuple[Path, ...], reason: str, add: bool, if_improved: bool, reference: bool) -> None:
    """Make RUN the baseline of its benchmark, tier and fingerprint. Several runs of one benchmark are accepted together.

    Of several runs it shows how much they differ and the smallest loss that the gate will find.
    """
    if reference:
        accept_reference(runs, reason, add)
    else:
        accept(runs, reason, add, if_improved)


def accept_reference(folders: Sequence[Path], reason: str, add: bool) -> None:
    runs = [_acceptable(Run(folder), but=reference_values.NAME) for folder in folders]
    values = [BENCHMARKS[run.config.benchmark].spec.page(run)[1] for run in runs]
    path = reference_values.accept(runs, values, reason, add)
    compared = reference_values.compared(runs[0], values[0])
    show_table({"value": item.name, "here": item.here.text, "reference": item.text} for item in compared)
    say(f"accepted as the reference: {path}\ncommit this file to share it.")


def _acceptable(run: Run, but: str = "") -> Run:
    """Judge a run again and require that it passed, ``but`` for the check that it is to change: a wider reference."""
    # The stored verdict may be older than what lies in the folder, or than the baselines.
    verdict = judging.judged(run)
    failed = verdict.verdict == "FAIL" and but
    others = [check for check in verdict.checks if check.name != but]
    baselines.require_acceptable(run, verdict_of(others) if failed else verdict)
    save_verdict(run.path, verdict)
    return Run(run.path)


def accept(folders: Sequence[Path], reason: str, add: bool, if_improved: bool) -> None:
    """Make runs the baseline of their fingerprint, or with ``add`` more runs of it, and say where it is.

    Runs of one benchmark are accepted together, all or none. Each is judged again first. What cannot be accepted is named at the end,
    with exit code 1; where nothing can, that is the error.
    """
    kinds = dict[tuple[str, str, str], list[Run]]()
    refused, accepted = list[str](), False
    for folder in folders:
        try:
            run = _acceptable(Run(folder))
            kinds.setdefault((run.config.benchmark, run.config.tier, run.config.backend), []).append(run)
        except UserError as error:
            refused.append(str(error))
    for runs in kinds.values():
        try:
            _accept_together(runs, reason, add, if_improved)
            accepted = True
        except UserError as error:
            refused.append(str(error))
    if not accepted:
        raise UserError("\n".join(refused))
    for why in refused:
        say(("not accepted: ", "yellow"), why)
    if refused:
        sys.exit(EXIT_FAIL)


def _accept_together(runs: list[Run], reason: str, add: bool, if_improved: bool) -> None:
    first, before = load(runs[0].path), baselines.find(runs[0]).baseline
    limits = first.limits
    path = baselines.accept(runs, reason, limits, add=add, if_improved=if_improved)
    accepted = baselines.load_baseline(path)
    calibration = load_calibration(baselines.folder(), first.benchmark, first.tier, first.fingerprint)
    spreads = baselines.known_spreads(first, limits, calibration, accepted.runs)
    rows = baselines.widths(accepted, limits, spreads)
    show_table(row.cells for row in rows)
    say(f"accepted: {path}\ncommit this file to share it.")
    if before and not add:
        say(f"It replaces {counted(len(before.runs), 'accepted run')}; --add would have kept them.")
    blunt = any(row.times > TWICE for row in rows)
    say((baselines.reach(accepted, rows), "yellow" if blunt else "dim"))


@verb.command("list")
def _list() -> None:
    """List the committed baselines."""
    sound, refused = baselines.stored()
    rows = [
        {
            "key": item.key,
            "benchmark": item.latest.benchmark,
            "tier": item.latest.tier,
            "machine": item.latest.fingerprint.get("devices") or item.latest.fingerprint.get("cpu", ""),
            "ranks": item.latest.fingerprint.get("world_size", ""),
            "runs": len(item.runs),
            "accepted": day(item.latest.accepted_at or 0),
            "reason": item.latest.reason,
        }
        for item in sound
    ]
    show_table(rows, whole=("key", "accepted"))
    if refused:
        raise UserError("\n".join(refused.values()))
    if not rows:
        raise UserError("no baselines yet: `benchlib baseline accept RUN --reason ...` makes the first")


@verb.command("show")
@click.argument("key")
def _show(key: str) -> None:
    """Show a baseline's metrics and fingerprint. KEY is a file or the first digits of its name."""
    item = baselines.load_baseline(Path(key)) if Path(key).is_file() else baselines.by_key(key)
    latest = item.latest
    say((f"{latest.benchmark}, {latest.tier}", "bold"), f"  {item.key}")
    for record in item.runs:
        say(f"from {record.run}: {record.reason}")
    limits = {limit.metric: limit for limit in item.limits}
    rows = []
    for metric in latest.metrics:
        side, limit = side_of(item.runs, metric.name), limits.get(metric.name)
        value = side.text(LOG) if side and side.runs and side.lowest > 0 else metric.text
        cells = {"metric": metric.name, "value": value, "limit": limit.text(metric.direction) if limit else ""}
        rows.append(cells | {"n": str(metric.n), "95% interval of the latest run": interval(metric)})
    show_table(rows)
    show_table({"factor": name, "value": value} for name, value in latest.fingerprint.items())
