"""``benchlib calibrate``: run a benchmark unchanged and slowed down on purpose, and see what the gate makes of it.

The runs are interleaved, so that a drift of the machine affects all kinds alike. They have no notebook: what is measured
is the worker's. They stay in ``<out>/calibrations/<benchmark>-<tier>-<time>/``.
"""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import click
from pydantic import Field, TypeAdapter, ValidationError

from benchlib.benchmarks import BENCHMARKS
from benchlib.commands import BACKEND, OUT, SET
from benchlib.commands.output import say, show_table
from benchlib.config.schema import parse_overrides
from benchlib.core.errors import UserError, explained
from benchlib.core.files import outputs
from benchlib.judge import baselines
from benchlib.judge import verdict as judging
from benchlib.judge.calibration import Calibration, save_calibration
from benchlib.launch.launch import execute
from benchlib.launch.plan import Plan, plan, prepare
from benchlib.results.record import Record, load

SHARES: TypeAdapter[list[float]] = TypeAdapter(list[Annotated[float, Field(gt=0, le=10)]])


def shares(text: str) -> list[float]:
    """Read the injected slow-downs of a command line: shares above 0, separated by commas; none of an empty text."""
    try:
        return sorted({*SHARES.validate_python(text.split(",") if text else [])})
    except ValidationError as error:
        wrong = explained(error).partition(": ")[2]
        raise UserError(f"--planted {text!r}: {wrong}; expected shares as 0.15,0.35: 0.15 is 15% slower") from None


def calibrate(
    target: str, tier: str, backend: str, overrides: Mapping[str, str], kinds: Mapping[float, int], out: Path | None
) -> Calibration:
    """Make the runs of each kind (how many of each share of slow-down), judge them against each other, store and print the result."""
    if "planted_slowdown" in overrides:
        raise UserError("planted_slowdown is what calibrate sets itself: use --planted SHARE,SHARE")
    base = plan(target, tier, backend, overrides)
    if base.unavailable:
        raise UserError(f"backend {base.config.backend} is not available: {base.unavailable}")
    slowed = {share: {**overrides, "planted_slowdown": share} for share in kinds if share}
    plans = {share: plan(target, tier, base.config.backend, values, base.probe) for share, values in slowed.items()}
    store = (out or outputs()) / "calibrations" / f"{target}-{base.config.tier}-{time.strftime('%Y%m%d-%H%M%S')}"
    calibration = _run_all(store, {0.0: base, **plans}, _schedule(kinds))
    path = save_calibration(baselines.folder(), calibration)
    rows = calibration.rows()
    show_table(rows, whole=[name for row in rows for name in row if name != "injected"])
    say("\n", (calibration.method(), "dim"))
    say(f"{calibration.sentence()}\nwritten: {path}\nruns: {store}")
    return calibration


def _schedule(kinds: Mapping[float, int]) -> list[float]:
    """Return the shares of all runs, evenly mixed: each kind's lie at the middles of equal parts of the whole time."""
    places = [((place + 0.5) / count, share) for share, count in kinds.items() for place in range(count)]
    return [share for _, share in sorted(places)]


def _run_all(store: Path, plans: Mapping[float, Plan], schedule: Sequence[float]) -> Calibration:
    runs = list[Record]()
    for number, share in enumerate(schedule, 1):
        run_dir = prepare(plans[share], store)
        kind = f"slowed by {share:.0%}" if share else "unchanged"
        say(f"  {number} of {len(schedule)}, {kind}: {run_dir.name}")
        try:
            execute(run_dir)
            verdict, run = judging.judge(run_dir, store / "no-baselines"), load(run_dir)
            if verdict.broken or not run.complete:
                raise UserError(verdict.sentence)
            for name, now, before in baselines.differences(run.fingerprint, (runs or [run])[0].fingerprint)[:1]:
                raise UserError(f"{name} changed from {before} to {now} during the calibration")
        except (UserError, RuntimeError) as error:
            raise UserError(f"{run_dir}: {str(error).strip().splitlines()[-1]}") from error
        record = run.kept(run.limits, accepted_at=time.time())
        runs.append(record.model_copy(update={"config": {"planted_slowdown": share}}))
    return Calibration(runs=sorted(runs, key=lambda run: run.injected), limits=run.limits)


@click.command()
@click.argument("target", type=click.Choice([*BENCHMARKS]), metavar="TARGET")
@click.option("--tier", "-t", default="quick", show_default=True, help="How much work each run is.")
@BACKEND
@SET
@click.option("--runs", type=click.IntRange(3, 100), default=8, show_default=True, help="Unchanged runs.")
@click.option("--planted", default="0.15,0.35,0.8", show_default=True, help="Injected slow-downs, as shares; '': none.")
@click.option("--planted-runs", type=click.IntRange(1, 100), default=2, show_default=True, help="Runs of each of them.")
@OUT
def verb(target: str, tier: str, backend: str, pairs: tuple[str, ...], out: Path | None, **runs: Any) -> None:
    """Measure what the gate of benchmark TARGET can detect on this machine.

    Repeats the benchmark unchanged (A/A) and with injected slow-downs, interleaved. Stores what the runs measured: reports and
    later gates tell by them how often the gate is wrong, and the smallest loss that it detects with 99% power.
    """
    kinds = {0.0: runs["runs"], **dict.fromkeys(shares(runs["planted"]), runs["planted_runs"])}
    calibrate(target, tier, backend, parse_overrides(pairs), kinds, out)
