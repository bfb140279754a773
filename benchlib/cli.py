"""The command line. Modules are imported where they are used, so that ``benchlib --help`` stays quick."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from benchlib import __version__
from benchlib.commands import EXIT_USAGE, OUT, SET, user_errors
from benchlib.core import interrupts
from benchlib.core.interrupts import EXIT_INTERRUPTED

MAY_BE_EMPTY = "--planted"  # of calibrate: no planted slow-down


class _Verbs(click.Group):
    """The verbs below, and those that benchmarks bring along; these are imported when they are asked for."""

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        """Read the words of the command line; an empty one would mean a default, or the working folder, and nobody asks so."""
        for before, word in zip(["", *args], args, strict=False):
            name, sign, value = word.partition("=")
            own = word.startswith("-") and sign and not value
            if (own and name != MAY_BE_EMPTY) or (not word and before != MAY_BE_EMPTY):
                option = name if own else before if before.startswith("-") else ""
                what = f"{option}: an empty value" if option else "an empty word"
                raise click.UsageError(f"{what}: give one, or leave it out (is a variable of your shell not set?)")
        return super().parse_args(context, args)

    def list_commands(self, context: click.Context) -> list[str]:
        from benchlib.benchmarks import loadable

        return sorted([*super().list_commands(context), *(item.name for item in loadable() if item.has("command"))])

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        from benchlib.benchmarks import BENCHMARKS

        def of_benchmark() -> click.Command | None:
            return BENCHMARKS[name].command if name in BENCHMARKS else None

        return super().get_command(context, name) or user_errors(of_benchmark)()  # type: ignore[no-any-return]

    def invoke(self, context: click.Context) -> Any:
        """Run a verb; an interrupt ends it with its own exit code, where click alone would say 1, as for a failed gate."""
        try:
            return super().invoke(context)
        except KeyboardInterrupt:
            click.echo("Stopped by the user", err=True)
            sys.exit(EXIT_INTERRUPTED)

    def main(self, args: Sequence[str] | None = None, *more: Any, **options: Any) -> Any:
        """Run the command line; after an interrupt end at once, so that a second one cannot change the exit code."""
        if args is not None:  # a caller in its own process
            return super().main(args, *more, **options)
        interrupts.end_during_imports()
        from benchlib.core.terminal import open_ended

        sys.stdout, sys.stderr = open_ended(sys.stdout), open_ended(sys.stderr)
        try:
            return super().main(args, *more, **options)
        except KeyboardInterrupt:  # before click looks after it
            interrupts.end()
        except SystemExit as ending:
            code = _flushed(ending.code)
            if code == EXIT_INTERRUPTED:
                os._exit(EXIT_INTERRUPTED)
            sys.exit(code)

    def make_context(self, *args: Any, **options: Any) -> click.Context:
        """Read the words of the command line; click alone would end an interrupt here with 1."""
        try:
            return super().make_context(*args, **options)
        except KeyboardInterrupt:
            interrupts.end()


def _flushed(code: Any) -> Any:
    """Write out what was printed, and return the exit code: 2 where a full disk took none of it. Python alone would say 120."""
    try:
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left would fail once more at the end
        if not code:
            click.echo(f"error: the standard output cannot be written: {error.strerror}", err=True)
        return code or EXIT_USAGE
    return code


@click.group(cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="benchlib")
def main() -> None:
    """Check whether a training and inference stack is right, fast and worth its price.

    \b
    Exit codes: 0 passed, 1 a check failed, 2 the run broke or the input was wrong,
    3 what was named could not be had (a backend, a benchmark that was skipped), or
    with --strict a gate was skipped or had no baseline, 130 interrupted.
    """


@main.command()
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
def run(
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
    from benchlib.commands import plans as planning
    from benchlib.commands import run as runner
    from benchlib.core.errors import UserError
    from benchlib.launch import plan
    from benchlib.results.run import check_place

    if loose:
        pairs_of = " ".join(f"--set {word}" for word in loose if "=" in word)
        remedy = f"set parameters with {pairs_of}" if pairs_of else "one benchmark or tier at a time"
        raise UserError(f"{' '.join(loose)}: unexpected after {target}: {remedy}")
    if everything and not dry_run:
        raise UserError("--all: shows every parameter of a plan, with --dry-run")
    if max_restarts is not None:  # in front: --set overrides it
        pairs = (*(["launcher=torchrun"] if max_restarts else []), f"max_restarts={max_restarts}", *pairs)
    if not (dry_run or manifest):  # before torch is asked for its devices, which takes seconds
        check_place(out or runner.outputs())
    with runner.at_work("asking torch for the devices"):
        ahead = None if dry_run or manifest else runner.get_ready
        plans = plan.plans(target, tier, backend, pairs, resume, ahead)
    if manifest:
        click.echo("---\n".join(planning.submission(planned, out) for planned in plans), nl=False)
        return
    if dry_run:
        planning.show(plans, out, everything)
        return
    planning.check_launchers(plans)
    sys.exit(runner.run_all(plans, out, strict, repeat))


@main.command("list")
@click.option("--runs", is_flag=True, help="List the stored runs instead.")
@OUT
@user_errors
def list_(runs: bool, out: Path | None) -> None:
    """List benchmarks, tiers, backends and clusters, or the stored runs."""
    from benchlib.commands import list

    if runs:
        list.show_runs(out)
    else:
        list.show_kit()


@main.command()
@click.argument("runs", nargs=-1, type=click.Path(path_type=Path))
@OUT
@user_errors
def report(runs: tuple[Path, ...], out: Path | None) -> None:
    """Judge and render stored RUNS again, without running anything. [default: all]"""
    from benchlib.commands import run as rejudge

    sys.exit(rejudge.report_all(runs, out))


@main.command()
@click.option(
    "--store",
    type=click.Path(file_okay=False, resolve_path=True, path_type=Path),
    help="Folder of runs. [default: outputs]",
)
@click.option(
    "--set",
    "-s",
    "pairs",
    multiple=True,
    metavar="NAME=VALUE",
    help="benchmark, tier, machine, metric, first_day or last_day; may be repeated.",
)
@user_errors
def history(store: Path | None, pairs: tuple[str, ...]) -> None:
    """Judge and draw the stored runs: trends, changes of level, machines. Writes history.html."""
    from benchlib.commands import history as history_page

    sys.exit(history_page.make(store, pairs))


@main.group()
def baseline() -> None:
    """Accept, list and show baselines: the runs that later ones are compared with."""


@baseline.command()
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="RUN...")
@click.option("--reason", required=True, help="Why this run is the new normal; stored in the file.")
@click.option(
    "--add", is_flag=True, help="Keep the runs of the baseline as well: several show how much unchanged runs differ."
)
@click.option("--if-improved", is_flag=True, help="Accept only where no gated metric gets worse.")
@click.option("--force", is_flag=True, help="Accept runs whose spread makes a limit more than twice as wide.")
@user_errors
def accept(runs: tuple[Path, ...], reason: str, add: bool, if_improved: bool, force: bool) -> None:
    """Make RUN the baseline of its benchmark, tier and fingerprint. Several runs of one kind are accepted together.

    Of several runs it shows how much they differ and the smallest loss that the gate will find.
    """
    from benchlib.commands import list

    list.accept_baseline(runs, reason, add, if_improved, force)


@baseline.command("list")
@user_errors
def baseline_list() -> None:
    """List the committed baselines."""
    from benchlib.commands import list

    list.show_baselines()


@baseline.command("show")
@click.argument("key")
@user_errors
def baseline_show(key: str) -> None:
    """Show a baseline's metrics and fingerprint. KEY is a file or the first digits of its name."""
    from benchlib.commands import list

    list.show_baseline(key)


