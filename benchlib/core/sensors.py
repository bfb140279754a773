"""Readings of a running machine: memory, load, power, energy, temperature, utilisation. No torch.

Every library is optional. What cannot be read is None, with its reason in ``reasons``; nothing is estimated
from constants. Legend of the names:

- ``rss_bytes_per_pid`` resident bytes of each rank's own process (a dict by process id as text)
- ``cpu_percent`` processor time of the ranks with their children, 100 = one core busy since the last reading
- ``others_percent`` processor time of everybody else on the machine, what a hypervisor took for other guests among it
- of the devices that the run uses (of the processor package for the backend cpu): ``power_w`` sum,
  ``energy_j`` sum of the hardware's own counters, ``temperature_c`` highest, ``utilization_percent`` mean,
  ``device_memory_bytes`` sum of what is in use, by whomever
"""

import contextlib
import importlib
import itertools
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil

from benchlib.core.events import Event

COMBINED: dict[str, Callable[[list[float]], float]] = {
    "power_w": sum,
    "energy_j": sum,
    "temperature_c": max,
    "utilization_percent": statistics.fmean,
    "device_memory_bytes": sum,
}
POWERCAP = Path("/sys/class/powercap")
# ROCm's HIP counts the devices that its runtime shows; without a variable of its own it reads CUDA's.
VISIBLE = {
    "cuda": (("CUDA_VISIBLE_DEVICES",),),
    "rocm": (("ROCR_VISIBLE_DEVICES",), ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")),
}
INSTALL = {"cuda": "pip install nvidia-ml-py", "rocm": "install ROCm's amdsmi package"}

Reading = dict[str, float | str]  # all names of COMBINED: a number, or a text that says why there is none
Question = Callable[[Any], Any]  # to a handle; any error means that the device gives no value


@dataclass(frozen=True)
class Devices:
    """Devices of one kind: a handle of each, and what they are asked."""

    handles: Sequence[Any]
    questions: dict[str, Question]

    def read(self) -> list[Reading]:
        return [{name: _answer(ask, handle) for name, ask in self.questions.items()} for handle in self.handles]


def _answer(ask: Question, handle: Any) -> float | str:
    try:
        return float(ask(handle))
    except Exception as error:  # each library has its own family of errors
        return str(error) or type(error).__name__


def nvidia(devices: int, nv: Any) -> Devices:
    """Return NVIDIA devices through NVML, in the order of their PCI bus. Power comes in mW, energy in mJ since the driver was loaded."""
    nv.nvmlInit()
    handles = [
        nv.nvmlDeviceGetHandleByIndex(int(name)) if name.isdigit() else nv.nvmlDeviceGetHandleByUUID(name)
        for name in _visible("cuda", devices)
    ]
    questions: dict[str, Question] = {
        "power_w": lambda handle: nv.nvmlDeviceGetPowerUsage(handle) / 1e3,
        "energy_j": lambda handle: nv.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3,
        "temperature_c": lambda handle: nv.nvmlDeviceGetTemperature(handle, nv.NVML_TEMPERATURE_GPU),
        "utilization_percent": lambda handle: nv.nvmlDeviceGetUtilizationRates(handle).gpu,
        "device_memory_bytes": lambda handle: nv.nvmlDeviceGetMemoryInfo(handle).used,
    }
    return Devices(handles, questions)


def amd(devices: int, smi: Any) -> Devices:
    """Return AMD devices through ROCm's amdsmi package (tested with a stand-in for the library only, never on a device)."""
    smi.amdsmi_init()
    handles = smi.amdsmi_get_processor_handles()
    hot, now = smi.AmdSmiTemperatureType.HOTSPOT, smi.AmdSmiTemperatureMetric.CURRENT

    def power_w(handle: Any) -> float:
        info = smi.amdsmi_get_power_info(handle)
        for name in ("current_socket_power", "average_socket_power"):  # which one is filled depends on the device
            if isinstance(info.get(name), (int, float)):
                return float(info[name])
        raise ValueError("the device reports no socket power")

    def energy_j(handle: Any) -> float:
        info = smi.amdsmi_get_energy_count(handle)  # resolution in microjoules per count
        count = info.get("energy_accumulator", info.get("power"))  # its older name; a missing one raises
        return float(count) * float(info["counter_resolution"]) / 1e6

    questions: dict[str, Question] = {
        "power_w": power_w,
        "energy_j": energy_j,
        "temperature_c": lambda handle: smi.amdsmi_get_temp_metric(handle, hot, now),
        "utilization_percent": lambda handle: smi.amdsmi_get_gpu_activity(handle)["gfx_activity"],
        "device_memory_bytes": lambda handle: smi.amdsmi_get_gpu_memory_usage(handle, smi.AmdSmiMemoryType.VRAM),
    }
    return Devices([handles[int(name)] for name in _visible("rocm", devices)], questions)


class Package:
    """The energy counters (RAPL) of the processor's packages under Linux."""

    def __init__(self, powercap: Path) -> None:
        self.zones = sorted(zone for zone in powercap.glob("intel-rapl:*") if zone.name.count(":") == 1)
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


def processor(powercap: Path = POWERCAP) -> Devices:
    psutil.cpu_percent()  # the first call starts the interval
    questions: dict[str, Question] = {
        "power_w": Package.power_w,
        "energy_j": Package.energy_j,
        "temperature_c": lambda _: _temperature_c(),
        "utilization_percent": lambda _: psutil.cpu_percent(),
        "device_memory_bytes": lambda _: _refuse("the processor has no memory of its own: see rss_bytes_per_pid"),
    }
    return Devices([Package(powercap)], questions)


def _temperature_c() -> float:
    read: dict[str, Any] = getattr(psutil, "sensors_temperatures", dict)()  # not on every system
    names = ("coretemp", "k10temp", "zenpower", "cpu_thermal")
    if values := [entry.current for name in names for entry in read.get(name, ())]:
        return float(max(values))
    raise LookupError("the system shows no processor temperature")


def _refuse(reason: str) -> float:
    raise LookupError(reason)


def absent(reason: str) -> Devices:
    return Devices([reason], dict.fromkeys(COMBINED, _refuse))


def devices_of(backend: str, count: int, library: ModuleType | Any | None = None) -> Devices:
    try:
        if backend == "cuda":
            return nvidia(count, library or importlib.import_module("pynvml"))
        if backend == "rocm":
            return amd(count, library or importlib.import_module("amdsmi"))
    except ImportError as error:
        return absent(f"{error}: {INSTALL[backend]}")
    except Exception as error:  # the driver is missing, too old, or a device is not there
        return absent(f"{type(error).__name__}: {error}")
    return processor() if backend == "cpu" else absent(f"benchlib has no sensor library for the backend {backend}")


def _visible(backend: str, count: int) -> list[str]:
    """Return the device numbers or ids that the run may use, at most ``count`` of them; an empty variable hides all devices."""
    names: list[str] | None = None
    for variables in VISIBLE[backend]:
        value = next((os.environ[name] for name in variables if name in os.environ), None)
        if value is None:
            continue
        # The drivers stop at the first entry that is none: -1 hides it and what follows.
        listed = list(itertools.takewhile(lambda name: name and name[0] != "-", map(str.strip, value.split(","))))
        names = listed if names is None else [names[int(n)] for n in listed if n.isdecimal() and int(n) < len(names)]
    return ([str(index) for index in range(count)] if names is None else names)[:count]


def _together(readings: list[Reading]) -> Reading:
    """Return the reading of all devices together; where one gives no value there is none, and the reason names it."""
    if not readings:
        return dict.fromkeys(COMBINED, "no device is visible")
    result = dict(readings[0])
    for name, combine in COMBINED.items() if len(readings) > 1 else ():
        values = [reading[name] for reading in readings]
        missing = [f"device {number}: {value}" for number, value in enumerate(values) if isinstance(value, str)]
        result[name] = missing[0] if missing else combine([float(value) for value in values])
    return result


def _busy_s() -> float:
    """Return the seconds that all cores have worked, or were taken by the hypervisor, since the start of the machine."""
    times = psutil.cpu_times()._asdict()
    # What guests used is counted as user time as well.
    return float(sum(times.get(name, 0.0) for name in ("user", "nice", "system", "irq", "softirq", "steal")))


class Sensors:
    """Reads everything at once. ``pids`` are the ranks' processes and may be changed between readings.

    ``reasons`` says of every name that the last reading had no value for why.
    """

    def __init__(
        self, pids: Sequence[int], backend: str = "cpu", devices: int = 1, library: ModuleType | Any | None = None
    ) -> None:
        self.pids = list(pids)
        self.devices = devices_of(backend, devices, library)
        self.reasons: dict[str, str] = {}
        self._cpu_s: dict[int, float] = {}
        self._cpu_at: float | None = None
        self._busy_s = 0.0
        self.read()

    def read(self) -> dict[str, Any]:
        """Return all names of the module's legend; None where there is no value."""
        answers = self._cpu_percent() | _together(self.devices.read())
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
                elif self._cpu_at is not None and member.create_time() > time.time() - (now - self._cpu_at):
                    used += spent[member.pid]
        everybody, self._busy_s = busy - self._busy_s, busy
        seen = bool(self._cpu_s.keys() & spent.keys())
        before, self._cpu_s, self._cpu_at = self._cpu_at, spent, now
        names = ("cpu_percent", "others_percent")
        if before is None or now <= before or not seen:
            return dict.fromkeys(names, "processor time is a difference and needs processes and a second reading")
        shares = (used, max(0.0, everybody - used))
        return {name: 100 * share / (now - before) for name, share in zip(names, shares, strict=True)}


def resident_gb(events: Sequence[Event]) -> dict[int, list[float]]:
    """Return the resident memory of each rank in GB from the events of a run: one reading a second."""
    pids = next((list(map(str, event["ranks"])) for event in reversed(events) if event["kind"] == "launched"), [])
    read: dict[int, list[float]] = {}
    for event in events:
        for pid, size in (event.get("rss_bytes_per_pid") or {}).items() if event["kind"] == "sensor" else ():
            if pid in pids and isinstance(size, (int, float)):
                read.setdefault(pids.index(pid), []).append(size / 1e9)
    return read
