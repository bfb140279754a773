"""The SQuAD benchmark, broken once right after its checkpoint at step 8; ``--benchmark restarting:FUNCTION``."""

import os
import signal
import time

import torch.distributed as dist
from harness import flip

from benchlib.benchmarks import BENCHMARKS
from benchlib.benchmarks.squad import run, train
from benchlib.benchmarks.squad.config import SquadConfig
from benchlib.core import events
from benchlib.runtime.measurement import executed
from benchlib.workloads import training

Config = SquadConfig
STEP = 8
training.PEAK_S = run.EXCHANGE_S = 0.02  # how fast it is, nobody asks


def _broken_once(config, run_dir, writer, fault):
    """Run the benchmark; in its first attempt ``fault`` happens when checkpoint 8 is there."""
    save = train.save

    def saved(work, plan, step, table):
        save(work, plan, step, table)
        if step == STEP:
            fault(work.task)

    if events.restarts(run_dir) == 0:
        train.save = saved
    executed(BENCHMARKS["squad"])(config, run_dir, writer)


def flipped_and_killed(config, run_dir, writer):
    """One bit of the newest checkpoint changes on the disk, then rank 1 dies."""

    def fault(task):
        if task.rank.world.main:
            flip(task.rank.run_dir / f"checkpoints/step-{STEP:08d}/model.safetensors")
        dist.barrier()
        if task.rank.world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    _broken_once(config, run_dir, writer, fault)


def waits_for_its_end(config, run_dir, writer):
    """The node whose run folder is called ``b`` waits to be killed."""

    def fault(task):
        if task.rank.run_dir.name == "b":
            (task.rank.run_dir / "waits").touch()
            time.sleep(600)

    _broken_once(config, run_dir, writer, fault)
