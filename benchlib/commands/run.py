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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
from rich.markup import escape
from rich.status import Status
from rich.text import Text

from benchlib.benchmarks import BENCHMARKS
from benchlib.commands import EXIT_INTERRUPTED, OUT, SET, user_errors
from benchlib.commands import plans as planning
from benchlib.config import cluster as clusters
from benchlib.core import run_folder, terminal
from benchlib.core.errors import StorageError, UserError, unexpected
from benchlib.core.events import EventFollower, Progress
from benchlib.core.files import outputs
from benchlib.core.imports import importing_jupyter
from benchlib.core.interrupts import Interrupts
from benchlib.core.text import counted, look, quantity
from benchlib.judge import baselines
from benchlib.judge import verdict as judging
from benchlib.judge.checks import save_verdict
from benchlib.judge.regression import save_repeats
from benchlib.launch import plan
from benchlib.launch.plan import Plan, prepare
from benchlib.results.record import Record, load
from benchlib.results.run import Run, check_place, find_runs, no_runs
from benchlib.results.verdict import EXIT_BROKEN, EXIT_FAIL, EXIT_NOTHING_TO_COMPARE, EXIT_PASS, Verdict
from benchlib.show.digest import cards, messages
from benchlib.show.headless import NOTEBOOK_S, execute
from benchlib.show.kernels import warm_up

console = terminal.console(least_width=120)
LINE_EVERY_S = 10.0  # between progress lines where the output is not a terminal
YEAR_S = 365 * 86400.0
ENDING_S = 2.0  # for it to learn that they were
KERNEL_DIED = "the notebook's kernel died"
SETTLE_S = 20.0  # for the supervisor to write how the ranks ended, after the notebook has gone
NARROW = 100  # columns; below, a limit stands behind the result instead of in a column of its own
OPEN = {
    "FAIL": "fail",
    "DIFFERS": "differs",
    "AMBIGUOUS": "undecided",
    "INCOMPLETE": "incomplete",
}  # that need a reader
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
    earlier: dict[int, list[Record]] = {number: [] for number in range(len(planned))}
    for turn in range(1, repeat + 1):
        due = [n for n in earlier if n not in done or done[n].verdict.verdict == "AMBIGUOUS"]
        if not due:
            break
        for number in due:
            if turn > 1:
                _say("undecided", "yellow", f"repetition {turn} of at most {repeat}")
                earlier[number].append(_repetition(done[number].run_dir))
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


def run_one(planned: Plan, out: Path, earlier: Sequence[Record] = ()) -> Outcome:
    """Run one plan into a folder of its own; ``earlier`` repetitions are judged with it.

    Raises ``StorageError`` where the run, its verdict or its report cannot be written; the ranks have ended then.
    """
    config, began = planned.config, time.time()
    with contextlib.ExitStack() as until_reported:
        interrupts = until_reported.enter_context(Interrupts())
        run_dir = prepare(planned, out)
        if earlier:
            save_repeats(run_dir, earlier)
        what = f"tier {config.tier}  backend {config.backend}  {counted(config.world_size, 'rank')}"
        console.print(f"[bold]{config.benchmark}[/]  {what}  [dim]{shown(run_dir)}[/]")
        until_reported.enter_context(run_folder.attended(run_dir))
        if planned.unavailable:
            judging.mark_skipped(Run(run_dir), planned.unavailable)
        else:
            _work(planned, run_dir, began, interrupts)
        verdict = judging.final(Run(run_dir))
        try:
            with at_work("drawing the report"):
                report = keep(run_dir, verdict)
        except StorageError:
            summarise(run_dir, verdict, None)
            raise
        summarise(run_dir, verdict, report)
        return Outcome(run_dir, verdict, interrupts.seen, _missed(planned, run_dir, verdict))


def _work(planned: Plan, run_dir: Path, began: float, interrupts: Interrupts) -> None:
    """Execute the notebook of a run until all has ended, and write down how where nothing else did."""
    from benchlib.launch.launch import blame_notebook, write_stopped

    error: Exception | None = None
    try:
        error = _execute(planned, run_dir, interrupts)
    finally:
        settled(run_dir)
    if error:
        late = isinstance(error, TimeoutError)
        blame_notebook(run_dir, "timeout" if late else "failed", f"the notebook: {error}" if late else KERNEL_DIED)
    if interrupts.seen and not (run_dir / "status.json").exists() and not run_folder.is_running(run_dir):
        write_stopped(run_dir, began)


