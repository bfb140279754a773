"""What several files of these tests start from."""

import pytest


@pytest.fixture(scope="module")
def one_thread():
    """Small tensors: threads of tests that run beside this one would only wait for each other."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
