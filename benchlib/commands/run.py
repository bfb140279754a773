"""`benchlib run` and `benchlib report`: from plans to exit codes.

A run executes its notebook into the run folder; the notebook starts the ranks and judges what they left. What it could not
do any more is done here, then the report is rendered and the terminal shows the checks.
"""

import contextlib
import importlib
import re
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.status import Status
from rich.table import Table

from benchlib.benchmarks import BENCHMARKS
from benchlib.commands import EXIT_INTERRUPTED
from benchlib.config import cluster as clusters
from benchlib.core import run_folder, terminal
from benchlib.core.errors import StorageError, UserError, unexpected
from benchlib.core.events import EventFollower, Progress
from benchlib.core.files import outputs, read_object
from benchlib.core.imports import importing_jupyter
from benchlib.core.interrupts import Interrupts
from benchlib.core.text import counted, quantity
from benchlib.judge import baselines
from benchlib.judge import verdict as judging
from benchlib.judge.checks import EXIT_BROKEN, EXIT_FAIL, EXIT_NOTHING_TO_COMPARE, EXIT_PASS, Verdict, save_verdict
from benchlib.judge.regression import RunRecord, limits_of, save_repeats
from benchlib.launch.plan import Plan, prepare
from benchlib.results.run import Run, find_runs, tolerant
from benchlib.results.store import state
from benchlib.show.digest import cards, messages
from benchlib.show.headless import NOTEBOOK_S, execute
from benchlib.show.kernels import warm_up

if TYPE_CHECKING:
    from benchlib.show.report import Dark, Pictures

console = terminal.console(least_width=120)
LINE_EVERY_S = 10.0  # between progress lines where the output is not a terminal
YEAR_S = 365 * 86400.0
ENDING_S = 2.0  # for it to learn that they were
KERNEL_DIED = "the notebook's kernel died"
SETTLE_S = 20.0  # for the supervisor to write how the ranks ended, after the notebook has gone
NARROW = 100  # columns; below, a limit stands behind the result instead of in a column of its own
COLOURS = {
    "PASS": "green",
    "FAIL": "red",
    "BROKEN": "red",
    "STOPPED": "yellow",
    "AMBIGUOUS": "yellow",
    "SKIPPED": "yellow",
    "NO_BASELINE": "blue",
    "NOT_COMPARABLE": "blue",
}
OPEN = {  # checks that need a reader
    "FAIL": ("fail", "red"),
    "DIFFERS": ("differs", "yellow"),
    "AMBIGUOUS": ("undecided", "yellow"),
    "INCOMPLETE": ("incomplete", "yellow"),
}
_DAY = re.compile(r".+-\d{8}")  # the folder of a day in a store


def get_ready() -> None:
    """Begin what every run needs and takes seconds: a kernel, and the imports of executing and reporting a notebook."""
    warm_up()
    threading.Thread(target=_load_papermill, daemon=True).start()


def _load_papermill() -> None:
    with importing_jupyter():
        importlib.import_module("papermill")