@main.command()
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
def calibrate(
    target: str | None,
    tier: str | None,
    backend: str | None,
    pairs: tuple[str, ...],
    runs: int | None,
    planted: str | None,
    planted_runs: int | None,
    out: Path | None,
    resume: Path | None,
) -> None:
    """Measure what the gate of benchmark TARGET can detect on this machine.

    Repeats the benchmark unchanged (A/A) and with planted slow-downs, in turns. Stores the false-alarm rate of the gate and the
    smallest loss that it detects with 99% power, for reports and later gates. --resume takes all else from the first call.
    """
    from benchlib.commands import calibrate as calibrating
    from benchlib.config.schema import parse_overrides

    asked = {
        "target": target,
        "tier": tier,
        "backend": backend,
        "overrides": parse_overrides(pairs),
        "runs": runs,
        "planted": None if planted is None else calibrating.shares(planted),
        "planted_runs": planted_runs,
    }
    try:
        calibrating.calibrate(calibrating.request(asked, resume), out, resume and resume.resolve())
    except calibrating.Interrupted as error:
        click.echo(str(error), err=True)
        sys.exit(EXIT_INTERRUPTED)


@main.command()
@click.argument("target", default="")
@click.option("--tier", "-t", default="quick", show_default=True, help="How much work each run is.")
@OUT
@click.option(
    "--spread", type=click.FloatRange(0, 10), metavar="SHARE", help="State the spread between runs: 0.05 is 5%."
)
@click.option(
    "--limit",
    type=click.FloatRange(0, 1),
    default=0.2,
    metavar="SHARE",
    help="Without TARGET: the limit. [default: 0.2]",
)
@click.option(
    "--noise", "noises", multiple=True, metavar="KIND", help="Add made-up noise, as neighbour or drifting, or all."
)
@click.option("--loss", type=click.FloatRange(0, 1), metavar="SHARE", help="How many runs to accept to find this loss?")
@user_errors
def power(
    target: str,
    tier: str,
    out: Path | None,
    spread: float | None,
    limit: float,
    noises: tuple[str, ...],
    loss: float | None,
) -> None:
    """Show what the gate of benchmark TARGET can tell, by the number of accepted runs. Nothing runs.

    The noise is that of the calibration, the stored and the accepted runs, or is stated with --spread (then TARGET may be left
    out). For each gated metric: false alarms, undecided comparisons, and the smallest loss found.
    """
    from benchlib.commands import power as outlook

    outlook.power(target, tier, out, spread, limit, noises, loss)


