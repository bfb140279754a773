"""Sensors against libraries and counters made for the test: units, sums, wraps, and reasons for what is absent."""

import os
import time
from types import SimpleNamespace

import pytest

from benchlib.core import sensors
from benchlib.core.sensors import COMBINED, Sensors, processor, together


def failing(text):
    def fail(*_):
        raise RuntimeError(text)

    return fail


def nvml(**other):
    """Two devices; the second has no energy counter (as before Volta)."""
    library = SimpleNamespace(
        NVML_TEMPERATURE_GPU=0,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByIndex=lambda index: (0, 1)[index],
        nvmlDeviceGetHandleByUUID=lambda name: {"GPU-b": 1}[name],
        nvmlDeviceGetPowerUsage=lambda handle: (100_000, 50_500)[handle],  # mW
        nvmlDeviceGetTotalEnergyConsumption=lambda handle: failing("Not Supported")() if handle else 7_000_500,  # mJ
        nvmlDeviceGetTemperature=lambda handle, kind: (40, 61)[handle],
        nvmlDeviceGetUtilizationRates=lambda handle: SimpleNamespace(gpu=(80, 90)[handle]),
    )
    vars(library).update(other)
    return library


def amdsmi():
    return SimpleNamespace(
        amdsmi_init=lambda: None,
        amdsmi_get_processor_handles=lambda: ["a", "b"],
        amdsmi_get_power_info=lambda handle: {"current_socket_power": "N/A", "average_socket_power": 250},
        amdsmi_get_energy_count=lambda handle: {"energy_accumulator": 2_000_000, "counter_resolution": 15.3},
        amdsmi_get_temp_metric=lambda handle, kind, which: 55,
        amdsmi_get_gpu_activity=lambda handle: {"gfx_activity": 30},
        AmdSmiTemperatureType=SimpleNamespace(HOTSPOT=1),
        AmdSmiTemperatureMetric=SimpleNamespace(CURRENT=0),
    )


@pytest.fixture(autouse=True)
def _all_visible(monkeypatch):
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


def row(*values):
    return dict(zip(COMBINED, values, strict=True))


def test_devices_alone_and_together():
    reader = Sensors([os.getpid()], "cuda", 2, nvml())
    values = reader.read()
    assert {name: values[name] for name in COMBINED} == row(150.5, None, 61, 85)
    assert reader.reasons["energy_j"] == "device 1: Not Supported", "a sum with a part missing is not the sum"
    values = Sensors([], "rocm", 2, amdsmi()).read()
    assert {name: values[name] for name in COMBINED} == row(500, pytest.approx(2 * 30.6), 55, 30)


@pytest.mark.parametrize(
    ("backend", "variables", "visible"),
    [
        ("cuda", {}, ["0", "1", "2", "3"]),
        ("cuda", {"CUDA_VISIBLE_DEVICES": "GPU-b"}, ["GPU-b"]),
        ("cuda", {"CUDA_VISIBLE_DEVICES": ""}, []),
        ("rocm", {"CUDA_VISIBLE_DEVICES": "-1"}, []),
        ("rocm", {"HIP_VISIBLE_DEVICES": "2, 3"}, ["2", "3"]),
        ("rocm", {"HIP_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "0"}, ["1"]),
        ("rocm", {"ROCR_VISIBLE_DEVICES": "4,5,6", "HIP_VISIBLE_DEVICES": "2,0"}, ["6", "4"]),  # counted among ROCr's
        ("rocm", {"ROCR_VISIBLE_DEVICES": ""}, []),
    ],
)
def test_the_devices_that_a_run_sees(monkeypatch, backend, variables, visible):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert sensors._visible(backend, 4) == visible


@pytest.mark.parametrize(
    ("backend", "library", "reason"),
    [
        ("cuda", nvml(nvmlInit=failing("Driver Not Loaded")), "RuntimeError: Driver Not Loaded"),
        ("mps", None, "no sensors of the backend mps"),
        ("cuda", nvml(), "no device is visible"),
    ],
)
def test_what_is_missing_is_a_reason_and_not_a_value(monkeypatch, backend, library, reason):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    reader = Sensors([], backend, 1, library)
    values, reasons = reader.read(), reader.reasons
    assert all(values[name] is None and reason in reasons[name] for name in COMBINED)


def test_processor_energy_adds_packages_and_survives_a_wrap(tmp_path):
    """A part of package 0 and the platform, which contains the packages, are not added to them."""
    zones = {"0": "package-0", "1": "package-1", "0:0": "core", "2": "psys"}
    for number, zone in zones.items():
        name = f"intel-rapl:{number}"
        (tmp_path / name).mkdir()
        (tmp_path / name / "name").write_text(f"{zone}\n")
        (tmp_path / name / "energy_uj").write_text("9000000")
        (tmp_path / name / "max_energy_range_uj").write_text("10000000")
    package = [processor(tmp_path)]
    assert together(package, "")["energy_j"] == 0
    (tmp_path / "intel-rapl:0/energy_uj").write_text("9500000")
    (tmp_path / "intel-rapl:1/energy_uj").write_text("500000")
    (tmp_path / "intel-rapl:2/energy_uj").write_text("9900000")
    time.sleep(0.02)
    values = together(package, "")
    assert values["energy_j"] == pytest.approx(0.5 + 1.5)
    assert 0 < values["power_w"] <= 2.0 / 0.02
    assert "no processor energy counter" in together([processor(tmp_path / "none")], "")["power_w"]


def _busy(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


@pytest.mark.parametrize("work", [_busy, time.sleep])
@pytest.mark.parametrize("known", [True, False])
def test_processor_time_of_a_rank(work, known):
    """What a rank used before its first reading is no part of one. The kernel counts in steps of 10 ms."""
    moments = [(time.monotonic(), time.process_time())]
    reader = Sensors([os.getpid()] if known else [])
    if not known:
        _busy(0.2)
        reader.pids, moments = [os.getpid()], [(time.monotonic(), time.process_time())]
        assert reader.read()["cpu_percent"] is None and "second reading" in reader.reasons["cpu_percent"]
    moments.append((time.monotonic(), time.process_time()))
    work(0.2)
    moments.append((time.monotonic(), time.process_time()))
    values = reader.read()
    (t0, used0), (t1, used1), (t2, used2), (t3, used3) = [*moments, (time.monotonic(), time.process_time())]
    assert 100 * (used2 - used1 - 0.03) / (t3 - t0) <= values["cpu_percent"] <= 100 * (used3 - used0 + 0.03) / (t2 - t1)
    assert values["rss_bytes_per_pid"][str(os.getpid())] > 1e6
