"""``benchlib run``: from plans to exit codes, or with ``--dry-run`` and ``--manifest`` what would run.

A run executes its notebook into the run folder; the notebook starts the ranks and judges what they left. What it could not
do any more is done here, then the report is rendered and the terminal shows the checks.
"""

import contextlib
import itertools
import shlex
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.markup import escape
from rich.text import Text

from benchlib.benchmarks import BENCHMARKS
from benchlib.commands import BACKEND, OUT, SET
from benchlib.commands.output import console, place, say, show_table
from benchlib.config import cluster as clusters
from benchlib.config.schema import tier_names
from benchlib.core import run_folder
from benchlib.core.errors import UserError
from benchlib.core.events import EventFollower, Progress
from benchlib.core.files import outputs
from benchlib.core.interrupts import EXIT_INTERRUPTED, Interrupts
from benchlib.core.machine import usable_cores
from benchlib.core.terminal import one_line
from benchlib.core.text import counted, duration, look
from benchlib.judge import baselines
from benchlib.judge import verdict as judging
from benchlib.judge.checks import save_verdict
from benchlib.judge.regression import save_repeats
from benchlib.launch import plan
from benchlib.launch.launchers import LAUNCHERS
from benchlib.launch.plan import Plan, prepare
from benchlib.results.record import Record, load
from benchlib.results.run import Run, check_place, run_path
from benchlib.results.verdict import EXIT_BROKEN, EXIT_FAIL, EXIT_NOTHING_TO_COMPARE, EXIT_PASS, Verdict
from benchlib.show import exports, headless
from benchlib.show.digest import messages
from benchlib.show.headless import NOTEBOOK_S
from benchlib.show.widgets import Lines

YEAR_S = 365 * 86400.0
SETTLE_S = 20.0  # for the supervisor to write how the ranks ended, after the notebook has gone
KERNEL_DIED = "the notebook's kernel died"
OPEN = {"FAIL": "fail", "DIFFERS": "differs", "AMBIGUOUS": "undecided", "INCOMPLETE": "incomplete"}  # need a reader
NOT_SHOWN = ("kind", "source", "t", "wall")  # of an event
CODES = (EXIT_PASS, EXIT_NOTHING_TO_COMPARE, EXIT_FAIL, EXIT_BROKEN, EXIT_INTERRUPTED)  # the worst last


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


def run_all(
    planned: list[Plan], out: Path | None, strict: bool, repeat: int = 1, verbose: bool = False, suite: str = ""
) -> int:
    """Run all plans and return the worst exit code. The results of a ``suite`` go to a file of that name in the day's folder.

    A benchmark that noise leaves undecided runs again until it is decided, ``repeat`` times in all at most, and so does one whose
    first run alone FAILs against the accepted runs: a neighbour may have taken all of it. The benchmarks are interleaved, so that
    a disturbance of minutes does not hit all repetitions of one of them.
    """
    store, done, pages = out or outputs(), dict[int, Outcome](), not headless.lacking()
    earlier = [list[Record]() for _ in planned]
    for turn, number in itertools.product(range(repeat), range(len(planned))):
        if turn:
            verdict = done[number].verdict
            if verdict.verdict != "AMBIGUOUS" and not (turn == 1 and verdict.regressed):
                continue
            word = "undecided" if verdict.verdict == "AMBIGUOUS" else "worse than accepted"
            say((word, "yellow"), f"  repetition {turn + 1} of at most {repeat}")
            record = load(done[number].run_dir)
            earlier[number].append(record.kept(record.limits))
        done[number] = run_one(planned[number], store, earlier[number], verbose)
        if done[number].interrupted:
            break
    if pages:
        from benchlib.show import index

        index.render(store)
    if suite:
        folders = [done[number].run_dir for number in sorted(done)]
        written = exports.export(list(map(load, folders)), "results", str(folders[0].parent / f"{suite}.json"))
        say(written + (f"\nindex: {place(store / 'index.html')}" if pages else ""))
    elif len(planned) > 1 and pages:
        summarise_tier(done.values(), store)
    return max((outcome.exit_code(strict) for outcome in done.values()), key=CODES.index)


