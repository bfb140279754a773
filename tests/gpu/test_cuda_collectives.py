"""The collectives on all GPUs of this machine, through the same launcher as everywhere."""

from pathlib import Path

import pytest
import torch

from benchlib.benchmarks.collectives.judge import checks
from benchlib.config.schema import build, save_config
from benchlib.judge.baselines import find
from benchlib.launch.launch import execute
from benchlib.results.run import Run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device")]


def test_every_operation_is_right_on_the_gpus_of_this_machine(tmp_path: Path) -> None:
    values = {
        "backend": "rocm" if torch.version.hip else "cuda",
        "nproc": torch.cuda.device_count(),
        "sizes": "1,999,4KiB,16MiB",
        "budget_s": 300.0,
    }
    (tmp_path / "logs").mkdir()
    save_config(build("collectives", values), tmp_path)
    assert execute(tmp_path)["outcome"] == "complete"
    run = Run(tmp_path)
    assert run.result is not None
    assert run.result.facts["collective"] == "nccl"
    assert run.result.facts["wrong_elements"] == 0
    measured = {(row["operation"], row["dtype"]) for row in run.result.tables["series"]}
    assert {("all_reduce", "bf16"), ("all_gather", "uint8"), ("barrier", "")} <= measured
    failed = [check.name for check in checks(run, find(run)) if check.status == "FAIL"]
    assert failed == []
