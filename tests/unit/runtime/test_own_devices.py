"""Which device a rank gets, on machines of pretended GPUs; two ranks on one are refused by name."""

import platform
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from benchlib.core.errors import BackendUnavailable
from benchlib.launch.nodes import Place
from benchlib.runtime import devices, group


@pytest.fixture
def gpus(monkeypatch):
    """Return a function that makes so many GPUs visible, with these UUIDs."""

    def visible(*uuids):
        answers = {
            "is_available": lambda: True,
            "device_count": lambda: len(uuids),
            "set_device": lambda where: None,
            "get_device_name": lambda index: "NVIDIA H100",
            "get_device_properties": lambda where: SimpleNamespace(uuid=uuids[where.index]),
        }
        for name, answer in answers.items():
            monkeypatch.setattr(torch.cuda, name, answer)
        monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return visible


def test_a_rank_whose_launcher_shows_it_one_device_takes_that_one(gpus):
    gpus("a", "b")
    assert [devices.device("cuda", rank).index for rank in range(2)] == [0, 1]
    with pytest.raises(BackendUnavailable, match="2 devices here and 4 ranks need one each: set nproc=2"):
        devices.require("cuda", 4)
    gpus("c")
    devices.require("cuda", 4)
    assert devices.identity(devices.device("cuda", 3)) == "c"


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        (["a", "b", "c"], ""),
        (["a", "b", "a"], f"ranks 0 and 2 on {platform.node()} have one device, a: give each rank one of its own"),
        (["", "", ""], ""),
    ],
)
def test_ranks_on_one_device_are_refused_by_its_name_on_all_ranks(names, reason):
    store, size = dist.HashStore(), len(names)

    def joins(rank):
        try:
            group.own_devices(store, Place(rank, size, rank, size), names[rank])
        except BackendUnavailable as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(size) as pool:
        said = list(pool.map(joins, range(size)))
    assert len(set(said)) == 1 and said[0].startswith(reason) and bool(said[0]) == bool(reason)


def test_devices_of_two_hosts_and_parts_of_one_gpu_are_apart(gpus, monkeypatch):
    assert devices.shared([("a", "GPU-1"), ("b", "GPU-1")]) == ""
    gpus("whole")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1,MIG-2")
    assert devices.identity(torch.device("cuda", 1)) == "MIG-2"


@pytest.mark.parametrize(
    ("torch_xla", "words"), [("2.9.0", "torch_xla 2.9 does not work with torch 2.13"), ("2.13.1", "finds no TPU")]
)
def test_torch_xla_of_another_release_is_named_and_not_imported(torch_xla, words, monkeypatch):
    imported = []

    def importing(name):
        imported.append(name)
        raise RuntimeError("no chip answers")

    monkeypatch.setattr(devices.importlib.util, "find_spec", lambda name: True)
    monkeypatch.setattr(devices.importlib, "import_module", importing)
    monkeypatch.setattr(devices.importlib.metadata, "version", {"torch": "2.13.0+cpu", "torch_xla": torch_xla}.get)
    with pytest.raises(BackendUnavailable, match=words):
        devices.require("tpu")
    assert bool(imported) == (words == "finds no TPU")
