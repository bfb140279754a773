"""From a request to a plan: checked before torch is asked, and settled by what the machine has."""

import pytest

from benchlib.config import schema
from benchlib.core.errors import UserError
from benchlib.core.files import home, read_json
from benchlib.launch import plan

CPU = {"available": True, "count": 1, "names": ["cpu"], "reason": ""}
ONE = {"backends": {"cpu": CPU}}
OLD = {"backends": {"cpu": {**CPU, "lacks": {"bf16": "this CPU has no bf16 instructions: use fp32"}}}}
GPUS = {"backends": {"cpu": CPU, "cuda": {"available": True, "count": 8, "names": ["gpu"] * 8, "reason": ""}}}


@pytest.mark.parametrize(
    ("backend", "overrides", "probe", "values", "origins"),
    [
        # The accelerator with its own parameters, and a rank for each device; what is set by hand stays.
        (
            "auto",
            {},
            GPUS,
            {"backend": "cuda", "nproc": 8, "precision": "bf16"},
            {"precision": "params/backends/cuda.yaml", "backend": "this machine", "nproc": "this machine"},
        ),
        ("cuda", {"nproc": "2"}, GPUS, {"nproc": 2}, {"nproc": "set by hand", "backend": None}),
        # While the backend is not known, nothing is refused for the CPU's sake.
        ("auto", {"precision": "fp16"}, GPUS, {"precision": "fp16"}, {}),
        # Other machines may have other devices and processors.
        ("cuda", {"launcher": "slurm", "nnodes": 2}, GPUS, {"nproc": 1}, {"nproc": None}),
        ("cpu", {"precision": "bf16", "launcher": "slurm"}, OLD, {"precision": "bf16"}, {}),
        ("cpu", {"precision": "bf16"}, ONE, {"precision": "bf16"}, {}),
    ],
)
def test_the_machine_settles_what_is_left_to_it(backend, overrides, probe, values, origins):
    planned = plan.plan("squad", "quick", backend, overrides, probe)
    assert {name: getattr(planned.config, name) for name in values} == values
    assert {name: planned.resolved.origins.get(name) for name in origins} == origins
    assert not planned.unavailable and planned.auto is (backend == "auto")


@pytest.mark.parametrize(
    ("backend", "precision", "probe", "words"),
    [
        ("auto", "fp16", ONE, "a CPU has no fast fp16"),
        ("cpu", "bf16", OLD, "precision = 'bf16': this CPU has no bf16 instructions: use fp32"),
    ],
)
def test_a_precision_that_the_device_lacks_is_refused_before_any_rank_starts(backend, precision, probe, words):
    with pytest.raises(UserError, match=words):
        plan.plan("squad", "smoke", backend, {"precision": precision}, probe)


def test_a_benchmark_of_one_process_is_that_on_every_machine():
    assert plan.plan("parity", "smoke", "cuda", {}, GPUS).config.nproc == 1
    with pytest.raises(UserError, match="the work of one process"):
        plan.plan("parity", "smoke", "cuda", {"nproc": 2}, GPUS)


def test_a_run_folder_holds_config_origins_and_machine(tmp_path):
    planned = plan.plan("squad", "quick", "cpu", {"epochs": 2}, ONE)
    run_dir = plan.prepare(planned, tmp_path)
    assert schema.load_config(run_dir) == planned.config
    origins = read_json(run_dir / "origins.json")
    assert origins == planned.resolved.origins | {"epochs": "set by hand"}
    assert read_json(run_dir / "machine.json")["devices"] == ONE
    for origin in origins.values():
        assert origin in ("set by hand", "this machine", "set by model=tiny") or (home() / origin).exists()
