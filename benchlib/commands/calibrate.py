"""``benchlib calibrate``: run a benchmark unchanged and slowed down on purpose, and see what the gate makes of it.

The runs take turns, so that a drift of the machine affects all kinds alike. They have no notebook: what is measured
is the worker's. They stay in ``<out>/calibrations/<benchmark>-<tier>-<time>/`` and an interrupted calibration resumes there.
"""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from pydantic import BaseModel, ConfigDict
from rich.progress import Progress

from benchlib.benchmarks import BENCHMARKS
from benchlib.commands import OUT, SET
from benchlib.commands.output import console, say, show_table
from benchlib.config.schema import parse_overrides
from benchlib.core.errors import UserError
from benchlib.core.files import outputs, read_model, write_json
from benchlib.judge import baselines
from benchlib.judge import verdict as judging
from benchlib.judge.calibration import Calibration, calibrate_metric, save_calibration
from benchlib.launch.launch import execute
from benchlib.launch.plan import Plan, plan, prepare
from benchlib.results.record import limits_of, load
from benchlib.results.run import Run, fingerprint_key

MAX_SHARE = 10.0
REQUEST = "request.json"
Runs = dict[float, list[Run]]  # by the share by which they were slowed down; 0 are the unchanged ones


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
    """Return what to do: what was asked (None or nothing where the user left the choice), or what ``resume`` was asked for.

    Raises ``UserError``.
    """
    choices = {name: value for name, value in asked.items() if value not in (None, {})}
    if resume is None:
        if "target" not in choices:
            raise UserError("calibrate needs a benchmark: " + ", ".join(BENCHMARKS))
        return Request(**choices)
    if choices:
        raise UserError(f"--resume {resume} does what that calibration was asked for: leave out {', '.join(choices)}")
    path = resume / REQUEST
    if not path.is_file():
        raise UserError(f"--resume {resume}: no calibration was started there; they are below outputs/calibrations")
    return read_model(path, Request, "the request of a calibration")


def shares(text: str) -> list[float]:
    """Read the injected slow-downs of a command line: shares above 0, separated by commas; none of an empty text."""
    try:
        planted = sorted({float(part) for part in text.split(",") if part.strip()})
    except ValueError:
        raise UserError(f"--planted {text!r}: expected shares such as 0.15,0.35") from None
    if wrong := [share for share in planted if not 0 < share <= MAX_SHARE]:
        limits = f"a share lies above 0 and is at most {MAX_SHARE:g}; 0.15 is 15% slower"
        raise UserError(f"--planted {wrong[0]:g}: {limits}")
    return planted


def calibrate(asked: Request, out: Path | None, resume: Path | None = None) -> Calibration:
    """Make the runs that are missing, judge them against each other, store and print the result."""
    if asked.target not in BENCHMARKS:
        raise UserError(f"calibrate takes one benchmark, not {asked.target!r}: " + ", ".join(BENCHMARKS))
    if "planted_slowdown" in asked.overrides:
        raise UserError("planted_slowdown is what calibrate sets itself: use --planted SHARE,SHARE")
    base = plan(asked.target, asked.tier, asked.backend, asked.overrides)
    if base.unavailable:
        raise UserError(f"backend {base.config.backend} is not available: {base.unavailable}")
    plans = {0.0: base}
    for share in asked.planted:
        overrides = {**asked.overrides, "planted_slowdown": share}
        plans[share] = plan(asked.target, asked.tier, base.config.backend, overrides, base.probe)
    name = f"{asked.target}-{asked.tier}-{time.strftime('%Y%m%d-%H%M%S')}"
    store = resume or (out or outputs()) / "calibrations" / name
    runs = _stored(store, plans)
    write_json(store / REQUEST, asked.model_dump(mode="json"))
    _run_all(store, plans, _schedule(asked.runs, dict.fromkeys(asked.planted, asked.planted_runs), runs), runs)
    calibration = _judge(base, runs)
    path = save_calibration(baselines.folder(), calibration, fingerprint_key(calibration.fingerprint))
    rows = calibration.rows()
    show_table(rows, whole=[name for row in rows for name in row if name != "injected"])
    say("\n", (calibration.method(), "dim"))
    say(f"{calibration.sentence()}\nwritten: {path}\nruns: {store}")
    return calibration


