"""Readings of a running machine: memory, load, power, energy, temperature, utilisation. No torch.

Every library is optional. What cannot be read is None, with its reason in ``reasons``; nothing is estimated
from constants. Legend of the names:

- ``rss_bytes_per_pid`` resident bytes of each rank's own process (a dict by process id as text)
- ``cpu_percent`` processor time of the ranks with their children, 100 = one core busy since the last reading
- ``others_percent`` processor time of everybody else on the machine, what a hypervisor took for other guests among it
- of the devices that the run uses (of the processor package for the backend cpu): ``power_w`` sum,
  ``energy_j`` sum of the hardware's own counters, ``temperature_c`` highest, ``utilization_percent`` mean
"""

import contextlib
import importlib
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

COMBINED: dict[str, Callable[[list[float]], float]] = {
    "power_w": sum,
    "energy_j": sum,
    "temperature_c": max,
    "utilization_percent": statistics.fmean,
}
POWERCAP = Path("/sys/class/powercap")
# ROCm's HIP counts the devices that its runtime shows; without a variable of its own it reads CUDA's.
VISIBLE = {
    "cuda": (("CUDA_VISIBLE_DEVICES",),),
    "rocm": (("ROCR_VISIBLE_DEVICES",), ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")),
}

Questions = dict[str, Callable[[], Any]]  # to a device, by names of COMBINED; an error means that it gives no value
Reading = dict[str, float | str]  # a number, or a text that says why there is none


def nvidia(count: int, nv: Any) -> list[Questions]:
    """Return NVIDIA devices through NVML, in the order of their PCI bus. Power comes in mW, energy in mJ since the driver was loaded."""
    nv.nvmlInit()

    def device(name: str) -> Questions:
        handle = nv.nvmlDeviceGetHandleByIndex(int(name)) if name.isdigit() else nv.nvmlDeviceGetHandleByUUID(name)
        return {
            "power_w": lambda: nv.nvmlDeviceGetPowerUsage(handle) / 1e3,
            "energy_j": lambda: nv.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3,
            "temperature_c": lambda: nv.nvmlDeviceGetTemperature(handle, nv.NVML_TEMPERATURE_GPU),
            "utilization_percent": lambda: nv.nvmlDeviceGetUtilizationRates(handle).gpu,
        }

    return [device(name) for name in _visible("cuda", count)]


def amd(count: int, smi: Any) -> list[Questions]:
    """Return AMD devices through ROCm's amdsmi package (tested with a stand-in for the library only, never on a device)."""
    smi.amdsmi_init()
    handles = smi.amdsmi_get_processor_handles()
    hot, now = smi.AmdSmiTemperatureType.HOTSPOT, smi.AmdSmiTemperatureMetric.CURRENT

    def device(handle: Any) -> Questions:
        def power_w() -> float:
            power = smi.amdsmi_get_power_info(handle)
            current = power["current_socket_power"]  # "N/A" where the device knows its average alone
            return float(current if isinstance(current, (int, float)) else power["average_socket_power"])

        def energy_j() -> float:
            energy = smi.amdsmi_get_energy_count(handle)  # resolution in microjoules per count
            return float(energy["energy_accumulator"] * energy["counter_resolution"] / 1e6)

        return {
            "power_w": power_w,
            "energy_j": energy_j,
            "temperature_c": lambda: smi.amdsmi_get_temp_metric(handle, hot, now),
            "utilization_percent": lambda: smi.amdsmi_get_gpu_activity(handle)["gfx_activity"],
        }

    return [device(handles[int(name)]) for name in _visible("rocm", count)]


class Package:
    """The energy counters (RAPL) of the processor's packages under Linux.

    Other zones are parts of a package, or the whole platform (psys), which contains the packages.
    """

    def __init__(self, powercap: Path) -> None:
        names = sorted(powercap.glob("intel-rapl:*/name"))
        self.zones = [name.parent for name in names if name.read_text().startswith("package")]
        self.last: dict[Path, int] = {}
        self.total_uj = 0
        self.last_read = (math.nan, 0.0)

    def energy_j(self) -> float:
        """Return joules since the first reading; a counter that wrapped is continued."""
        if not self.zones:
            raise LookupError(f"no processor energy counter in {POWERCAP} (virtual machines seldom have one)")
        try:
            for zone in self.zones:
                now = int((zone / "energy_uj").read_text())
                before = self.last.get(zone, now)
                wrapped = int((zone / "max_energy_range_uj").read_text()) if now < before else 0
                self.total_uj += now - before + wrapped
                self.last[zone] = now
        except PermissionError as error:
            raise LookupError(f"{error.filename} may be read by root only: sudo chmod a+r {error.filename}") from error
        return self.total_uj / 1e6

    def power_w(self) -> float:
        (before_s, before_j), self.last_read = self.last_read, (time.monotonic(), self.energy_j())
        if not (span_s := self.last_read[0] - before_s) > 0:
            raise LookupError("power is the change of the energy counter and needs a second reading")
        return (self.last_read[1] - before_j) / span_s


def processor(powercap: Path = POWERCAP) -> Questions:
    package = Package(powercap)
    psutil.cpu_percent()  # the first call starts the interval
    return {
        "power_w": package.power_w,
        "energy_j": package.energy_j,
        "temperature_c": _temperature_c,
        "utilization_percent": psutil.cpu_percent,
    }


def _temperature_c() -> float:
    read: dict[str, Any] = getattr(psutil, "sensors_temperatures", dict)()  # not on every system
    names = ("coretemp", "k10temp", "zenpower", "cpu_thermal")
    if values := [entry.current for name in names for entry in read.get(name, ())]:
        return float(max(values))
    raise LookupError("the system shows no processor temperature")


def devices_of(backend: str, count: int, library: Any = None) -> tuple[list[Questions], str]:
    """Return the devices of a run, or none and why."""
    try:
        if backend == "cuda":
            return nvidia(count, library or importlib.import_module("pynvml")), "no device is visible"
        if backend == "rocm":
            return amd(count, library or importlib.import_module("amdsmi")), "no device is visible"
    except Exception as error:  # no library or no driver, one too old, or a device is not there
        return [], f"{type(error).__name__}: {error}; `benchlib doctor` says what to install"
    return ([processor()], "") if backend == "cpu" else ([], f"no sensors of the backend {backend} are read")


def _visible(backend: str, count: int) -> list[str]:
    """Return the device numbers or ids that the run may use, at most ``count`` of them; an empty variable or -1 hides all devices."""
    names: list[str] | None = None
    for variables in VISIBLE[backend]:
        value = next((os.environ[name] for name in variables if name in os.environ), None)
        if value is not None:
            listed = [name for name in map(str.strip, value.split(",")) if name and name[0] != "-"]
            names = listed if names is None else [names[int(place)] for place in listed]
    return ([str(index) for index in range(count)] if names is None else names)[:count]


def together(devices: Sequence[Questions], why: str) -> Reading:
    """Return the reading of all devices together; where one gives no value there is none, and the reason names it."""
    return {name: _combined(name, devices) if devices else why for name in COMBINED}


def _combined(name: str, devices: Sequence[Questions]) -> float | str:
    values = list[float]()
    for number, questions in enumerate(devices):
        try:
            values.append(float(questions[name]()))
        except Exception as error:  # each library has its own family of errors
            which = f"device {number}: " if len(devices) > 1 else ""
            return which + (str(error) or type(error).__name__)
    return COMBINED[name](values)


def _busy_s() -> float:
    """Return the seconds that all cores have worked, or were taken by the hypervisor, since the start of the machine."""
    times = psutil.cpu_times()._asdict()
    # What guests used is counted as user time as well.
    return sum(times.get(name, 0.0) for name in ("user", "nice", "system", "irq", "softirq", "steal"))


class Sensors:
    """Reads everything at once. ``pids`` are the ranks' processes and may be changed between readings.

    ``reasons`` says of every name that the last reading had no value for why.
    """

    def __init__(self, pids: Sequence[int], backend: str = "cpu", devices: int = 1, library: Any = None) -> None:
        self.pids = list(pids)
        self.devices = devices_of(backend, devices, library)
        self.reasons: dict[str, str] = {}
        self._cpu_s: dict[int, float] = {}
        self._cpu_at = time.monotonic()
        self._busy_s = 0.0
        self.read()

    def read(self) -> dict[str, Any]:
        """Return all names of the module's legend; None where there is no value."""
        answers = self._cpu_percent() | together(*self.devices)
        self.reasons = {name: value for name, value in answers.items() if isinstance(value, str)}
        return {"rss_bytes_per_pid": self._rss(), **answers, **dict.fromkeys(self.reasons)}

    def _rss(self) -> dict[str, int]:
        resident = {}
        for pid in self.pids:
            with contextlib.suppress(psutil.Error):
                resident[str(pid)] = psutil.Process(pid).memory_info().rss
        return resident

    def _family(self) -> Iterator[psutil.Process]:
        """Yield the ranks and what they started, by one scan of the machine's processes for all: they descend from this one."""
        pids, here = set(self.pids), psutil.Process()
        for process in (here, *here.children(recursive=True)) if pids else ():  # parents come before their children
            with contextlib.suppress(psutil.Error):
                if process.pid in pids or process.ppid() in pids:
                    pids.add(process.pid)
                    yield process

    def _cpu_percent(self) -> Reading:
        """Return the processor time of the ranks and that of all others since the last reading, 100 is one core."""
        now, spent, used, busy = time.monotonic(), dict[int, float](), 0.0, _busy_s()
        for member in self._family():
            with contextlib.suppress(psutil.Error):
                spent[member.pid] = sum(member.cpu_times()[:2])
                # What a process had used before it was first seen is not of this interval.
                if member.pid in self._cpu_s:
                    used += spent[member.pid] - self._cpu_s[member.pid]
                elif member.create_time() > time.time() - (now - self._cpu_at):
                    used += spent[member.pid]
        everybody, self._busy_s = busy - self._busy_s, busy
        seen, span_s = self._cpu_s.keys() & spent.keys(), now - self._cpu_at
        self._cpu_s, self._cpu_at = spent, now
        if not seen:
            why = "processor time is a difference and needs processes and a second reading"
            return {"cpu_percent": why, "others_percent": why}
        return {"cpu_percent": 100 * used / span_s, "others_percent": 100 * max(0.0, everybody - used) / span_s}