@main.command()
@click.option("--metric", "-m", default="", help="Only figures of this metric, such as f1 or matmul_flops.")
@click.option("--device", "-d", default="", help="Only figures of devices with this in their name, such as h100.")
@user_errors
def references(metric: str, device: str) -> None:
    """List the published figures that runs are placed beside, with conditions, source and validity."""
    from benchlib.commands import list

    list.show(metric, device)


@main.command()
@click.argument("sides", nargs=-1, metavar="REFERENCE OTHER...")
@click.option("--all-metrics", is_flag=True, help="Show all metrics, not only key numbers and those with a limit.")
@click.option("--json", "as_json", is_flag=True, help="Print the whole comparison as JSON.")
@click.option("--html", type=click.Path(dir_okay=False, path_type=Path), help="Write a page that can be shared.")
@click.option("--strict", is_flag=True, help="Exit with 3 if sides are not comparable.")
@click.option(
    "--cost",
    "prices",
    multiple=True,
    metavar="NAME=3.00",
    help="Compare by price: USD per device hour by run, host or machine, or without names in the order of the sides; "
    "on-demand or spot takes params/prices.yaml. May be repeated.",
)
@click.option(
    "--deadline", default="", metavar="8h", help="With --cost: which machine is the cheapest within this time?"
)
@user_errors
def compare(
    sides: tuple[str, ...],
    all_metrics: bool,
    as_json: bool,
    html: Path | None,
    strict: bool,
    prices: tuple[str, ...],
    deadline: str,
) -> None:
    """Compare runs with the first one. Each side is a run folder, a folder of runs, a report.html or a baseline.

    All complete runs of a folder are one side. Exit code 1: a metric got worse than its benchmark allows. With --cost or
    --deadline machines are compared by time, price and energy instead.
    """
    from benchlib.commands import compare as comparing

    if prices or deadline:
        comparing.compare_worth(sides, prices, deadline, as_json, html)
        return
    contrasts, notes = comparing.compare(sides)
    if html:
        comparing.write_html(comparing.html(contrasts, notes), html)
    if as_json:
        click.echo(comparing.to_json(contrasts, notes))
    else:
        comparing.show(contrasts, notes, all_metrics)
    if html:
        click.echo(f"page: {html}", err=as_json)
    sys.exit(comparing.exit_code(contrasts, strict))


