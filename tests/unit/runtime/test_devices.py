"""In which precision products run, how large copies have to be, and what memory a process states."""

import os
import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest
import torch

from benchlib.benchmarks.parallel import run as parallel
from benchlib.benchmarks.parallel.config import ParallelConfig
from benchlib.core import machine
from benchlib.runtime import devices, peaks
from benchlib.runtime.group import World


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        ({}, ["fp32", "bf16", "fp32"]),
        ({"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"}, ["tf32", "bf16", "fp32"]),
        ({"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1", "NVIDIA_TF32_OVERRIDE": "0"}, ["fp32", "bf16", "fp32"]),
    ],
)
def test_fp32_products_are_named_by_what_the_process_lets_them_run_in(environment, named):
    """NVIDIA's containers set the first variable; a GPU of before Ampere and a CPU have no tf32."""
    script = (
        "import torch; from benchlib.runtime import devices; gpu, cpu = map(torch.device, ('cuda', 'cpu'));"
        "torch.cuda.get_device_capability = lambda where: (8, 0);"
        "print([devices.products_in(*asked) for asked in (('fp32', gpu), ('bf16', gpu), ('fp32', cpu))]);"
        "torch.cuda.get_device_capability = lambda where: (7, 0); torch.cuda.get_device_name = str;"
        "print(devices.products_in('fp32', gpu))"
    )
    clean = {name: value for name, value in os.environ.items() if "TF32" not in name}
    told = subprocess.run(
        [sys.executable, "-c", script], env=clean | environment, capture_output=True, text=True, check=True
    )
    assert told.stdout.splitlines() == [str(named), "fp32"]


def test_the_peak_beside_tf32_work_is_that_of_tf32(monkeypatch):
    """Work and peak are compared as one precision: on a GPU that has both, the other peak is eight times as low."""
    asked = []
    monkeypatch.setattr(devices, "products_in", lambda precision, where: "tf32")
    monkeypatch.setattr(
        peaks, "all_ranks_peak", lambda here, precision, seconds: (asked.append(precision), (1e12, ""))[1]
    )
    monkeypatch.setattr(peaks, "matmul_peaks", lambda device, precision, **more: asked.append(precision) or [])
    monkeypatch.setattr(peaks, "copy_rates", lambda *args: [1.0])
    world = World(0, 1, 0, 1)
    monkeypatch.setattr(parallel, "all_gather_objects", lambda value: [value])
    monkeypatch.setattr(parallel, "barrier", lambda: None)
    parallel._peaks(ParallelConfig(nproc=1), world)
    assert asked == ["tf32", "tf32"]


def test_a_copy_is_four_times_what_the_caches_hold(monkeypatch):
    """STREAM's rule, over all ranks of a host; a smaller one says that it shows the caches."""
    cpu, gpu = World(0, 4, 0, 4), World(0, 8, 0, 8, torch.device("cuda"))
    monkeypatch.setattr(devices, "cache_bytes", lambda where: (384 if where.type == "cpu" else 50) << 20)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1 << 40))
    sizes = [peaks.copy_size(*asked) for asked in (("host", cpu), ("device", gpu), ("host", World(0, 1, 0, 1)))]
    assert [(size.bytes >> 20, size.lacking) for size in sizes] == [(384, ""), (1024, ""), (1536, "")]
    small = peaks.copy_size("host", cpu, 64 << 20)
    assert small.bytes == 64 << 20 and "64 MiB shows caches of 384 MiB: the memory takes 384 MiB" in small.lacking
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1 << 30))
    scarce = peaks.copy_size("host", cpu)  # a quarter of the free memory, for three buffers of each of four ranks
    assert scarce.bytes >> 20 == 21 and scarce.lacking


def test_the_last_level_caches_of_all_processors_are_added(tmp_path):
    """Two sockets of two processors that share a level 3 of 32 MiB, each with a level 2 of its own."""
    for cpu in range(4):
        for index, (level, shared, size) in enumerate(
            [(2, f"{cpu}", "512K"), (3, f"{cpu // 2 * 2}-{cpu // 2 * 2 + 1}", "32768K")]
        ):
            folder = tmp_path / f"cpu{cpu}" / "cache" / f"index{index}"
            folder.mkdir(parents=True)
            for name, text in (("level", f"{level}"), ("shared_cpu_list", shared), ("size", size)):
                (folder / name).write_text(text + "\n")
    assert machine.cache_bytes(tmp_path) == 64 << 20
    assert machine.cache_bytes(tmp_path / "nothing") == 0


def test_products_that_are_too_small_show_no_peak():
    assert not peaks.too_small(torch.device("cpu"), 256) and not peaks.too_small(torch.device("cuda"), 4096)
    assert "too small for a peak of cuda: take 4096" in peaks.too_small(torch.device("cuda"), 2048)


def test_a_process_does_not_state_the_memory_of_the_one_that_started_it():
    """The launcher holds 900 MB when it starts the child, which holds torch alone."""
    child = "from benchlib.runtime import devices; print(devices.peak_resident_bytes())"
    script = f"""
import resource, subprocess, sys
held = bytearray(b"1") * 900_000_000
print(subprocess.run([sys.executable, "-c", {child!r}], capture_output=True, text=True, check=True).stdout)
"""
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert 5e7 < float(told.stdout) < 8e8