def run_one(planned: Plan, out: Path, earlier: Sequence[Record] = (), verbose: bool = False) -> Outcome:
    """Run one plan into a folder of its own; ``earlier`` repetitions are judged with it. ``verbose`` shows every event and check.

    Raises ``StorageError`` where the run, its verdict or its report cannot be written; the ranks have ended then.
    """
    config = planned.config
    with Interrupts() as interrupts:
        run_dir = prepare(planned, out)
        if earlier:
            save_repeats(run_dir, earlier)
        what = f"tier {config.tier}  backend {config.backend}  {counted(config.world_size, 'rank')}"
        say((config.benchmark, "bold"), f"  {what}  ", (place(run_dir), "dim"))
        cores = usable_cores()
        if config.backend == "cpu" and config.nproc > cores and config.launcher not in clusters.ELSEWHERE:
            shared = f"{config.nproc} ranks share {counted(cores, 'core')}"
            say(("note", "yellow"), f"  {shared}: their speeds say little about ranks of their own")
        if planned.unavailable:
            judging.mark_skipped(Run(run_dir), planned.unavailable)
        else:
            _work(config, run_dir, interrupts, verbose)
        verdict = judging.final(Run(run_dir))
        summarise(run_dir, verdict, verbose)
        if lack := headless.lacking():
            save_verdict(run_dir, verdict)
            say(("no report", "yellow"), f"  {lack}\n")
        else:
            with console.status("drawing the report"):
                say(f"report: {place(keep(run_dir, verdict))}\n")
        return Outcome(run_dir, verdict, interrupts.seen, _missed(planned, run_dir, verdict))


def _work(config: Any, run_dir: Path, interrupts: Interrupts, verbose: bool) -> None:
    """Execute the notebook of a run until all has ended, and write down how where nothing else did.

    Without the extra ``notebooks`` the ranks run without one.
    """
    from benchlib.launch.launch import RankFailed, blame_notebook, write_lost
    from benchlib.launch.launch import execute as execute_ranks

    blame = None
    # The notebook reads config.json in the run folder; tier and backend are what a reader of its copy wants to see.
    parameters = {"tier": config.tier, "backend": config.backend, "run_dir": str(run_dir)}
    # A job elsewhere may wait in a queue first; 0 is a queue without a limit.
    queue_s = clusters.load(config.cluster).queue_s or YEAR_S if config.launcher in clusters.ELSEWHERE else 0.0
    limit_s, notebook = config.hard_limit_s + queue_s + NOTEBOOK_S, BENCHMARKS[config.benchmark].notebook
    try:
        with _progress(run_dir, verbose), interrupts.allowed():
            if headless.lacking():
                execute_ranks(run_dir)
            else:
                headless.execute(notebook, run_dir / "notebook.ipynb", parameters, limit_s)
    except RankFailed:  # status.json says how
        pass
    except KeyboardInterrupt:
        say(("stopping", "yellow"), "  the ranks are ended and the report is written, which takes some seconds")
    except Exception as error:  # a failing cell, a dead kernel, a timeout: the verdict names it, the report shows it
        judging.mark_notebook_error(run_dir, error)
        late, dead = isinstance(error, TimeoutError), type(error).__name__ == "DeadKernelError"
        blame = ("timeout", f"the notebook: {error}") if late else ("failed", KERNEL_DIED) if dead else None
    finally:
        settled(run_dir)
    if blame:
        blame_notebook(run_dir, *blame)
    if interrupts.seen and not (run_dir / "status.json").exists() and not run_folder.is_running(run_dir):
        write_lost(run_dir, "stopped by the user before a rank was started", "stopped")


def settled(run_dir: Path) -> None:
    """Wait until the supervisor has ended the ranks and written ``status.json``; write it where the supervisor is gone."""
    from benchlib.launch.launch import settle

    end = time.monotonic() + SETTLE_S
    with contextlib.suppress(UserError):  # a damaged status.json: the verdict says so
        while time.monotonic() < end and run_folder.is_running(run_dir) and settle(run_dir) is None:
            time.sleep(0.1)
        settle(run_dir)


def _missed(planned: Plan, run_dir: Path, verdict: Verdict) -> bool:
    """Whether the user named what was skipped. A tier may skip what it chose, but not a backend that was named."""
    if verdict.broken or verdict.elsewhere:
        return False
    if verdict.verdict == "SKIPPED" and (not planned.of_tier or not (planned.auto or verdict.checks)):
        return True
    undone = BENCHMARKS[planned.config.benchmark].spec.undone(Run(run_dir))
    named = [
        f"{name} {value}" for name, values in dict(undone).items() if planned.set_by_hand(name) for value in values
    ]
    if named:
        say(("skipped although named", "yellow"), f"  {', '.join(named)}: exit code 3\n")
    return bool(named)


@contextlib.contextmanager
def _progress(run_dir: Path, verbose: bool) -> Iterator[None]:
    """Show the progress of a run: one live line in a terminal, a line every few seconds elsewhere; ``verbose``: every event."""
    ended = threading.Event()
    follower = threading.Thread(target=_follow, args=(run_dir, ended, verbose), daemon=True)
    follower.start()
    try:
        yield
    finally:
        ended.set()
        follower.join()