def _stored(store: Path, plans: dict[float, Plan]) -> Runs:
    """Return the complete runs of an interrupted calibration, by planted share."""
    runs: Runs = {share: [] for share in plans}
    wanted = plans[0.0].config
    for path in sorted(store.glob("*-*/*/config.json")):
        run = Run(path.parent)
        config = run.config
        if (config.benchmark, config.work()) != (wanted.benchmark, wanted.work()):
            raise UserError(f"{run.path} has another config than this calibration: start a new one")
        if config.planted_slowdown in runs and run.result is not None and run.result.status == "complete":
            runs[config.planted_slowdown].append(run)
    return runs


def _schedule(count: int, planted: dict[float, int], done: Runs) -> list[float]:
    """Return the shares of the runs that are missing, evenly mixed."""
    left = {share: number - len(done[share]) for share, number in {0.0: count, **planted}.items()}
    # Each kind's runs lie at the middles of equal parts of the whole time.
    places = [((place + 0.5) / number, share) for share, number in left.items() for place in range(number)]
    return [share for _, share in sorted(places)]


def _run_all(store: Path, plans: dict[float, Plan], schedule: list[float], runs: Runs) -> None:
    config, go_on = plans[0.0].config, f"go on with `benchlib calibrate --resume {store}`"
    with Progress(console=console) as bar:
        task = bar.add_task(f"{config.benchmark}, {config.tier}", total=len(schedule))
        for share in schedule:
            kind = f"slowed by {share:.0%}" if share else "unchanged"
            bar.update(task, description=kind)
            run_dir = prepare(plans[share], store)
            try:
                execute(run_dir)
                run = Run(run_dir)
                verdict = judging.judge(run_dir, store / "no-baselines")
                if verdict.broken or run.result is None or run.result.status != "complete":
                    raise UserError(verdict.sentence)
            except KeyboardInterrupt:
                say(f"stopped; {go_on}")
                raise
            except (UserError, RuntimeError) as error:
                reason = str(error).strip().splitlines()[-1]
                raise UserError(f"{run_dir}: {reason}\nThe runs so far are kept: {go_on}") from error
            runs[share].append(run)
            if not console.is_terminal:
                say(f"  {kind}: {run_dir.name}")
            bar.advance(task)


def _judge(base: Plan, runs: Runs) -> Calibration:
    first = runs[0.0][0]
    for run in runs[0.0][1:]:
        if other := baselines.differences(run.fingerprint, first.fingerprint):
            name, now, before = other[0][:3]
            raise UserError(f"{run.path}: {name} changed from {before} to {now} during the calibration")
    records = {share: [load(run.path) for run in members] for share, members in runs.items()}
    unchanged = records.pop(0.0)
    metrics = [calibrate_metric(limit, unchanged, records) for limit in limits_of(first)]
    return Calibration(
        benchmark=base.config.benchmark,
        tier=base.config.tier,
        fingerprint=first.fingerprint,
        made_at=time.time(),
        runs=len(unchanged),
        planted_runs=sum(map(len, records.values())),
        metrics=[item for item in metrics if item is not None],
    )


@click.command()
@click.argument("target", required=False)
@click.option("--tier", "-t", help="How much work each run is. [default: quick]")
@click.option("--backend", "-b", help="Where, as for `benchlib run`. [default: auto]")
@SET
@click.option("--runs", type=click.IntRange(3, 100), help="Unchanged runs. [default: 8]")
@click.option("--planted", help="Injected slow-downs, as shares; '' for none. [default: 0.15,0.35,0.8]")
@click.option("--planted-runs", type=click.IntRange(1, 100), help="Runs of each injected slow-down. [default: 2]")
@OUT
@click.option(
    "--resume", type=click.Path(path_type=Path), metavar="FOLDER", help="Continue an interrupted calibration."
)
def verb(pairs: tuple[str, ...], planted: str | None, out: Path | None, resume: Path | None, **asked: Any) -> None:
    """Measure what the gate of benchmark TARGET can detect on this machine.

    Repeats the benchmark unchanged (A/A) and with injected slow-downs, interleaved. Stores the false-alarm rate of the gate and the
    smallest loss that it detects with 99% power, for reports and later gates. --resume takes all else from the first call.
    """
    asked |= {"overrides": parse_overrides(pairs), "planted": None if planted is None else shares(planted)}
    calibrate(request(asked, resume), out, resume and resume.resolve())
