"""What several files of these tests start from."""

import os

import pytest
import torch.distributed as dist
from harness import HERE


@pytest.fixture(autouse=True, scope="module")
def _ranks_find_these_files():
    """Let processes that a test starts import the benchmarks that lie beside it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(map(str, (HERE.parents[1], HERE, HERE.parent / "fixtures"))))
        yield


@pytest.fixture
def group():
    """A world of one rank in this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def held(monkeypatch):
    """Stand in for the memory of a device: a training holds 1 GB from where its peak is reset, matrix products then 9 GB.

    Returns a function by which a test says that something else holds so many bytes.
    """
    from benchlib.runtime import devices
    from benchlib.workloads import training

    most = [0.0]

    def hold(size):
        most[0] = max(most[0], size)

    def products(rank, precision):
        hold(9e9)
        return 1e15, "a stand-in"

    monkeypatch.setattr(devices, "reset_peak_memory", lambda device: most.__setitem__(0, 1e9))
    monkeypatch.setattr(devices, "peak_memory_bytes", lambda device: (most[0], ""))
    monkeypatch.setattr(training, "peak", products)
    return hold
