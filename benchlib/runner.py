"""A run from its plan to its exit code: execute the notebook, judge, render, sum up."""

import contextlib
import shlex
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Column, Table

from benchlib import judge as judging
from benchlib import terminal
from benchlib.checks import EXIT_BROKEN, EXIT_FAIL, EXIT_NOTHING_TO_COMPARE, EXIT_PASS, Verdict, save_verdict
from benchlib.config import parse_overrides, read_params, tier_names
from benchlib.errors import StorageError, UserError
from benchlib.events import EventFollower
from benchlib.machine import probe_devices
from benchlib.metrics import quantity
from benchlib.notebook import execute, split_parameters
from benchlib.paths import home, outputs
from benchlib.progress import Progress
from benchlib.record import RunRecord
from benchlib.registry import BENCHMARKS
from benchlib.repeats import save_repeats
from benchlib.results import Run
from benchlib.session import Plan, plan, prepare

console = terminal.console(least_width=120)
COLOURS = {
    "PASS": "green",
    "FAIL": "red",
    "AMBIGUOUS": "yellow",
    "SKIPPED": "yellow",
    "NO_BASELINE": "blue",
    "NOT_COMPARABLE": "blue",
}
LINE_EVERY_S = 10.0  # between progress lines where the output is no terminal
SETTLE_S = 10.0  # that the supervisor gets to write how the ranks ended, after the notebook is gone


def plans(target: str, tier: str | None, backend: str, pairs: Iterable[str], resume: str | None) -> list[Plan]:
    """Resolve the configs of a benchmark, or of all benchmarks of a tier. Starts no rank. Raises ``UserError``."""
    overrides: dict[str, Any] = dict(parse_overrides(pairs))
    if target in BENCHMARKS:
        names, level = [target], tier or "smoke"
    elif target in tier_names():
        if tier not in (None, target):
            raise UserError(f"{target} is a tier already: leave --tier {tier} away, or name a benchmark")
        names, level = [name for name in BENCHMARKS if name in read_params("tiers", target)], target
        if overrides or resume:
            names = _that_know(names, overrides, resume)
    else:
        from benchlib.config import nearest

        raise UserError(f"unknown benchmark or tier {target!r}: {nearest(target, [*BENCHMARKS, *tier_names()])}")
    if resume:
        overrides["resume"] = str(Path(resume).resolve())
    # Wrong input is reported before torch is asked for its devices, which takes seconds.
    for name in names:
        plan(name, level, "cpu" if backend == "auto" else backend, overrides, probe={})
    probe = probe_devices()
    return [plan(name, level, backend, overrides, probe) for name in names]


def _that_know(names: list[str], overrides: dict[str, Any], resume: str | None) -> list[str]:
    from benchlib.config import check_names, config_class

    wanted = {*overrides, *(["resume"] if resume else [])}
    fitting = [name for name in names if wanted <= set(config_class(name).model_fields)]
    if not fitting:
        check_names(names[-1], wanted, "set by hand")
    return fitting


def show_plan(planned: Plan, out: Path | None) -> None:
    """Print the resolved config, the command lines and the expected work."""
    from benchlib.launch import LAUNCHERS

    config = planned.config
    folder = (out or outputs()) / "<run>"
    console.print(
        f"[bold]{config.benchmark}[/], tier {config.tier}, backend {config.backend}"
        + (f" [yellow](not available: {escape(planned.unavailable)})[/]" if planned.unavailable else "")
    )
    table = Table(
        Column("parameter", no_wrap=True),
        "value",
        Column("from", no_wrap=True),
        "meaning",
        box=None,
        padding=(0, 2, 0, 0),
    )
    for name, field in type(config).model_fields.items():
        asked = "command line" if name in ("benchmark", "tier", "backend") else "default"
        origin = planned.resolved.origins.get(name, asked)
        style = None if origin != "default" else "dim"
        origin = {"params/tiers": "tier", "params/backends": "backend"}.get(str(Path(origin).parent), origin)
        table.add_row(name, escape(str(getattr(config, name))), origin, escape(field.description or ""), style=style)
    console.print(table)
    job = LAUNCHERS[config.launcher](config, folder)
    console.print("\n[bold]starts[/]")
    for command in job.commands:
        console.print("  " + escape(shlex.join(command)), soft_wrap=True)
    for name, value in sorted(job.env.items()):
        console.print(f"  with {name}={escape(str(value))}", soft_wrap=True)
    for note in job.notes:
        console.print("  " + escape(str(note)), soft_wrap=True)
    console.print(f"\n[bold]expected work[/]\n  {escape(config.expected_work())}")
    console.print(
        f"  ends by itself within {config.budget_s:.0f} s; is ended after {config.hard_limit_s:.0f} s at the latest\n"
    )


