"""Worlds of ranks over gloo for tests that need no run folder: processes that share one import of torch."""

import gc
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# What ranks need, loaded once: an optimizer and DDP bring Dynamo.
PRELOADED = ["pytest", "torch.distributed.fsdp", "torch._dynamo", "benchlib.benchmarks.parallel.measure"]


def _rank(rank: int, size: int, store: Path, interfaces: str, work: Callable[[int, int], None]) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = interfaces
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    work(rank, size)
    dist.barrier()  # nobody leaves while another one still talks to it
    gc.collect()
    dist.destroy_process_group()


def in_world(size: int, folder: Path, work: Callable[[int, int], None], interfaces: str = "lo") -> None:
    """Call ``work(rank, size)`` on every rank; the first error of a rank is raised here."""
    multiprocessing.set_forkserver_preload(PRELOADED)
    mp.start_processes(_rank, (size, folder / "store", interfaces, work), nprocs=size, start_method="forkserver")
