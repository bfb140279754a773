"""Whole benchmarks as a rank executes them, on a simulated device or on the CPU."""

import itertools
import json
import os
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers

from benchlib.benchmarks import BENCHMARKS
from benchlib.benchmarks.machine import run as machine
from benchlib.benchmarks.squad import balance
from benchlib.benchmarks.squad import run as squad
from benchlib.config.schema import save_config
from benchlib.core.events import EventWriter
from benchlib.runtime import child, peaks
from benchlib.runtime.measurement import executed
from benchlib.runtime.timing import StepTimer
from benchlib.workloads import encoders, training


def shrink() -> None:
    """Leave out what a virtual device never ends: products that a CPU is slow at, and the host's own copies, which take no
    virtual time. Children start without the device: their work is done here."""
    peaks.default_sizes = lambda where: (128,)
    copies = machine.copy_rates
    machine.copy_rates = lambda kind, *more: [1.0] if kind == "host" else copies(kind, *more)
    balance.CALIBRATION_S = 0.01
    child.run = lambda work, *args, timeout_s, tell, log=None: child.Ended("done", work(*args, tell), "", 0.0)


def tiny(folder: Path) -> str:
    """Write a random BERT of one layer with the embedded vocabulary; return its path."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(encoders.TINY)
    tokenizer.save_pretrained(folder)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    transformers.BertConfig(vocab_size=len(tokenizer), **sizes).save_pretrained(folder)
    return str(folder)


def whole(device: Any, folder: Path, benchmark: str, **values: Any) -> dict[str, Any]:
    """Execute a benchmark. Return the tables of rank 0, each step's waits for the device, and what the device did."""
    size, rank = int(os.environ["WORLD_SIZE"]), os.environ["RANK"]
    training.PEAK_S = squad.EXCHANGE_S = 0.005
    waits, truth = [], dict[str, Any]()
    if device:
        shrink()
        watch(device, waits, truth)
    run_dir = folder / f"run{rank}" if size == 1 else folder / "run"
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    if benchmark == "squad":
        values = {"model": tiny(folder / f"model{rank}"), "init": "random", **values}
    entry = BENCHMARKS[benchmark]
    given = {"nproc": size, "threads": 1, "backend": "cuda" if device else "cpu", "budget_s": 3600.0, **values}
    config = entry.config.model_validate(given)
    if rank == "0":
        save_config(config, run_dir)
    warnings.simplefilter("ignore")
    kept: dict[str, Any] = {}
    save = type(entry.spec).save

    def keep(spec: Any, config: Any, run_dir: Any, began: Any, tables: Any) -> None:
        kept.update(json.loads(json.dumps(tables, default=str)))
        save(spec, config, run_dir, began, tables)

    type(entry.spec).save = keep
    executed(entry)(config, run_dir, EventWriter(run_dir, f"rank{rank}"))
    steps = [later - earlier for earlier, later in itertools.pairwise(waits)]
    return {"tables": kept, "waits": steps, "truth": truth}


def watch(device: Any, waits: list[int], truth: dict[str, Any]) -> None:
    """Note how often the host has waited at the end of each step, and what the device knows of the training."""
    end_step, train = StepTimer.end_step, training.train

    def ended(timer: StepTimer) -> None:
        end_step(timer)
        waits.append(device.queue.waits())

    def trained(*args: Any, **options: Any) -> Any:
        memory = device.memory[torch.cuda.current_device()]
        memory.reset()
        began, work = device.queue.host(), device.work
        result = train(*args, **options)
        truth.update(peak_bytes=memory.highest, seconds=device.queue.host() - began, flops=device.work - work)
        return result

    StepTimer.end_step, training.train = ended, trained  # type: ignore[method-assign]
