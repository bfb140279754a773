"""The verb ``benchlib machine init``: this machine as a preset for estimates, from its measured peaks."""

import re
from pathlib import Path
from typing import Any

import click

from benchlib.core.errors import UserError


@click.group("machine")
def command() -> None:
    """Write this machine as a preset that estimates are made for."""


@command.command("init")
@click.argument("run", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--name", default="this", show_default=True, help="File params/machines/NAME.yaml.")
@click.option("--force", is_flag=True, help="Replace an existing file.")
def init(run: Path, name: str, force: bool) -> None:
    """Write params/machines/NAME.yaml from RUN, the folder of a run that `benchlib run machine` left.

    `benchlib run parallel --dry-run` takes the preset `this` by itself, others with --set machine=NAME.
    """
    import yaml

    from benchlib.core.files import home, write_text
    from benchlib.results.run import Run

    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise UserError(f"--name {name!r}: use letters, digits, '.', '_' and '-'")
    path = home() / "params" / "machines" / f"{name}.yaml"
    if path.exists() and not force and name != "this":
        raise UserError(f"{path} exists: take another --name, or --force to replace it")
    text = yaml.safe_dump(content(Run(run)), sort_keys=False, allow_unicode=True, width=160)
    write_text(path, f"# Written by `benchlib machine init`.\n{text}")
    click.echo(f"preset: {path}")


def content(run: Any) -> dict[str, Any]:
    """Return a run as a preset's content. Raises ``UserError`` where it lacks a peak, or is of another benchmark."""
    from benchlib.benchmarks.machine.spec import largest, peaking, smallest
    from benchlib.core.text import day
    from benchlib.spec.tables import Rows

    folder, config, machine = run.path, run.config, run.machine
    if run.result is None or config.benchmark != "machine":
        raise UserError(f"{folder}: not a complete run of the benchmark machine")
    rows, ranks, on_cpu = Rows.of(run), config.nproc, config.backend == "cpu"

    def figure(value: float, how: str) -> dict[str, Any]:
        source = f"measured by {folder.name} on {day(run.result.started_at)}: {how}"
        return {"value": float(f"{value:.4g}"), "kind": "measured", "source": source}

    device = machine.get("devices", {}).get("backends", {}).get(config.backend, {})
    names = "" if on_cpu else ", ".join(dict.fromkeys(device.get("names", [])))
    shared = float(machine.get("memory_bytes") or 0) / ranks if config.backend in ("cpu", "mps") else 0.0
    memory = float(min(device.get("memory_bytes") or [shared]))
    copy = run.result.value(f"copy_{'host' if on_cpu else 'device'}_gbytes_per_s") or 0.0
    peaks = {
        row["precision"]: figure(row["peak_flops"] / rows.world / 1e12, f"n = {row['peak_n']}, best samples, by rank")
        for row in peaking.rows(rows)
    }
    required = {"peak of matrix products": peaks, "memory copy": copy, "memory size of a device": memory}
    if missing := [name for name, value in required.items() if not value]:
        raise UserError(f"{folder}: it has no {missing[0]}: run `benchlib run machine` again")
    model = names or machine.get("cpu", {}).get("model") or "CPU"
    preset: dict[str, Any] = {"description": f"{ranks} x {model} ({config.backend}), measured", "devices": ranks}
    preset |= {"peak_tflops": peaks, "memory_gb": figure(memory / 1e9, "as the system reports it, by rank")}
    preset["memory_gbytes_per_s"] = figure(copy / rows.world, "memory copy, read plus written, by rank")
    if ranks == 1:
        return preset
    # Rate and time of a hop: the bus bandwidth of the largest all-reduce, and the latency of the smallest over a ring's hops.
    if config.nnodes > 1 or not largest.ran().rows(rows):
        raise UserError(f"{folder}: no all-reduce in one node was measured: `benchlib run machine --set nproc={ranks}`")
    (large,), (small,), hops = largest.rows(rows), smallest.rows(rows), 2 * (ranks - 1)
    rate, latency_us = largest["busbw_gbps"].finite(large, rows) or 0.0, smallest["times_us"].finite(small, rows) or 0.0
    link = {
        "name": str(rows.run.get("collective") or "collective"),
        "gbytes_per_s": figure(rate / 8, f"bus bandwidth of an all-reduce of {large['bytes']:,} bytes"),
        "latency_us": figure(latency_us / hops, f"an all-reduce of {small['bytes']:,} bytes over {hops} hops"),
    }
    return preset | {"link": link}