def _follow(run_dir: Path, ended: threading.Event, verbose: bool) -> None:
    follower, progress, lines = EventFollower(run_dir), Progress(), Lines(lambda line: say(f"  {line}"))
    with console.status("starting") as status:
        while not ended.wait(0.25):
            for event in follower.poll():
                progress.update(event)
                if verbose:
                    facts = ", ".join(f"{name}={value}" for name, value in event.items() if name not in NOT_SHOWN)
                    say(f"  {event['source']}  {event['kind']}  {one_line(facts)}", style="dim")
            if progress.phase == "done":  # for the ranks; the notebook goes on
                progress.text = "checking and drawing"
            status.update(escape(progress.line()))
            if not console.is_terminal and not verbose:
                lines.show(progress)


def keep(run_dir: Path, verdict: Verdict) -> Path:
    """Write the verdict, at once, and the report of a run; return its path. Raises ``StorageError``."""
    from benchlib.show import report

    save_verdict(run_dir, verdict)
    return report.render(run_dir)


def summarise(run_dir: Path, verdict: Verdict, verbose: bool = False) -> None:
    """Print the failed, undecided and incomplete checks of a run, the others in a line each group, its key numbers and the verdict.

    ``verbose`` prints every check.
    """
    checks, record, run = verdict.checks, load(run_dir, False, verdict), Run(run_dir)
    # Those that need a reader, the gates first; the others take a line each group, and the report has their reasons.
    first = sorted(checks, key=lambda item: (item.status != "FAIL", item.word == "INCOMPLETE", not item.gates))
    show_table(
        {
            "check": check.name,
            "status": Text(OPEN.get(check.word, check.word.lower()), look(check.word).colour),
            "result": check.reason + (f" (limit: {check.limit})" if check.limit else ""),
        }
        for check in first
        if verbose or check.word in OPEN
    )
    passed = sum(check.status == "PASS" for check in checks)
    skipped = [check.name for check in checks if check.word == "SKIPPED"]
    uncompared = [check.reason for check in checks if check.status in ("NO_BASELINE", "NOT_COMPARABLE")]
    causes = [reason.partition("; ")[2] or reason for reason in uncompared[:1]]
    lines = [
        ("passed", "green", counted(passed, "check") if passed else ""),
        *(("note", "yellow", message) for message in messages(run)),
        ("key numbers", "", "; ".join(f"{label} {metric.text}" for label, metric in record.key_numbers)),
        ("not evaluated", "yellow", ", ".join(skipped)),
        ("not compared", "blue", f"{counted(len(uncompared), 'metric')}: {causes[0]}" if causes else ""),
    ]
    for word, style, text in lines:
        if text:
            say((word, style), f"  {text}")
    if uncompared and verdict.verdict == "PASS" and not (baselines.continued(run) or run.config.planted_slowdown):
        again = f'benchlib baseline accept {shlex.quote(place(run_dir))} --reason "..."'
        say(f"to compare later runs with this one: {again}", style="dim")
    if verdict.gate:
        say(verdict.gate["sentence"], style="dim")
    say((record.word, f"bold {look(record.word).colour}"), f"  {verdict.sentence}")


def summarise_tier(outcomes: Iterable[Outcome], store: Path) -> None:
    from benchlib.show import machine_page

    records = [load(outcome.run_dir, False, outcome.verdict) for outcome in outcomes]
    show_table(
        {"benchmark": run.benchmark, "verdict": Text(run.word, look(run.word).colour), "summary": run.verdict.sentence}
        for run in records
        if run.verdict
    )
    folders = [Path(run.folder) for run in records]
    try:
        with console.status("making the page of the machine"):
            page = place(machine_page.render(folders[0].parent, folders))
        say(("page", "bold"), f"  {page}")
    except UserError as error:  # the verdicts and the exit code hold without it
        say(("no page", "yellow"), f"  {error}")
    say(f"index: {place(store / 'index.html')}")


def submission(planned: Plan, out: Path | None) -> str:
    """Return the manifest or script that the run would hand to its cluster, under the name of a run that begins now.

    Raises ``UserError`` for a launcher that hands over none.
    """
    config = planned.config
    job = LAUNCHERS[config.launcher](config, run_path(config, out or outputs()))
    if not job.files:
        remedy = "--manifest needs --set launcher=kubernetes, slurm or torchx"
        raise UserError(f"launcher={config.launcher} hands nothing to a cluster: {remedy}")
    return next(iter(job.files.values()))


