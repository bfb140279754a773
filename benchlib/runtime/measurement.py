"""What stands around a measurement of the new shape: the process group before it, its rows written after it."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchlib.benchmarks import Benchmark
from benchlib.core.events import EventWriter, Moment
from benchlib.core.text import listing
from benchlib.launch.nodes import place

if TYPE_CHECKING:
    from benchlib.runtime import group

Tables = dict[str, list[dict[str, Any]]]


@dataclass(frozen=True)
class Rank:
    """What a measurement gets: its config, its place in the world, the run folder, when the ranks were launched and how long
    they took until all were there."""

    config: Any
    run_dir: Path
    world: "group.World"
    events: EventWriter
    began: Moment
    startup_s: float = 0.0

    def left_s(self, share: float = 1.0) -> float:
        """Return what is left of a share of the budget, which begins after the start-up."""
        return float(share * self.config.allowed_s + self.startup_s - self.began.since())

    def progress(self, done: int, total: int, unit: str = "measurements") -> None:
        self.events.emit("progress", phase="measure", done=done, total=total, unit=unit)


def executed(benchmark: Benchmark) -> Callable[..., None]:
    """Return what a rank executes: ``run(config, run_dir, events)`` of a benchmark, or its ``measure(rank)`` in the process group.

    The spec saves the rows of rank 0. A benchmark of one process joins no group and opens no device: those are for the processes
    that it starts.
    """
    if whole := benchmark.part("run", "run", None):
        return whole  # type: ignore[no-any-return]
    measure: Callable[[Rank], Tables] = benchmark.part("run", "measure")

    def run(config: Any, run_dir: Path, events: EventWriter) -> None:
        import torch  # a benchmark whose ranks form no group needs none

        from benchlib.runtime import group
        from benchlib.runtime.steps import launched_at

        began = launched_at(run_dir)  # the import of torch is part of the start-up
        events.emit("phase", name="init")
        with alone(config) if config.ONE_PROCESS else group.world(config, run_dir) as world:
            startup_s = began.since() if config.ONE_PROCESS else max(group.all_gather_objects(began.since()))
            events.emit("phase", name="measure")
            tables = measure(Rank(config, run_dir, world, events, began, startup_s))
            moved = group.transports(run_dir, world)
            events.emit("phase", name="write")
            if world.main:
                if moved:
                    events.emit("log", message=f"{world.collective} moved data by {listing(moved)}")
                cuda = world.device.type == "cuda"
                frame = {
                    "startup_s": startup_s,
                    "total_s": began.since(),
                    "collective": world.collective,
                    "layout": world.layout,
                    "device": torch.cuda.get_device_name(world.device) if cuda else world.device.type,
                    "threads": torch.get_num_threads(),
                    "torch": torch.__version__,
                }
                own = next(iter(tables.get("run", [])), {})
                benchmark.spec.save(config, run_dir, began, {**tables, "run": [frame | own]})

    return run


def alone(config: Any) -> "contextlib.AbstractContextManager[group.World]":
    """Return the world of one process, on the CPU."""
    import torch

    from benchlib.runtime import group

    torch.set_num_threads(place().threads(config.threads))
    return contextlib.nullcontext(group.World())
