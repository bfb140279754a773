"""One run of the past: what it was, where it ran, what it measured and what its checks said.

``benchlib.results.store`` makes it from a run folder. A folder that cannot be read is a run with a reason in ``damaged``.
"""

import contextlib
import dataclasses
import datetime
import functools
import gc
import hashlib
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic_core import from_json, to_json

from benchlib.config.schema import BaseConfig, build, config_class
from benchlib.core import files
from benchlib.core.errors import UserError
from benchlib.core.files import PACKAGE, check_schema, read_bytes, write_bytes
from benchlib.results.run import fingerprint, fingerprint_key

FILES = ("config.json", "machine.json", "result.json", "verdict.json")
DAY = re.compile(r"(?P<tier>.+)-(?P<day>\d{8})$", re.DOTALL)
CHECKED = (*FILES, "files.json", "samples.parquet", "status.json", "job.json", "predictions.json")  # read, or looked at
RUN = re.compile(r"(?P<benchmark>.+?)-(?P<backend>[a-z]+)-(?P<time>\d{6})-\w+$", re.DOTALL)


class Measured(NamedTuple):
    """A metric of a run: its value with the 95 % interval (None where there is none)."""

    name: str
    value: float
    low: float | None
    high: float | None
    unit: str
    direction: str


@dataclass
class StoredRun:
    """What one run folder says.

    ``path`` is relative to the store. ``word`` is the verdict, or BROKEN, UNFINISHED or DAMAGED. ``series`` stands for
    the fingerprint without versions: runs of the same series measured the same work on the same hardware. ``facts`` are
    the host, its system and all versions; ``planted`` is a slow-down that was put in on purpose. ``regressions`` are
    (metric, reason), ``unreadable`` says why there was no baseline to read. ``digest`` stands for config and result: runs
    that share it are one run in several folders, and ``copy_of`` names the folder that counts.
    """

    path: str
    benchmark: str
    tier: str
    backend: str
    started: float
    ended: float | None = None
    word: str = "UNFINISHED"
    sentence: str = ""
    damaged: str = ""
    ranks: int = 0
    hardware: str = ""
    series: str = ""
    planted: float = 0.0
    report: bool = False
    digest: str = ""
    copy_of: str = ""
    unreadable: str = ""
    facts: dict[str, str] = field(default_factory=dict)
    regressions: list[tuple[str, str]] = field(default_factory=list)
    metrics: list[Measured] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Name of the run folder."""
        return self.path.rsplit("/", 1)[-1]

    @property
    def host(self) -> str:
        """Name of the machine, '' where it is not known."""
        return self.facts.get("host", "")

    @property
    def moment(self) -> datetime.datetime:
        """Local start of the run."""
        return datetime.datetime.fromtimestamp(self.started).astimezone()

    def metric(self, name: str) -> Measured | None:
        """Return the metric of this name, or the first one ``name`` with a scope suffix, or None."""
        whole = next((metric for metric in self.metrics if metric.name == name), None)
        return whole or next((metric for metric in self.metrics if metric.name.startswith(name + "_")), None)


# Reads run folders into ``StoredRun``, from four small files and the sizes of others.
#
# A folder that cannot be read is a run with a reason in ``damaged``, never an error.


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
    if os.path.lexists(samples) and (fault := files.samples_fault(samples)):
        raise _Unlike(f"samples.parquet is not readable: {fault}")
    if os.path.exists(path):
        fault = files.size_fault(folder, _object(read_bytes(path)))
        if fault:
            raise _Unlike(fault)


FILL = {"machine.json": _machine, "result.json": _result, "verdict.json": _verdict}


# What ``benchlib.results.store`` read, kept in ``.cache/history.json`` of the store, so that the next reading is quick.
#
# An entry holds as long as its files keep their inode, size and times of change: a run that was judged again has
# another ``verdict.json``. The file begins with a digest of the rest and with the state of the code that wrote it: one that
# is cut, foreign or of another version is not used, and one that cannot be written is done without.


NAME = ".cache/history.json"
WORTH = 100  # runs read anew before the cache is written: fewer are read in the time that writing takes
Entries = dict[str, tuple[list[int], StoredRun]]


def stamp_of(folder: str) -> list[int]:
    """Return what tells whether a run folder changed: inode, size and times of the files that are read."""
    found = []
    for name in (*CHECKED, "report.html"):
        try:
            state = os.stat(f"{folder}/{name}")
            # The report's content does not matter, only whether there is one to link to.
            found += (
                [state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns] if name != "report.html" else [1]
            )
        except OSError:
            found.append(0)
    return found


@functools.cache
def _code() -> str:
    """Return a digest of the state of this package's code: what other code read may mean something else."""
    states = sorted((str(path), path.stat().st_mtime_ns, path.stat().st_size) for path in PACKAGE.rglob("*.py"))
    return hashlib.sha256(repr(states).encode()).hexdigest()[:16]


