"""The script that compares training loops: what it skips, and what it says of a variant that fails."""

import importlib.util
import sys

import pytest
import torch

from benchlib.core.files import home
from benchlib.runtime import devices


@pytest.fixture
def script(monkeypatch):
    """The script as a module, called with three files that are not opened."""
    spec = importlib.util.spec_from_file_location("bench_training", home() / "scripts" / "bench_training.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    given = ["--train", "t.json", "--eval", "e.json", "--model", "m", "--rounds", "1"]
    monkeypatch.setattr(sys, "argv", ["bench_training.py", *given, "--variants", "native-bf16,native-fp32"])
    return module


def test_a_variant_of_a_precision_that_is_not_here_is_skipped(script, monkeypatch, capsys):
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    monkeypatch.setattr(script, "probe_devices", devices.probe)
    row = {"questions_per_s": 5.0, "padding_share": 0.1, "mfu": 0.2, "f1": 0.0}
    monkeypatch.setattr(script, "run", lambda name, options, work: row)
    script.main()
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "native-bf16: skipped, this CPU has no bf16 instructions (AVX512_BF16, AMX or Arm BF16): use fp32"
    assert [line.split()[0] for line in said if line.startswith("native")] == ["native-bf16:", "native-fp32"]


def test_a_variant_that_fails_says_why(script, monkeypatch, tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho there is no model m >&2\nexit 2\n")
    python.chmod(0o755)
    monkeypatch.setattr(script, "probe_devices", lambda: {"backends": {"cpu": {}}})
    monkeypatch.setattr(script.sys, "executable", str(python))
    with pytest.raises(SystemExit) as raised:
        script.main()
    assert str(raised.value) == "native-bf16 failed, rank 0 with exit code 2:\nthere is no model m"