@main.command()
@click.argument("runs", nargs=-1, metavar="[RUN]...")
@click.option("--to", "name", required=True, metavar="FORMAT", help="One of the formats above.")
@click.option("--output", "-o", default="", help="File, folder or store to write; - is the standard output.")
@click.option("--samples", is_flag=True, help="csv and parquet: one row per raw sample instead of one row per metric.")
@OUT
@user_errors
def export(runs: tuple[str, ...], name: str, output: str, samples: bool, out: Path | None) -> None:
    """Write stored runs for other tools. RUN is a run folder, a folder of runs or a report.html. [default: all]

    \b
    junit        JUnit XML: one suite per run, one test per check
    github       Markdown, appended to $GITHUB_STEP_SUMMARY where that is set
    openmetrics  OpenMetrics text of the newest run of each kind
    prometheus   the text format of node exporter's textfile collector (*.prom)
    csv          one row per metric, or with --samples one row per sample
    parquet      the same as a file for pandas, DuckDB or Spark
    mlflow       --output FILE.db, a tracking URI, or $MLFLOW_TRACKING_URI
    tensorboard  event files in the folder --output

    Benchmarks add formats of their own, such as nccl-tests.
    """
    from benchlib.core.files import outputs
    from benchlib.judge.snapshot import load_all
    from benchlib.show.exports import export as write

    sentence = write(load_all(runs or [out or outputs()]), name, output, samples)
    if sentence:
        click.echo(sentence)


@main.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="FILE...")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
@user_errors
def judge(files: tuple[Path, ...], as_json: bool) -> None:
    """Look for impossible numbers in results of any origin.

    FILE is output of nccl-tests (text or JSON), an MLPerf LoadGen summary, a throughput table (CSV, TSV, Markdown),
    a run folder, report or JSON of the kit, or a claim in neutral JSON.

    \b
    Exit codes: 0 nothing impossible, 1 something is, 2 a file cannot be read, 3 it reports too little to be judged.
    """
    from benchlib.commands import judge as judging

    sys.exit(judging.judge_files(files, as_json))


@main.command()
@click.option("--engine", required=True, help="What answers: sim, static, continuous.")
@click.option("--model", help="Hub name, folder, tiny, or llama3-8b-random. [default: tiny, the kit's own]")
@click.option("--device", help="Where: cpu, cuda, xpu, mps. [default: cpu]")
@click.option("--precision", help="fp32, bf16 or fp16. [default: fp32]")
@click.option("--slots", type=click.IntRange(1), help="Queries that are worked on at once. [default: 8]")
@click.option("--threads", type=click.IntRange(0), help="CPU threads of torch; 0: its own default. [default: 0]")
@click.option("--fixed-length", is_flag=True, default=None, help="Ignore the end of a text: max_tokens each time.")
@click.option("--step-ms", type=click.FloatRange(0), help="sim: time of one token. [default: 10]")
@click.option("--host", help="Address to listen on; any but this machine's own needs a token. [default: 127.0.0.1]")
@click.option("--port", type=click.IntRange(0, 65535), help="0: any free one. [default: 8000]")
@click.option("--token-file", help="File with the bearer token. [default: the variable BENCHLIB_TOKEN]")
@click.option("--max-queue", type=click.IntRange(1), help="Open requests; beyond them 429. [default: 4096]")
@click.option("--max-body", type=click.IntRange(1), help="Bytes of a request; beyond them 413. [default: 4 MiB]")
@click.option("--drain-s", type=click.FloatRange(0), help="Seconds to finish what it has after SIGTERM. [default: 60]")
def serve(**options: Any) -> None:
    """Serve a language model over HTTP, until SIGTERM: a worker for `benchlib run serving --set workers=http://HOST:PORT`.

    It speaks OpenAI's completions with token ids, /health and /metrics.
    """
    from benchlib.commands import serve as serving

    serving.serve(options)


@main.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--picture", type=click.Path(path_type=Path, dir_okay=False), help="PNG file for the graph by layer.")
@user_errors
def inspect(file: Path, picture: Path | None) -> None:
    """Read a StableHLO program (FILE.mlir): check its types, count operations, FLOPs and bytes.

    A manifest beside it, FILE.mlir.json, tells which layer is which.
    """
    from benchlib.commands import inspect as inspecting

    inspecting.inspect(file, picture)


@main.command()
@user_errors
def doctor() -> None:
    """Show what this machine can run, what is missing and how to install it."""
    from benchlib.commands import list

    sys.exit(list.show_doctor())


if __name__ == "__main__":
    main()