def _missed(planned: Plan, run_dir: Path, verdict: Verdict) -> bool:
    """Whether the user named what was skipped. A tier may skip what it chose, but not a backend that was named."""
    if verdict.broken or verdict.elsewhere:
        return False
    if verdict.verdict == "SKIPPED" and (not planned.of_tier or (planned.backend_named and not verdict.checks)):
        return True
    missed = dict(BENCHMARKS[planned.config.benchmark].spec.undone(Run(run_dir)))
    named = [f"{name} {value}" for name, values in missed.items() if planned.set_by_hand(name) for value in values]
    if named:
        _say("skipped although named", "yellow", f"{', '.join(named)}: exit code 3\n")
    return bool(named)


def _repetition(run_dir: Path) -> Record:
    record = load(run_dir)
    return record.kept(record.limits)


def _worst(codes: list[int]) -> int:
    order = (EXIT_PASS, EXIT_NOTHING_TO_COMPARE, EXIT_FAIL, EXIT_BROKEN, EXIT_INTERRUPTED)
    return max(codes, key=order.index, default=EXIT_PASS)


def _execute(planned: Plan, run_dir: Path, interrupts: Interrupts) -> Exception | None:
    """Execute the notebook of a run until its end, its limit or an interrupt; return the error of one that was killed or died."""
    config = planned.config
    path = BENCHMARKS[config.benchmark].notebook
    # The notebook reads config.json in the run folder; tier and backend are what a reader of its copy wants to see.
    parameters = {"tier": config.tier, "backend": config.backend, "run_dir": str(run_dir)}
    display = _Display(run_dir)
    display.start()
    try:
        # A job elsewhere may wait in a queue first; 0 is a queue without a limit.
        queue_s = clusters.load(config.cluster).queue_s or YEAR_S if config.launcher in clusters.ELSEWHERE else 0.0
        limit_s = config.hard_limit_s + queue_s + ENDING_S
        with interrupts.allowed():
            execute(path, run_dir / "notebook.ipynb", parameters, limit_s, NOTEBOOK_S)
    except KeyboardInterrupt:
        _say("stopping", "yellow", "the ranks are ended and the report is written, which takes some seconds")
    except Exception as error:  # a failing cell, a dead kernel, a timeout: the verdict names it, the report shows it
        judging.mark_notebook_error(run_dir, error)
        return error if isinstance(error, TimeoutError) or type(error).__name__ == "DeadKernelError" else None
    finally:
        display.stop()
    return None


def settled(run_dir: Path) -> None:
    """Wait until the supervisor has ended the ranks and written ``status.json``; write it where the supervisor is gone."""
    from benchlib.launch.launch import settle

    end = time.monotonic() + SETTLE_S
    with contextlib.suppress(UserError):  # a damaged status.json: the verdict says so
        while time.monotonic() < end and run_folder.is_running(run_dir) and settle(run_dir) is None:
            time.sleep(0.1)
        settle(run_dir)


def at_work(words: str) -> contextlib.AbstractContextManager[Status | None]:
    """Show in a terminal that something takes its time; print nothing elsewhere."""
    return console.status(words) if console.is_terminal else contextlib.nullcontext()


