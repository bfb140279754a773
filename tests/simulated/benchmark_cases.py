"""Whole benchmarks as a rank executes them, on a simulated device or on the CPU."""

import gc
import itertools
import json
import os
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers

from benchlib.benchmarks import BENCHMARKS
from benchlib.benchmarks.machine import run as machine
from benchlib.benchmarks.parallel import measure as parallel
from benchlib.benchmarks.parity import run as parity
from benchlib.benchmarks.squad import balance
from benchlib.benchmarks.squad import run as squad
from benchlib.config.schema import save_config
from benchlib.core.events import EventWriter
from benchlib.core.sensors import Sensors
from benchlib.results.run import Run
from benchlib.runtime import child, peaks
from benchlib.runtime.measurement import executed
from benchlib.runtime.timing import StepTimer
from benchlib.workloads import encoders, training


def shrink() -> None:
    """Leave out what a virtual device never ends: products that a CPU is slow at, and the host's own copies, which take no
    virtual time. Children start without the device: their work is done here, and none is asked which devices there are. The profiler
    sees the host alone."""
    peaks.default_sizes = lambda where: (128,)
    peaks.LEAST_DEVICE_COPY = 1 << 20
    copies = machine.copy_rates
    machine.copy_rates = lambda kind, *more: [1.0] if kind == "host" else copies(kind, *more)
    balance.CALIBRATION_S = 0.01
    child.run = here
    parity._require = lambda config: None
    profile = parallel.profile
    parallel.profile = lambda activities, **more: profile(activities=activities[:1], **more)


def here(work: Any, *args: Any, timeout_s: float, tell: Any, log: Any = None) -> child.Ended:
    """Do the work of a child, and give back the memory that it held, as its end would."""
    value = work(*args, tell)
    gc.collect()
    torch.cuda.set_per_process_memory_fraction(1.0)
    return child.Ended("done", value, "", 0.0)


def tiny(folder: Path) -> str:
    """Write a random BERT of one layer with the embedded vocabulary; return its path."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(encoders.TINY)
    tokenizer.save_pretrained(folder)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    transformers.BertConfig(vocab_size=len(tokenizer), **sizes).save_pretrained(folder)
    return str(folder)


def whole(device: Any, folder: Path, benchmark: str, pause_s: float = 0.0, **values: Any) -> dict[str, Any]:
    """Execute a benchmark; every third step of a training pauses. Return the tables and metrics of rank 0, each step's waits
    for the device, and what the device did."""
    size, rank = int(os.environ["WORLD_SIZE"]), os.environ["RANK"]
    training.PEAK_S = squad.EXCHANGE_S = 0.005
    waits, truth = [], dict[str, Any]()
    if device:
        shrink()
    run_dir = folder / f"run{rank}" if size == 1 else folder / "run"
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    if benchmark == "squad":
        values = {"model": tiny(folder / f"model{rank}"), "init": "random", **values}
    entry = BENCHMARKS[benchmark]
    given = {"nproc": size, "threads": 1, "backend": "cuda" if device else "cpu", "budget_s": 3600.0, **values}
    config = entry.config.model_validate(given)
    if rank == "0":
        save_config(config, run_dir)
    events = EventWriter(run_dir, f"rank{rank}")
    if device:
        watch(device, waits, truth, events, pause_s)
    warnings.simplefilter("ignore")
    kept: dict[str, Any] = {}
    save = type(entry.spec).save

    def keep(spec: Any, config: Any, run_dir: Any, began: Any, tables: Any) -> None:
        kept.update(json.loads(json.dumps(tables, default=str)))
        save(spec, config, run_dir, began, tables)

    type(entry.spec).save = keep
    executed(entry)(config, run_dir, events)
    steps = [later - earlier for earlier, later in itertools.pairwise(waits)]
    metrics = {metric.name: metric.value for metric in Run(run_dir).result.metrics} if rank == "0" else {}
    return {"tables": kept, "metrics": metrics, "waits": steps, "truth": truth}


def watch(device: Any, waits: list[int], truth: dict[str, Any], events: EventWriter, pause_s: float) -> None:
    """Note how often the host has waited at the end of each step, and what the device knows of the training; read the sensors
    before it, after it and at each step."""
    end_step, train = StepTimer.end_step, training.train
    sensors = Sensors([], backend="cuda", devices=1)

    def read() -> None:
        events.emit("sensor", **sensors.read())

    def ended(timer: StepTimer) -> None:
        if pause_s and len(waits) % 3 == 2:
            time.sleep(pause_s)
        end_step(timer)
        waits.append(device.queue.waits())
        read()

    def trained(*args: Any, **options: Any) -> Any:
        memory, queue = device.memory[torch.cuda.current_device()], device.queue
        memory.reset()
        read()
        began, busy, work = queue.host(), queue.busy(0), device.work
        result = train(*args, **options)
        seconds, busy = queue.host() - began, queue.busy(0) - busy
        read()
        joules = device.truth.idle_w * seconds + (device.truth.busy_w - device.truth.idle_w) * busy
        truth.update(peak_bytes=memory.highest, flops=device.work - work, joules=joules)
        return result

    StepTimer.end_step, training.train = ended, trained  # type: ignore[method-assign]
