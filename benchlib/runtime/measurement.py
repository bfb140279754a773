"""What stands around a measurement of the new shape: the process group before it, its rows written after it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchlib.benchmarks import Benchmark
from benchlib.core.events import EventWriter, Moment
from benchlib.runtime import group
from benchlib.runtime.steps import launched_at

Tables = dict[str, list[dict[str, Any]]]


@dataclass(frozen=True)
class Rank:
    """What a measurement gets: its config, its place in the world, the run folder, and when the ranks were launched."""

    config: Any
    run_dir: Path
    world: group.World
    events: EventWriter
    began: Moment

    def progress(self, done: int, total: int, unit: str = "measurements") -> None:
        """Report how far the measurement is."""
        self.events.emit("progress", phase="measure", done=done, total=total, unit=unit)


def executed(benchmark: Benchmark) -> Callable[..., None]:
    """Return what a rank executes: ``run(config, run_dir, events)`` of a benchmark, with or without a spec."""
    save = getattr(benchmark.spec, "save", None)
    return measured(benchmark.part("run", "measure"), save) if save else benchmark.part("run", "run")


def measured(measure: Callable[[Rank], Tables], save: Callable[..., None]) -> Callable[..., None]:
    """Return a function that calls ``measure(rank)`` in the process group; ``save`` gets the rows of rank 0."""

    def run(config: Any, run_dir: Path, events: EventWriter) -> None:
        began = launched_at(run_dir)  # the import of torch is part of the start-up
        events.emit("phase", name="init")
        with group.world(config, run_dir) as world:
            startup_s = max(group.all_gather_objects(began.since()))
            events.emit("phase", name="measure")
            tables = measure(Rank(config, run_dir, world, events, began))
            events.emit("phase", name="write")
            if world.main:
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
                save(config, run_dir, began, {**tables, "run": [frame | own]})

    return run
