"""Which collective libraries there are, what is said where one is missing, and how mpirun starts ranks."""

import importlib.util
import math
import sys

import pytest
import torch
import torch.distributed as dist

from benchlib.benchmarks.collectives import gradients
from benchlib.config.schema import BaseConfig
from benchlib.core.errors import BackendUnavailable, UserError
from benchlib.launch import launchers
from benchlib.launch.diagnosis import agent_failures
from benchlib.launch.launchers import LAUNCHERS
from benchlib.launch.nodes import Place, place
from benchlib.runtime import group
from benchlib.runtime.libraries import LIBRARIES


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


def test_mpi_brings_its_launcher():
    assert config(collective="mpi").launcher == "mpirun"
    assert config(collective="mpi", launcher="slurm").launcher == "slurm"
    with pytest.raises(ValueError, match="collective = mpi with launcher = local"):
        config(collective="mpi", launcher="local")


def test_the_job_of_mpirun_and_what_stands_for_it(monkeypatch, tmp_path):
    monkeypatch.setattr(launchers, "mpirun_path", lambda: "/opt/bin/mpirun")
    job = LAUNCHERS["mpirun"](config(nproc=4, nnodes=2, collective="mpi"), tmp_path, "")
    worker = [sys.executable, "-m", "benchlib.runtime.worker", str(tmp_path)]
    assert job.command == ["/opt/bin/mpirun", "-n", "8", *worker]
    assert (job.agent, job.ranks) == (True, 4)
    assert job.env["PRTE_MCA_rmaps_default_mapping_policy"] == "ppr:4:node:oversubscribe"
    assert job.env["PRTE_MCA_hwloc_default_binding_policy"] == "none"
    monkeypatch.setattr(launchers, "mpirun_path", lambda: "")
    values = config(nproc=2, collective="mpi")
    assert LAUNCHERS["mpirun"](values, tmp_path, "").name == "local"  # its ranks say what is missing
    with pytest.raises(UserError, match="no mpirun on PATH"):
        LAUNCHERS["mpirun"](values.model_copy(update={"collective": "gloo"}), tmp_path, "")


OPEN_MPI = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
HYDRA = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")


@pytest.mark.parametrize(("names", "inherited"), [(OPEN_MPI, {}), (HYDRA, {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"})])
def test_place_of_a_rank_of_mpi(monkeypatch, names, inherited):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {**dict(zip(names, ("5", "8", "1", "4"), strict=True)), **inherited}.items():
        monkeypatch.setenv(name, value)
    assert place() == Place(5, 8, 1, 4)


@pytest.mark.parametrize(
    ("text", "pid"),
    [
        ("prterun noticed that process rank 1 with PID 20825 on node vm exited on\nsignal 9 (Killed).", 20825),
        ("mpirun noticed that process rank 1 with PID 0 on node vm exited on signal 9 (Killed).", 0),
    ],
)
def test_whom_mpirun_saw_killed(text, pid):
    assert agent_failures(f"-----\n{text}\n-----\n") == [(1, -9, pid, True)]


def test_gradients_tell_a_contribution_that_is_lost():
    device = torch.device("cpu")
    whole, half = gradients._train(None, range(2), device), gradients._train(None, [0], device)
    assert gradients.difference(whole, gradients._train(None, range(2), device)) == 0.0
    assert gradients.difference(whole, half) > 1e-2
    broken = [*whole[:-1], torch.full_like(whole[-1], torch.nan)]
    assert gradients.difference(broken, whole) == gradients.difference(whole, broken) == math.inf
