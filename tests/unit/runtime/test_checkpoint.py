"""Checkpoints: whole or not used."""

import errno
import json
import os
from pathlib import Path

import pytest
import torch

from benchlib.core.errors import UserError
from benchlib.runtime import checkpoint


def _save(folder: Path, step: int) -> Path:
    tensors = {"model": {"weight": torch.arange(1000.0) + step}, "rng": {"rank0.cpu": torch.get_rng_state()}}
    return checkpoint.save(folder, step, tensors, {"step": step})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for step in (4, 8, 12):
        _save(tmp_path, step)
    return tmp_path


def test_the_last_two_are_kept_and_the_newest_is_read(folder: Path) -> None:
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000008", "step-00000012"]
    found = checkpoint.newest(folder)
    assert (found.step, found.state) == (12, {"step": 12})
    assert torch.equal(found.tensors("model")["weight"], torch.arange(1000.0) + 12)
    assert {path.suffix for path in found.path.iterdir()} == {".safetensors", ".json"}, "nothing is pickled"


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (lambda path: _flip(path / "model.safetensors"), "was altered"),
        (lambda path: os.truncate(path / "model.safetensors", 100), "bytes, not"),
        (lambda path: (path / "rng.safetensors").unlink(), "is missing"),
        (lambda path: (path / "manifest.json").unlink(), "missing or truncated"),
        (lambda path: (path / "manifest.json").write_text('{"step": 12, "fil'), "missing or truncated"),
        (lambda path: (path / "manifest.json").write_text('{"step": 12, "files": []}'), "missing or truncated"),
        (lambda path: (path / "manifest.json").write_text('{"step": 12, "files": {}}'), "was not written by benchlib"),
        (lambda path: _list(path, "../../secret"), "was not written by benchlib"),
    ],
)
def test_a_damaged_checkpoint_is_passed_over(folder: Path, fault, reason: str) -> None:
    fault(folder / "step-00000012")
    assert reason in checkpoint.damage(folder / "step-00000012")
    assert checkpoint.newest(folder).step == 8


def test_a_checkpoint_under_another_step_s_name_is_passed_over(folder: Path) -> None:
    (folder / "step-00000012").rename(folder / "step-00000040")
    assert checkpoint.damage(folder / "step-00000040") == "manifest.json is of step 12, its folder's name of step 40"
    assert checkpoint.newest(folder).step == 8


@pytest.mark.parametrize("dies", [False, True])
def test_the_same_step_again_never_leaves_less_than_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch, dies: bool
) -> None:
    """The process may end between any two calls of the system, without a chance to clear up."""
    rename, calls = os.rename, []

    class Ended(BaseException):
        """What nobody catches: a SIGKILL."""

    def cut(source: Path, target: Path) -> None:
        calls.append(source)
        if len(calls) == 3:
            if dies:
                monkeypatch.setattr(checkpoint.shutil, "rmtree", lambda *_, **__: None)
                raise Ended
            raise OSError(errno.EIO, "the disk")
        rename(source, target)

    monkeypatch.setattr(checkpoint.os, "rename", cut)
    with pytest.raises(Ended if dies else OSError):
        _save(folder, 12)
    monkeypatch.undo()
    assert (folder / "step-00000012").exists() != dies, "set aside at the time"
    assert checkpoint.newest(folder).step == 12
    _save(folder, 12)
    assert checkpoint.newest(folder).step == 12
    assert not list(folder.glob(".*.old"))


def _list(path: Path, name: str) -> None:
    """Add a file to the manifest."""
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"][name] = {"bytes": 1, "sha256": ""}
    (path / "manifest.json").write_text(json.dumps(manifest))


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)


def test_none_is_an_error_that_names_each_fault(folder: Path) -> None:
    for path in folder.iterdir():
        (path / "manifest.json").unlink()
    with pytest.raises(UserError, match=r"step-00000012: manifest.json.*step-00000008"):
        checkpoint.newest(folder)


def test_a_finished_training_is_not_resumed(folder: Path) -> None:
    assert checkpoint.newest(folder, lambda found: found.step < 12).step == 8
    with pytest.raises(UserError, match="the training is finished, nothing is left to resume; start a new run"):
        checkpoint.newest(folder, lambda found: found.step < 8)


def test_a_save_that_fails_leaves_the_others(folder: Path) -> None:
    with pytest.raises(TypeError):
        checkpoint.save(folder, 16, {"model": {"weight": torch.zeros(3)}}, {"step": object()})
    assert checkpoint.newest(folder).step == 12
    assert len(list(folder.iterdir())) == 2


def test_optimizer_state_comes_back(tmp_path: Path) -> None:
    def steps(parameter: torch.nn.Parameter, optimizer: torch.optim.Optimizer, count: int) -> None:
        for _ in range(count):
            optimizer.zero_grad()
            (parameter**2).sum().backward()
            optimizer.step()

    def fresh(values: torch.Tensor) -> tuple[torch.nn.Parameter, torch.optim.Optimizer]:
        parameter = torch.nn.Parameter(values.clone())
        return parameter, torch.optim.AdamW([parameter], lr=0.1)

    whole, optimizer = fresh(torch.ones(3))
    steps(whole, optimizer, 5)
    first, optimizer = fresh(torch.ones(3))
    steps(first, optimizer, 3)
    checkpoint.save(tmp_path, 3, {"optimizer": checkpoint.optimizer_tensors(optimizer)}, {})
    second, optimizer = fresh(first.detach())
    checkpoint.load_optimizer(optimizer, checkpoint.newest(tmp_path).tensors("optimizer"))
    steps(second, optimizer, 2)
    assert torch.equal(second, whole)
