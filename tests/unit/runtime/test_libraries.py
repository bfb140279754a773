"""Which collective libraries there are, what is said where one is missing, and how mpirun starts ranks."""

import importlib.util
import sys

import pytest
import torch
import torch.distributed as dist

from benchlib.benchmarks.collectives import gradients
from benchlib.config.schema import BaseConfig
from benchlib.core.errors import BackendUnavailable, UserError
from benchlib.runtime import group
from benchlib.runtime.libraries import LIBRARIES
from benchlib.workloads.numerics import max_abs


def config(**values):
    return BaseConfig(benchmark="x", **values)


@pytest.mark.skipif(dist.is_nccl_available() or dist.is_ucc_available(), reason="this torch has NCCL or UCC")
def test_what_torch_lacks_is_named(monkeypatch):
    with pytest.raises(BackendUnavailable, match=r"library nccl is not available: .* built without nccl and has gloo"):
        LIBRARIES["nccl"].register()
    with pytest.raises(BackendUnavailable, match=r"library ucc is not available: .* built without ucc .*USE_UCC=1"):
        group._library(config(collective="ucc"))
    with pytest.raises(UserError, match="collective = nccl moves tensors of cuda, not of cpu"):
        group._library(config(collective="nccl"))
    monkeypatch.setattr(dist, "is_backend_available", lambda name: True)
    assert group._library(config(collective="ucc")).backend == "ucc"


def test_steps_to_get_mpi(monkeypatch, tmp_path):
    mpi = LIBRARIES["mpi"]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "mpi4py is not installed: pip install -e '.[mpi]'" in mpi.unavailable()
    monkeypatch.undo()
    if mpi.missing():
        pytest.skip(mpi.missing())
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert mpi.unavailable().endswith("set launcher=mpirun (or launcher=slurm, with an srun that speaks PMIx)")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "no mpirun on PATH" in mpi.unavailable()


def test_gradients_tell_a_contribution_that_is_lost():
    device = torch.device("cpu")
    whole, half = gradients._train(None, range(2), device), gradients._train(None, [0], device)
    assert max_abs(whole, gradients._train(None, range(2), device)) == 0.0
    assert max_abs(whole, half) > 1e-2
