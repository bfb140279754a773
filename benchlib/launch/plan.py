"""From a target to the plans of its runs, and what a dry run shows of them."""

import shlex
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Column, Table

from benchlib.benchmarks import BENCHMARKS
from benchlib.commands.run import console
from benchlib.config.schema import check_names, config_class, nearest, parse_overrides, read_params, tier_names
from benchlib.core.errors import UserError
from benchlib.core.files import outputs
from benchlib.core.machine import probe_devices
from benchlib.session import Plan, plan


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
        names = _that_fit(names, overrides)
    else:
        raise UserError(f"unknown benchmark or tier {target!r}: {nearest(target, [*BENCHMARKS, *tier_names()])}")
    if resume:
        overrides["resume"] = str(Path(resume).resolve())
    # Wrong input is reported before torch is asked for its devices, which takes seconds.
    given = {name: overrides if target in BENCHMARKS else _of_one_process(name, overrides) for name in names}
    for name in names:
        plan(name, level, "cpu" if backend == "auto" else backend, given[name], probe={})
    probe = probe_devices()
    return [plan(name, level, backend, given[name], probe) for name in names]


def _that_fit(names: list[str], overrides: Mapping[str, Any]) -> list[str]:
    """Leave the benchmarks of one process out of a tier that is run over several nodes, and say so."""
    single = [name for name in names if config_class(name).ONE_PROCESS]
    if str(overrides.get("nnodes", "1")) == "1" or single == names:
        return names
    for name in single:  # not on standard output, which may be a manifest
        print(f"{name} is the work of one process: left out of this run over several nodes", file=sys.stderr)
    return [name for name in names if name not in single]


def _of_one_process(name: str, overrides: dict[str, Any]) -> dict[str, Any]:
    """Return what a benchmark of a tier gets: the number of ranks is not for those that are the work of one process."""
    return {key: value for key, value in overrides.items() if key != "nproc" or not config_class(name).ONE_PROCESS}


def _that_know(names: list[str], overrides: dict[str, Any], resume: str | None) -> list[str]:
    wanted = {*overrides, *(["resume"] if resume else [])}
    fitting = [name for name in names if wanted <= set(config_class(name).model_fields)]
    if not fitting:
        check_names(names[-1], wanted, "set by hand")
    return fitting


def submission(planned: Plan, out: Path | None) -> str:
    """Return the manifest or script that the run would hand to its cluster, under the name of a run that begins now.

    Raises ``UserError`` for a launcher that hands over none.
    """
    from benchlib.launch.launchers import LAUNCHERS
    from benchlib.results.run import run_path

    config = planned.config
    job = LAUNCHERS[config.launcher](config, run_path(config, out or outputs()))
    if not job.submits:
        known = "kubernetes, slurm or torchx"
        raise UserError(
            f"launcher={config.launcher} hands nothing to a cluster: --manifest needs --set launcher={known}"
        )
    return job.files[job.submits]


def show_plan(planned: Plan, out: Path | None) -> None:
    """Print the resolved config, the command lines and the expected work."""
    from benchlib.launch.launch import LAUNCHERS

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
    for name, content in job.files.items():
        console.print(f"\n[bold]{escape(name)}[/] in the run folder")
        console.print(content, markup=False, highlight=False, soft_wrap=True)
    console.print(f"\n[bold]expected work[/]\n  {escape(config.expected_work())}")
    console.print(
        f"  ends by itself within {config.budget_s:.0f} s; is ended after {config.hard_limit_s:.0f} s at the latest\n"
    )
