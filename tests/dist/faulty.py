"""A benchmark that breaks on purpose: ``fault`` says how, ``who`` which rank. Run with ``--benchmark faulty:run``."""

import os
import signal
import subprocess
import sys
import time

from benchlib.config.schema import BaseConfig
from benchlib.launch.nodes import place


class Config(BaseConfig):
    """``fault`` is a function of this module that rank ``who`` calls at step 3 while the others go on."""

    fault: str = "nothing"
    who: int = 1
    steps: int = 100_000
    step_s: float = 0.05


def nothing():
    """Go on."""


def boom():
    """Raise."""
    raise ValueError("boom <script>")


def spin_without_end():
    """Hang in a Python loop."""
    while True:
        time.sleep(0.01)


def deaf():
    """Hang and ignore every polite signal, with a child in a session of its own."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    spin_without_end()


def steps(config, events):
    """Count steps; at step 3 the chosen rank breaks."""
    rank = place().rank
    events.emit("phase", name="train")
    for step in range(1, config.steps + 1):
        events.emit("heartbeat", step=step)
        if step == 3 and rank == config.who:
            globals()[config.fault]()
        time.sleep(config.step_s)


def run(config, run_dir, events):
    """Independent ranks, no torch."""
    steps(config, events)


def never_at_work(config, run_dir, events):
    """Rank ``who`` gets stuck before its first phase."""
    if place().rank == config.who:
        spin_without_end()
    steps(config, events)


def collective(config, run_dir, events):
    """Ranks that exchange a tensor in every step; the others wait in the collective for the broken one."""
    import torch
    import torch.distributed as dist

    from benchlib.runtime import group

    events.emit("phase", name="init")
    with group.world(config, run_dir) as world:
        events.emit("phase", name="train")
        for step in range(1, config.steps + 1):
            events.emit("heartbeat", step=step)
            if step == 3 and world.rank == config.who:
                globals()[config.fault]()
            total = torch.ones(3)
            dist.all_reduce(total)
            assert total.tolist() == [world.size] * 3
            time.sleep(config.step_s)


def checksums(config, run_dir, events):
    """Compare the weights of the ranks, equal at first, then with one bit of rank 1 changed."""
    import torch

    from benchlib.core import files
    from benchlib.runtime import group

    events.emit("phase", name="init")
    with group.world(config, run_dir) as world:
        events.emit("phase", name="train")
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)).to(torch.bfloat16)

        def compared(model):
            checksums = group.all_gather_objects(group.weight_checksum(model))
            return checksums, len(set(checksums)) == 1

        same, wrapped = compared(model), compared(torch.nn.parallel.DistributedDataParallel(model))
        if world.rank == 1:
            with torch.no_grad():
                model[0].bias.view(torch.int16)[0] ^= 1
        other = compared(model)
        place = [world.rank, world.size, world.local_rank, str(world.device), world.collective]
        seen = {"place": place, "threads": torch.get_num_threads(), "omp": os.environ["OMP_NUM_THREADS"]}
        seen |= {"same": same, "wrapped": wrapped, "other": other}
        files.write_json(run_dir / f"seen{world.rank}.json", seen)
