"""``benchlib run --dry-run`` and ``--manifest``: what would run. A tier is a table, a benchmark is shown in full. Starts nothing."""

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
        remedy = "--manifest needs --set launcher=kubernetes, slurm or torchx"
        raise UserError(f"launcher={config.launcher} hands nothing to a cluster: {remedy}")
    return job.files[job.submits]


def check_launchers(planned: Sequence[Plan]) -> None:
    """Raise ``UserError`` where this machine lacks a program that a plan's launcher calls."""
    for plan in planned:
        job = LAUNCHERS[plan.config.launcher](plan.config, outputs() / "run")
        if lack := job.lacks():
            raise UserError(f"launcher {job.name}: {lack}")


def show(planned: Sequence[Plan], out: Path | None, everything: bool = False) -> None:
    """Print a table of several plans; a single one, or with ``everything`` all of them, in full."""
    if len(planned) > 1 and not everything:
        _overview(planned)
        return
    for plan in planned:
        _in_full(plan, (out or outputs()) / "<run>", everything)


def _overview(planned: Sequence[Plan]) -> None:
    """Print a row per benchmark: its work and its limits."""
    rows, config, budgets_s = list[dict[str, str | Text]](), planned[0].config, 0.0
    for plan in planned:
        row = {"benchmark": plan.config.benchmark, "work": plan.config.expected_work()}
        if plan.unavailable:
            row |= {"work": Text.assemble(("SKIPPED", "yellow"), f": {plan.unavailable}"), **dict.fromkeys(NUMBERS, "")}
        else:
            budgets_s += plan.config.budget_s
            limits = (plan.config.budget_s, plan.config.hard_limit_s)
            row |= {name: f"{limit:.0f} s" for name, limit in zip(NUMBERS, limits, strict=True)}
        rows.append(row)
    console.print(f"[bold]tier {config.tier}[/], backend {config.backend}: {len(rows)} benchmarks")
    console.print(terminal.table(rows, right=NUMBERS, whole=NUMBERS))
    console.print(f"at most {duration(budgets_s)} by the budgets")
    in_full = f"benchlib run {config.benchmark} --tier {config.tier} --dry-run"
    console.print(f"[dim]in full, with command lines: {in_full}; all of them: --dry-run --all[/]")


def _in_full(planned: Plan, folder: Path, everything: bool) -> None:
    """Print what is not a default, or with ``everything`` every parameter, then the command lines and the expected work."""
    config, missing = planned.config, f" [yellow](not available: {escape(planned.unavailable)})[/]"
    named = f"[bold]{config.benchmark}[/], tier {config.tier}, backend {config.backend}"
    console.print(named + missing * bool(planned.unavailable))
    rows = []
    for name, field in type(config).model_fields.items():
        asked = "" if name in ("benchmark", "tier", "backend") else "default"
        origin = planned.resolved.origins.get(name, asked)
        if everything or origin not in ("", "default"):
            cells = {
                "parameter": name,
                "value": getattr(config, name),
                "from": origin,
                "meaning": field.description or "",
            }
            style = "dim" if origin == "default" else ""
            rows.append({head: Text(str(cell), style) for head, cell in cells.items()})
    console.print(terminal.table(rows, whole=("parameter", "from")))
    if not everything:
        left = f"{len(type(config).model_fields) - len(rows) - 3} more parameters have their defaults"
        console.print(f"[dim]{left}: --dry-run --all shows them with their meaning[/]")
    job = LAUNCHERS[config.launcher](config, folder)
    console.print("\n[bold]starts[/]")
    settings = [f"with {name}={value}" for name, value in sorted(job.env.items())]
    for line in (*map(shlex.join, job.commands), *settings, *map(str, job.notes)):
        console.print(f"  {escape(line)}", soft_wrap=True)
    for name, content in job.files.items():
        console.print(f"\n[bold]{escape(name)}[/] in the run folder")
        console.print(content, markup=False, highlight=False, soft_wrap=True)
    console.print(f"\n[bold]expected work[/]\n  {escape(config.expected_work())}", soft_wrap=True)
    console.print(
        f"  the ranks end by themselves within {config.budget_s:.0f} s of their launch and are ended after "
        f"{config.hard_limit_s:.0f} s at the latest; the notebook's start and its pictures come on top, at most "
        f"{NOTEBOOK_S:.0f} s after the ranks\n"
    )
