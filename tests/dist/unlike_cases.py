"""What the tests of unlike ranks execute in each of several ranks, and in one: ``--benchmark unlike_cases:run``."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import training_cases as cases

from benchlib.benchmarks.squad import shares, train, unlike
from benchlib.benchmarks.squad.config import SquadConfig
from benchlib.core.errors import UserError
from benchlib.core.events import EventWriter
from benchlib.core.files import write_json
from benchlib.runtime.devices import supports
from benchlib.runtime.group import World, world
from benchlib.runtime.step_metrics import own_work
from benchlib.runtime.steps import COLUMNS, Columns

Config = SquadConfig
GLOBAL_BATCH = 12
SAMPLE_S = 0.01  # of a rank that does its work once, by the injected clock


def config_of(model: str, ranks: int, **changes: Any) -> SquadConfig:
    """Return a config whose global batch does not depend on the number of ranks."""
    return cases.config_of(model, ranks, **cases.without_dropout(**{"batch_size": GLOBAL_BATCH // ranks, "epochs": 2, **changes}))


def other_splits(ranks: int, step: int) -> shares.Plan:
    """Return a split that is another one in every step: of all, of none, of one, in several micro-batches."""
    first = [0, 12, 1, 7, 5, 11][step % 6]
    rest = [first, GLOBAL_BATCH - first, 0] if step % 2 else [first, 0, GLOBAL_BATCH - first]
    counts = [first, GLOBAL_BATCH - first] if ranks == 2 else rest
    members = [
        shares.Rank(device="cpu", threads=1, precision="fp32", most=5, sample_s=1.0 + place, samples=count)
        for place, count in enumerate(counts)
    ]
    return shares.Plan(model="m", max_length=384, global_batch=GLOBAL_BATCH, tokens=100.0, ranks=members)


def exact(config: SquadConfig, here: World, run_dir: Path, events: EventWriter, unlike: bool) -> dict[str, Any]:
    """Train in fp64; return the losses, the gradients of the first step and the samples that each rank saw."""
    gradients: list[list[torch.Tensor]] = []
    clip, plan = torch.nn.utils.clip_grad_norm_, train.Batches.plan

    def look(parameters: Any, limit: float) -> Any:
        parameters = list(parameters)
        gradients.append([parameter.grad.clone() for parameter in parameters])
        return clip(parameters, limit)

    task = cases.task_of(config, here, run_dir, events)
    task.loaded.model.double()
    torch.nn.utils.clip_grad_norm_ = look
    if unlike:
        train.Batches.plan = lambda batches, step: other_splits(here.size, step)
    try:
        trained = train.train(task)
    finally:
        torch.nn.utils.clip_grad_norm_, train.Batches.plan = clip, plan
    return {
        "losses": trained.table[:, :, 0].sum(axis=1).tolist(),
        "samples": trained.table[:, :, 1].tolist(),
        "gradients": gradients,
        "equal": [len(set(ranks)) == 1 for ranks in trained.checksums],
    }


def run(config: SquadConfig, run_dir: Path, events: EventWriter) -> None:
    """Execute all cases; rank 0 leaves unlike.json and unlike.pt, of two ranks plans.json as well."""
    with world(config, run_dir) as here:
        outcome = exact(config, here, run_dir, events, unlike=True)
        gradients = outcome.pop("gradients")
        if here.main:
            torch.save(gradients, run_dir / "unlike.pt")
            write_json(run_dir / "unlike.json", outcome)
        if here.size == 2:
            _plans(config, run_dir, events, here)


@contextlib.contextmanager
def injected_clock(config: SquadConfig, rank: int) -> Iterator[None]:
    """Let calibration and steps take SAMPLE_S a sample times what the rank repeats, however busy the machine is."""
    follow = unlike.Balance.follow

    def paced(balance: unlike.Balance, table: np.ndarray, next_open: int) -> None:
        repeats = [[config.work_of(place, step) for place in range(table.shape[1])] for step in range(len(table))]
        table = table.copy()
        table[:, :, [COLUMNS.index(name) for name in ("data_s", "backward_s", "optimizer_s")]] = 0.0
        table[:, :, COLUMNS.index("forward_s")] = SAMPLE_S * np.array(repeats) * Columns(table)["samples"]
        assert (own_work(Columns(table)) > 0).all()
        follow(balance, table, next_open)

    with (
        mock.patch.object(unlike, "fit", lambda shapes, times: (0.0, SAMPLE_S * config.work_of(rank), 0.0)),
        mock.patch.object(unlike, "_optimizer_s", lambda task, optimizer: 0.0),
        mock.patch.object(unlike.Balance, "follow", paced),
    ):
        yield


def _plans(config: SquadConfig, run_dir: Path, events: EventWriter, here: World) -> None:
    """Train with a plan by calibration, then by its file whole, cut short and continued; rank 0 leaves plans.json."""
    found: dict[str, Any] = {}

    def case(name: str, folder: str = "", **changes: Any) -> None:
        place = run_dir / name
        if here.main:
            place.mkdir(exist_ok=True)
        torch.distributed.barrier()
        settings = config_of(config.model, 2, **{"planted_work": [1, 4], **changes})
        made = cases.task_of(settings, here, place, events)
        with injected_clock(settings, here.rank):
            trained = train.train(made)
        found[name] = {
            "losses": trained.table[:, :, 0].sum(axis=1).tolist(),
            "samples": trained.table[:, :, 1].tolist(),
            "resumed": trained.resumed_step,
            "tables": trained.more.tables,
        }

    # Rank 1 becomes the fast one: the even split of the last steps follows from what the steps take.
    case("auto", balance="auto", epochs=8, planted_drift=[4, 1], planted_drift_step=8)
    plan = str(run_dir / "auto")
    if here.main:
        made = shares.load(plan)
        shares.save(run_dir / "auto", made.giving([9, 3], ranks=[rank.model_copy(update={"work": work}) for rank, work in zip(made.ranks, (1, 4), strict=True)]))  # fmt: skip
    torch.distributed.barrier()
    case("whole", balance=plan, checkpoint_every=2)
    if here.main:
        shutil.rmtree(run_dir / "whole" / "checkpoints" / "step-00000006")
    torch.distributed.barrier()
    case("resumed", balance=plan, resume=str(run_dir / "whole"), checkpoint_every=0)
    try:
        case("other", balance=plan, planted_work=[1, 1])
    except UserError as error:
        found["refused"] = str(error)
    if supports("bf16", torch.device("cpu"))[0]:
        case("mixed", bf16_ranks=[1], max_steps=2, planted_work=[])
    if here.main:
        write_json(run_dir / "plans.json", found)
