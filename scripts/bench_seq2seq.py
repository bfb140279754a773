"""How much faster is the tuned encoder-decoder, what does the frame cost, and do its samples come fast enough?

Question: how much work does `engine=tuned` do in the time of the usual loop, at the default size, and which share of a
step goes to the frame around it (timing, events, sensors)? How long do 100,000 samples of 2 x 256 tokens take to
generate, and which share of the raw sequential rate of the same shards does the loader deliver?

Method: the engines take steps in turns on the same batches, in one process on all cores; the ratio is formed per pair
of steps, by the clock and by processor time, which other programs disturb less. The frame: the time that the
benchmark's loop spends outside of its steps, as a share of them, and the share of the processors that its sensors take
beside it; blocks of framed and bare steps in turns differ by more than both. Generation in batches on one thread,
several times. Then shards are written (or found) in a folder of the disk to test and read in turns in order in blocks
of 1 MiB, and by the loader in batches in the shuffled order of an epoch: raw, loader, loader, raw, ... Before each pass
the page cache is put into the same state, and its share of the shards is measured. The ratio is the median of the
ratios of the rounds. The load of the machine is beside it: a disk test needs an idle one.

    python scripts/bench_seq2seq.py --data-dir /mnt/nvme
    python scripts/bench_seq2seq.py --engines 5 --frame 7
"""

import argparse
import json
import math
import multiprocessing
import os
import statistics
import tempfile
import time
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist

from benchlib.benchmarks.seq2seq.config import Seq2seqConfig
from benchlib.benchmarks.seq2seq.engine import Engine, Task, epoch_order, share
from benchlib.core.events import EventWriter, Moment
from benchlib.core.machine import usable_cores
from benchlib.core.sensors import Sensors
from benchlib.runtime import devices
from benchlib.runtime.group import World
from benchlib.runtime.measurement import Rank
from benchlib.workloads.pairs import Pairs, generate
from benchlib.workloads.shards import disk_rates, open_source
from benchlib.workloads.training import Plan, train


def generation_s(samples: int, batch: int, rounds: int) -> list[float]:
    """Return the seconds that ``samples`` pairs of 256 tokens take in batches on one thread, for each round."""
    seconds = []
    for seed in range(rounds):
        pairs = Pairs(samples, 256, 8192, seed)
        began = time.perf_counter()
        for low in range(0, samples, batch):
            generate(pairs, np.arange(low, min(low + batch, samples)))
        seconds.append(time.perf_counter() - began)
    return seconds


def disk_row(folder: Path, samples: int, batch: int, rounds: int, page_cache: str) -> dict[str, Any]:
    """Return the rates raw and by the loader with the page cache in one state, and the residency that was measured
    before."""
    source = open_source(Pairs(samples, 256, 8192, 0), folder, page_cache, read_ahead=8)
    assert source.shards
    residency = source.shards.settle()
    used = time.process_time()
    raw, loader = disk_rates(source, batch, epoch_order(samples, 0, 1), rounds)
    used = time.process_time() - used
    ratios = [own / plain for own, plain in zip(loader, raw, strict=True)]
    return {
        "page_cache": page_cache,
        "resident_share": residency,
        "raw_mb_per_s": [round(rate / 1e6) for rate in raw],
        "loader_mb_per_s": [round(rate / 1e6) for rate in loader],
        "ratio_of_each_round": [round(value, 2) for value in ratios],
        "ratio": round(statistics.median(ratios), 2),
        "processor_s": round(used, 2),
    }


def task_of(folder: Path, batch: int, samples: int, precision: str) -> Task:
    """Return the task of one rank on all cores, at the default size."""
    torch.set_num_threads(usable_cores())
    config = Seq2seqConfig(batch_size=batch, samples=samples, epochs=1, threads=usable_cores())
    here = World(0, 1, 0, 1, torch.device("cpu"), "gloo")
    rank = Rank(config, folder, here, EventWriter(folder, "rank0"), Moment.now())
    return Task(rank, open_source(Pairs(samples, 256, 8192, 0)), precision, batch)


