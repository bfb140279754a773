"""Checkpoints: whole or not used."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from benchlib.core.errors import UserError
from benchlib.runtime import checkpoint


def _save(folder: Path, step: int, **state: Any) -> None:
    tensors = {"model": {"weight": torch.arange(1000.0) + step}, "rng": {"rank0.cpu": torch.get_rng_state()}}
    checkpoint.save(folder, step, tensors, {"step": step, **state})


def _newest(folder: Path, below: int = 99) -> tuple[int, list[str]]:
    start, faults = checkpoint.newest(folder, lambda candidate: candidate.step < below)
    return start.step, faults


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for step in (4, 8, 12):
        _save(tmp_path, step)
    return tmp_path


def test_the_last_two_are_kept_and_the_newest_is_read(folder: Path) -> None:
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000008", "step-00000012"]
    (start, faults), files = checkpoint.search(folder), list((folder / "step-00000012").iterdir())
    assert start is not None and (start.step, start.state, faults) == (12, {"step": 12}, [])
    assert torch.equal(start.tensors("model")["weight"], torch.arange(1000.0) + 12)
    assert {path.suffix for path in files} == {".safetensors", ".json"}, "nothing is pickled"


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (lambda path: _flip(path / "model.safetensors"), "model.safetensors was altered"),
        (lambda path: os.truncate(path / "model.safetensors", 100), "model.safetensors was altered"),
        (lambda path: (path / "rng.safetensors").unlink(), "rng.safetensors is missing"),
        (lambda path: (path / "manifest.json").unlink(), "missing or truncated"),
        (lambda path: os.truncate(path / "manifest.json", 50), "missing or truncated"),
    ],
)
def test_a_damaged_checkpoint_is_passed_over_and_written_again(folder: Path, fault: Any, reason: str) -> None:
    fault(folder / "step-00000012")
    step, (named,) = _newest(folder)
    assert step == 8 and named.startswith("step-00000012: ") and reason in named
    _save(folder, 12, again=True)
    assert _newest(folder) == (12, [])


def test_what_cannot_be_resumed_says_why(folder: Path) -> None:
    assert _newest(folder, below=12) == (8, [])
    with pytest.raises(UserError, match="the training is finished, nothing is left to resume; start a new run"):
        _newest(folder, below=8)
    for path in folder.iterdir():
        (path / "manifest.json").unlink()
    with pytest.raises(UserError, match=r"step-00000012: manifest.json.*step-00000008"):
        _newest(folder)


def test_a_save_that_fails_leaves_the_others(folder: Path) -> None:
    with pytest.raises(TypeError):
        _save(folder, 16, unknown=object())
    assert _newest(folder)[0] == 12 and len(list(folder.iterdir())) == 2


def test_optimizer_state_comes_back(tmp_path: Path) -> None:
    def steps(parameter: torch.nn.Parameter, optimizer: torch.optim.Optimizer, count: int) -> None:
        for _ in range(count):
            optimizer.zero_grad()
            (parameter**2).sum().backward()
            optimizer.step()

    whole, half = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    steps(whole, torch.optim.AdamW([whole], lr=0.1), 5)
    steps(half, before := torch.optim.AdamW([half], lr=0.1), 3)
    checkpoint.save(tmp_path, 3, {"optimizer": checkpoint.optimizer_tensors(before)}, {})
    checkpoint.load_optimizer(
        after := torch.optim.AdamW([half], lr=0.1), checkpoint.search(tmp_path)[0].tensors("optimizer")
    )
    steps(half, after, 2)
    assert torch.equal(half, whole)
