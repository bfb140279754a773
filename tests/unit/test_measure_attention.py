"""The script behind docs/attention.md: tiled attention against the formula in numpy, and the page that it writes."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch

from benchlib.benchmarks.parity.attention import KERNELS, Case, inputs
from benchlib.core.errors import BackendUnavailable

HOME = Path(__file__).parents[2]
PAGE = HOME / "docs" / "attention.md"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("measure_attention", HOME / "scripts" / "measure_attention.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("tile", [1, 7, 32, 100])
def test_tiles_of_any_size_are_the_formula_and_rounding_the_weights_shows(script, tile):
    case, double = Case("fp64", 32, scale=3.0), torch.float64
    q, k, v = (tensor.numpy() for tensor in inputs(case)[0])
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    expected = weights / weights.sum(axis=-1, keepdims=True) @ v
    assert np.abs(script.tiled(case, tile, double, double, double) - expected).max() < 1e-13  # scores of up to 100
    off = np.abs(script.tiled(case, tile, torch.bfloat16, double, double) - expected).max()
    assert 1e-4 < off < np.abs(v).max() * 2**-8


def test_each_runtime_says_what_a_query_without_a_key_gets(script, monkeypatch, tmp_path):
    """Softmax of -inf alone is 0/0 and of equal numbers uniform; what runtimes make of it is data, not a crash."""

    def lacking(module, folder):
        raise BackendUnavailable("made up")

    monkeypatch.setitem(script.RUNTIMES, "lacking", lacking)
    names = ("torch", "ONNX Runtime", "OpenVINO f32", "lacking")
    rows = {name: script.masked_rows(name, script.by_softmax, tmp_path / name) for name in names}
    assert rows["torch"] == (["nan", "nan", "uniform"], "")
    for name in names[1:3]:
        assert set(rows[name][0]) <= {"nan", "zeros", "uniform", "as unmasked"}
    assert rows["lacking"] == (["SKIPPED"] * 3, " made up")


def test_the_script_writes_between_the_markers_of_its_page_and_nowhere_else(script, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(PAGE.read_text(encoding="utf-8"), encoding="utf-8")
    script.put(page, "| made up |")
    before, rest = PAGE.read_text(encoding="utf-8").split(script.BEGIN)
    after = rest.split(script.END)[1]
    assert page.read_text(encoding="utf-8") == f"{before}{script.BEGIN}\n\n| made up |\n{script.END}{after}"
    page.write_text("no markers", encoding="utf-8")
    with pytest.raises(ValueError, match="needs each of these lines once"):
        script.put(page, "")


def test_the_page_holds_every_kernel_with_numbers_or_a_reason(script):
    measured = PAGE.read_text(encoding="utf-8").split(script.BEGIN)[1].split(script.END)[0]
    for kernel in KERNELS:
        assert f"| {kernel} | " in measured or f"- {kernel}: SKIPPED: " in measured
    assert f"torch {torch.__version__.split('+')[0]}" in measured
