"""``benchlib list``: benchmarks, tiers, backends and clusters; with ``--runs`` the stored runs."""

from pathlib import Path
from typing import Any

import click
from rich.padding import Padding
from rich.text import Text

from benchlib.benchmarks import BENCHMARKS, Benchmark
from benchlib.commands import OUT
from benchlib.commands.output import console, say, show_table
from benchlib.config import cluster
from benchlib.config.schema import read_params, tier_names
from benchlib.core.errors import UserError
from benchlib.core.files import outputs
from benchlib.core.machine import BACKENDS
from benchlib.core.terminal import one_line
from benchlib.core.text import duration
from benchlib.results.record import Record, load_all
from benchlib.results.run import no_runs


def budget_s(tier: dict[str, Any]) -> float:
    every = tier.get("all", {})
    values = [(every | (tier[name] or {})).get("budget_s") for name in BENCHMARKS if name in tier]
    return float(sum(value for value in values if value))


def show_kit() -> None:
    tiers = {name: read_params("tiers", name) for name in tier_names()}
    show_table(_row(benchmark, tiers) for benchmark in BENCHMARKS.values())
    budget = "time budget of all its benchmarks"
    show_table(
        {"tier": name, "what it is": content.get("description", ""), budget: f"at most {duration(budget_s(content))}"}
        for name, content in tiers.items()
    )
    words = {name: read_params("backends", name).get("description", "") for name in BACKENDS}
    show_table({"backend": name, "what it is": words[name], "needs": BACKENDS[name].install} for name in BACKENDS)
    show_table({"cluster": name, "what it is": cluster.load(name).description} for name in cluster.names())
    say("\n`benchlib doctor` tells which of them this machine has.")


def _row(benchmark: Benchmark, tiers: dict[str, Any]) -> dict[str, Any]:
    if benchmark.fault:
        fault = Text.assemble(("not loadable", "red"), f": {benchmark.fault}")
        return {"benchmark": benchmark.name, "question": fault, "tiers": "", "notebook": ""}
    try:
        notebook = benchmark.notebook.name
    except UserError:
        notebook = "none"
    names = ", ".join(name for name in tiers if benchmark.name in tiers[name])
    return {"benchmark": benchmark.name, "question": benchmark.question, "tiers": names, "notebook": notebook}


def show_runs(folder: Path) -> None:
    """Print the stored runs, the newest first: name, verdict, time and key number; below it why a run did not pass."""
    if not (runs := load_all(folder)):
        raise UserError(no_runs(folder))
    names = [one_line(run.path) for run in runs]
    width, words = max(map(len, names)), max(len(run.word) for run in runs)
    for run, name in zip(runs[::-1], names[::-1], strict=True):
        number = "".join(f"{label} {metric.text}" for label, metric in run.key_numbers[:1])
        say(f"{name:<{width}}  {run.word:<{words}}  {run.moment:%H:%M}  {one_line(number)}".rstrip())
        if run.word != "PASS" or run.copy_of:
            console.print(Padding(Text(one_line(_sentence(run)), "dim"), (0, 0, 0, 4), expand=False))


def _sentence(run: Record) -> str:
    judged = any(problem.startswith("verdict.json") for problem in run.problems)
    remedy = " `benchlib report` judges it again." if judged else ""
    return (f"copy of {run.copy_of}: " if run.copy_of else "") + run.sentence + remedy


@click.command()
@click.option("--runs", is_flag=True, help="List the stored runs instead.")
@OUT
def verb(runs: bool, out: Path | None) -> None:
    """List benchmarks, tiers, backends and clusters, or the stored runs."""
    if runs:
        show_runs(out or outputs())
    else:
        show_kit()
