"""Strategies on two and four ranks against one process, faults that the proofs must find, and slow parts that must be named."""

import functools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import worlds
from torch.distributed.tensor import DTensor

from benchlib.benchmarks.parallel import measure, proofs, strategies
from benchlib.benchmarks.parallel.config import ParallelConfig
from benchlib.benchmarks.parallel.shapes import MODELS, STRATEGIES, Job, Shape
from benchlib.benchmarks.parallel.spec import FP32, LOSS_FP64, RECOMPUTED, WEIGHT_FP64
from benchlib.core.errors import BackendUnavailable
from benchlib.core.events import EventWriter, Moment
from benchlib.runtime import timing
from benchlib.runtime.group import World, all_gather_objects
from benchlib.runtime.measurement import Rank
from benchlib.workloads import transformer_stack

NARROW = Shape("narrow", "decoder", 32, 8, 8, 8, 64, 32, 64)
CPU = torch.device("cpu")
Work = Callable[[ParallelConfig, World, Path], dict[str, Any]]
FIT_TWO = {"single", "data", "sharded", "sharded_direct", "tensor", "sequence", "context", "pipeline"}


def world(rank: int, size: int) -> World:
    return World(rank, size, rank, size, CPU, "gloo")


def proved(job: Job, size: int) -> list[float]:
    """Return the errors of loss, weights, gradient and, in fp32, loss. On four ranks fp64 alone: half the time."""
    with pytest.MonkeyPatch.context() as patch:
        if size > 2:
            differences = proofs._differences
            patch.setattr(
                proofs,
                "_differences",
                lambda job, *rest: differences(job, *rest) if job.weights == "fp64" else (0.0, 0.0, 0.0),
            )
        proof = proofs.prove(job, CPU)
    return [proof[name] for name in ("loss_error", "weight_error", "gradient_error", "loss_error_fp32")]


