"""A short training on one GPU, through the same worker as everywhere."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchlib.benchmarks.squad.config import SquadConfig
from benchlib.config.schema import save_config
from benchlib.results.run import Run
from benchlib.runtime import devices

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device")]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("engine", ["native", "trainer"])
def test_training_on_one_gpu(tmp_path, precision, engine):
    if devices.lacking(precision, torch.device("cuda", 0)):
        pytest.skip(f"this GPU has no {precision}")
    backend = "rocm" if torch.version.hip else "cuda"
    values = {"train_questions": 640, "learning_rate": 5e-4, "budget_s": 600.0}
    save_config(SquadConfig(backend=backend, precision=precision, engine=engine, **values), tmp_path)
    env = os.environ | {"BENCHLIB_OUTPUTS": str(tmp_path / "outputs"), "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-m", "benchlib.runtime.worker", str(tmp_path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stderr
    result = Run(tmp_path).result
    assert result.status == "complete"
    assert sum(result.facts["samples_seen"]) == result.facts["samples_expected"]
    assert result.value("loss_final_minisquad_tiny") < result.value("loss_first_minisquad_tiny")
    assert 0 < result.value("mfu_minisquad_tiny") < 1
    assert result.value("device_memory_gb") > 0
    if engine == "native":
        parts = [result.value(f"time_{part}_s") for part in ("data", "forward", "backward", "optimizer")]
        assert 0 < sum(parts) <= result.value("step_s_minisquad_tiny") * 1.1