class _Display(threading.Thread):
    """Shows the progress of a run: one live line in a terminal, a line every few seconds elsewhere."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__(daemon=True)
        self._follower, self._progress, self._end = EventFollower(run_dir), Progress(), threading.Event()

    def run(self) -> None:
        with at_work("starting") as status:
            shown, printed = "", -LINE_EVERY_S
            while not self._end.wait(0.25):
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


def keep(run_dir: Path, verdict: Verdict) -> Path:
    """Write the verdict, at once, and the report of a run; return its path. Raises ``StorageError``."""
    from benchlib.show import report

    save_verdict(run_dir, verdict)
    return report.render(run_dir)


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
    _say(word, "red", str(error))
    return EXIT_BROKEN


def _say(word: str, style: str, text: str = "") -> None:
    console.print(Text.assemble((word, style), f"  {text}" if text else ""), soft_wrap=True)


def _seen(run_dir: Path, verdict: Verdict) -> Record:
    """Return a run as a list sees it with this verdict."""
    return load(run_dir, whole=False).model_copy(update={"verdict": verdict})


def summarise(run_dir: Path, verdict: Verdict, report: Path | None) -> None:
    """Print the failed, undecided and incomplete checks of a run, the others in a line each group, its key numbers and the verdict."""
    narrow = console.width < NARROW
    rows = []
    # Those that need a reader, the gates first; the others take a line each group, and the report has their reasons.
    for check in sorted(
        verdict.checks, key=lambda check: (check.status != "FAIL", check.word == "INCOMPLETE", not check.gates)
    ):
        if check.word not in OPEN:
            continue
        limit = f" (limit: {check.limit})" if narrow and check.limit else ""
        cells = {
            "check": check.name,
            "status": Text(OPEN[check.word], look(check.word).colour),
            "result": check.reason + limit,
        }
        rows.append(cells if narrow else cells | {"limit": check.limit})
    if rows:
        console.print(terminal.table(rows))
    if passed := sum(check.status == "PASS" for check in verdict.checks):
        _say("passed", "green", counted(passed, "check"))
    run, record = Run(run_dir), _seen(run_dir, verdict)
    for message in messages(run):
        _say("note", "yellow", message)
    if numbers := cards(record.result) if record.result else []:  # a damaged one is in the verdict already
        words = "; ".join(f"{row['label']} {row['value']} {row['unit']}".strip() for row in numbers)
        _say("key numbers", "", words)
    if skipped := [check for check in verdict.checks if check.word == "SKIPPED"]:
        values = (f" (measured {quantity(one.value, one.unit)})" if one.value is not None else "" for one in skipped)
        _say(
            "not evaluated", "yellow", ", ".join(map("".join, zip((one.name for one in skipped), values, strict=True)))
        )
    if uncompared := [check for check in verdict.checks if check.status in ("NO_BASELINE", "NOT_COMPARABLE")]:
        why = uncompared[0].reason.partition("; ")[2] or uncompared[0].reason
        _say("not compared", "blue", f"{counted(len(uncompared), 'metric')}: {why}")
        if verdict.verdict == "PASS" and (how := baselines.continued(run)):
            why = f"it was {how}, and its speed is that of the last part"
            _say(f"this run cannot become a baseline: {why}; run it again undisturbed", "dim")
        elif verdict.verdict == "PASS" and not run.config.planted_slowdown:
            again = f'benchlib baseline accept {shlex.quote(_short(run_dir))} --reason "..."'
            _say(f"to compare later runs with this one: {again}", "dim")
    if verdict.gate:
        _say(verdict.gate["sentence"], "dim")
    _say(record.word, f"bold {look(record.word).colour}", verdict.sentence)
    if report is not None:
        console.print(f"report: {shown(report)}\n", soft_wrap=True)


def summarise_tier(outcomes: Iterable["Outcome"], store: Path) -> None:
    """Print the verdicts of a tier's benchmarks, each with its sentence, and the path of the index."""
    rows = [
        {
            "benchmark": (record := _seen(outcome.run_dir, outcome.verdict)).benchmark,
            "verdict": Text(record.word, look(record.word).colour),
            "summary": outcome.verdict.sentence,
        }
        for outcome in outcomes
    ]
    console.print(terminal.table(rows))
    console.print(f"index: {shown(store / 'index.html')}", soft_wrap=True)


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
        raise UserError(no_runs(folder))
    codes = [_report(run_dir) for run_dir in chosen]
    # A run in STORE/<tier>-<day>/<run> changes the list of its own store. A copy elsewhere has no list.
    places = [run_dir.resolve().parent for run_dir in chosen]
    for store in sorted({place.parent for place in places if _DAY.fullmatch(place.name)}):
        codes.append(write_index(store))
    sys.stdout.flush()
    return max(codes)


def _report(run_dir: Path) -> int:
    """Judge and render one run; return the exit code."""
    try:
        return _judged_and_rendered(run_dir)
    except Exception as error:  # the others are reported all the same
        reason = str(error) if isinstance(error, (UserError, OSError)) else unexpected(error)
        reason = reason.removeprefix(f"{run_dir}: ")
        _say("error", "red", f"{terminal.one_line(_short(run_dir))}: {reason}")
        return EXIT_BROKEN


