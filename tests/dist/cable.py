"""A benchmark that measures the network between ranks: the library's all-reduce by size. ``--benchmark cable:run``."""

from pathlib import Path
from typing import Any

import torch

from benchlib import allreduce, files, process_group
from benchlib.config import BaseConfig
from benchlib.events import EventWriter


class Config(BaseConfig):
    """``sizes_bytes`` are timed in turn, ``seconds`` each, ``rounds`` times over."""

    sizes_bytes: tuple[int, ...] = (16 * 2**20,)
    seconds: float = 1.0
    rounds: int = 3


def run(config: Config, run_dir: Path, events: EventWriter) -> None:
    """Leave ``rows.json``: a row for each round and size, on every node."""
    events.emit("phase", name="init")
    with process_group.world(config, run_dir) as world:
        events.emit("phase", name="measure")
        rows = []
        for _ in range(config.rounds):
            for size in config.sizes_bytes:
                events.emit("heartbeat")
                timing = allreduce.time_all_reduce(size, torch.device("cpu"), config.seconds)
                rows.append({"bytes": size, "busbw_gbps": timing.busbw_gbps, "wrong": timing.wrong})
        told: dict[str, Any] = {"rows": rows, "rank": world.rank, "hosts": list(world.hosts)}
        files.write_json(run_dir / "rows.json", told)