def show_tier(planned: Sequence[Plan]) -> None:
    """Print a line a benchmark."""
    config, rows = planned[0].config, list[dict[str, Any]]()
    for item in planned:
        skipped = Text.assemble(("SKIPPED", "yellow"), f": {item.unavailable}")
        work = {"work": item.config.expected_work(), "budget": f"{item.config.budget_s:.0f} s"}
        rows.append(
            {"benchmark": item.config.benchmark} | ({"work": skipped, "budget": ""} if item.unavailable else work)
        )
    say((f"tier {config.tier}", "bold"), f", backend {config.backend}: {counted(len(rows), 'benchmark')}")
    show_table(rows, right=("budget",), whole=("budget",))
    say(f"at most {duration(sum(item.config.budget_s for item in planned if not item.unavailable))} by the budgets")
    say(f"in full: benchlib run {config.benchmark} --tier {planned[0].tier} --dry-run", style="dim")


def show_plan(planned: Plan, folder: Path) -> None:
    """Print every parameter, the command lines and the expected work."""
    config, why, origins = planned.config, planned.unavailable, planned.resolved.origins
    missing = f" (not available: {why})" if why else ""
    say((config.benchmark, "bold"), f", tier {config.tier}, backend {config.backend}", (missing, "yellow"))
    rows = [
        {"parameter": name, "value": getattr(config, name), "from": origins.get(name, ""), "meaning": field.description}
        for name, field in type(config).model_fields.items()
        if field.description
    ]
    show_table(rows, whole=("parameter", "from"))
    job = LAUNCHERS[config.launcher](config, folder)
    say("\n", ("starts", "bold"), f"\n  {shlex.join(job.command)}")
    for name, value in sorted(job.env.items()):
        say(f"  with {name}={value}")
    for name, content in job.files.items():
        say("\n", (name, "bold"), " in the run folder\n", content)
    say("\n", ("expected work", "bold"), f"\n  {config.expected_work()}")
    say(
        f"  the ranks end by themselves within {config.allowed_s:.0f} s after their start-up and are ended after "
        f"{config.hard_limit_s:.0f} s at the latest; the notebook's start and its pictures come on top, at most "
        f"{NOTEBOOK_S:.0f} s after the ranks"
    )


@click.command()
@click.argument("target")
@click.option("--tier", "-t", help=f"How much work: {', '.join(tier_names())}, or a file FILE.yaml. [default: smoke]")
@BACKEND
@SET
@OUT
@click.option("--resume", metavar="RUN", help="Continue an interrupted run from its last checkpoint.")
@click.option("--max-restarts", type=click.IntRange(0, 100), metavar="N", help="Restart failed ranks N times at most.")
@click.option(
    "--repeat",
    type=click.IntRange(1, 20),
    default=1,
    metavar="N",
    help="Repeat what noise leaves open, and once what one run calls worse, up to N runs.",
)
@click.option(
    "--config",
    "file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Take settings from a JSON or YAML file, of several runs if it has a list `suite`; --set goes before it.",
)
@click.option("--verbose", "-v", is_flag=True, help="Print every event of the ranks and every check with its reason.")
@click.option("--strict", is_flag=True, help="Exit with 3 if a gate was skipped or had no baseline.")
@click.option("--dry-run", is_flag=True, help="Show what would run: a tier as a table, a benchmark in full.")
@click.option("--manifest", is_flag=True, help="Print only the manifest or script for the cluster; start nothing.")
def verb(
    target: str, pairs: tuple[str, ...], out: Path | None, max_restarts: int | None, file: Path | None, **options: Any
) -> None:
    """Run TARGET: a benchmark, or a tier (quick, or a file) with all its benchmarks. `benchlib list` names them."""
    if max_restarts is not None:  # in front: --set overrides it
        pairs = (*(["launcher=torchrun"] if max_restarts else []), f"max_restarts={max_restarts}", *pairs)
    with console.status("asking torch for the devices"):
        plans = plan.plans(target, options["tier"], options["backend"], pairs, options["resume"], file)
    if options["manifest"]:
        click.echo("---\n".join(submission(planned, out) for planned in plans), nl=False)
        return
    if options["dry_run"]:
        if plans[1:]:
            show_tier(plans)
        else:
            show_plan(plans[0], (out or outputs()) / "<run>")
        return
    for planned in plans:
        job = LAUNCHERS[planned.config.launcher](planned.config, outputs() / "run")
        if lack := job.lacks():
            raise UserError(f"launcher {job.name}: {lack}")
    check_place(out or outputs())
    suite = f"{file.stem}-results" if file and plans[1:] else ""
    code = run_all(plans, out, options["strict"], options["repeat"], options["verbose"], suite)
    if code == EXIT_INTERRUPTED:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one changes nothing
    sys.exit(code)