def all_proofs(config: ParallelConfig, here: World, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, schedule in config.ways(STRATEGIES):
        if config.obstacle(name, schedule, here.size):
            continue
        try:
            found[f"{name} {schedule}".strip()] = proved(config.job(name, schedule, here.size), here.size)
        except BackendUnavailable as error:
            found[name] = str(error)
    return found


def one_row_taken_for_a_column(part: Any, sequence: bool) -> Any:
    plan = TENSOR_PLAN(part, sequence)
    name = "blocks.0.attention.output"
    return plan | {name: strategies.tp.ColwiseParallel(input_layouts=strategies.Shard(-1), use_local_output=True)}


def dropped(_: Any, bucket: Any) -> Any:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def swapped(layers: int, stage: int, stages: int) -> tuple[int, int]:
    """Cut a model whose inner stages lie in another order than they are run in."""
    return CUT(layers, {1: 2, 2: 1}.get(stage, stage), stages)


def averaged_twice(*args: Any) -> Any:
    way = PREPARE(*args)
    step = way.step

    def again(tokens: Any, targets: Any, mark: Any) -> Any:
        mean = step(tokens, targets, mark)
        for part in way.parts:
            for parameter in part.parameters():
                parameter.grad /= way.layout.data
        return mean

    way.step = again
    return way


TENSOR_PLAN, CUT, PREPARE = strategies.tensor_plan, strategies._cut, proofs.prepare


def faults(config: ParallelConfig, here: World, folder: Path) -> dict[str, Any]:
    """Return what the proof of a strategy says with a fault in it: its errors, or that it did not even run."""
    found: dict[str, Any] = {}

    def planted(label: str, name: str, schedule: str, where: Any, attribute: str, fault: Any) -> None:
        job = replace(config.job(name, schedule, here.size), repeats=int(attribute == "_repeated"))  # DDP takes a hook
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(where, attribute, fault)
            try:
                found[label] = proved(job, here.size)
            except (RuntimeError, ValueError, AssertionError) as error:
                found[label] = type(error).__name__

    planted("plan", "tensor", "", strategies, "tensor_plan", one_row_taken_for_a_column)
    planted("averaged twice", "data", "", proofs, "prepare", averaged_twice)
    planted("stage order", "pipeline", "interleaved", strategies, "_cut", swapped)
    planted("bucket", "data", "", strategies, "_repeated", dropped)
    planted("no fault", "data", "", strategies, "_repeated", strategies._repeated)
    return found


def slow(config: ParallelConfig, here: World, folder: Path) -> dict[str, Any]:
    """Return by fault that was injected: the steps in which each rank held its data, and its step; all-reduces of a step."""
    found: dict[str, Any] = {}
    for planted in ("", "data", "rank", "communication"):
        slowed = {"planted": planted, "planted_slowdown": 1} if planted else {}
        own = config.model_copy(update={**slowed, "warmup": 2, "steps": 3})
        held = {"data": 0, "step": 0}

        def hold(place: str, seconds: float, held: dict[str, int] = held) -> None:
            held[place] += seconds != 0

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(measure, "hold", functools.partial(hold, "data"))
            patch.setattr(timing, "hold", functools.partial(hold, "step"))
            rank = Rank(own, folder, here, EventWriter(folder, f"rank{here.rank}"), Moment.at(0.0))
            tables = measure.measure(own.job("data", "", 2), rank)
        calls = sum(row["calls"] for row in tables["communication"])
        found[planted] = {"held": all_gather_objects((held["data"], held["step"])), "calls": calls}
    return found


def counts(config: ParallelConfig, here: World, folder: Path) -> dict[str, Any]:
    """Return what all ranks hold by strategy: as it is, and where the last rank's shards are empty; and what the shape has."""
    found: dict[str, Any] = {}
    to_local = DTensor.to_local
    for name, strategy in STRATEGIES.items():
        schedule = "1f1b" if "pipeline" in strategy.axes else ""
        if name == "context" or config.obstacle(name, schedule, here.size):
            continue
        way = strategies.prepare(config.job(name, schedule, here.size), here.device)
        held = {} if way is None else measure.held(way)
        with pytest.MonkeyPatch.context() as patch:
            if here.rank == here.size - 1:
                patch.setattr(DTensor, "to_local", lambda self: to_local(self)[:0])
            empty = {} if way is None else measure.held(way)
        cut = held != empty
        found[name] = [measure.counted(all_gather_objects(sizes)) for sizes in (held, empty)] + [
            any(all_gather_objects(cut))
        ]
    return found | {"shape": config.shape.parameters}


class Ranks:
    """What each rank does; picklable."""

    def __init__(self, folder: Path, *works: Work) -> None:
        self.folder, self.works = folder, works

    def __call__(self, rank: int, size: int) -> None:
        schedules = ["1f1b", "gpipe", "interleaved", "zero_bubble"][: 4 if size == 2 else 1]
        MODELS["narrow"] = NARROW
        config = ParallelConfig(model="narrow", nproc=size, schedules=schedules)
        found = [work(config, world(rank, size), self.folder) for work in self.works]
        if rank == 0:
            (self.folder / "found.json").write_text(json.dumps(found))


def outcome(size: int, folder: Path, *works: Work) -> list[dict[str, Any]]:
    worlds.in_world(size, folder, Ranks(folder, *works))
    return json.loads((folder / "found.json").read_text())


def assert_equal(proofs: dict[str, Any]) -> None:
    assert "needs a GPU" in proofs.pop("context")
    for name, (loss, weight, gradient, loss32) in proofs.items():
        assert loss <= LOSS_FP64 and weight <= WEIGHT_FP64 and gradient <= FP32 and loss32 <= FP32, name


def test_two_ranks_compute_what_one_does_and_faults_are_found(tmp_path: Path) -> None:
    proofs, found = outcome(2, tmp_path, all_proofs, faults)
    pipelines = {f"pipeline {schedule}" for schedule in ("1f1b", "gpipe", "interleaved", "zero_bubble")}
    assert set(proofs) == FIT_TWO - {"pipeline"} | pipelines
    assert_equal(proofs)
    assert found.pop("no fault")[0] <= LOSS_FP64
    assert set(found) == {"plan", "averaged twice", "stage order", "bucket"}
    for name, seen in found.items():
        assert isinstance(seen, str) or max(seen[2], seen[3]) > 100 * FP32, name


def test_an_injected_slow_down_lands_in_its_part_of_the_step(tmp_path: Path) -> None:
    (found,) = outcome(2, tmp_path, slow)
    plain = found[""]
    # Of 2 + 3 steps, a traced and a counted one the first has no step before it, whose time the data could be held for.
    assert {name: seen["held"] for name, seen in found.items()} == {
        "": [[0, 0], [0, 0]], "data": [[6, 0], [6, 0]], "rank": [[0, 0], [0, 6]], "communication": [[0, 0], [0, 0]],
    }  # fmt: skip
    assert plain["calls"] > 0 and found["communication"]["calls"] == (1 + measure.REPEATS) * plain["calls"]


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_hold_the_shape_once_and_an_empty_shard_is_missed(tmp_path: Path, size: int) -> None:
    (found,) = outcome(size, tmp_path, counts)
    whole = found.pop("shape")
    assert set(found) == (FIT_TWO - {"context"} if size == 2 else set(STRATEGIES) - {"context"})
    for name, (held, empty, injected) in found.items():
        assert held == whole, name
        assert (empty < whole) == injected, name
    assert {name for name, (*_, injected) in found.items() if not injected} == {
        "single",
        "data",
        "pipeline",
    }  # plain tensors


def test_four_ranks_compute_what_one_does(tmp_path: Path) -> None:
    (proofs,) = outcome(4, tmp_path, all_proofs)
    assert {name.split()[0] for name in proofs} == set(STRATEGIES)
    assert_equal(proofs)


def test_recomputed_activations_that_drop_others_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    error = functools.partial(proofs.checkpointing_error, Job(NARROW), CPU)
    assert error() <= RECOMPUTED
    monkeypatch.setattr(
        transformer_stack, "checkpoint", functools.partial(transformer_stack.checkpoint, preserve_rng_state=False)
    )
    assert error() > 1e-4
