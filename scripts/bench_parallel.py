"""What does the frame cost, and what do the kit's exchanges save FSDP2 over gloo?

Question: is a step of `single` and `data` within 2% of a bare torch loop of the same model, and is FSDP2 with the kit's exchanges at
least 1.5 times as fast as with gloo's own, on two ranks with 64 MiB of parameters or more?
Method: both sides live in the same ranks and take blocks of steps in turns, the first side changing with the block; the ratio is formed
per block, by wall clock and by the processor's time (which neighbours disturb less). A block's time is the slowest rank's. The exchange
is timed as forward and backward pass of FSDP2 with a short batch, where communication is most of the step.

    python scripts/bench_parallel.py [--rounds 10] [--steps 10] [--model small] [--layers 2] [--parts exchange single data]
"""

import argparse
import functools
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

from benchlib.benchmarks.parallel.config import ParallelConfig
from benchlib.benchmarks.parallel.measure import Runner
from benchlib.benchmarks.parallel.proofs import tokens
from benchlib.benchmarks.parallel.shapes import MODELS, Job, Layout
from benchlib.benchmarks.parallel.strategies import Way, prepare
from benchlib.core.events import EventWriter, Moment
from benchlib.core.stats import median_interval
from benchlib.runtime import devices
from benchlib.runtime.group import World
from benchlib.runtime.measurement import Rank
from benchlib.runtime.steps import agree
from benchlib.workloads.transformer_stack import loss

Options = argparse.Namespace
PARTS = ("exchange", "single", "data")


def in_turns(
    first: Callable[[], None], second: Callable[[], None], rounds: int, here: World
) -> tuple[list[float], list[float]]:
    """Return second over first by round, of the slowest rank: by wall clock, by processor time of both ranks."""
    walls, cpus = [], []
    for number in range(-1, rounds):  # the first round warms up
        times = {}
        for side in (first, second) if number % 2 else (second, first):
            dist.barrier()
            began, cpu = time.perf_counter(), time.process_time()
            side()
            times[side] = agree(time.perf_counter() - began, here), time.process_time() - cpu
        if number >= 0:
            walls.append(times[second][0] / times[first][0])
            cpus.append(times[second][1] / max(times[first][1], 1e-9))
    return walls, cpus


def show(what: str, ratios: list[float]) -> None:
    """Print a ratio with its interval."""
    low, high = median_interval(ratios) if len(ratios) > 4 else (min(ratios), max(ratios))
    print(f"{what}: {statistics.median(ratios):.3f} (95% {low:.3f} to {high:.3f}, n = {len(ratios)})", flush=True)


def frame(strategy: str, size: int, here: World, options: Options) -> None:
    """Compare a strategy's step with a bare loop of the same model on the same batches; ranks beyond ``size`` wait."""
    shape = replace(MODELS[options.model], layers=options.layers)
    job = Job(shape, strategy, Layout(data=size), seq=options.seq_len)
    way = prepare(job, here.device)
    bare = kit = _nothing
    if way is not None:
        folder = Path(tempfile.mkdtemp())
        rank = Rank(ParallelConfig(nproc=here.size), folder, here, EventWriter(folder, "rank"), Moment.at(0.0))
        runner = Runner(way, rank)
        (model,) = Way(job.alone(), here.device).parts
        module = DistributedDataParallel(model, gradient_as_bucket_view=True) if size > 1 else model
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        numbers = itertools.count()

        def bare() -> None:
            for _ in range(options.steps):
                inputs, targets = tokens(job, next(numbers))
                mean = loss(module(inputs.chunk(size)[here.rank]), targets.chunk(size)[here.rank])
                mean.backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)

        def kit() -> None:
            runner.timed(options.steps)

    walls, cpus = in_turns(bare, kit, options.rounds, here)
    if here.main:
        show(f"step of {strategy} over a bare loop, wall", walls)
        show(f"step of {strategy} over a bare loop, processor", cpus)


def _nothing() -> None:
    return None


def _passes(way: Way, inputs: torch.Tensor, targets: torch.Tensor) -> None:
    way.step(inputs, targets)
    way.optimizer.zero_grad(set_to_none=True)


def exchanges(here: World, options: Options) -> None:
    """Compare forward and backward pass of FSDP2 by gloo's collectives and by the kit's."""
    shape, sides = replace(MODELS[options.model], layers=options.layers), []
    for strategy in ("sharded_direct", "sharded"):
        job = Job(shape, strategy, Layout(shard=here.size), batch=2, seq=16)
        inputs, targets = tokens(job, 0)
        way = prepare(job, here.device)
        assert way is not None
        sides.append(functools.partial(_passes, way, way.share(inputs), way.share(targets)))
    walls, cpus = in_turns(sides[0], sides[1], max(options.rounds, 5), here)
    if here.main:
        size = 4 * shape.parameters / 2**20
        show(f"FSDP2 by gloo over FSDP2 by the kit, {size:.0f} MiB of parameters, wall", walls)
        show(f"FSDP2 by gloo over FSDP2 by the kit, {size:.0f} MiB of parameters, processor", cpus)


def rank(number: int, store: str, options: Options) -> None:
    """Do all of it on one of two ranks."""
    torch.set_num_threads(1)
    devices.keep_freed_memory()  # as in a run
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=number, world_size=2)
    here = World(number, 2, number, 2, torch.device("cpu"), "gloo")
    if "exchange" in options.parts:
        exchanges(here, options)
    for strategy, size in (("single", 1), ("data", 2)):
        if strategy in options.parts:
            frame(strategy, size, here, options)
    dist.barrier()


def main() -> None:
    """Run the comparisons on two ranks of this machine."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--model", default="small")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--seq-len", type=int, default=64)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(rank, (f"{folder}/store", options), nprocs=2, start_method="spawn")


if __name__ == "__main__":
    main()