def run_all(planned: list[Plan], out: Path | None, strict: bool, repeat: int = 1) -> int:
    """Run all plans and return the worst exit code.

    A benchmark that noise leaves undecided runs again until it is decided, ``repeat`` times in all at most. The benchmarks
    take turns, so that a disturbance of minutes does not hit all repetitions of one of them.
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
                return max(_not_stored(error, "BROKEN"), write_index(store, quiet=True))
            if done[number].interrupted:
                break
        if any(outcome.interrupted for outcome in done.values()):
            break
    codes = [outcome.exit_code(strict) for outcome in done.values()]
    written = write_index(store, quiet=True)
    if len(planned) > 1 and written == EXIT_PASS:
        summarise_tier(done.values(), store)
    return _worst([*codes, written])


@dataclass(frozen=True)
class Outcome:
    """A run that ended. ``missed``: the user named its benchmark or backend, and it was skipped."""

    run_dir: Path
    verdict: Verdict
    interrupted: bool
    missed: bool = False

    def exit_code(self, strict: bool = False) -> int:
        """Return 130 after an interrupt, 3 for what was named and not had, else the code of the verdict."""
        if self.interrupted:
            return EXIT_INTERRUPTED
        return self.verdict.exit_code(strict) or (EXIT_NOTHING_TO_COMPARE if self.missed else EXIT_PASS)


def run_one(planned: Plan, out: Path, earlier: Sequence[RunRecord] = ()) -> Outcome:
    """Run one plan into a folder of its own; ``earlier`` repetitions are judged with it.

    Raises ``StorageError`` where the run, its verdict or its report cannot be written; the ranks have ended then.
    """
    with Interrupts() as interrupts:
        return _run_one(planned, out, earlier, interrupts)


def _run_one(planned: Plan, out: Path, earlier: Sequence[RunRecord], interrupts: Interrupts) -> Outcome:
    config, began = planned.config, time.time()
    run_dir = prepare(planned, out)
    if earlier:
        save_repeats(run_dir, earlier)
    console.print(
        f"[bold]{config.benchmark}[/]  tier {config.tier}  backend {config.backend}  {config.world_size} rank{'s' * (config.world_size > 1)}  [dim]{shown(run_dir)}[/]"
    )
    with run_folder.attended(run_dir):
        return _finished(planned, run_dir, began, interrupts)


def _finished(planned: Plan, run_dir: Path, began: float, interrupts: Interrupts) -> Outcome:
    """Execute, judge and report a run whose folder is there."""
    ahead = _Ahead(run_dir, planned.config.benchmark)
    if planned.unavailable:
        judging.mark_skipped(Run(run_dir), planned.unavailable)
    else:
        error: Exception | None = None
        try:
            error = _execute(planned, run_dir, ahead, interrupts)
        finally:
            settled(run_dir)
        if error:
            from benchlib.launch.launch import blame_notebook

            late = isinstance(error, TimeoutError)
            blame_notebook(run_dir, "timeout" if late else "failed", f"the notebook: {error}" if late else KERNEL_DIED)
        if interrupts.seen and not (run_dir / "status.json").exists() and not run_folder.is_running(run_dir):
            from benchlib.launch.launch import write_stopped

            write_stopped(run_dir, began)
    verdict = judging.final(Run(run_dir))
    try:
        with at_work("drawing the report"):
            report = keep(run_dir, verdict, ahead.pictures)
    except StorageError:
        summarise(run_dir, verdict, None)
        raise
    summarise(run_dir, verdict, report)
    return Outcome(run_dir, verdict, interrupts.seen, _missed(planned, run_dir, verdict))


def _missed(planned: Plan, run_dir: Path, verdict: Verdict) -> bool:
    """Whether the user named what was skipped. A tier may skip what it chose, but not a backend that was named."""
    if verdict.broken or verdict.elsewhere:
        return False
    if verdict.verdict == "SKIPPED" and (not planned.of_tier or (planned.backend_named and not verdict.checks)):
        return True
    missed = dict(BENCHMARKS[planned.config.benchmark].missed(Run(run_dir)))
    named = [f"{name} {value}" for name, values in missed.items() if planned.set_by_hand(name) for value in values]
    if named:
        console.print(f"[yellow]skipped although named[/]  {escape(', '.join(named))}: exit code 3\n", soft_wrap=True)
    return bool(named)


def _record(run_dir: Path) -> RunRecord:
    run = Run(run_dir)
    return RunRecord.of(run, limits_of(run))


def _worst(codes: list[int]) -> int:
    order = (EXIT_PASS, EXIT_NOTHING_TO_COMPARE, EXIT_FAIL, EXIT_BROKEN, EXIT_INTERRUPTED)
    return max(codes, key=order.index, default=EXIT_PASS)


def _execute(planned: Plan, run_dir: Path, ahead: "_Ahead", interrupts: Interrupts) -> Exception | None:
    """Execute the notebook of a run until its end, its limit or an interrupt; return the error of one that was killed or died."""
    config = planned.config
    path = BENCHMARKS[config.benchmark].notebook
    # The notebook reads config.json in the run folder; tier and backend are what a reader of its copy wants to see.
    parameters = {"tier": config.tier, "backend": config.backend, "run_dir": str(run_dir)}
    display = _Display(run_dir, ahead)
    display.start()
    try:
        # A job elsewhere may wait in a queue first; 0 is a queue without a limit.
        queue_s = clusters.load(config.cluster).queue_s or YEAR_S if config.launcher in clusters.ELSEWHERE else 0.0
        limit_s = config.hard_limit_s + queue_s + ENDING_S
        with interrupts.allowed():
            execute(path, run_dir / "notebook.ipynb", parameters, limit_s, NOTEBOOK_S)
    except KeyboardInterrupt:
        console.print("[yellow]stopping[/]  the ranks are ended and the report is written, which takes some seconds")
    except Exception as error:  # a failing cell, a dead kernel, a timeout: the verdict names it, the report shows it
        judging.mark_notebook_error(run_dir, error)
        return error if isinstance(error, TimeoutError) or type(error).__name__ == "DeadKernelError" else None
    finally:
        display.stop()
    return None


def settled(run_dir: Path) -> None:
    """Wait until the supervisor has ended the ranks and written ``status.json``; write it where the supervisor is gone."""
    from benchlib.launch.launch import continue_supervisor, settle

    continue_supervisor(run_dir)
    end = time.monotonic() + SETTLE_S
    while time.monotonic() < end and not (run_dir / "status.json").exists() and run_folder.is_running(run_dir):
        time.sleep(0.1)
    with contextlib.suppress(UserError):  # a damaged status.json: the verdict says so
        settle(run_dir)


def at_work(words: str) -> contextlib.AbstractContextManager[Status | None]:
    """Show in a terminal that something takes its time; print nothing elsewhere."""
    return console.status(words) if console.is_terminal else contextlib.nullcontext()


class _Ahead:
    """The dark pictures of a report, drawn when the ranks have ended, while the notebook judges and draws the light ones.

    Nothing is timed then.
    """

    def __init__(self, run_dir: Path, benchmark: str) -> None:
        self._run_dir, self._benchmark = run_dir, benchmark
        self._dark: Future[Dark] | None = None

    def begin(self) -> None:
        """Begin, once, if the ranks have ended."""
        if self._dark is not None or not (self._run_dir / "status.json").exists():
            return
        from benchlib.show.report import draw_dark

        pool = ThreadPoolExecutor(1)
        self._dark = pool.submit(draw_dark, Run(self._run_dir), self._benchmark)
        pool.shutdown(wait=False)

    def pictures(self) -> "Pictures | None":
        """Return the pictures of the report, to be called when the notebook has ended; None where none were begun."""
        from benchlib.show.report import draw_pictures, pictures_in

        if self._dark is None:
            return None
        shown = pictures_in(self._run_dir / "notebook.ipynb")
        return draw_pictures(Run(self._run_dir), self._benchmark, self._dark.result(), shown)


class _Display(threading.Thread):
    """Shows the progress of a run: one live line in a terminal, a line every few seconds elsewhere."""

    def __init__(self, run_dir: Path, ahead: _Ahead) -> None:
        super().__init__(daemon=True)
        self._ahead = ahead
        self._follower, self._progress, self._end = EventFollower(run_dir), Progress(), threading.Event()

    def run(self) -> None:
        with at_work("starting") as status:
            shown, printed = "", -LINE_EVERY_S
            while not self._end.wait(0.25):
                self._ahead.begin()
                for event in self._follower.poll():
                    self._progress.update(event)
                if self._progress.phase == "done":  # for the ranks; the notebook goes on
                    self._progress.text = "checking and drawing"
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


def keep(run_dir: Path, verdict: Verdict, pictures: "Callable[[], Pictures | None]" = lambda: None) -> Path:
    """Write the verdict, at once, and the report of a run with its ``pictures``; return its path. Raises ``StorageError``."""
    from benchlib.show import report

    save_verdict(run_dir, verdict)
    return report.render(run_dir, pictures())


def write_index(store: Path, quiet: bool = False) -> int:
    """Write the list of the runs of a store; return the exit code, 2 where it cannot be written."""
    from benchlib.show import index

    try:
        path = index.render(store)
    except StorageError as error:
        return _not_stored(error)
    if not quiet:
        console.print(f"index: {shown(path)}", soft_wrap=True)
    return EXIT_PASS


def _not_stored(error: StorageError, word: str = "error") -> int:
    console.print(f"[red]{word}[/]  {escape(str(error))}", soft_wrap=True)
    return EXIT_BROKEN


def summarise(run_dir: Path, verdict: Verdict, report: Path | None) -> None:
    """Print the failed, undecided and incomplete checks of a run, the others in a line each group, its key numbers and the verdict."""
    narrow = console.width < NARROW
    heads = ["check", "status", "result"] + ([] if narrow else ["limit"])
    table = Table(*heads, box=None, padding=(0, 2, 0, 0), header_style="dim")
    # Those that need a reader, the gates first; the others take a line each group, and the report has their reasons.
    for check in sorted(
        verdict.checks, key=lambda check: (check.status != "FAIL", check.word == "INCOMPLETE", not check.gates)
    ):
        if check.word not in OPEN:
            continue
        word, colour = OPEN[check.word]
        limit = f" (limit: {check.limit})" if narrow and check.limit else ""
        cells = [check.name, f"[{colour}]{word}[/]", escape(check.reason + limit), escape(check.limit)]
        table.add_row(*cells[: len(heads)])
    if table.row_count:
        console.print(table)
    if passed := [check for check in verdict.checks if check.status == "PASS"]:
        console.print(f"[green]passed[/]  {len(passed)} check{'s' * (len(passed) != 1)}")
    for message in messages(Run(run_dir)):
        console.print(f"[yellow]note[/]  {escape(message)}", soft_wrap=True)
    if numbers := _key_numbers(run_dir):
        console.print(f"key numbers  {escape(numbers)}", soft_wrap=True)
    skipped = [check for check in verdict.checks if check.word == "SKIPPED"]
    if skipped:
        names = ", ".join(
            check.name + (f" (measured {quantity(check.value, check.unit)})" if check.value is not None else "")
            for check in skipped
        )
        console.print(f"[yellow]not evaluated[/]  {escape(names)}", soft_wrap=True)
    uncompared = [check for check in verdict.checks if check.status in ("NO_BASELINE", "NOT_COMPARABLE")]
    if uncompared:
        why = uncompared[0].reason.partition("; ")[2] or uncompared[0].reason
        console.print(f"[blue]not compared[/]  {counted(len(uncompared), 'metric')}: {escape(why)}", soft_wrap=True)
        run = Run(run_dir)
        if verdict.verdict == "PASS" and (how := baselines.continued(run)):
            why = f"it was {how}, and its speed is that of the last part"
            console.print(f"[dim]this run cannot become a baseline: {why}; run it again undisturbed[/]", soft_wrap=True)
        elif verdict.verdict == "PASS" and not run.config.planted_slowdown:
            again = f'benchlib baseline accept {shlex.quote(_short(run_dir))} --reason "..."'
            console.print(f"[dim]to compare later runs with this one: {escape(again)}[/]", soft_wrap=True)
    if verdict.gate:
        console.print(f"[dim]{escape(verdict.gate['sentence'])}[/]", soft_wrap=True)
    console.print(f"[bold]{_word(run_dir, verdict)}[/]  {escape(verdict.sentence)}", soft_wrap=True)
    if report is not None:
        console.print(f"report: {shown(report)}\n", soft_wrap=True)


def summarise_tier(outcomes: Iterable["Outcome"], store: Path) -> None:
    """Print the verdicts of a tier's benchmarks, each with its sentence, and the path of the index."""
    table = Table("benchmark", "verdict", "summary", box=None, padding=(0, 2, 0, 0), header_style="dim")
    for outcome in outcomes:
        table.add_row(
            Run(outcome.run_dir).config.benchmark,
            _word(outcome.run_dir, outcome.verdict),
            escape(outcome.verdict.sentence),
        )
    console.print(table)
    console.print(f"index: {shown(store / 'index.html')}", soft_wrap=True)


