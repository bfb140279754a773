"""What the tests of heterogeneous ranks execute in each of several ranks, and in one: ``--benchmark unlike_cases:run``."""

import contextlib
import functools
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import training_cases as cases

from benchlib.benchmarks.squad import balance, train
from benchlib.benchmarks.squad.config import SquadConfig
from benchlib.benchmarks.squad.passes import Batches
from benchlib.benchmarks.squad.shares import Member, Split
from benchlib.core.events import EventWriter
from benchlib.core.files import write_json
from benchlib.runtime import checkpoint
from benchlib.runtime.group import World, world
from benchlib.runtime.steps import COLUMNS, Columns

Config = SquadConfig
GLOBAL_BATCH = 12
SAMPLE_S = 0.01  # of a rank that does its work once, by the injected clock


def config_of(model: str, ranks: int, **changes: Any) -> SquadConfig:
    """Return a config whose global batch does not depend on the number of ranks."""
    values = {"batch_size": GLOBAL_BATCH // ranks, "epochs": 2, **changes}
    return cases.config_of(model, ranks, **cases.without_dropout(**values))


def other_split(step: int) -> Split:
    """Return a split that is another one in every step: of all, of none, of one, in several micro-batches."""
    first = [0, 12, 1, 7, 5, 11][step % 6]
    members = (
        Member(most=5, sample_s=1.0 + place, samples=count) for place, count in enumerate((first, GLOBAL_BATCH - first))
    )
    return Split(tuple(members), tokens=100.0)


def exact(config: SquadConfig, here: World, run_dir: Path, events: EventWriter, heterogeneous: bool) -> dict[str, Any]:
    """Train in fp64; return the losses, the gradients of the first step and the samples that each rank saw."""
    gradients: list[list[torch.Tensor]] = []
    clip = torch.nn.utils.clip_grad_norm_

    def look(parameters: Any, limit: float) -> Any:
        parameters = list(parameters)
        gradients.append([parameter.grad.clone() for parameter in parameters])
        return clip(parameters, limit)

    task = cases.task_of(config, here, run_dir, events)
    task.loaded.model.double()
    split = (lambda batches, step: other_split(step)) if heterogeneous else Batches.split
    with mock.patch.object(torch.nn.utils, "clip_grad_norm_", look), mock.patch.object(Batches, "split", split):
        trained = train.train(task)
    return {
        "losses": trained.table[:, :, 0].sum(axis=1).tolist(),
        "samples": trained.table[:, :, 1].tolist(),
        "gradients": gradients,
        "equal": [len(set(ranks)) == 1 for ranks in trained.checksums],
    }


def run(config: SquadConfig, run_dir: Path, events: EventWriter) -> None:
    """Execute all cases; rank 0 leaves unlike.json, unlike.pt and splits.json."""
    with world(config, run_dir) as here:
        outcome = exact(config, here, run_dir, events, heterogeneous=True)
        gradients = outcome.pop("gradients")
        if here.main:
            torch.save(gradients, run_dir / "unlike.pt")
            write_json(run_dir / "unlike.json", outcome)
        _splits(config, run_dir, events, here)


@contextlib.contextmanager
def injected_clock(config: SquadConfig, rank: int) -> Iterator[None]:
    """Let calibration and steps take SAMPLE_S a sample times what the rank repeats, however busy the machine is."""
    follow = balance.Balance.follow

    def paced(balance: balance.Balance, table: np.ndarray, next_open: int) -> None:
        repeats = [[config.work_of(place, step) for place in range(table.shape[1])] for step in range(len(table))]
        table = table.copy()
        table[:, :, [COLUMNS.index(name) for name in ("data_s", "backward_s", "optimizer_s")]] = 0.0
        table[:, :, COLUMNS.index("forward_s")] = SAMPLE_S * np.array(repeats) * Columns(table)["samples"]
        follow(balance, table, next_open)

    with (
        mock.patch.object(balance, "fit", return_value=(0.0, SAMPLE_S * config.work_of(rank), 0.0)),
        mock.patch.object(balance.Balance, "_optimizer_s", return_value=0.0),
        mock.patch.object(balance.Balance, "follow", paced),
    ):
        yield


def _splits(config: SquadConfig, run_dir: Path, events: EventWriter, here: World) -> None:
    """Train with a drift, whole, and continued from before the answer to it; rank 0 leaves splits.json."""
    outcomes: dict[str, Any] = {}

    def case(name: str, **changes: Any) -> None:
        place = run_dir / name
        if here.main:
            place.mkdir(exist_ok=True)
        torch.distributed.barrier()
        # Rank 1 becomes the fast one: the even split of the last steps follows from what the steps take.
        drift = {"balance": "auto", "epochs": 8, "planted_work": [1, 4], "planted_drift_step": 8}
        settings = config_of(config.model, 2, **drift, **changes)
        with injected_clock(settings, here.rank):
            trained = train.train(cases.task_of(settings, here, place, events))
        outcomes[name] = {
            "losses": trained.table[:, :, 0].sum(axis=1).tolist(),
            "samples": trained.table[:, :, 1].tolist(),
            "resumed": trained.first,
            "tables": trained.tables,
        }

    with mock.patch.object(checkpoint, "save", functools.partial(checkpoint.save, keep=100)):
        case("whole", checkpoint_every=4)
    checkpoints = run_dir / "whole" / "checkpoints"
    if here.main:
        for folder in checkpoints.iterdir():
            if int(folder.name.rpartition("-")[2]) > 4:
                shutil.rmtree(folder)
    torch.distributed.barrier()
    case("before", resume=str(run_dir / "whole"), checkpoint_every=4)
    if here.main:
        write_json(run_dir / "splits.json", outcomes)