def engines_row(folder: Path, batch: int, rounds: int, precision: str) -> dict[str, Any]:
    """Return seconds and processor seconds of each engine's steps in turns, and the ratios."""
    task = task_of(folder, batch, batch * (rounds + 1), precision)
    engines = {name: Engine(name, task) for name in ("plain", "tuned")}
    wall: dict[str, list[float]] = {name: [] for name in engines}
    cpu: dict[str, list[float]] = {name: [] for name in engines}
    orders = list(share(task, 0, range(rounds + 1)))
    batches = task.source.batches(order for order, _ in orders)
    for number, (loaded, (_, weight)) in enumerate(zip(batches, orders, strict=True)):
        for name in ("plain", "tuned")[:: -1 if number % 2 else 1]:
            began, used = time.perf_counter(), time.process_time()
            engines[name].differentiate(loaded, weight, True, 0, lambda phase: None)
            engines[name].update()
            wall[name].append(time.perf_counter() - began)
            cpu[name].append(time.process_time() - used)

    def ratio(seconds: dict[str, list[float]]) -> list[float]:
        # The first step maps memory and chooses kernels.
        return [plain / tuned for plain, tuned in list(zip(seconds["plain"], seconds["tuned"], strict=True))[1:]]

    return {
        "batch": batch,
        "precision": precision,
        "samples_per_s": {name: round(batch / statistics.median(wall[name][1:]), 1) for name in wall},
        "step_s": {name: [round(value, 3) for value in wall[name]] for name in wall},
        "ratio": round(statistics.median(ratio(wall)), 2),
        "ratio_of_each_pair": [round(value, 2) for value in ratio(wall)],
        "ratio_by_processor_time": round(statistics.median(ratio(cpu)), 2),
    }


def _sample(folder: Path, pid: int, end: Event) -> None:
    sensors, events = Sensors([pid]), EventWriter(folder, "supervisor")
    while not end.wait(1.0):
        events.emit("sensor", **sensors.read())


class Watched(Engine):
    """An engine that adds up the seconds of its steps."""

    seconds = 0.0

    def differentiate(self, *values: Any) -> torch.Tensor:
        """See ``Engine.differentiate``."""
        self.began = time.perf_counter()
        return super().differentiate(*values)

    def update(self) -> None:
        """See ``Engine.update``."""
        super().update()
        self.seconds += time.perf_counter() - self.began


def frame_row(folder: Path, batch: int, rounds: int, precision: str, steps: int = 6) -> dict[str, Any]:
    """Return what the benchmark's loop adds to ``steps`` steps: the time between them, and the processor time of the
    sensors."""
    task = task_of(folder, batch, batch * steps, precision)
    engine, plan = Watched("tuned", task), Plan(2 * steps, 2 * steps * batch, 2 * steps, 2 * steps * batch, 1.0)
    end = multiprocessing.get_context("spawn").Event()
    sampler = multiprocessing.get_context("spawn").Process(target=_sample, args=(folder, os.getpid(), end))
    sampler.start()
    time.sleep(4.0)  # its imports are no part of the frame
    sensors = psutil.Process(sampler.pid)
    between, sensing = list[float](), list[float]()
    for number in range(rounds + 1):
        began, used = time.perf_counter(), sum(sensors.cpu_times()[:2])
        engine.seconds = 0.0
        epochs_s = math.fsum(train(task.rank, engine, plan, [1e-4] * 2 * steps, steps).epoch_s)
        if number:  # the first round compiles
            between.append(epochs_s / engine.seconds - 1)
            passed = time.perf_counter() - began
            sensing.append((sum(sensors.cpu_times()[:2]) - used) / passed / usable_cores())
    end.set()
    sampler.join()
    return {
        "batch": batch,
        "between_steps": [round(value, 4) for value in between],
        "sensors": [round(value, 4) for value in sensing],
        "median": round(statistics.median(between) + statistics.median(sensing), 4),
    }


def main() -> None:
    """Measure and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data-dir", type=Path, help="folder for the shards, on the disk to test; without it no disk is"
    )
    parser.add_argument("--samples", type=int, default=262_144, help="of the shards, 4,096 bytes each [262144: 1 GiB]")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--engines", type=int, default=0, metavar="PAIRS", help="compare the engines in so many pairs of steps"
    )
    parser.add_argument("--frame", type=int, default=0, metavar="ROUNDS", help="measure the frame in so many rounds")
    parser.add_argument("--precision", choices=("fp32", "bf16"), help="of the engines [bf16 where the device has it]")
    arguments = parser.parse_args()
    report: dict[str, Any] = {
        "cores": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg()[0],
        "generation_s": [round(value, 3) for value in generation_s(100_000, arguments.batch, arguments.rounds)],
    }
    precision = arguments.precision or devices.mixed_precision(torch.device("cpu"))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory() as folder:
        if arguments.engines:
            report["engines"] = engines_row(Path(folder), arguments.batch, arguments.engines, precision)
        if arguments.frame:
            report["frame"] = frame_row(Path(folder), min(arguments.batch, 16), arguments.frame, precision)
    dist.destroy_process_group()
    if arguments.data_dir:
        size = (arguments.samples, arguments.batch, arguments.rounds)
        report["disk"] = [disk_row(arguments.data_dir, *size, cache) for cache in ("cold", "warm")]
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
