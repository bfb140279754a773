"""Heterogeneous ranks: two of them against a single process, whatever the split of each step."""

import contextlib
import functools
import json
import shutil
from unittest import mock

import numpy as np
import pytest
import torch
import training_cases as cases
from worlds import in_ranks

from benchlib.benchmarks.squad import balance, train
from benchlib.benchmarks.squad.balance import Member, Split
from benchlib.benchmarks.squad.train import Native
from benchlib.config.schema import save_config
from benchlib.core.events import EventWriter
from benchlib.core.files import write_json
from benchlib.runtime import checkpoint
from benchlib.runtime.group import world
from benchlib.runtime.steps import COLUMNS, Columns

GLOBAL_BATCH = 12
SAMPLE_S = 0.01  # of a rank that does its work once, by the injected clock


def config_of(model, ranks, **changes):
    """Return a config whose global batch does not depend on the number of ranks."""
    values = {"batch_size": GLOBAL_BATCH // ranks, "epochs": 2, **changes}
    return cases.config_of(model, ranks, **cases.without_dropout(**values))


def other_split(step):
    """Return a split that is another one in every step: of all, of none, of one, in several micro-batches."""
    first = [0, 12, 1, 7, 5, 11][step % 6]
    members = (Member(most=5, sample_s=1.0 + place) for place in range(2))
    return Split(tuple(members), [first, GLOBAL_BATCH - first], tokens=100.0)


def exact(config, here, run_dir, events, heterogeneous):
    """Train in fp64; return the losses, the gradients of the first step and the samples that each rank saw."""
    gradients = []
    clip = torch.nn.utils.clip_grad_norm_

    def look(parameters, limit):
        parameters = list(parameters)
        gradients.append([parameter.grad.clone() for parameter in parameters])
        return clip(parameters, limit)

    task = cases.task_of(config, here, run_dir, events)
    task.loaded.model.double()
    split = (lambda batches, step: other_split(step)) if heterogeneous else Native.split
    with mock.patch.object(torch.nn.utils, "clip_grad_norm_", look), mock.patch.object(Native, "split", split):
        trained = train.train(task)
    return {
        "losses": trained.table[:, :, 0].sum(axis=1).tolist(),
        "samples": trained.table[:, :, 1].tolist(),
        "gradients": gradients,
        "equal": [len(set(ranks)) == 1 for ranks in trained.checksums],
    }


def run(config, run_dir, events):
    """Execute all cases; rank 0 leaves outcome.json, gradients.pt and splits.json."""
    with world(config, run_dir) as here:
        outcome = exact(config, here, run_dir, events, heterogeneous=True)
        gradients = outcome.pop("gradients")
        if here.main:
            torch.save(gradients, run_dir / "gradients.pt")
            write_json(run_dir / "outcome.json", outcome)
        _splits(config, run_dir, events, here)


@contextlib.contextmanager
def injected_clock(config, rank):
    """Let calibration and steps take SAMPLE_S a sample times what the rank repeats, however busy the machine is."""
    follow = balance.Balance.follow

    def paced(balance, table, next_open):
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


def _splits(config, run_dir, events, here):
    """Train with a drift, whole, and continued from before the answer to it; rank 0 leaves splits.json."""
    outcomes = {}

    def case(name, **changes):
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


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return cases.make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def one_process(model, tmp_path_factory):
    config, run_dir = config_of(model, 1), tmp_path_factory.mktemp("one")
    events = EventWriter(run_dir, "rank0")
    with world(config, run_dir) as here:
        return exact(config, here, run_dir, events, heterogeneous=False)


@pytest.fixture(scope="module")
def two_ranks(model, tmp_path_factory):
    """Run the cases in two processes; return the run folder."""
    folder = tmp_path_factory.mktemp("two")
    save_config(config_of(model, 2), folder)
    in_ranks(2, folder, run)
    return folder


def test_splits_that_change_every_step_give_the_curve_of_one_process(two_ranks, one_process):
    outcome = json.loads((two_ranks / "outcome.json").read_text())
    gradients = torch.load(two_ranks / "gradients.pt", weights_only=True)

    samples = np.array(outcome["samples"])
    assert (samples.sum(axis=1) == np.array(one_process["samples"]).sum(axis=1)).all()
    assert (samples[:, 0] == 0).any()  # without work
    assert len(set(map(tuple, samples.tolist()))) >= 5
    assert all(outcome["equal"])
    np.testing.assert_allclose(outcome["losses"], one_process["losses"], rtol=1e-12)
    assert len(gradients) == len(one_process["gradients"]) == len(samples)
    # Steps later than the first also carry what AdamW makes of rounding in gradients near zero.
    for step, limit in ((0, 1e-12), (len(samples) - 1, 1e-9)):
        pairs = list(zip(gradients[step], one_process["gradients"][step], strict=True))
        largest = max(float(other.abs().max()) for _, other in pairs)
        assert max(float((gradient - other).abs().max()) for gradient, other in pairs) < limit * largest


@pytest.fixture(scope="module")
def splits(two_ranks):
    return json.loads((two_ranks / "splits.json").read_text())


def test_a_drift_in_the_middle_is_answered_within_8_steps(splits):
    """By the injected clock rank 1 takes four times as long as rank 0, from step 8 on a quarter of it."""
    samples, tables = np.array(splits["whole"]["samples"]), splits["whole"]["tables"]
    moment = next(row for row in tables["splits"] if row["from_step"] > 8)
    assert moment["from_step"] <= 8 + 8
    whole = samples[samples.sum(axis=1) == 12]
    assert whole[:6].tolist() == [[10, 2]] * 6  # up to step 8
    assert whole[-1, 0] < whole[-1, 1]
    assert all(row["even_s"] > 0 for row in tables["shares"])


def test_splits_are_continued_bit_by_bit(splits):
    """Across the moment of a new split, which follows from steps that the first part took."""
    whole, continued = splits["whole"], splits["before"]
    assert continued["resumed"] == 4
    assert (continued["losses"], continued["samples"]) == (whole["losses"], whole["samples"])
