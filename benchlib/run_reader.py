"""Reads run folders into ``StoredRun``, from four small files and the sizes of others.

A folder that cannot be read is a run with a reason in ``damaged``, never an error.
"""

import datetime
import hashlib
import os
from typing import Any

from pydantic_core import from_json

from benchlib import manifest
from benchlib.config import BaseConfig, build, config_class
from benchlib.errors import UserError
from benchlib.files import check_schema, read_bytes
from benchlib.results import fingerprint, fingerprint_key
from benchlib.stored_run import DAY, FILES, RUN, Measured, StoredRun

GATE = " vs baseline"  # ends the name of a check that compares a metric
VERSIONS = ("benchlib", "torch", "transformers")  # of the fingerprint: a series runs across them, to show what they do
LARGEST = 1e100  # no unit comes near it, and its square is still a float
LATEST = 32_503_680_000  # the year 3000: a clock that says more is none
WORDS = ("PASS", "FAIL", "AMBIGUOUS", "SKIPPED")


class _Unlike(ValueError):
    """The files of a run are not what they were when it ended."""


class Reader:
    """Reads run folders and remembers what many of them share: equal configs and machines are looked at once."""

    def __init__(self) -> None:
        self._configs: dict[bytes, tuple[dict[str, Any], BaseConfig | None]] = {}
        self._series: dict[tuple[Any, ...], str] = {}
        self._facts: dict[tuple[Any, ...], dict[str, str]] = {}

    def read(self, folder: str) -> StoredRun:
        """Return what a run folder says; what is damaged is said in ``damaged``."""
        run = _named(folder)
        run.report = os.path.exists(f"{folder}/report.html")
        parts: dict[str, Any] = {}
        steps = (*((name, self._read_part) for name in FILES), ("machine.json", self._place), ("files.json", _whole))
        for name, step in steps:
            try:
                step(run, f"{folder}/{name}", name, parts)
            except KeyError as error:
                run.damaged = run.damaged or f"{name} is not readable: it has no {error}"
            except _Unlike as error:
                run.damaged = run.damaged or str(error)
            except (OSError, ValueError, TypeError, AttributeError, ArithmeticError) as error:
                run.damaged = (
                    run.damaged or f"{name} is not readable: {_first_line(error).replace(f'{folder}/{name}: ', '')}"
                )
        if not parts.keys() & {"verdict.json", "config.json"} and not run.damaged:
            run.damaged = "the folder has no config.json"
        run.facts = self._facts.setdefault(tuple(run.facts.items()), run.facts)
        if run.damaged:
            run.word = "DAMAGED"
        return run

    def _read_part(self, run: StoredRun, path: str, name: str, parts: dict[str, Any]) -> None:
        if not os.path.exists(path):
            return
        content = read_bytes(path)  # refuses a pipe, which open() would wait for
        if name == "config.json":
            if content not in self._configs:
                self._configs[content] = _config(_object(content))
            values, parts[name] = self._configs[content]
            run.benchmark, run.tier, run.backend = (str(values[key]) for key in ("benchmark", "tier", "backend"))
            run.planted = _number(values.get("planted_slowdown") or 0.0)
            parts["digest"] = hashlib.blake2b(content, digest_size=12)
        else:
            parts[name] = _object(content)
            check_schema(path, parts[name], 1)
            FILL[name](run, parts[name])
        if name == "result.json" and "digest" in parts:
            parts["digest"].update(content)
            run.digest = parts["digest"].hexdigest()

    def _place(self, run: StoredRun, _path: str, _name: str, parts: dict[str, Any]) -> None:
        """Fill in the series, which stands for config, hardware and data."""
        config, machine = parts.get("config.json"), parts.get("machine.json")
        if config is None or machine is None:
            return
        found = parts.get("result.json", {}).get("facts", {})
        key = (id(config), run.hardware, machine.get("memory_bytes"), str(found.get("identity")), *run.facts.values())
        if key not in self._series:
            factors = fingerprint(config, machine, found)
            same = {name: value for name, value in factors.items() if name not in VERSIONS}
            self._series[key] = fingerprint_key(same | {"benchmark": config.benchmark, "tier": config.tier})
        run.series = self._series[key]


def _named(folder: str) -> StoredRun:
    """Return a run as far as its folder's name tells it."""
    parent, name = folder.rsplit("/", 2)[-2:]
    day, run = DAY.match(parent), RUN.match(name)
    try:
        numbers = (day["day"] + run["time"]) if day and run else ""
        parts = (int(numbers[a:b]) for a, b in ((0, 4), (4, 6), (6, 8), (8, 10), (10, 12), (12, 14)))
        started = datetime.datetime(*parts).timestamp()  # type: ignore[arg-type]
    except (ValueError, OverflowError):
        started = os.stat(folder).st_mtime
    names = (run["benchmark"] if run else "?", day["tier"] if day else "?", run["backend"] if run else "?")
    return StoredRun(f"{parent}/{name}", *names, started)


