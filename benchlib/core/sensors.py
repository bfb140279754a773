"""Readings of a running machine: memory, load, power, energy, temperature, utilisation. No torch.

Every library is optional. What cannot be read is None, with its reason in ``availability()``; nothing is estimated
from constants. Legend of the names:

- ``rss_bytes_per_pid`` resident bytes of each rank's own process (a dict by process id as text)
- ``cpu_percent`` processor time of the ranks with their children, 100 = one core busy since the last reading
- ``others_percent`` processor time of everybody else on the machine, what a hypervisor took for other guests among it
- ``load_1m`` runnable processes of the machine, mean of a minute
- ``frequency_mhz`` clock of the processor, mean of its cores
- of the devices that the run uses (of the processor package for the backend cpu): ``power_w`` sum,
  ``energy_j`` sum of the hardware's own counters, ``temperature_c`` highest, ``utilization_percent`` mean,
  ``device_memory_bytes`` sum of what is in use, by whomever; ``devices`` has the same of each device, in the order of
  the ranks of this machine (none for the processor)
- ``energy_integrated_j`` trapezoids over the ``power_w`` readings since the first one: derived, not a counter
"""

import contextlib
import importlib
import itertools
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import psutil

from benchlib.core.events import Event

COMBINED: dict[str, Callable[[list[float]], float]] = {
    "power_w": sum,
    "energy_j": sum,
    "temperature_c": max,
    "utilization_percent": statistics.fmean,
    "device_memory_bytes": sum,
}
DEVICE_NAMES = tuple(COMBINED)
POWERCAP = Path("/sys/class/powercap")


Reading = dict[str, float | str]  # all of DEVICE_NAMES: a number, or a text that says why there is none


class Source(Protocol):
    """Reads the devices of one kind."""

    def read(self) -> list[Reading]:
        """Return the reading of each device."""
        ...

    def close(self) -> None:
        """Release the library."""
        ...