def _key_numbers(run_dir: Path) -> str:
    """Return the key numbers of a run in one line, '' where it left none."""
    run = Run(run_dir)
    result = tolerant(run, [])(lambda: run.result)  # a damaged one is in the verdict already
    return "; ".join(f"{row['label']} {row['value']} {row['unit']}".strip() for row in cards(result)) if result else ""


def _word(run_dir: Path, verdict: Verdict) -> str:
    """Return the word for a run in its colour: its verdict, or BROKEN, STOPPED or DAMAGED."""
    word, *_ = state(Run(run_dir), verdict.model_dump())
    return f"[{COLOURS.get(verdict.verdict, 'white')}]{word}[/]"


def shown(path: Path) -> str:
    """Return a path for the console: relative where it lies below the working folder, on one line, its signs escaped."""
    return escape(terminal.one_line(_short(path)))


def _short(path: Path) -> str:
    with contextlib.suppress(ValueError):
        path = path.resolve().relative_to(Path.cwd())
    return str(path)


def report_all(runs: Iterable[Path], out: Path | None) -> int:
    """Judge and render stored runs again and refresh their stores' lists; return 2 where one of these failed, else 0."""
    folder = out or outputs()
    chosen = list(runs) or list(find_runs(folder))
    if not chosen:
        raise UserError(f"{folder} holds no runs yet: `benchlib run quick` makes the first")
    codes = [_report(run_dir) for run_dir in chosen]
    # A run in STORE/<tier>-<day>/<run> changes the list of its own store. A copy elsewhere has no list.
    places = [run_dir.resolve().parent for run_dir in chosen]
    for store in sorted({place.parent for place in places if _DAY.fullmatch(place.name)}):
        codes.append(write_index(store))
    sys.stdout.flush()
    return max(codes)


