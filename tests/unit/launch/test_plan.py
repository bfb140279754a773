"""From a request to a plan: checked before torch is asked, resolved once, and settled by what the machine has."""

import pytest

from benchlib.config import schema
from benchlib.core.errors import UserError
from benchlib.core.files import home, read_json
from benchlib.core.machine import default_nproc
from benchlib.launch import plan

CPU = {"backends": {"cpu": {"available": True, "count": 1, "names": ["cpu"], "reason": ""}}}
GPUS = {"backends": {**CPU["backends"], "cuda": {"available": True, "count": 8, "names": ["gpu"] * 8, "reason": ""}}}


def test_auto_takes_the_accelerator_with_its_parameters_and_a_rank_per_device():
    planned = plan.plan("squad", "quick", "auto", {}, GPUS)
    config, origins = planned.config, planned.resolved.origins
    assert (config.backend, config.nproc, config.precision) == ("cuda", 8, "bf16")
    assert origins["precision"] == "params/backends/cuda.yaml"
    assert origins["backend"] == origins["nproc"] == "this machine"
    assert not planned.unavailable


def test_what_is_set_by_hand_is_not_settled_by_the_machine():
    planned = plan.plan("squad", "quick", "cuda", {"nproc": "2"}, GPUS)
    assert (planned.config.nproc, planned.resolved.origins["nproc"]) == (2, "set by hand")
    assert "backend" not in planned.resolved.origins


def test_values_are_held_against_the_backend_that_was_taken():
    """While the backend is not known, nothing is refused for the CPU's sake."""
    assert plan.plan("squad", "smoke", "auto", {"precision": "fp16"}, GPUS).config.precision == "fp16"
    with pytest.raises(UserError, match="a CPU has no fast fp16"):
        plan.plan("squad", "smoke", "auto", {"precision": "fp16"}, CPU)


def test_a_precision_that_the_device_lacks_is_refused_before_any_rank_starts():
    old = {
        "backends": {
            "cpu": {**CPU["backends"]["cpu"], "lacks": {"bf16": "this CPU has no bf16 instructions: use fp32"}}
        }
    }
    with pytest.raises(UserError, match="precision = 'bf16': this CPU has no bf16 instructions: use fp32"):
        plan.plan("squad", "smoke", "cpu", {"precision": "bf16"}, old)
    assert plan.plan("squad", "smoke", "cpu", {"precision": "fp32"}, old).config.precision == "fp32"
    assert plan.plan("squad", "smoke", "cpu", {"precision": "bf16"}, CPU).config.precision == "bf16"
    elsewhere = plan.plan("squad", "smoke", "cpu", {"precision": "bf16", "launcher": "slurm"}, old)
    assert elsewhere.config.precision == "bf16"  # its nodes may have other processors


def test_jobs_elsewhere_have_the_ranks_of_their_config():
    planned = plan.plan("squad", "smoke", "cuda", {"launcher": "slurm", "nnodes": 2}, GPUS)
    assert planned.config.nproc == 1 and "nproc" not in planned.resolved.origins


def test_a_benchmark_is_resolved_once(monkeypatch):
    built, read = [], []
    build, check = schema.build, schema.check_params
    monkeypatch.setattr(schema, "build", lambda *given: built.append(given[0]) or build(*given))
    monkeypatch.setattr(schema, "check_params", lambda path: read.append(path) or check(path))
    monkeypatch.setattr(plan, "probe_devices", lambda: CPU)
    schema._read_once.cache_clear()
    planned = plan.plans("quick", None, "auto", [], None)
    assert built == [one.config.benchmark for one in planned]
    assert len(read) == len(set(read))


def test_a_run_folder_holds_config_origins_and_machine(tmp_path):
    planned = plan.plan("squad", "quick", "cpu", {"epochs": 2}, CPU)
    run_dir = plan.prepare(planned, tmp_path)
    assert schema.load_config(run_dir) == planned.config
    assert read_json(run_dir / "origins.json") == planned.resolved.origins | {"epochs": "set by hand"}
    assert read_json(run_dir / "machine.json")["devices"] == CPU
    assert planned.config.nproc == default_nproc("cpu", CPU)
    for origin in planned.resolved.origins.values():
        assert origin in ("set by hand", "this machine", "set by model=tiny") or (home() / origin).exists()
