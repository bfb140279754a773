"""Sensors against libraries and counters made for the test: units, sums, wraps, and reasons for what is absent."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from benchlib.core import sensors
from benchlib.core.sensors import DEVICE_NAMES, Processor, Sensors


class FakeNvml:
    """Two devices; the second has no energy counter (as before Volta)."""

    NVML_TEMPERATURE_GPU = 0

    def __init__(self) -> None:
        self.open = 0

    def nvmlInit(self) -> None:
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index > 1:
            raise RuntimeError("Invalid Argument")
        return index

    def nvmlDeviceGetHandleByUUID(self, name: str) -> int:
        return {"GPU-b": 1}[name]

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        return (100_000, 50_500)[handle]  # mW

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: int) -> int:
        if handle == 1:
            raise RuntimeError("Not Supported")
        return 7_000_500  # mJ

    def nvmlDeviceGetTemperature(self, handle: int, kind: int) -> int:
        return (40, 61)[handle]

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        return SimpleNamespace(gpu=(80, 90)[handle])

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(used=(1 << 30, 1 << 29)[handle])


@pytest.fixture(autouse=True)
def _all_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


def test_nvml_two_devices() -> None:
    library = FakeNvml()
    reader = Sensors([os.getpid()], "cuda", 2, library)
    values = reader.read()
    assert values["power_w"] == 150.5
    assert (values["temperature_c"], values["utilization_percent"]) == (61, 85)
    assert values["device_memory_bytes"] == 1.5 * 2**30
    assert values["energy_j"] is None, "a sum with a part missing is not the sum"
    assert reader.availability()["energy_j"] == "device 1: Not Supported"
    first, second = values["devices"]
    assert (first["power_w"], first["energy_j"], first["temperature_c"], first["utilization_percent"]) == (
        100,
        7000.5,
        40,
        80,
    )
    assert (second["power_w"], second["energy_j"], second["device_memory_bytes"]) == (50.5, None, 2**29)
    reader.close()
    assert library.open == 0


def test_nvml_reads_only_the_devices_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Sensors([], "cuda", 1, FakeNvml()).read()["energy_j"] == 7000.5
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    assert Sensors([], "cuda", 1, FakeNvml()).read()["power_w"] == 50.5
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-b")
    assert Sensors([], "cuda", 2, FakeNvml()).read()["power_w"] == 50.5


@pytest.mark.parametrize("value", ["", "-1", " "])
def test_a_variable_that_hides_all_devices_leaves_none_to_read(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    reader = Sensors([], "cuda", 2, FakeNvml())
    values = reader.read()
    assert values["devices"] == [] and all(values[name] is None for name in DEVICE_NAMES)
    assert {reader.availability()[name] for name in DEVICE_NAMES} == {"no device is visible"}


@pytest.mark.parametrize(
    ("variables", "visible"),
    [
        ({"CUDA_VISIBLE_DEVICES": "3,-1,1"}, ["3"]),
        ({"HIP_VISIBLE_DEVICES": "2, 3"}, ["2", "3"]),
        ({"HIP_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "0"}, ["1"]),
        ({"ROCR_VISIBLE_DEVICES": "4,5,6"}, ["4", "5", "6"]),
        ({"ROCR_VISIBLE_DEVICES": "4,5,6", "HIP_VISIBLE_DEVICES": "2,0"}, ["6", "4"]),  # counted among those of ROCr
        ({"ROCR_VISIBLE_DEVICES": ""}, []),
        ({}, ["0", "1", "2", "3"]),
    ],
)
def test_the_devices_that_rocm_shows(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], visible: list[str]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert sensors._visible("rocm", 4) == visible


def test_integrated_energy_is_power_times_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(sensors, "time", SimpleNamespace(monotonic=lambda: now[0]))
    library = FakeNvml()
    reader = Sensors([], "cuda", 1, library)
    now[0] += 2.0
    library.nvmlDeviceGetPowerUsage = lambda handle: 300_000  # type: ignore[method-assign]
    assert reader.read()["energy_integrated_j"] == pytest.approx(2.0 * (100 + 300) / 2)
    now[0] += 0.5
    assert reader.read()["energy_integrated_j"] == pytest.approx(400 + 0.5 * 300)


def test_missing_driver_and_library_are_reasons_and_not_values() -> None:
    def no_driver() -> None:
        raise RuntimeError("Driver Not Loaded")

    library = FakeNvml()
    library.nvmlInit = no_driver  # type: ignore[method-assign]
    for reader, reason in (
        (Sensors([], "cuda", 1, library), "RuntimeError: Driver Not Loaded"),
        (Sensors([], "mps"), "no sensor library for the backend mps"),
    ):
        values, reasons = reader.read(), reader.availability()
        assert all(values[name] is None and reason in reasons[name] for name in DEVICE_NAMES)
        assert values["energy_integrated_j"] is None
        reader.close()


def test_amdsmi_units(monkeypatch: pytest.MonkeyPatch) -> None:
    library = SimpleNamespace(
        amdsmi_init=lambda: None,
        amdsmi_shut_down=lambda: None,
        amdsmi_get_processor_handles=lambda: ["a", "b"],
        amdsmi_get_power_info=lambda handle: {"current_socket_power": "N/A", "average_socket_power": 250},
        amdsmi_get_energy_count=lambda handle: {"energy_accumulator": 2_000_000, "counter_resolution": 15.3},
        amdsmi_get_temp_metric=lambda handle, kind, which: 55,
        amdsmi_get_gpu_activity=lambda handle: {"gfx_activity": 30},
        amdsmi_get_gpu_memory_usage=lambda handle, kind: 1000,
        AmdSmiTemperatureType=SimpleNamespace(HOTSPOT=1),
        AmdSmiTemperatureMetric=SimpleNamespace(CURRENT=0),
        AmdSmiMemoryType=SimpleNamespace(VRAM=0),
    )
    values = Sensors([], "rocm", 2, library).read()
    assert [device["power_w"] for device in values["devices"]] == [250, 250]
    assert (values["power_w"], values["energy_j"]) == (500, pytest.approx(2 * 30.6))
    assert (values["temperature_c"], values["utilization_percent"], values["device_memory_bytes"]) == (55, 30, 2000)


def _zone(folder: Path, name: str, energy_uj: int) -> Path:
    zone = folder / name
    zone.mkdir()
    (zone / "energy_uj").write_text(str(energy_uj))
    (zone / "max_energy_range_uj").write_text("10000000")
    return zone


def test_processor_energy_adds_packages_and_survives_a_wrap(tmp_path: Path) -> None:
    zones = [_zone(tmp_path, f"intel-rapl:{number}", 9_000_000) for number in range(2)]
    _zone(tmp_path, "intel-rapl:0:0", 5)  # a part of package 0: counting it would count it twice
    processor = Processor(tmp_path)
    assert processor.read()[0]["energy_j"] == 0
    (zones[0] / "energy_uj").write_text("9500000")
    (zones[1] / "energy_uj").write_text("500000")
    time.sleep(0.02)
    (values,) = processor.read()
    assert values["energy_j"] == pytest.approx(0.5 + 1.5)
    assert isinstance(values["power_w"], float)
    assert 0 < values["power_w"] <= 2.0 / 0.02


def test_processor_without_counters_says_so(tmp_path: Path) -> None:
    assert "no processor energy counter" in str(Processor(tmp_path / "none").read()[0]["power_w"])


def _moment() -> tuple[float, float]:
    return time.monotonic(), time.process_time()


def _assert_between(percent: Any, *moments: tuple[float, float]) -> None:
    """Assert a share of processor time between a reading within the first two moments and one within the last two."""
    (t0, used0), (t1, used1), (t2, used2), (t3, used3) = moments
    counted = 0.03  # s: the kernel counts in steps of 10 ms
    assert 100 * (used2 - used1 - counted) / (t3 - t0) <= percent <= 100 * (used3 - used0 + counted) / (t2 - t1)


def _busy(seconds: float) -> None:
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def _idle(seconds: float) -> None:
    time.sleep(seconds)


@pytest.mark.parametrize("work", [_busy, _idle])
def test_processor_time_of_a_rank(work: Callable[[float], None]) -> None:
    before = _moment()
    reader = Sensors([os.getpid()])
    begun = _moment()
    work(0.3)
    ended = _moment()
    values = reader.read()
    _assert_between(values["cpu_percent"], before, begun, ended, _moment())
    assert values["rss_bytes_per_pid"][str(os.getpid())] > 1e6


def test_what_a_rank_used_before_it_was_seen_is_no_part_of_a_reading() -> None:
    """A first reading soon after the sensors were made once said 412% of two cores: all of a rank's time since its start."""
    _busy(0.3)
    reader = Sensors([])
    reader.pids = [os.getpid()]
    before = _moment()
    assert reader.read()["cpu_percent"] is None and "second reading" in reader.availability()["cpu_percent"]
    begun = _moment()
    _busy(0.2)
    ended = _moment()
    _assert_between(reader.read()["cpu_percent"], before, begun, ended, _moment())


def test_all_ranks_are_read_by_one_scan_of_the_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The children of a rank count with it, those of others do not, and the number of ranks costs no further scan."""
    scans, scan = [], psutil.Process.children
    words = [sys.executable, "-c", "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"]
    processes = [subprocess.Popen(words, stdin=subprocess.PIPE) for _ in range(3)]
    try:
        children = [until(psutil.Process(process.pid).children) for process in processes]
        reader = Sensors([process.pid for process in processes[:2]])
        monkeypatch.setattr(psutil.Process, "children", lambda *args, **words: scans.append(1) or scan(*args, **words))
        reader.read()
        assert len(scans) == 1
        assert reader._cpu_s.keys() == {one.pid for one in processes[:2]} | {one[0].pid for one in children[:2]}
    finally:
        for process in processes:
            process.communicate(b"\n")


def until(condition: Callable[[], Any]) -> Any:
    end = time.monotonic() + 60
    while not (value := condition()):
        assert time.monotonic() < end
        time.sleep(0.01)
    return value