def _object(content: bytes) -> dict[str, Any]:
    # Three times as fast as the json module; its errors are ValueErrors as well.
    value = from_json(content, allow_inf_nan=False)
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def _config(values: dict[str, Any]) -> tuple[dict[str, Any], BaseConfig | None]:
    """Return the values and the config they make; None where no benchmark of this version has such a config."""
    try:
        known = config_class(str(values["benchmark"])).model_fields
        return values, build(values["benchmark"], {name: value for name, value in values.items() if name in known})
    except UserError:
        return values, None


def _machine(run: StoredRun, machine: dict[str, Any]) -> None:
    run.facts = _facts(machine)
    cpu = machine.get("cpu", {})
    devices = machine.get("devices", {}).get("backends", {}).get(run.backend, {}).get("names", [])
    processor = f"{cpu.get('model', 'unknown processor')} × {cpu.get('usable_cores', '?')}"
    counted = {name: devices.count(name) for name in devices} if run.backend != "cpu" else {}
    run.hardware = ", ".join(f"{count} × {name}" for name, count in counted.items()) or processor


def _facts(machine: dict[str, Any]) -> dict[str, str]:
    """Return what a machine runs: host, system and versions by name; drivers and CUDA where they were told."""
    probed = machine.get("devices", {}).get("versions", {})
    drivers = {f"driver {name}": version for name, version in machine.get("drivers", {}).items()}
    facts = {"host": machine.get("host", ""), "system": machine.get("system", "")} | drivers
    return {name: str(value) for name, value in (facts | probed | machine.get("versions", {})).items() if value}


def _result(run: StoredRun, result: dict[str, Any]) -> None:
    run.benchmark, run.tier, run.backend = (str(result[name]) for name in ("benchmark", "tier", "backend"))
    run.started, run.ended = _moment(result["started_at"]), _moment(result.get("ended_at") or result["started_at"])
    run.ranks = int(_number(result.get("world_size") or 0))
    run.metrics = [
        Measured(m["name"], _number(m["value"]), _bound(m, "ci_low"), _bound(m, "ci_high"), m["unit"], m["direction"])
        for m in result["metrics"]
        if m.get("value") is not None and m.get("provenance") != "claimed"
    ]
    if any(type(text) is not str for metric in run.metrics for text in (metric.name, metric.unit, metric.direction)):
        raise ValueError("a metric has numbers where texts belong")


def _number(value: Any) -> float:
    """Return a stored number, refusing texts and what no float holds: a whole number may have 400 digits."""
    if type(value) not in (float, int):
        raise ValueError(f"{str(value)[:40]!r} stands where a number belongs")
    if not -LARGEST < value < LARGEST:
        raise ValueError("a number in it is too large")
    return float(value)


def _bound(metric: dict[str, Any], name: str) -> float | None:
    return None if metric.get(name) is None else _number(metric[name])


def _moment(value: Any) -> float:
    found = _number(value)
    if not 0 <= found <= LATEST:
        raise ValueError(f"{found} is no time")
    return found


def _verdict(run: StoredRun, verdict: dict[str, Any]) -> None:
    if verdict["verdict"] not in WORDS:
        raise ValueError(f"not a verdict of benchlib: {str(verdict['verdict'])[:40]!r}")
    run.word = "BROKEN" if verdict.get("broken") else verdict["verdict"]
    run.sentence = str(verdict.get("sentence", ""))
    for check in verdict.get("checks", []):
        if check.get("kind") == "regression" and check.get("status") == "FAIL":
            name, reason = str(check["name"]), str(check.get("reason", ""))
            if name.endswith(GATE):
                run.regressions.append((name.removesuffix(GATE), reason))
            else:  # a baseline that cannot be read fails the gate, but nothing got slower
                run.unreadable = reason or name


def _whole(_run: StoredRun, path: str, _name: str, _parts: dict[str, Any]) -> None:
    """Raise where files are not as they were when the run ended, as far as sizes and the ends of the samples tell."""
    folder = path.rsplit("/", 1)[0]
    samples = f"{folder}/samples.parquet"
    if os.path.lexists(samples) and (fault := manifest.samples_fault(samples)):
        raise _Unlike(f"samples.parquet is not readable: {fault}")
    if os.path.exists(path):
        fault = manifest.size_fault(folder, _object(read_bytes(path)))
        if fault:
            raise _Unlike(fault)


FILL = {"machine.json": _machine, "result.json": _result, "verdict.json": _verdict}