# ROCm's HIP counts the devices that its runtime shows; without a variable of its own it reads CUDA's.
VISIBLE = {
    "cuda": (("CUDA_VISIBLE_DEVICES",),),
    "rocm": (("ROCR_VISIBLE_DEVICES",), ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")),
}


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


def _asked(handle: Any, questions: dict[str, Callable[[Any], Any]]) -> Reading:
    reading: Reading = {}
    for name, ask in questions.items():
        try:
            reading[name] = float(ask(handle))
        except Exception as error:  # each library has its own family of errors; all mean that the device gives no value
            reading[name] = str(error) or type(error).__name__
    return reading


def _together(readings: list[Reading]) -> Reading:
    """Return the reading of all devices together; where one gives no value there is none, and the reason names it."""
    if len(readings) == 1:
        return readings[0]
    result: Reading = dict.fromkeys(DEVICE_NAMES, "no device is visible")
    for name, combine in COMBINED.items() if readings else ():
        values = [reading[name] for reading in readings]
        missing = [f"device {number}: {value}" for number, value in enumerate(values) if isinstance(value, str)]
        result[name] = missing[0] if missing else combine([float(value) for value in values])
    return result


class Nvml:
    """NVIDIA devices through NVML, in the order of their PCI bus."""

    def __init__(self, devices: int, library: ModuleType | Any | None = None) -> None:
        self.library = library or importlib.import_module("pynvml")
        self.library.nvmlInit()
        self.handles = [self._handle(name) for name in _visible("cuda", devices)]

    def _handle(self, name: str) -> Any:
        if name.isdigit():
            return self.library.nvmlDeviceGetHandleByIndex(int(name))
        return self.library.nvmlDeviceGetHandleByUUID(name)

    def read(self) -> list[Reading]:
        """Power comes in mW, energy in mJ since the driver was loaded."""
        nv = self.library
        questions: dict[str, Callable[[Any], Any]] = {
            "power_w": lambda h: nv.nvmlDeviceGetPowerUsage(h) / 1e3,
            "energy_j": lambda h: nv.nvmlDeviceGetTotalEnergyConsumption(h) / 1e3,
            "temperature_c": lambda h: nv.nvmlDeviceGetTemperature(h, nv.NVML_TEMPERATURE_GPU),
            "utilization_percent": lambda h: nv.nvmlDeviceGetUtilizationRates(h).gpu,
            "device_memory_bytes": lambda h: nv.nvmlDeviceGetMemoryInfo(h).used,
        }
        return [_asked(handle, questions) for handle in self.handles]

    def close(self) -> None:
        """Shut NVML down."""
        self.library.nvmlShutdown()


class Amdsmi:
    """AMD devices through ROCm's amdsmi package (tested with a stand-in for the library only, never on a device)."""

    def __init__(self, devices: int, library: ModuleType | Any | None = None) -> None:
        self.library = library or importlib.import_module("amdsmi")
        self.library.amdsmi_init()
        handles = self.library.amdsmi_get_processor_handles()
        self.handles = [handles[int(name)] for name in _visible("rocm", devices)]

    def _power_w(self, handle: Any) -> float:
        info = self.library.amdsmi_get_power_info(handle)
        for name in ("current_socket_power", "average_socket_power"):  # which one is filled depends on the device
            if isinstance(info.get(name), (int, float)):
                return float(info[name])
        raise ValueError("the device reports no socket power")

    def _energy_j(self, handle: Any) -> float:
        info = self.library.amdsmi_get_energy_count(handle)  # resolution in microjoules per count
        count = info.get("energy_accumulator", info.get("power"))  # its older name; a missing one raises
        return float(count) * float(info["counter_resolution"]) / 1e6

    def _temperature_c(self, handle: Any) -> float:
        kind, which = self.library.AmdSmiTemperatureType.HOTSPOT, self.library.AmdSmiTemperatureMetric.CURRENT
        return float(self.library.amdsmi_get_temp_metric(handle, kind, which))

    def _memory_bytes(self, handle: Any) -> float:
        return float(self.library.amdsmi_get_gpu_memory_usage(handle, self.library.AmdSmiMemoryType.VRAM))

    def read(self) -> list[Reading]:
        """Temperatures are those of the hot spot."""
        questions: dict[str, Callable[[Any], Any]] = {
            "power_w": self._power_w,
            "energy_j": self._energy_j,
            "temperature_c": self._temperature_c,
            "utilization_percent": lambda h: self.library.amdsmi_get_gpu_activity(h)["gfx_activity"],
            "device_memory_bytes": self._memory_bytes,
        }
        return [_asked(handle, questions) for handle in self.handles]

    def close(self) -> None:
        """Shut amdsmi down."""
        self.library.amdsmi_shut_down()


class Processor:
    """The processor: package energy counters (RAPL) of Linux, temperature and utilisation of psutil."""

    def __init__(self, powercap: Path = POWERCAP) -> None:
        self.zones = sorted(zone for zone in powercap.glob("intel-rapl:*") if zone.name.count(":") == 1)
        self.last: dict[Path, int] = {}
        self.total_uj = 0
        self.last_read: tuple[float, float] | None = None
        psutil.cpu_percent()  # the first call starts the interval

    def _energy_j(self) -> float | str:
        """Return joules since the first reading; a counter that wrapped is continued."""
        if not self.zones:
            return f"no processor energy counter in {POWERCAP} (virtual machines and non-x86 systems seldom have one)"
        try:
            for zone in self.zones:
                now = int((zone / "energy_uj").read_text())
                before = self.last.get(zone, now)
                wrapped = int((zone / "max_energy_range_uj").read_text()) if now < before else 0
                self.total_uj += now - before + wrapped
                self.last[zone] = now
        except PermissionError as error:
            return f"{error.filename} may be read by root only: sudo chmod a+r {error.filename}"
        except (OSError, ValueError) as error:
            return str(error)
        return self.total_uj / 1e6

    def _power_w(self, energy_j: float | str) -> float | str:
        if isinstance(energy_j, str):
            return energy_j
        now, before = time.monotonic(), self.last_read
        self.last_read = (now, energy_j)
        if before is None or now <= before[0]:
            return "power is the change of the energy counter and needs a second reading"
        return (energy_j - before[1]) / (now - before[0])

    def _temperature_c(self) -> float | str:
        read: dict[str, Any] = getattr(psutil, "sensors_temperatures", dict)()  # not on every system
        values = [
            entry.current for name in ("coretemp", "k10temp", "zenpower", "cpu_thermal") for entry in read.get(name, ())
        ]
        return max(values) if values else "the system shows no processor temperature"

    def read(self) -> list[Reading]:
        """Read the counters; the first power needs a second reading."""
        energy = self._energy_j()
        return [
            {
                "power_w": self._power_w(energy),
                "energy_j": energy,
                "temperature_c": self._temperature_c(),
                "utilization_percent": psutil.cpu_percent(),
                "device_memory_bytes": "the processor has no memory of its own: see rss_bytes_per_pid",
            }
        ]

    def close(self) -> None:
        """Nothing is held."""


class Absent:
    """Stands for devices that no library can be asked about."""

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def read(self) -> list[Reading]:
        """Return the reason for every name."""
        return [dict.fromkeys(DEVICE_NAMES, self.reason)]

    def close(self) -> None:
        """Nothing is held."""


def source(backend: str, devices: int, library: ModuleType | Any | None = None) -> Source:
    """Return the source for a backend's devices; ``library`` replaces the module that would be imported."""
    if backend == "cpu":
        return Processor()
    makers: dict[str, tuple[Callable[..., Source], str]] = {
        "cuda": (Nvml, "pip install nvidia-ml-py"),
        "rocm": (Amdsmi, "install ROCm's amdsmi package"),
    }
    if backend not in makers:
        return Absent(f"no sensor library for the backend {backend} is known to benchlib")
    maker, install = makers[backend]
    try:
        return maker(devices, library)
    except ImportError as error:
        return Absent(f"{error}: {install}")
    except Exception as error:  # the driver is missing, too old, or a device is not there
        return Absent(f"{type(error).__name__}: {error}")


def _busy_s() -> float:
    """Return the seconds that all cores have worked, or were taken by the hypervisor, since the start of the machine."""
    times = psutil.cpu_times()._asdict()
    # What guests used is counted as user time as well.
    return float(sum(times.get(name, 0.0) for name in ("user", "nice", "system", "irq", "softirq", "steal")))


class Sensors:
    """Reads everything at once. ``pids`` are the ranks' processes and may be changed between readings."""

    def __init__(
        self, pids: Sequence[int], backend: str = "cpu", devices: int = 1, library: ModuleType | Any | None = None
    ) -> None:
        self.pids = list(pids)
        self.source = source(backend, devices, library)
        self._reasons: dict[str, str] = {}
        self._cpu_s: dict[int, float] = {}
        self._cpu_at: float | None = None
        self._busy_s = 0.0
        self._power: tuple[float, float] | None = None
        self._integrated_j = 0.0
        self.read()

    def availability(self) -> dict[str, str]:
        """Return the reason for every name that the last reading had no value for."""
        return dict(self._reasons)

    def read(self) -> dict[str, Any]:
        """Return all names of the module's legend; None where there is no value."""
        self._reasons = {}
        load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
        values: dict[str, Any] = {"rss_bytes_per_pid": self._rss(), "load_1m": load}
        values["cpu_percent"], values["others_percent"] = self._cpu_percent()
        values["frequency_mhz"] = self._frequency_mhz()
        readings = self.source.read()
        for name, value in _together(readings).items():
            values[name] = None if isinstance(value, str) else value
            if isinstance(value, str):
                self._reasons[name] = value
        if isinstance(self.source, (Nvml, Amdsmi)):
            values["devices"] = [
                {name: None if isinstance(value, str) else value for name, value in reading.items()}
                for reading in readings
            ]
        values["energy_integrated_j"] = self._integrate(values["power_w"])
        return values

    def close(self) -> None:
        """Release the sensor library."""
        with contextlib.suppress(Exception):
            self.source.close()

    def _rss(self) -> dict[str, int]:
        resident = {}
        for pid in self.pids:
            with contextlib.suppress(psutil.Error):
                resident[str(pid)] = psutil.Process(pid).memory_info().rss
        return resident

    def _frequency_mhz(self) -> float | None:
        with contextlib.suppress(OSError, NotImplementedError, AttributeError, RuntimeError):
            if (clock := psutil.cpu_freq()) is not None and clock.current > 0:
                return float(clock.current)
        self._reasons["frequency_mhz"] = "the system shows no clock of its processor"
        return None

    def _family(self) -> list[psutil.Process]:
        """Return the ranks and what they started, by one scan of the machine's processes for all: they descend from this one."""
        family = {}
        for pid in self.pids:
            with contextlib.suppress(psutil.Error):
                family[pid] = psutil.Process(pid)
        for child in psutil.Process().children(recursive=True) if family else ():  # parents come before their children
            with contextlib.suppress(psutil.Error):
                if child.ppid() in family:
                    family.setdefault(child.pid, child)
        return list(family.values())

    def _cpu_percent(self) -> tuple[float | None, float | None]:
        """Return the processor time of the ranks and that of all others since the last reading, 100 is one core."""
        now, spent, used = time.monotonic(), dict[int, float](), 0.0
        for member in self._family():
            with contextlib.suppress(psutil.Error):
                spent[member.pid] = sum(member.cpu_times()[:2])
                # What a process had used before it was first seen is not of this interval.
                if member.pid in self._cpu_s:
                    used += spent[member.pid] - self._cpu_s[member.pid]
                elif self._cpu_at is not None and member.create_time() > time.time() - (now - self._cpu_at):
                    used += spent[member.pid]
        busy = _busy_s()
        everybody, self._busy_s = busy - self._busy_s, busy
        seen = bool(self._cpu_s.keys() & spent.keys())
        before, self._cpu_s, self._cpu_at = self._cpu_at, spent, now
        if before is None or now <= before or not seen:
            why = "processor time is a difference and needs processes and a second reading"
            self._reasons |= {"cpu_percent": why, "others_percent": why}
            return None, None
        return 100 * used / (now - before), 100 * max(0.0, everybody - used) / (now - before)

    def _integrate(self, power_w: float | None) -> float | None:
        now = time.monotonic()
        if power_w is None:
            self._power = None  # a gap is not bridged
            if not self._integrated_j:
                self._reasons["energy_integrated_j"] = "needs power_w"
                return None
        else:
            if self._power:
                self._integrated_j += (power_w + self._power[1]) / 2 * (now - self._power[0])
            self._power = (now, power_w)
        return self._integrated_j


def resident_gb(events: Sequence[Event]) -> dict[int, list[float]]:
    """Return the resident memory of each rank in GB from the events of a run: one reading a second."""
    pids = next((list(map(str, event["ranks"])) for event in reversed(events) if event["kind"] == "launched"), [])
    read: dict[int, list[float]] = {}
    for event in events:
        for pid, size in (event.get("rss_bytes_per_pid") or {}).items() if event["kind"] == "sensor" else ():
            if pid in pids and isinstance(size, (int, float)):
                read.setdefault(pids.index(pid), []).append(size / 1e9)
    return read
