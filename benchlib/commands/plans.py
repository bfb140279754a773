"""`benchlib run --dry-run` and `--manifest`: what would run. A tier is a table, a benchmark is shown in full. Starts nothing."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from rich.markup import escape
from rich.text import Text

from benchlib.core import terminal
from benchlib.core.errors import UserError
from benchlib.core.files import outputs
from benchlib.core.text import duration
from benchlib.launch.launchers import LAUNCHERS
from benchlib.launch.plan import Plan
from benchlib.results.run import run_path
from benchlib.show.headless import NOTEBOOK_S

console = terminal.console(least_width=120)
NUMBERS = ("budget", "ended after")


def submission(planned: Plan, out: Path | None) -> str:
    """Return the manifest or script that the run would hand to its cluster, under the name of a run that begins now.

    Raises ``UserError`` for a launcher that hands over none.
    """
    config = planned.config
    job = LAUNCHERS[config.launcher](config, run_path(config, out or outputs()))
    if not job.submits:
        launchers = "kubernetes, slurm or torchx"
        raise UserError(
            f"launcher={config.launcher} hands nothing to a cluster: --manifest needs --set launcher={launchers}"
        )
    return job.files[job.submits]


def check_launchers(planned: Sequence[Plan]) -> None:
    """Raise ``UserError`` where this machine lacks a program that a plan's launcher calls."""
    for plan in planned:
        job = LAUNCHERS[plan.config.launcher](plan.config, outputs() / "run")
        if lack := job.lacks():
            raise UserError(f"launcher {job.name}: {lack}")


def show(planned: Sequence[Plan], out: Path | None, everything: bool = False) -> None:
    """Print a table of several plans; a single one, or with ``everything`` all of them, in full."""
    folder = out or outputs()
    if len(planned) > 1 and not everything:
        _overview(planned)
        return
    for plan in planned:
        _in_full(plan, folder, everything)


def _overview(planned: Sequence[Plan]) -> None:
    """Print a row per benchmark: its work and its limits."""
    rows = list[dict[str, str | Text]]()
    for config, unavailable in ((plan.config, plan.unavailable) for plan in planned):
        work = Text.assemble(("SKIPPED", "yellow"), f": {unavailable}") if unavailable else config.expected_work()
        limits = ("", "") if unavailable else (f"{config.budget_s:.0f} s", f"{config.hard_limit_s:.0f} s")
        rows.append({"benchmark": config.benchmark, "work": work, "budget": limits[0], "ended after": limits[1]})
    config = planned[0].config
    console.print(f"[bold]tier {config.tier}[/], backend {config.backend}: {len(rows)} benchmarks")
    console.print(terminal.table(rows, right=NUMBERS, whole=NUMBERS))
    budgets_s = sum(plan.config.budget_s for plan in planned if not plan.unavailable)
    console.print(f"at most {duration(budgets_s)} by the budgets")
    console.print(
        f"[dim]in full, with command lines: benchlib run {config.benchmark} --tier {config.tier} --dry-run; all of them: --dry-run --all[/]"
    )


def _in_full(planned: Plan, out: Path, everything: bool) -> None:
    """Print what is not a default, or with ``everything`` every parameter, then the command lines and the expected work."""
    config = planned.config
    folder = out / "<run>"
    console.print(
        f"[bold]{config.benchmark}[/], tier {config.tier}, backend {config.backend}"
        + (f" [yellow](not available: {escape(planned.unavailable)})[/]" if planned.unavailable else "")
    )
    rows = []
    for name, field in type(config).model_fields.items():
        asked = "" if name in ("benchmark", "tier", "backend") else "default"
        origin = planned.resolved.origins.get(name, asked)
        if origin in ("", "default") and not everything:
            continue
        cells = {"parameter": name, "value": getattr(config, name), "from": origin, "meaning": field.description or ""}
        style = "dim" if origin == "default" else ""
        rows.append({head: Text(str(cell), style) for head, cell in cells.items()})
    console.print(terminal.table(rows, whole=("parameter", "from")))
    if not everything:
        left = len(type(config).model_fields) - len(rows) - 3
        console.print(
            f"[dim]{left} more parameters have their defaults: --dry-run --all shows them with their meaning[/]"
        )
    job = LAUNCHERS[config.launcher](config, folder)
    console.print("\n[bold]starts[/]")
    console.print("  " + escape(shlex.join(job.command)), soft_wrap=True)
    for name, value in sorted(job.env.items()):
        console.print(f"  with {name}={escape(str(value))}", soft_wrap=True)
    for note in job.notes:
        console.print("  " + escape(str(note)), soft_wrap=True)
    for name, content in job.files.items():
        console.print(f"\n[bold]{escape(name)}[/] in the run folder")
        console.print(content, markup=False, highlight=False, soft_wrap=True)
    console.print(f"\n[bold]expected work[/]\n  {escape(config.expected_work())}", soft_wrap=True)
    console.print(
        f"  the ranks end by themselves within {config.budget_s:.0f} s of their launch and are ended after {config.hard_limit_s:.0f} s "
        f"at the latest; the notebook's start and its pictures come on top, at most {NOTEBOOK_S:.0f} s after the ranks\n"
    )
