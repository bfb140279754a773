"""``benchlib run --dry-run`` and ``--manifest``: what would run. A tier is a table, a benchmark is shown in full. Starts nothing."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from rich.text import Text

from benchlib.commands.output import say, show_table
from benchlib.core.errors import UserError
from benchlib.core.files import outputs
from benchlib.core.text import duration
from benchlib.launch.launchers import LAUNCHERS
from benchlib.launch.plan import Plan
from benchlib.results.run import run_path
from benchlib.show.headless import NOTEBOOK_S

NUMBERS = ("budget", "ended after")

# What a launcher needs of the nodes, beside its command.
SHARED = "the run folder and the interpreter have to be at the same place on all {nnodes} nodes"
ON_NODES = {
    "torchrun": "start this command on each of the {nnodes} nodes, each with its own copy of the config; rank 0's node has the result",
    "mpirun": f"mpirun reaches the nodes by the scheduler's job or a host file; {SHARED}",
    "slurm": SHARED,
    "torchx": SHARED,
}


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


def check_launchers(planned: Sequence[Plan]) -> None:
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
    config, rows = planned[0].config, list[dict[str, str | Text]]()
    for plan in planned:
        skipped = Text.assemble(("SKIPPED", "yellow"), f": {plan.unavailable}")
        row = {"benchmark": plan.config.benchmark, "work": skipped, "budget": "", "ended after": ""}
        if not plan.unavailable:
            limits = {"budget": f"{plan.config.budget_s:.0f} s", "ended after": f"{plan.config.hard_limit_s:.0f} s"}
            row |= {"work": plan.config.expected_work(), **limits}
        rows.append(row)
    say((f"tier {config.tier}", "bold"), f", backend {config.backend}: {len(rows)} benchmarks")
    show_table(rows, right=NUMBERS, whole=NUMBERS)
    say(f"at most {duration(sum(plan.config.budget_s for plan in planned if not plan.unavailable))} by the budgets")
    in_full = f"benchlib run {config.benchmark} --tier {config.tier} --dry-run"
    say(f"in full, with command lines: {in_full}; all of them: --dry-run --all", style="dim")


def _in_full(planned: Plan, folder: Path, everything: bool) -> None:
    """Print what is not a default, or with ``everything`` every parameter, then the command lines and the expected work."""
    config, why, origins = planned.config, planned.unavailable, planned.resolved.origins
    missing = f" (not available: {why})" if why else ""
    say((config.benchmark, "bold"), f", tier {config.tier}, backend {config.backend}", (missing, "yellow"))
    rows = [
        {"parameter": name, "value": getattr(config, name), "from": origins.get(name, ""), "meaning": field.description}
        for name, field in type(config).model_fields.items()
        if everything or name in origins
    ]
    show_table(rows, whole=("parameter", "from"))
    if not everything:
        left = f"{len(type(config).model_fields) - len(rows) - 3} more parameters have their defaults"
        say(f"{left}: --dry-run --all shows them with their meaning", style="dim")
    job = LAUNCHERS[config.launcher](config, folder)
    say("\n", ("starts", "bold"), f"\n  {shlex.join(job.command)}")
    for name, value in sorted(job.env.items()):
        say(f"  with {name}={value}")
    if config.nnodes > 1 and config.launcher in ON_NODES:
        say(f"  {ON_NODES[config.launcher].format(nnodes=config.nnodes)}", style="dim")
    for name, content in job.files.items():
        say("\n", (name, "bold"), " in the run folder")
        say(content)
    say("\n", ("expected work", "bold"), f"\n  {config.expected_work()}")
    say(
        f"  the ranks end by themselves within {config.budget_s:.0f} s after their start-up and are ended after "
        f"{config.hard_limit_s:.0f} s at the latest; the notebook's start and its pictures come on top, at most "
        f"{NOTEBOOK_S:.0f} s after the ranks\n"
    )