def load(store: Path) -> Entries:
    """Return the entries of a store's cache by path; none where it is missing, damaged, foreign or outdated."""
    try:
        head, _, body = (store / NAME).read_bytes().partition(b"\n")
        if head.decode() != _head(body):
            return {}
        content = from_json(body)
        facts = content["facts"]
        names, units, directions = zip(*content["labels"], strict=True) if content["labels"] else ((), (), ())
        entries = {}
        for path, (state, values, place, metrics) in content["runs"].items():
            run = StoredRun(path, **values, facts=facts[place])
            run.regressions = [(name, reason) for name, reason in run.regressions]
            run.metrics = [
                Measured(names[kind], value, low, high, units[kind], directions[kind])
                for kind, value, low, high in metrics
            ]
            entries[path] = (state, run)
        return entries
    except (OSError, ValueError, TypeError, KeyError, IndexError, AttributeError):
        return {}


def _head(body: bytes) -> str:
    return f"{_code()} {hashlib.sha256(body).hexdigest()}"


def save(store: Path, entries: Entries, fresh: int, known: int) -> None:
    """Write the cache where enough changed to be worth it; a store that cannot be written to stays without."""
    if fresh + abs(known + fresh - len(entries)) < WORTH:
        return
    facts: dict[int, int] = {}  # runs share the mappings that are equal
    shared: list[dict[str, str]] = []
    labels: dict[tuple[str, str, str], int] = {}
    runs = {}
    for path, (state, run) in entries.items():
        values = {item.name: getattr(run, item.name) for item in dataclasses.fields(run)}
        for name in ("path", "facts", "metrics"):
            del values[name]
        if id(run.facts) not in facts:
            facts[id(run.facts)] = len(shared)
            shared.append(run.facts)
        metrics = [
            (labels.setdefault((m.name, m.unit, m.direction), len(labels)), m.value, m.low, m.high) for m in run.metrics
        ]
        runs[path] = (state, values, facts[id(run.facts)], metrics)
    content: dict[str, Any] = {"facts": shared, "labels": list(labels), "runs": runs}
    with contextlib.suppress(OSError, ValueError, UserError):  # ValueError: a folder's name that is no text
        body = to_json(content)
        write_bytes(store / NAME, _head(body).encode() + b"\n" + body)


# The past of a folder of runs, in the order of time.
#
# Of each run only a few small files are read (``benchlib.results.store``); of samples only the two ends, of events nothing.
# What was read is kept in a cache that may be deleted at any time (``benchlib.results.store``).


if TYPE_CHECKING:
    import pandas


def run_folders(store: Path) -> Iterable[str]:
    """Return the folders that lie where runs lie: two levels below ``store``, hidden ones left out.

    They are texts and no paths: putting paths together takes as long as reading the files.
    """
    for day in sorted(store.iterdir()) if store.is_dir() else []:
        if day.is_dir() and DAY.match(day.name):
            with os.scandir(day) as items:
                yield from (item.path for item in items if item.is_dir() and not item.name.startswith("."))


def read(store: Path | str) -> list[StoredRun]:
    """Return all runs of a folder of runs, the oldest first; none where there is no such folder."""
    store = Path(store)
    with _no_collection():
        known = load(store)
        reader, found = Reader(), dict[str, tuple[list[int], StoredRun]]()
        fresh = 0
        for folder in run_folders(store):
            path = "/".join(folder.rsplit("/", 2)[-2:])
            stamp = stamp_of(folder)
            if path in known and known[path][0] == stamp:
                found[path] = known[path]
            else:
                found[path] = (stamp, reader.read(folder))
                fresh += 1
        save(store, found, fresh, len(known))
    runs = sorted((run for _, run in found.values()), key=lambda run: (run.started, run.path))
    _mark_copies(runs)
    return runs


def _mark_copies(runs: Iterable[StoredRun]) -> None:
    """Say of folders that hold the same run which one counts, and of the others what they are copies of."""
    groups: dict[str, list[StoredRun]] = {}
    for run in runs:
        if run.digest:
            groups.setdefault(run.digest, []).append(run)
    for same in groups.values():
        if len(same) > 1:
            first, *others = sorted(same, key=_originality)
            for run in others:
                run.copy_of = first.path if run.name == first.name else first.name


def _originality(run: StoredRun) -> tuple[bool, bool, int, str]:
    # Who copies a folder adds to its name ("-copy", "Copy of ").
    return bool(run.damaged), not RUN.match(run.name), len(run.name), run.path


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    # Hundreds of thousands of small objects and no cycle among them: looking for garbage takes a fifth of the time.
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def frame(runs: Iterable[StoredRun]) -> "pandas.DataFrame":
    """Return runs as one table with a row for each metric; a run without metrics has one row without a metric."""
    import pandas as pd

    rows = []
    for run in runs:
        place = {name: run.facts.get(name, "") for name in ("host", "benchlib", "torch")}
        common = {
            "run": run.name, "started": run.moment, "benchmark": run.benchmark, "tier": run.tier,
            "backend": run.backend, "machine": run.hardware, **place, "series": run.series, "verdict": run.word,
            "sentence": run.sentence, "damaged": run.damaged, "planted": run.planted,
        }  # fmt: skip
        rows += [
            common | {"metric": m.name, "value": m.value, "low": m.low, "high": m.high, "unit": m.unit}
            for m in run.metrics
        ] or [common]
    return pd.DataFrame(rows)
