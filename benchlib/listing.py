"""The commands that only show: the kit, the stored runs, the baselines, the machine."""

from collections.abc import Sequence
from pathlib import Path

from rich.markup import escape
from rich.table import Column, Table

from benchlib import baselines, cluster, history, terminal
from benchlib import judge as judging
from benchlib.backends import BACKENDS
from benchlib.calibration import load_calibration
from benchlib.change import Spread, change
from benchlib.checks import save_verdict
from benchlib.config import read_params, tier_names
from benchlib.errors import UserError
from benchlib.labels import day
from benchlib.metrics import Metric, band_text, quantity
from benchlib.paths import outputs
from benchlib.registry import BENCHMARKS
from benchlib.results import Run
from benchlib.stored_run import StoredRun

console = terminal.console(least_width=120)
ENOUGH_RUNS = 3  # from which on the spread between the accepted runs widens the gate's interval


def _table(*columns: str | Column) -> Table:
    return Table(*columns, box=None, padding=(0, 2), header_style="bold")


def show_kit() -> None:
    """Print benchmarks, tiers, backends and clusters."""
    table = _table("benchmark", "question", "tiers", "notebook")
    tiers = {name: read_params("tiers", name) for name in tier_names()}
    for benchmark in BENCHMARKS.values():
        has = ", ".join(name for name, content in tiers.items() if benchmark.name in content)
        table.add_row(benchmark.name, benchmark.question, has, benchmark.notebook)
    console.print(table)
    table = _table("tier", "what it is")
    for name, content in tiers.items():
        table.add_row(name, content.get("description", ""))
    console.print(table)
    table = _table("backend", "what it is", "needs")
    for backend in BACKENDS.values():
        table.add_row(
            backend.name, read_params("backends", backend.name).get("description", ""), escape(backend.install)
        )
    console.print(table)
    table = _table("cluster", "what it is")
    for name in cluster.names():
        table.add_row(name, escape(cluster.load(name).description))
    console.print(table)
    console.print("\n`benchlib doctor` tells which of them this machine has.")


def show_runs(out: Path | None) -> None:
    """Print the stored runs, the newest first; damaged ones and copies say so."""
    folder = out or outputs()
    runs = history.read(folder)
    if not runs:
        raise UserError(f"{folder} holds no runs yet: `benchlib run quick` makes the first")
    table = _table(Column("run", overflow="fold", min_width=30), Column("verdict", no_wrap=True), "what it says")
    for run in reversed(runs):
        table.add_row(escape(terminal.one_line(run.path)), escape(run.word), escape(terminal.one_line(_said(run))))
    console.print(table)


def _said(run: StoredRun) -> str:
    """Return what a run's line says after its verdict."""
    if run.damaged:
        remedy = "; `benchlib report` judges it again" if run.damaged.startswith("verdict.json") else ""
        return f"{run.damaged}{remedy}"
    copied = f"copy of {run.copy_of}: " if run.copy_of else ""
    return copied + (run.sentence or "no verdict yet: `benchlib report` makes it")


def accept_baseline(run_dirs: Sequence[Path], reason: str, add: bool, if_improved: bool) -> None:
    """Make runs the baseline of their fingerprint, or with ``add`` more runs of it, and say where it is.

    Several runs must be of one kind. Each is judged again first.
    """
    runs = [Run(path) for path in run_dirs]
    for run in runs:
        # The stored verdict may be older than what lies in the folder, or than the baselines.
        verdict = judging.judged(run)
        baselines.require_acceptable(run, verdict.model_dump())
        save_verdict(run.path, verdict)
    runs = [run.refresh() for run in runs]
    limits = BENCHMARKS[runs[0].config.benchmark].load("limits")(runs[0])
    path = baselines.accept(runs, reason, limits, add=add, if_improved=if_improved)
    count = len(baselines.load_baseline(path).runs)
    console.print(f"accepted: {escape(str(path))}\ncommit this file to share it.", soft_wrap=True)
    if count < ENOUGH_RUNS:
        console.print(
            f"[dim]The baseline holds {count} run{'s' * (count > 1)}. From {ENOUGH_RUNS} on (accept --add), or after `benchlib calibrate`, "
            "the gate knows how much unchanged runs differ.[/]",
            soft_wrap=True,
        )


def show_baselines() -> None:
    """Print the committed baselines."""
    table = _table(
        Column("key", no_wrap=True),
        "benchmark",
        "tier",
        "machine",
        "ranks",
        "runs",
        Column("accepted", no_wrap=True),
        "reason",
    )
    stored, damaged = [], []
    for path in sorted(baselines.folder().glob("*/*/*.json")):
        try:
            stored.append(baselines.load_baseline(path))
        except UserError as error:
            damaged.append(str(error))
    for item in stored:
        factors = item.fingerprint
        machine = factors.get("devices") or factors.get("cpu", "")
        table.add_row(
            item.key,
            item.benchmark,
            item.tier,
            escape(machine),
            factors.get("world_size", ""),
            str(len(item.runs)),
            day(item.latest.recorded_at),
            escape(item.latest.reason),
        )
    if stored:
        console.print(table)
    if damaged:
        raise UserError("\n".join(damaged))
    if not stored:
        raise UserError("no baselines yet: `benchlib baseline accept RUN --reason ...` makes the first")


def show_baseline(key: str) -> None:
    """Print a baseline's metrics and fingerprint."""
    found = (
        [baselines.load_baseline(Path(key))]
        if Path(key).is_file()
        else [item for _, item in baselines.stored() if item.key.startswith(key)]
    )
    if len(found) != 1:
        raise UserError(f"{len(found)} baselines begin with {key!r}: `benchlib baseline list` shows the keys")
    item = found[0]
    console.print(f"[bold]{item.benchmark}, {item.tier}[/]  {item.key}")
    for record in item.runs:
        console.print(f"from {escape(record.run)}: {escape(record.reason)}")
    measured = load_calibration(baselines.folder(), item.benchmark, item.tier, item.key)
    table = _table("metric", "value", "A/A band", "n", "95 % interval of the latest run")
    for metric in item.latest.metrics:
        interval = (
            ""
            if metric.ci_low is None or metric.ci_high is None
            else f"{quantity(metric.ci_low)} to {quantity(metric.ci_high)}"
        )
        known = measured.spread(metric.name) if measured else None
        table.add_row(metric.name, *_of_all_runs(item, metric, known), str(metric.n), interval)
    console.print(table)
    table = _table("factor", "value")
    for name, value in item.fingerprint.items():
        table.add_row(name, escape(value))
    console.print(table)


def _of_all_runs(baseline: baselines.Baseline, metric: Metric, known: Spread | None) -> tuple[str, str]:
    """Return a metric's value over all accepted runs and its A/A band, as texts."""
    side = baseline.side(metric.name)
    if side is None or not side.runs or min(map(min, side.runs)) <= 0:
        return metric.text, ""
    spread = change(side.runs, side.runs, known=known).spread
    return side.text("ratio"), band_text(spread.band(), "ratio") if spread else ""


def show_doctor() -> int:
    """Print what the machine has and lacks; return 2 where a needed part is missing."""
    from benchlib.doctor import examine

    table = Table(box=None, padding=(0, 2), show_header=False)
    findings = examine()
    for item in findings:
        mark = "[green]yes[/]" if item.ok else "[red]no[/]" if item.needed else "[yellow]no[/]"
        table.add_row(
            mark,
            item.part,
            escape(item.seen) + (f"\n[dim]{escape(item.remedy)}[/]" if item.remedy and not item.ok else ""),
        )
    console.print(table)
    return 2 if any(item.needed and not item.ok for item in findings) else 0
