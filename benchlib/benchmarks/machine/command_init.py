"""A run of the machine benchmark as a preset of ``params/machines``. Torch-free: what was measured is read."""

import re
from pathlib import Path
from typing import Any

import yaml

from benchlib.core.errors import UserError
from benchlib.core.files import outputs, write_text
from benchlib.core.text import day
from benchlib.judge.presets import folder, parse
from benchlib.launch.kubernetes import YamlDumper
from benchlib.results.run import Run

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
ALPHA_BYTES = 64 * 1024  # below it an all-reduce is latency


def measure(tier: str, backend: str, out: Path | None) -> Path:
    """Run the machine benchmark and return its folder; ``UserError`` where it does not pass."""
    from benchlib.commands import run as runner
    from benchlib.launch import plan

    (planned,) = plan.plans("machine", tier, backend, (), None)
    outcome = runner.run_one(planned, out or outputs())
    if outcome.exit_code():
        raise UserError(
            f"{outcome.run_dir}: the measurement did not pass: {outcome.verdict.sentence}; name a run that did"
        )
    return outcome.run_dir


def content(run: Run) -> dict[str, Any]:
    """Return a run as a preset's content. Raises ``UserError`` where it lacks a peak, or is of another benchmark."""
    result, config, machine = run.result, run.config, run.machine
    if result is None or config.benchmark != "machine":
        raise UserError(f"{run.path}: a complete run of the benchmark machine is needed, this is {config.benchmark}")
    ranks, source = config.nproc, f"measured by {run.path.name} on {day(result.started_at)}"

    def given(value: float, how: str) -> dict[str, Any]:
        return {"value": float(f"{value:.4g}"), "kind": "measured", "source": f"{source}: {how}"}

    peaks = {}
    for metric in result.metrics:
        match = re.fullmatch(r"matmul_(\w+)_peak_flops", metric.name)
        if match and metric.value:
            peaks[match[1]] = given(metric.value / config.world_size / 1e12, f"{metric.reason}, by rank")
    where = "host" if config.backend == "cpu" else "device"
    copy = result.value(f"copy_{where}_gbytes_per_s")
    if not peaks or not copy:
        raise UserError(
            f"{run.path}: it has no peak of matrix products or no memory copy: run `benchlib run machine` again"
        )
    device = machine.get("devices", {}).get("backends", {}).get(config.backend, {})
    names = ", ".join(dict.fromkeys(device.get("names", []))) if config.backend != "cpu" else ""
    shared = float(machine.get("memory_bytes") or 0) / ranks if config.backend in ("cpu", "mps") else 0.0
    memory = float(min(device.get("memory_bytes") or [shared]))
    if not memory:
        raise UserError(
            f"{run.path}: its machine.json does not say how much memory a device has: run `benchlib run machine` again"
        )
    preset: dict[str, Any] = {
        "description": f"{ranks} x {names or machine.get('cpu', {}).get('model') or 'CPU'} ({config.backend}), measured",
        "devices": ranks,
        "peak_tflops": peaks,
        "memory_gb": given(memory / 1e9, "as the system reports it, by rank"),
        "memory_gbytes_per_s": given(copy / config.world_size, "memory copy, read plus written, by rank"),
    }
    if ranks > 1:
        preset["link"] = _link(run, ranks, given)
    return preset


def _link(run: Run, ranks: int, given: Any) -> dict[str, Any]:
    """Return rate and time of a hop: the bus bandwidth of the largest all-reduce, and its latency over the hops of a ring."""
    assert run.result is not None
    rows = run.result.tables.get("allreduce", [])
    if not rows or run.config.nnodes > 1:
        raise UserError(
            f"{run.path}: no all-reduce within one node was measured: `benchlib run machine --set nproc={ranks}`"
        )
    large, small = (pick(rows, key=lambda row: row["bytes"]) for pick in (max, min))
    if small["bytes"] > ALPHA_BYTES:
        raise UserError(
            f"{run.path}: its smallest all-reduce has {small['bytes']:,} bytes, latency needs less: set allreduce_mib=0.001,16"
        )
    hops = 2 * (ranks - 1)
    return {
        "name": str(run.result.facts.get("collective") or "collective"),
        "gbytes_per_s": given(large["busbw_gbps"] / 8, f"bus bandwidth of an all-reduce of {large['bytes']:,} bytes"),
        "latency_us": given(small["median_us"] / hops, f"an all-reduce of {small['bytes']:,} bytes over {hops} hops"),
    }


def write(run_dir: Path, name: str, force: bool) -> Path:
    """Write the preset of a run and return its path; ``UserError`` for a bad name or a file that is there."""
    if not NAME.fullmatch(name):
        raise UserError(f"--name {name!r}: use letters, digits, '.', '_' and '-'")
    path = folder() / f"{name}.yaml"
    if path.exists() and not force and name != "this":
        raise UserError(f"{path} is there: take another --name, or --force to replace it")
    values = content(Run(run_dir))
    parse(values)
    text = yaml.dump(values, Dumper=YamlDumper, sort_keys=False, allow_unicode=True, width=160)
    write_text(path, f"# Written by `benchlib machine init`.\n{text}")
    return path
