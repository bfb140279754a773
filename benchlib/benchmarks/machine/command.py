"""The verb ``benchlib machine init``: this machine as a preset for estimates, from its measured peaks."""

import re
from pathlib import Path
from typing import Any

import click

from benchlib.commands import OUT, user_errors
from benchlib.core.errors import UserError

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
ALPHA_BYTES = 64 * 1024  # below it an all-reduce is latency


@click.group()
def command() -> None:
    """Write this machine as a preset that estimates are made for."""


@command.command("init")
@click.argument("run", required=False, type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--name", default="this", show_default=True, help="File params/machines/NAME.yaml.")
@click.option("--tier", "-t", default="smoke", show_default=True, help="How much work, where it has to be measured.")
@click.option("--backend", "-b", default="auto", show_default=True, help="Where, as for `benchlib run`.")
@click.option("--force", is_flag=True, help="Replace a file that is there.")
@OUT
@user_errors
def init(run: Path | None, name: str, tier: str, backend: str, force: bool, out: Path | None) -> None:
    """Write params/machines/NAME.yaml from RUN, a run of the benchmark machine. [default: measure now]

    `benchlib run parallel --dry-run` takes the preset `this` by itself, others with --set machine=NAME.
    """
    click.echo(f"preset: {write(run or measured(tier, backend, out), name, force)}")


def measured(tier: str, backend: str, out: Path | None) -> Path:
    """Run the machine benchmark and return its folder; ``UserError`` where it does not pass."""
    from benchlib.commands import run as runner
    from benchlib.core.files import outputs
    from benchlib.launch import plan

    (planned,) = plan.plans("machine", tier, backend, (), None)
    outcome = runner.run_one(planned, out or outputs())
    if outcome.exit_code():
        raise UserError(f"{outcome.run_dir}: the run did not pass: {outcome.verdict.sentence}; name a run that did")
    return outcome.run_dir


def content(run: Any) -> dict[str, Any]:
    """Return a run as a preset's content. Raises ``UserError`` where it lacks a peak, or is of another benchmark."""
    from benchlib.benchmarks.machine.spec import largest, products, smallest
    from benchlib.core.text import day
    from benchlib.spec.tables import Rows

    folder = run.path
    if run.result is None or run.config.benchmark != "machine":
        raise UserError(f"{folder}: not a complete run of the benchmark machine")
    rows, ranks, machine = Rows.of(run), run.config.nproc, run.machine
    source = f"measured by {folder.name} on {day(run.result.started_at)}"

    def stated(value: float, how: str) -> dict[str, Any]:
        return {"value": float(f"{value:.4g}"), "kind": "measured", "source": f"{source}: {how}"}

    peaks = {
        row["precision"]: stated(row["peak_flops"] / rows.world / 1e12, f"n = {row['peak_n']}, best samples, by rank")
        for row in products.ran().rows(rows)
    }
    copy = run.result.value(f"copy_{'host' if run.config.backend == 'cpu' else 'device'}_gbytes_per_s")
    device = machine.get("devices", {}).get("backends", {}).get(run.config.backend, {})
    names = ", ".join(dict.fromkeys(device.get("names", []))) if run.config.backend != "cpu" else ""
    shared = float(machine.get("memory_bytes") or 0) / ranks if run.config.backend in ("cpu", "mps") else 0.0
    memory = float(min(device.get("memory_bytes") or [shared]))
    lacking = {"peak of matrix products": peaks, "memory copy": copy, "memory size of a device": memory}
    if missing := [name for name, value in lacking.items() if not value]:
        raise UserError(f"{folder}: it has no {missing[0]}: run `benchlib run machine` again")
    preset: dict[str, Any] = {
        "description": f"{ranks} x {names or machine.get('cpu', {}).get('model') or 'CPU'} ({run.config.backend}), measured",
        "devices": ranks,
        "peak_tflops": peaks,
        "memory_gb": stated(memory / 1e9, "as the system reports it, by rank"),
        "memory_gbytes_per_s": stated((copy or 0.0) / rows.world, "memory copy, read plus written, by rank"),
    }
    if ranks == 1:
        return preset
    # Rate and time of a hop: the bus bandwidth of the largest all-reduce, and the latency of the smallest over a ring's hops.
    if run.config.nnodes > 1 or not largest.ran().rows(rows):
        raise UserError(f"{folder}: no all-reduce in one node was measured: `benchlib run machine --set nproc={ranks}`")
    (large,), (small,), hops = largest.rows(rows), smallest.rows(rows), 2 * (ranks - 1)
    if small["bytes"] > ALPHA_BYTES:
        few = f"its smallest all-reduce has {small['bytes']:,} bytes, latency needs less: set allreduce_mib=0.001,16"
        raise UserError(f"{folder}: {few}")
    rate, latency = largest["busbw_gbps"].number(large, rows) or 0.0, smallest["times_us"].number(small, rows) or 0.0
    link = {
        "name": str(rows.run.get("collective") or "collective"),
        "gbytes_per_s": stated(rate / 8, f"bus bandwidth of an all-reduce of {large['bytes']:,} bytes"),
        "latency_us": stated(latency / hops, f"an all-reduce of {small['bytes']:,} bytes over {hops} hops"),
    }
    return preset | {"link": link}


def write(run_dir: Path, name: str, force: bool) -> Path:
    """Write the preset of a run and return its path; ``UserError`` for a bad name or a file that is there."""
    import yaml

    from benchlib.core.files import write_text
    from benchlib.judge.presets import folder, parse
    from benchlib.results.run import Run

    if not NAME.fullmatch(name):
        raise UserError(f"--name {name!r}: use letters, digits, '.', '_' and '-'")
    path = folder() / f"{name}.yaml"
    if path.exists() and not force and name != "this":
        raise UserError(f"{path} is there: take another --name, or --force to replace it")
    values = content(Run(run_dir))
    parse(values)
    text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=160)
    write_text(path, f"# Written by `benchlib machine init`.\n{text}")
    return path
