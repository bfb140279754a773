"""Strategies on two and four ranks against one process, faults that the proofs must find, and injected slow-downs."""

import contextlib
import functools
import json
import warnings
from dataclasses import replace

import pytest
import torch
import worlds
from torch.distributed.tensor import DTensor

from benchlib.benchmarks.parallel import measure, run, strategies
from benchlib.benchmarks.parallel.config import ParallelConfig
from benchlib.benchmarks.parallel.shapes import MODELS, STRATEGIES, Shape
from benchlib.benchmarks.parallel.spec import FP32, LOSS_FP64, WEIGHT_FP64
from benchlib.core.errors import BackendUnavailable, UserError
from benchlib.core.events import EventWriter, Moment
from benchlib.runtime import timing
from benchlib.runtime.group import World, all_gather_objects
from benchlib.runtime.measurement import Rank
from benchlib.workloads import transformer_stack

NARROW = Shape("narrow", "decoder", 32, 4, 8, 8, 64, 32, 61)  # 64 rows where tensor-parallel ranks share them
CPU = torch.device("cpu")
SCHEDULES = ("1f1b", "gpipe", "interleaved", "zero_bubble")
TENSOR_PLAN, PREPARE = strategies.tensor_plan, strategies.prepare
PART, TO_LOCAL = transformer_stack.Stack.part, DTensor.to_local
SHALLOW = replace(NARROW, name="shallow", layers=1)  # for the profiler, to which every kernel is a row


def jobs(config, size):
    for name, schedule in config.ways(STRATEGIES):
        with contextlib.suppress(UserError):
            yield f"{name} {schedule}".strip(), config.job(name, schedule, size)


def proved(job):
    """Return the errors of loss, weights, gradient and, in fp32, loss."""
    proof = strategies.prove(job, CPU)
    return [proof[name] for name in ("loss_error", "weight_error", "gradient_error", "loss_error_fp32")]


def all_proofs(config, rank):
    """Prove the mixtures on four ranks, whatever fits two ranks there, pipelines with every schedule."""
    errors = {}
    for name, job in jobs(config, rank.world.size):
        if rank.world.size == 4 and len(STRATEGIES[job.strategy]) < 2:
            continue
        try:
            errors[name] = proved(job)
        except BackendUnavailable as error:
            errors[name] = str(error)
    return errors


def one_row_taken_for_a_column(part, sequence):
    column = strategies.tp.ColwiseParallel(input_layouts=strategies.Shard(-1), use_local_output=True)
    return TENSOR_PLAN(part, sequence) | {"blocks.0.attention.output": column}


def dropped(_, bucket):
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def swapped(model, number, stages):
    """Return a stage of a model whose inner stages lie in another order than they are run in."""
    return PART(model, {1: 2, 2: 1}.get(number, number), stages)


def averaged_twice(*args):
    way = PREPARE(*args)
    step = way.step

    def again(*batch):
        mean = step(*batch)
        for part in way.parts:
            for parameter in part.parameters():
                parameter.grad /= way.job.layout.data
        return mean

    way.step = again
    return way


FAULTS = {
    "plan": ("tensor", "", strategies, "tensor_plan", one_row_taken_for_a_column),
    "averaged twice": ("data", "", strategies, "prepare", averaged_twice),
    "stage order": ("pipeline", "interleaved", transformer_stack.Stack, "part", swapped),
    "bucket": ("data", "", strategies, "_repeated", dropped),
    "no fault": ("data", "", strategies, "_repeated", strategies._repeated),
}


def faults(config, rank):
    """Return what the proof of a strategy says with a fault in it: its errors, or that it did not even run."""
    errors = {}
    for label, (name, schedule, module, attribute, fault) in FAULTS.items():
        job = config.job(name, schedule, rank.world.size)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, attribute, fault)
            try:
                errors[label] = proved(replace(job, repeats=int(attribute == "_repeated")))  # DDP takes a hook
            except (RuntimeError, ValueError, AssertionError) as error:
                errors[label] = type(error).__name__
    return errors


def slow(config, rank):
    """Return by injected fault: the steps in which each rank held its data, and its step; all-reduces of a step."""
    seen = {}
    config = config.model_copy(update={"model": "shallow"})
    for planted in ("", "data", "rank", "communication"):
        slowed = {"planted": planted, "planted_slowdown": 1} if planted else {}
        own = replace(rank, config=config.model_copy(update={**slowed, "warmup": 1, "steps": 1}))
        held = {"data": 0, "step": 0}

        def hold(place, seconds, held=held):
            held[place] += seconds != 0

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(measure, "hold", functools.partial(hold, "data"))
            patch.setattr(timing, "hold", functools.partial(hold, "step"))
            _, tables = measure.measure(config.job("data", "", 2), own)
        calls = sum(row["calls"] for row in tables["kernels"] if row["class"] == "communication")
        seen[planted] = {"held": all_gather_objects((held["data"], held["step"])), "calls": calls}
    return seen


