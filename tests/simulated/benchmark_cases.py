"""Whole benchmarks as a rank executes them, on a simulated device or on the CPU."""

import json
import warnings
from pathlib import Path
from typing import Any

from benchlib.benchmarks import BENCHMARKS
from benchlib.benchmarks.squad import run as squad
from benchlib.benchmarks.machine import run as machine
from benchlib.config.schema import save_config
from benchlib.core.events import EventWriter
from benchlib.runtime import peaks
from benchlib.runtime.measurement import executed
from benchlib.workloads import training


def shrink() -> None:
    """Leave out what takes a virtual device for ever: products that a CPU computes too slowly, and the host's own copies,
    which cost no virtual time."""
    peaks.default_sizes = lambda where: (128, 256)
    copies = machine.copy_rates
    machine.copy_rates = lambda kind, *more: [1.0] if kind == "host" else copies(kind, *more)


def whole(device: Any, folder: Path, benchmark: str, **values: Any) -> dict[str, Any]:
    """Execute a benchmark; return the tables that rank 0 saved."""
    import os

    training.PEAK_S = squad.EXCHANGE_S = 0.02
    if device:
        shrink()
    size, rank = int(os.environ["WORLD_SIZE"]), os.environ["RANK"]
    run_dir = folder / "run"
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    backend = "cuda" if device else "cpu"
    entry = BENCHMARKS[benchmark]
    config = entry.config.model_validate({"nproc": size, "threads": 1, "backend": backend, "budget_s": 3600.0, **values})
    warnings.simplefilter("ignore")
    kept: dict[str, Any] = {}
    save = type(entry.spec).save

    def keep(spec: Any, config: Any, run_dir: Any, began: Any, tables: Any) -> None:
        kept.update(json.loads(json.dumps(tables, default=str)))
        save(spec, config, run_dir, began, tables)

    type(entry.spec).save = keep
    if rank == "0":
        save_config(config, run_dir)
    executed(entry)(config, run_dir, EventWriter(run_dir, f"rank{rank}"))
    return kept
