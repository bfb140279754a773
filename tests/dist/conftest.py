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