def _require_benchmark(run: Run) -> None:
    """Raise ``UserError`` for a run whose benchmark is not here: what cannot be judged is not called broken."""
    values = tolerant(run, [])(lambda: read_object(run.path / "config.json", {"benchmark": str}))
    own = BENCHMARKS.get(values["benchmark"]) if values else None
    if own and own.fault:
        raise UserError(own.fault)


def _report(run_dir: Path) -> int:
    """Judge and render one run; return the exit code."""
    try:
        return _judged_and_rendered(run_dir)
    except Exception as error:  # the others are reported all the same
        reason = str(error) if isinstance(error, (UserError, OSError)) else unexpected(error)
        reason = reason.removeprefix(f"{run_dir}: ")
        console.print(f"[red]error[/]  {shown(run_dir)}: {escape(reason)}", soft_wrap=True)
        return EXIT_BROKEN


def _judged_and_rendered(run_dir: Path) -> int:
    run = Run(run_dir)
    if not run.recognised:
        raise UserError("not a run folder of benchlib: nothing is written there")
    _require_benchmark(run)
    if run_folder.at_work(run_dir):
        console.print(f"RUNNING  {shown(run_dir)}: still going on, nothing changed", soft_wrap=True)
        return EXIT_PASS
    settled(run_dir)
    verdict = judging.judged(Run(run_dir))
    try:
        place = shown(keep(run_dir, verdict))
        code = EXIT_PASS
    except StorageError as error:
        place, code = f"{shown(run_dir)}: {escape(verdict.sentence)}\n[red]error[/]  {escape(str(error))}", EXIT_BROKEN
    console.print(f"{_word(run_dir, verdict)}  {place}", soft_wrap=True)
    if verdict.verdict != "PASS" and code == EXIT_PASS:
        console.print(f"  {escape(terminal.one_line(verdict.sentence))}", soft_wrap=True)
    return code