def run_all(planned: list[Plan], out: Path | None, strict: bool, repeat: int = 1) -> int:
    """Run all plans and return the worst exit code.

    What noise leaves undecided is run again, at most ``repeat`` times in all, until it is decided. The benchmarks take turns,
    so that a disturbance of minutes does not hit all repetitions of one of them.
    """
    store = out or outputs()
    done: dict[int, Outcome] = {}
    earlier: dict[int, list[RunRecord]] = {number: [] for number in range(len(planned))}
    for turn in range(1, repeat + 1):
        due = [n for n in earlier if n not in done or done[n].verdict.verdict == "AMBIGUOUS"]
        if not due:
            break
        for number in due:
            if turn > 1:
                console.print(f"[yellow]undecided[/]  repetition {turn} of at most {repeat}")
                earlier[number].append(_record(done[number].run_dir))
            try:
                done[number] = run_one(planned[number], store, earlier[number])
            except StorageError as error:  # no place for the next run either
                return max(_not_stored(error), write_index(store, quiet=True))
            if done[number].interrupted:
                break
        if any(outcome.interrupted for outcome in done.values()):
            break
    codes = [130 if outcome.interrupted else outcome.verdict.exit_code(strict) for outcome in done.values()]
    return _worst([*codes, write_index(store, quiet=True)])


def _not_stored(error: StorageError) -> int:
    console.print(f"[red]error[/]  {escape(str(error))}", soft_wrap=True)
    return EXIT_BROKEN


def _record(run_dir: Path) -> RunRecord:
    run = Run(run_dir)
    return RunRecord.of(run, BENCHMARKS[run.config.benchmark].load("limits")(run))


@dataclass(frozen=True)
class Outcome:
    """A run that ended."""

    run_dir: Path
    verdict: Verdict
    interrupted: bool


def _worst(codes: list[int]) -> int:
    order = (EXIT_PASS, EXIT_NOTHING_TO_COMPARE, EXIT_FAIL, EXIT_BROKEN, 130)
    return max(codes, key=order.index, default=EXIT_PASS)


def run_one(planned: Plan, out: Path, earlier: Sequence[RunRecord] = ()) -> Outcome:
    """Run one plan into a folder of its own; ``earlier`` repetitions are judged with it.

    Raises ``StorageError`` where the run, its verdict or its report cannot be written; the ranks have ended then.
    """
    config = planned.config
    run_dir = prepare(planned, out)
    if earlier:
        save_repeats(run_dir, earlier)
    console.print(
        f"[bold]{config.benchmark}[/]  tier {config.tier}  backend {config.backend}  {config.world_size} rank{'s' * (config.world_size > 1)}  [dim]{shown(run_dir)}[/]"
    )
    interrupted = False
    if planned.unavailable:
        judging.mark_skipped(Run(run_dir), planned.unavailable)
    else:
        try:
            interrupted = _execute(planned, run_dir)
        finally:
            settled(run_dir)
    verdict = judging.judged(Run(run_dir))
    try:
        report = keep(run_dir, verdict)
    except StorageError:
        _summary(run_dir, verdict, None)
        raise
    _summary(run_dir, verdict, report)
    return Outcome(run_dir, verdict, interrupted)


def _execute(planned: Plan, run_dir: Path) -> bool:
    """Execute the notebook of a run; return whether the user interrupted it."""
    config = planned.config
    path = home() / "notebooks" / BENCHMARKS[config.benchmark].notebook
    values = {name: getattr(config, name) for name in planned.resolved.origins}
    parameters = split_parameters(
        path, {**values, "tier": config.tier, "backend": config.backend, "run_dir": str(run_dir)}
    )
    display = _Display(run_dir)
    display.start()
    try:
        execute(path, run_dir / "notebook.ipynb", parameters, config.hard_limit_s + 60)
    except KeyboardInterrupt:
        return True
    except Exception as error:  # a failing cell, a dead kernel, a time-out: the verdict says it, the report shows it
        judging.mark_notebook_error(run_dir, error)
    finally:
        display.stop()
    return False


