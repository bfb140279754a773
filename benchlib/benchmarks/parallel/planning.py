"""Estimates in words: what a dry run says of a machine, by name of ``params/machines`` or file, with ``:NODES``."""

from typing import Any

from rich.console import Console

from benchlib.benchmarks.parallel.estimate import Rates, Time, memory, step_time
from benchlib.benchmarks.parallel.shapes import STRATEGIES, Job
from benchlib.core import terminal
from benchlib.core.errors import UserError
from benchlib.core.text import quantity, seconds
from benchlib.judge.presets import Preset, names, preset

HERE = "this"  # the preset that `benchlib machine init` writes
Estimate = tuple[Job, float, Time]  # with the bytes of the fullest device


def machine(text: str) -> Preset:
    """Return the machine of ``NAME`` or ``NAME:NODES``; ``UserError`` for none, or for nodes that are not joined."""
    name, sign, nodes = text.partition(":")
    chosen = preset(name)
    if sign and not (nodes.isdigit() and int(nodes)):
        raise UserError(f"machine = {text}: expected NAME:NODES with a whole number of nodes, as in {name}:16")
    if sign and chosen.network is None:
        raise UserError(f"machine = {text}: {name} has no network between nodes: take {name}, or a file with `network`")
    return chosen.model_copy(update={"nodes": int(nodes)}) if sign else chosen


def expected(config: Any) -> str:
    """Return the lines of a dry run about memory and time, '' where no machine is named and none was written."""
    name = config.machine or (HERE if HERE in names() else "")
    if not name:
        return ""
    there, job = machine(name), config.job()
    world = there.world if config.machine else config.world_size
    possible, lacking = estimates(config, Rates.of_preset(there, job.precision), world)
    capacity, (_, peak) = 1e9 * there.memory_gb.value, there.peak_flops(job.precision)
    note = "" if peak == job.precision else f"; it has no {job.precision} peak: {peak} is taken"
    lines = [
        f"estimates for {name} ({there.description}), devices: {world}; nothing was measured; "
        f"times are lower bounds from the peaks below{note}",
        f"{job.batch:,} samples of {job.seq:,} tokens a step, {job.precision}{', checkpointing' * job.checkpointing}",
        *_table(possible, capacity),
        *(f"not possible: {why}" for why in lacking),
        *([_choice(possible, capacity)] if possible else []),
        "sources of the peaks:",
        *(f"  {what} {given.value:,.6g}: {given.kind}, {given.source}" for what, given in there.sources.items()),
    ]
    return "\n\n  " + "\n  ".join(lines)


def estimates(config: Any, rates: Rates, world: int) -> tuple[list[Estimate], list[str]]:
    """Return the estimates of all strategies that fit a world, and why others do not."""
    possible, lacking = list[Estimate](), list[str]()
    for name, schedule in config.ways(config.strategies or (STRATEGIES if config.machine else config.chosen)):
        try:
            job = config.job(name, schedule, world if STRATEGIES[name] else 1)
        except UserError as error:
            lacking.append(str(error))
        else:
            possible.append((job, sum(memory(job).values()), step_time(job, rates)))
    return possible, lacking


def _choice(possible: list[Estimate], capacity: float) -> str:
    """Say which strategy the estimates prefer: the fastest that fits, and whether one device does not."""
    fitting = [item for item in possible if item[1] <= capacity]
    if not fitting:
        job, need, _ = min(possible, key=lambda item: item[1])
        return (
            f"estimate: none fits; {job.strategy} needs least, {quantity(need / 1e9, 'GB')} of "
            f"{quantity(capacity / 1e9, 'GB')} a device: take more devices, checkpointing=true or fewer samples"
        )
    best, *_ = min(fitting, key=lambda item: item[2].step_s)
    words = f"estimate: {best.strategy} ({best.layout}) is the fastest that fits"
    lacks = [need for job, need, _ in possible if job.strategy == "single" and need > capacity]
    return words + "".join(f"; one device needs {quantity(need / 1e9, 'GB')} and does not fit" for need in lacks)


def _table(possible: list[Estimate], capacity: float) -> list[str]:
    rows = []
    for job, need, time in possible:
        times = {"step at least": time.step_s, "compute": time.compute_s}
        times |= {"memory-bound": time.elementwise_s + time.optimizer_s, "communication": time.comm_s}
        times |= {"exposed": time.exposed_s, "bubble": time.bubble_s}
        row = {"strategy": f"{job.strategy} {job.schedule}", "layout": str(job.layout)}
        row |= {"memory a device": quantity(need / 1e9, "GB"), "fits": "yes" if need <= capacity else "no"}
        row |= {part: seconds(value) if value else "0" for part, value in times.items()}
        rows.append(row | {"samples/s at most": f"{job.batch / time.step_s:,.4g}"})
    console = Console(width=200, no_color=True)
    with console.capture() as shown:
        console.print(terminal.table(rows))
    return [line.rstrip() for line in shown.get().splitlines()]
