"""`benchlib calibrate`: run a benchmark unchanged and slowed down on purpose, and see what the gate makes of it.

The runs take turns, so that a drift of the machine affects all kinds alike. They have no notebook: what is measured
is the worker's. They stay in ``<out>/calibrations/<benchmark>-<tier>-<time>/`` and an interrupted calibration resumes there.
"""

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from pydantic import BaseModel, ConfigDict
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from benchlib.benchmarks import BENCHMARKS
from benchlib.commands import EXIT_INTERRUPTED, OUT, SET, user_errors
from benchlib.config.schema import parse_overrides
from benchlib.core import terminal
from benchlib.core.errors import UserError
from benchlib.core.files import outputs, read_model, write_json
from benchlib.judge import baselines
from benchlib.judge import verdict as judging
from benchlib.judge.calibration import Calibration, calibrate_metric, save_calibration
from benchlib.launch.launch import execute
from benchlib.launch.plan import Plan, plan, prepare
from benchlib.results.record import limits_of, load
from benchlib.results.run import Run, fingerprint_key

console = terminal.console(least_width=140)
MOST_SHARE = 10.0
REQUEST = "request.json"


class Interrupted(UserError):
    """The user stopped the calibration; its runs are kept."""


class Request(BaseModel):
    """What a calibration was asked for, kept beside its runs so that it can go on. ``planted`` are shares."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    target: str
    tier: str = "quick"
    backend: str = "auto"
    overrides: dict[str, str] = {}
    runs: int = 8
    planted: list[float] = [0.15, 0.35, 0.8]
    planted_runs: int = 2


def request(asked: Mapping[str, Any], resume: Path | None) -> Request:
    """Return what to do: what was asked, or what the calibration in ``resume`` was asked for with more or other runs.

    ``asked`` has None or nothing where the user left the choice. Raises ``UserError``.
    """
    given = {name: value for name, value in asked.items() if value not in (None, {}, ())}
    if resume is None:
        if "target" not in given:
            raise UserError("calibrate needs a benchmark: " + ", ".join(BENCHMARKS))
        return Request(**given)
    path = resume / REQUEST
    if not path.is_file():
        raise UserError(f"--resume {resume}: no calibration was started there; they are below outputs/calibrations")
    kept = read_model(path, Request, "the request of a calibration")
    for name in ("target", "tier", "backend", "overrides"):
        if name in given and given[name] != getattr(kept, name):
            raise UserError(
                f"--resume {resume}: that calibration has {name} = {getattr(kept, name)}, not {given[name]}: leave it out"
            )
    return kept.model_copy(update=given)


def calibrate(asked: Request, out: Path | None, resume: Path | None = None) -> Calibration:
    """Make the runs that are missing, judge them against each other, store and print the result."""
    if asked.target not in BENCHMARKS:
        raise UserError(f"calibrate takes one benchmark, not {asked.target!r}: " + ", ".join(BENCHMARKS))
    if "planted_slowdown" in asked.overrides:
        raise UserError("planted_slowdown is what calibrate sets itself: use --planted SHARE,SHARE")
    base = plan(asked.target, asked.tier, asked.backend, asked.overrides)
    if base.unavailable:
        raise UserError(f"backend {base.config.backend} is not available: {base.unavailable}")
    slowed = {
        share: plan(
            asked.target, asked.tier, base.config.backend, {**asked.overrides, "planted_slowdown": share}, base.probe
        )
        for share in asked.planted
    }
    name = f"{asked.target}-{asked.tier}-{time.strftime('%Y%m%d-%H%M%S')}"
    store = resume or (out or outputs()) / "calibrations" / name
    runs = _stored(store, base, asked.planted)
    write_json(store / REQUEST, asked.model_dump(mode="json"))
    schedule = _schedule(asked.runs, dict.fromkeys(asked.planted, asked.planted_runs), runs)
    if schedule:
        _run_all(store, base, slowed, schedule, runs)
    calibration = _judge(base, runs)
    key = fingerprint_key(calibration.fingerprint)
    path = save_calibration(baselines.folder(), calibration, key)
    show(calibration)
    console.print(f"written: {escape(str(path))}\nruns: {escape(str(store))}", soft_wrap=True)
    return calibration


def shares(text: str) -> list[float]:
    """Read the planted slow-downs of a command line: shares above 0, separated by commas; none of an empty text."""
    try:
        planted = sorted({float(part) for part in text.split(",") if part.strip()})
    except ValueError:
        raise UserError(f"--planted {text!r}: expected shares such as 0.15,0.35") from None
    wrong = [share for share in planted if not 0 < share <= MOST_SHARE]
    if wrong:
        raise UserError(
            f"--planted {wrong[0]:g}: a share lies above 0 and is at most {MOST_SHARE:g}; 0.15 is 15% slower"
        )
    return planted


Runs = dict[float, list[Run]]  # by the share by which they were slowed down; 0 are the unchanged ones


def _stored(store: Path, base: Plan, shares: list[float]) -> Runs:
    """Return the complete runs of an interrupted calibration, by planted share; 0 are the unchanged ones."""
    runs: Runs = {share: [] for share in (0.0, *shares)}
    for path in sorted(store.glob("*-*/*/config.json")):
        run = Run(path.parent)
        if run.config.benchmark != base.config.benchmark or run.config.work() != base.config.work():
            differing = [name for name, value in base.config.work().items() if run.config.work().get(name) != value]
            raise UserError(
                f"{run.path} has another config than this calibration ({', '.join(differing) or 'benchmark'}): start a new calibration"
            )
        if run.config.planted_slowdown in runs and run.result is not None and run.result.status == "complete":
            runs[run.config.planted_slowdown].append(run)
    return runs


def _schedule(count: int, planted: dict[float, int], done: Runs) -> list[float]:
    """Return the shares of the runs that are missing, evenly mixed."""
    wanted = {0.0: count, **planted}
    left = {share: number - len(done[share]) for share, number in wanted.items()}
    # Each kind's runs lie at the middles of equal parts of the whole time.
    places = [((place + 0.5) / number, share) for share, number in left.items() for place in range(number)]
    return [share for _, share in sorted(places)]


def _run_all(store: Path, base: Plan, slowed: dict[float, Plan], schedule: list[float], runs: Runs) -> None:
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), "left", TimeRemainingColumn(),
        console=console,
    )  # fmt: skip
    with bar:
        task = bar.add_task(f"{base.config.benchmark}, {base.config.tier}", total=len(schedule))
        for share in schedule:
            bar.update(task, description="unchanged" if not share else f"slowed by {share:.0%}")
            run_dir = prepare(slowed[share] if share else base, store)
            try:
                execute(run_dir)
                run = Run(run_dir)
                verdict = judging.judge(run_dir, store / "no-baselines")
                if verdict.broken or run.result is None or run.result.status != "complete":
                    raise UserError(verdict.sentence)
            except KeyboardInterrupt:
                raise Interrupted(f"stopped; go on with `benchlib calibrate --resume {store}`") from None
            except (UserError, RuntimeError) as error:
                raise UserError(
                    f"{run_dir}: {str(error).strip().splitlines()[-1]}\nThe runs so far are kept: go on with `benchlib calibrate --resume {store}`"
                ) from error
            runs[share].append(run)
            if not console.is_terminal:
                kind = f"slowed by {share:.0%}" if share else "unchanged"
                console.print(f"  {kind}: {escape(run_dir.name)}")
            bar.advance(task)


def _judge(base: Plan, runs: Runs) -> Calibration:
    first = runs[0.0][0]
    limits = limits_of(first)
    records = {share: [load(run.path) for run in members] for share, members in runs.items()}
    factors = first.fingerprint
    for run in runs[0.0][1:]:
        other = baselines.differences(run.fingerprint, factors)
        if other:
            raise UserError(
                f"{run.path}: {other[0][0]} changed from {other[0][2]} to {other[0][1]} during the calibration"
            )
    unchanged = records.pop(0.0)
    metrics = [item for limit in limits if (item := calibrate_metric(limit, unchanged, records)) is not None]
    return Calibration(
        benchmark=base.config.benchmark,
        tier=base.config.tier,
        fingerprint=factors,
        made_at=time.time(),
        runs=len(unchanged),
        planted_runs=sum(len(runs) for runs in records.values()),
        metrics=metrics,
    )


def show(calibration: Calibration) -> None:
    """Print what the gate can tell."""
    if rows := calibration.rows():
        console.print(terminal.table(rows, whole=[name for name in rows[0] if name != "planted"]))
        console.print()
    console.print(escape(calibration.method()), style="dim", soft_wrap=True)
    console.print(escape(calibration.sentence()), soft_wrap=True)


@click.command()
@click.argument("target", required=False)
@click.option("--tier", "-t", help="How much work each run is. [default: quick]")
@click.option("--backend", "-b", help="Where, as for `benchlib run`. [default: auto]")
@SET
@click.option("--runs", type=click.IntRange(3, 100), help="Unchanged runs. [default: 8]")
@click.option("--planted", help="Planted slow-downs, as shares; '' for none. [default: 0.15,0.35,0.8]")
@click.option("--planted-runs", type=click.IntRange(1, 100), help="Runs of each planted slow-down. [default: 2]")
@OUT
@click.option(
    "--resume", type=click.Path(path_type=Path), metavar="FOLDER", help="Continue an interrupted calibration."
)
@user_errors
def verb(pairs: tuple[str, ...], planted: str | None, out: Path | None, resume: Path | None, **asked: Any) -> None:
    """Measure what the gate of benchmark TARGET can detect on this machine.

    Repeats the benchmark unchanged (A/A) and with planted slow-downs, in turns. Stores the false-alarm rate of the gate and the
    smallest loss that it detects with 99% power, for reports and later gates. --resume takes all else from the first call.
    """
    asked |= {"overrides": parse_overrides(pairs), "planted": None if planted is None else shares(planted)}
    try:
        calibrate(request(asked, resume), out, resume and resume.resolve())
    except Interrupted as error:
        click.echo(str(error), err=True)
        sys.exit(EXIT_INTERRUPTED)