def settled(run_dir: Path) -> None:
    """Wait until the supervisor has ended the ranks and said how; say it where the supervisor is gone as well."""
    from benchlib.launch import settle

    end = time.monotonic() + SETTLE_S
    while time.monotonic() < end and not (run_dir / "status.json").exists() and judging.is_running(run_dir):
        time.sleep(0.1)
    with contextlib.suppress(UserError):  # a damaged status.json: the verdict says so
        settle(run_dir)


class _Display(threading.Thread):
    """Shows the progress of a run: one live line in a terminal, a line every few seconds elsewhere."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__(daemon=True)
        self._follower, self._progress, self._end = EventFollower(run_dir), Progress(), threading.Event()

    def run(self) -> None:
        with console.status("starting") if console.is_terminal else _Quiet() as status:
            shown, printed = "", -LINE_EVERY_S
            while not self._end.wait(0.25):
                for event in self._follower.poll():
                    self._progress.update(event)
                line, now = self._progress.line(), time.monotonic()
                if line == shown:
                    continue
                shown = line
                if console.is_terminal:
                    status.update(escape(line))  # type: ignore[union-attr]
                elif now - printed >= LINE_EVERY_S:
                    printed = now
                    console.print(f"  {escape(line)}")

    def stop(self) -> None:
        self._end.set()
        self.join()


class _Quiet:
    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None


def keep(run_dir: Path, verdict: Verdict) -> Path:
    """Write the verdict and the report of a run; return the report's path. Raises ``StorageError``."""
    from benchlib import report

    save_verdict(run_dir, verdict)
    return report.render(run_dir)


def write_index(store: Path, quiet: bool = False) -> int:
    """Write the list of the runs of a store; return the exit code, 2 where it cannot be written."""
    from benchlib import index

    try:
        path = index.render(store)
    except StorageError as error:
        return _not_stored(error)
    if not quiet:
        console.print(f"index: {shown(path)}", soft_wrap=True)
    return EXIT_PASS


def _summary(run_dir: Path, verdict: Verdict, report: Path | None) -> None:
    table = Table("check", "status", "what was found", "limit", box=None, padding=(0, 2, 0, 0), header_style="dim")
    for check in verdict.checks:
        if check.status in ("SKIPPED", "NO_BASELINE", "NOT_COMPARABLE"):
            continue  # what was not judged stands in a line below, with all reasons in the report
        word, colour = check.status.replace("_", " ").lower(), COLOURS.get(check.status, "white")
        if not check.gates and check.status == "FAIL":
            word, colour = "differs", "yellow"
        table.add_row(check.name, f"[{colour}]{word}[/]", escape(check.reason), escape(check.limit))
    if table.row_count:
        console.print(table)
    skipped = [check for check in verdict.checks if check.status == "SKIPPED"]
    if skipped:
        names = ", ".join(
            check.name + (f" ({quantity(check.value, check.unit)})" if check.value is not None else "")
            for check in skipped
        )
        console.print(f"[yellow]not judged[/]  {escape(names)}", soft_wrap=True)
    open_ = [check for check in verdict.checks if check.status in ("NO_BASELINE", "NOT_COMPARABLE")]
    if open_:
        why = open_[0].reason.partition("; ")[2] or open_[0].reason
        console.print(f"[blue]no comparison[/]  for {len(open_)} metrics: {escape(why)}", soft_wrap=True)
        if verdict.verdict == "PASS" and not Run(run_dir).config.planted_slowdown:
            again = f'benchlib baseline accept {shlex.quote(_short(run_dir))} --reason "..."'
            console.print(f"[dim]to compare later runs with this one: {escape(again)}[/]", soft_wrap=True)
    if verdict.gate:
        console.print(f"[dim]{escape(verdict.gate['sentence'])}[/]", soft_wrap=True)
    word = "BROKEN" if verdict.broken else verdict.verdict
    colour = COLOURS.get(verdict.verdict, "white")
    console.print(f"[bold {colour}]{word}[/]  {escape(verdict.sentence)}", soft_wrap=True)
    if report is not None:
        console.print(f"report: {shown(report)}\n", soft_wrap=True)


def shown(path: Path) -> str:
    """Return a path for the console: relative where it lies below the working folder, on one line, its signs escaped."""
    return escape(terminal.one_line(_short(path)))


def _short(path: Path) -> str:
    with contextlib.suppress(ValueError):
        path = path.resolve().relative_to(Path.cwd())
    return str(path)
