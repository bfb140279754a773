"""Ranks over gloo that nobody supervises, with and without a run folder: processes that share one import of torch."""

import gc
import multiprocessing
import os
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchlib.config.schema import load_config
from benchlib.core.events import EventWriter

# What ranks need, loaded once: an optimizer and DDP bring Dynamo, a model of transformers as much as torch.
PRELOADED = [
    "pytest",
    "torch.distributed.fsdp",
    "torch._dynamo",
    "benchlib.benchmarks.parallel.measure",
    "benchlib.benchmarks.squad.run",
    "transformers.models.bert.modeling_bert",
]


def _rank(rank, size, store, interfaces, work):
    gc.freeze()  # what was preloaded: to look through it copies its pages, a second for each collection
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = interfaces
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    work(rank, size)
    dist.barrier()  # nobody leaves while another one still talks to it
    gc.collect()
    dist.destroy_process_group()


def _rank_of_run(rank, size, run_dir, work, env):
    gc.freeze()
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ.update(env | {name: str(value) for name, value in place.items()})
    warnings.simplefilter("error")
    work(load_config(run_dir), run_dir, EventWriter(run_dir, f"rank{rank}"))


def in_ranks(size, run_dir, work, **env):
    """Call a benchmark's ``work(config, run_dir, events)`` on every rank of a prepared folder; a warning is an error."""
    (run_dir / "logs").mkdir(exist_ok=True)
    _start(_rank_of_run, (size, run_dir, work, env), size)


def in_world(size, folder, work, interfaces="lo"):
    """Call ``work(rank, size)`` on every rank; the first error of a rank is raised here."""
    _start(_rank, (size, folder / "store", interfaces, work), size)


def _start(rank, arguments, size):
    multiprocessing.set_forkserver_preload(PRELOADED)
    mp.start_processes(rank, arguments, nprocs=size, start_method="forkserver")
