"""What several files of these tests start from."""

import functools

import pytest

from benchlib.commands import kit
from benchlib.core import machine
from benchlib.launch import plan


@pytest.fixture(autouse=True, scope="session")
def _one_probe():
    """Ask torch once what is here: each answer is a process of seconds."""
    probe = functools.cache(machine.probe_devices)
    with pytest.MonkeyPatch.context() as patch:
        for module in (plan, kit):
            patch.setattr(module, "probe_devices", probe)
        yield


@pytest.fixture(scope="module")
def one_thread():
    """Small tensors: threads of tests that run beside this one would only wait for each other."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