def _judged_and_rendered(run_dir: Path) -> int:
    run = Run(run_dir)
    if not run.recognised:
        raise UserError("not a run folder of benchlib: nothing is written there")
    own = BENCHMARKS.get(load(run_dir, whole=False).benchmark)
    if own and own.fault:  # what cannot be judged is not called broken
        raise UserError(own.fault)
    if run_folder.at_work(run_dir):
        console.print(f"RUNNING  {shown(run_dir)}: still going on, nothing changed", soft_wrap=True)
        return EXIT_PASS
    settled(run_dir)
    verdict, place = judging.judged(Run(run_dir)), terminal.one_line(_short(run_dir))
    failed: StorageError | None = None
    try:
        place = terminal.one_line(_short(keep(run_dir, verdict)))
    except StorageError as error:
        failed, place = error, f"{place}: {verdict.sentence}"
    word = _seen(run_dir, verdict).word
    _say(word, look(word).colour, place)
    if failed:
        return _not_stored(failed)
    if verdict.verdict != "PASS":
        console.print(f"  {escape(terminal.one_line(verdict.sentence))}", soft_wrap=True)
    return EXIT_PASS


@click.command()
@click.argument("target")
@click.argument("loose", nargs=-1, metavar="")
@click.option("--tier", "-t", help="How much work: smoke, quick, nightly or weekend. [default: smoke]")
@click.option(
    "--backend", "-b", default="auto", show_default=True, help="Where: auto, cpu, cuda, rocm, mps, xpu or tpu."
)
@SET
@OUT
@click.option("--resume", metavar="RUN", help="Continue an interrupted run from its last checkpoint.")
@click.option(
    "--max-restarts",
    type=click.IntRange(0, 100),
    metavar="N",
    help="Restart the ranks after a failure, up to N times: --set max_restarts=N, with launcher=torchrun unless set.",
)
@click.option(
    "--repeat",
    type=click.IntRange(1, 20),
    default=1,
    metavar="N",
    help="Repeat a benchmark that noise leaves undecided, up to N runs in all.",
)
@click.option("--strict", is_flag=True, help="Exit with 3 if a gate was skipped or had no baseline.")
@click.option(
    "--dry-run",
    is_flag=True,
    help="Show what would run: a table for a tier, settings and command lines for a benchmark; start nothing.",
)
@click.option(
    "--all",
    "everything",
    is_flag=True,
    help="With --dry-run: every benchmark of a tier in full, every parameter with its meaning.",
)
@click.option("--manifest", is_flag=True, help="Print only the manifest or script for the cluster; start nothing.")
@user_errors
def verb(
    target: str,
    loose: tuple[str, ...],
    tier: str | None,
    backend: str,
    pairs: tuple[str, ...],
    out: Path | None,
    resume: str | None,
    max_restarts: int | None,
    repeat: int,
    strict: bool,
    dry_run: bool,
    everything: bool,
    manifest: bool,
) -> None:
    """Run TARGET: a benchmark, or a tier (quick) with all its benchmarks. `benchlib list` names them."""
    if loose:
        pairs_of = " ".join(f"--set {word}" for word in loose if "=" in word)
        remedy = f"set parameters with {pairs_of}" if pairs_of else "one benchmark or tier at a time"
        raise UserError(f"{' '.join(loose)}: unexpected after {target}: {remedy}")
    if everything and not dry_run:
        raise UserError("--all: shows every parameter of a plan, with --dry-run")
    if max_restarts is not None:  # in front: --set overrides it
        pairs = (*(["launcher=torchrun"] if max_restarts else []), f"max_restarts={max_restarts}", *pairs)
    if not (dry_run or manifest):  # before torch is asked for its devices, which takes seconds
        check_place(out or outputs())
    with at_work("asking torch for the devices"):
        ahead = None if dry_run or manifest else get_ready
        plans = plan.plans(target, tier, backend, pairs, resume, ahead)
    if manifest:
        click.echo("---\n".join(planning.submission(planned, out) for planned in plans), nl=False)
        return
    if dry_run:
        planning.show(plans, out, everything)
        return
    planning.check_launchers(plans)
    sys.exit(run_all(plans, out, strict, repeat))


@click.command()
@click.argument("runs", nargs=-1, type=click.Path(path_type=Path))
@OUT
@user_errors
def report(runs: tuple[Path, ...], out: Path | None) -> None:
    """Judge and render stored RUNS again, without running anything. [default: all]"""
    sys.exit(report_all(runs, out))