def counts(config, rank):
    """Return what all ranks hold by strategy: as it is, and where the last rank's shards are empty, if it has any."""
    seen = {}
    for name, job in jobs(config, rank.world.size):
        if "context" in name or name in seen:
            continue
        way = strategies.prepare(job, CPU)
        held = measure.held(way) if way else {}
        with pytest.MonkeyPatch.context() as patch:
            if rank.world.rank == rank.world.size - 1:
                patch.setattr(DTensor, "to_local", lambda self: TO_LOCAL(self)[:0])
            empty = measure.held(way) if way else {}
        sums = [measure.counted(all_gather_objects(sizes)) for sizes in (held, empty)]
        seen[name] = [job.shape.parameters, *sums, any(all_gather_objects(held != empty))]
    return seen


class Ranks:
    """What each rank does; picklable."""

    def __init__(self, folder, *works):
        self.folder, self.works = folder, works

    def __call__(self, rank, size):
        warnings.simplefilter("error", FutureWarning)
        MODELS.update(narrow=NARROW, shallow=SHALLOW)
        values = {"model": "narrow", "nproc": size, "schedules": SCHEDULES[: 4 if size == 2 else 1]}
        config = ParallelConfig.model_construct(**values)
        world, events = World(rank, size, rank, size, CPU, "gloo"), EventWriter(self.folder, f"rank{rank}")
        done = [work(config, Rank(config, self.folder, world, events, Moment.at(0.0))) for work in self.works]
        if rank == 0:
            (self.folder / "done.json").write_text(json.dumps(done))


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Return by number of ranks what was seen, by the name of the work; each world is started once."""
    seen = {}
    for size, works in ((2, (all_proofs, faults, slow)), (4, (all_proofs, counts))):
        folder = tmp_path_factory.mktemp(f"ranks{size}")
        worlds.in_world(size, folder, Ranks(folder, *works))
        done = json.loads((folder / "done.json").read_text())
        seen[size] = {work.__name__: outcome for work, outcome in zip(works, done, strict=True)}
    return seen


def test_ranks_compute_what_one_does_and_faults_are_found(ranks):
    proved = ranks[2]["all_proofs"] | ranks[4]["all_proofs"]
    assert "needs a GPU" in proved.pop("context")
    assert {name.split()[0] for name in proved} == {*STRATEGIES} - {"context"}
    assert {f"pipeline {name}" for name in SCHEDULES} <= set(proved)
    for name, (loss, weight, gradient, loss32) in proved.items():
        assert loss <= LOSS_FP64 and weight <= WEIGHT_FP64 and gradient <= FP32 and loss32 <= FP32, name
    errors = dict(ranks[2]["faults"])
    assert errors.pop("no fault")[0] <= LOSS_FP64 and set(errors) == FAULTS.keys() - {"no fault"}
    for name, error in errors.items():
        assert isinstance(error, str) or max(error[2:]) > 100 * FP32, name


def test_an_injected_slow_down_lands_in_its_part_of_the_step(ranks):
    seen = ranks[2]["slow"]
    # Of 1 + 1 and two traced steps the first has no step before it, whose time the data could be held for.
    assert {name: case["held"] for name, case in seen.items()} == {
        "": [[0, 0], [0, 0]], "data": [[3, 0], [3, 0]], "rank": [[0, 0], [0, 4]], "communication": [[0, 0], [0, 0]],
    }  # fmt: skip
    plain = seen[""]["calls"]
    assert plain > 0 and seen["communication"]["calls"] == (1 + measure.REPEATS) * plain


def test_ranks_hold_the_shape_once_and_an_empty_shard_is_missed(ranks):
    seen = ranks[4]["counts"]
    assert {name.split()[0] for name in seen} == {*STRATEGIES} - {"context"}
    for name, (parameters, held, empty, injected) in seen.items():
        assert parameters == NARROW.parameters + 2 * 3 * NARROW.hidden * ("tensor" in name or name == "sequence"), name
        assert held == parameters and (empty < held) == injected, name
    plain = {name.split()[0] for name, (*_, injected) in seen.items() if not injected}
    assert plain == {"single", "data", "pipeline"}  # tensors that no mesh cuts


def broken(folder, rank, size):
    """Raise on both ranks, on one alone, and in an exchange."""
    run.BROKE_S = 1.0
    here, own = World(rank, size, rank, size, CPU, "gloo"), RuntimeError("got mixed torch.Tensor and DTensor")
    seen = [run.everywhere(own, "both", here), rank == 0 and run.everywhere(own, "one", here)]
    seen.append(run.everywhere(torch.distributed.DistBackendError("NCCL error"), "peer", here))
    (folder / f"{rank}.json").write_text(json.dumps(seen))


def test_an_error_on_all_ranks_costs_its_strategy_and_another_one_the_run(tmp_path):
    worlds.in_world(2, tmp_path, functools.partial(broken, tmp_path))
    assert [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)] == [[True, False, False]] * 2


@pytest.mark.parametrize(
    ("name", "kind", "lacks"), [("context", "cuda", "ring attention"), ("data", "cuda", ""), ("data", "mps", "no fp64")]
)
def test_the_proof_takes_fp64_where_the_device_computes_in_it(name, kind, lacks, monkeypatch):
    weights = []
    monkeypatch.setattr(strategies, "_differences", lambda job, *_: weights.append(job.weights) or (0.0, 0.0, 0.0))
    proof = strategies.prove(ParallelConfig(nproc=2).job(name, "", 2), torch.device(kind))
    assert weights == (["fp32"] if lacks else ["fp64", "fp32"])
    assert all(lacks in reason for reason in proof["why"].values()) and bool(proof["why"]) == bool(lacks)
