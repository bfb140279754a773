"""What a rank sets in its environment before anything opens a device."""

import json
import os
import subprocess
import sys

import pytest

LOOK = """
import json, os
from pathlib import Path

def look(config, run_dir, events):
    Path(run_dir, "seen.json").write_text(json.dumps(dict(os.environ)))
"""


@pytest.mark.parametrize(("before", "after"), [(None, "PCI_BUS_ID"), ("FASTEST_FIRST", "FASTEST_FIRST")])
def test_devices_have_the_numbers_that_the_sensors_give_them_whoever_starts_the_rank(before, after, tmp_path):
    (tmp_path / "looking.py").write_text(LOOK)
    (tmp_path / "config.json").write_text("{}")
    env = {name: value for name, value in os.environ.items() if name != "CUDA_DEVICE_ORDER"}
    env |= {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "PYTHONPATH": f"{tmp_path}:{env.get('PYTHONPATH', '')}"}
    env |= {"CUDA_DEVICE_ORDER": before} if before else {}
    command = [sys.executable, "-m", "benchlib.runtime.worker", str(tmp_path), "--benchmark", "looking:look"]
    subprocess.run(command, env=env, check=True, timeout=100)
    assert json.loads((tmp_path / "seen.json").read_text())["CUDA_DEVICE_ORDER"] == after
