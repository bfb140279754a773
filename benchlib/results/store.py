"""Stored runs: one reader, and one value for each run, which list, index, history and exports share.

``read`` goes through a folder of runs. A folder that cannot be read is a run with a reason in ``damaged``, never an error.
Lists, reports, exports and comparisons have the same word for the same folder: ``judgement``.

``summary.json`` holds what is needed of a run's files. It is written with the verdict (``summarize``) and used as long as
these files keep their sizes and times of change. A run without one is read from its files, and their checksums are compared:
runs of benchlib 0.1, copies that got new times, damaged runs.
"""

import contextlib
import datetime
import gc
import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic_core import from_json, to_json

from benchlib.config.schema import BaseConfig, build, config_class
from benchlib.core import run_folder
from benchlib.core.errors import UserError
from benchlib.core.files import check_schema, read_bytes, write_bytes
from benchlib.core.text import capitalized
from benchlib.results.run import (
    NOT_FINITE,
    VERDICTS,
    Result,
    Run,
    damage,
    fingerprint,
    fingerprint_key,
    one_word,
    tolerant,
)

if TYPE_CHECKING:
    import pandas

SUMMARY = "summary.json"
SUMMARY_SCHEMA = 3  # of its fields and their meaning: a summary of another number is not used
FILES = ("config.json", "machine.json", "result.json", "verdict.json")
CHECKED = (*FILES, "files.json", "samples.parquet", "status.json", "job.json", "predictions.json", "answers.json")
DAY = re.compile(r"(?P<tier>.+)-(?P<day>\d{8})$", re.DOTALL)
RUN = re.compile(r"(?P<benchmark>.+?)-(?P<backend>[a-z]+)-(?P<time>\d{6})-\w+$", re.DOTALL)
GATE = " vs baseline"  # ends the name of a check that compares a metric
VERSIONS = ("benchlib", "torch", "transformers")  # of the fingerprint: a series runs across them, to show what they do
LARGEST = 1e100  # no unit comes near it, and its square is still a float
LATEST = 32_503_680_000  # the year 3000: a later clock is wrong


class Measured(NamedTuple):
    """A metric of a run: its value with the 95% interval (None where there is none)."""

    name: str
    value: float
    low: float | None
    high: float | None
    unit: str
    direction: str


@dataclass
class StoredRun:
    """What one run folder says.

    ``path`` is relative to the store. ``word`` is the verdict, or BROKEN, STOPPED, RUNNING, UNFINISHED or DAMAGED. ``series`` stands
    for the fingerprint without versions: runs of the same series measured the same work on the same hardware. ``facts`` are
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
        """Name of the run folder; what of it is not UTF-8 becomes question marks."""
        return self.path.rsplit("/", 1)[-1].encode(errors="replace").decode()

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
        exact = next((metric for metric in self.metrics if metric.name == name), None)
        return exact or next((metric for metric in self.metrics if metric.name.startswith(name + "_")), None)


def judgement(
    verdict: Mapping[str, Any] | None,
    status: Mapping[str, Any] | None,
    skipped: str | None = None,
    damage: Iterable[str] = (),
    at_work: bool = False,
) -> tuple[str, str]:
    """Return the word of a run and its sentence: from the verdict, else from how the ranks ended.

    ``skipped`` is the reason of a result that was skipped, None for any other result. What a run with ``damage`` still says
    is not what it said: the damage goes first. ``at_work`` tells of a run without a verdict whether it is still going on.
    """
    if faults := list(damage):
        return "DAMAGED", f"Files are unreadable or changed: {'; '.join(faults)}."
    if verdict is None and at_work:
        return "RUNNING", "The run is still going on."
    outcome, reason = (str((status or {}).get(name) or "") for name in ("outcome", "reason"))
    sentence = str((verdict or {}).get("sentence") or "")
    if verdict and verdict.get("verdict") != "BROKEN":
        return str(verdict.get("verdict", "UNFINISHED")), sentence
    if outcome == "skipped" or skipped is not None:
        return "SKIPPED", capitalized(reason or skipped or "")
    if outcome not in ("", "complete"):
        # Older versions had no word for a stopped run in its verdict, only the supervisor's sentence.
        words = capitalized(reason)
        word = "STOPPED" if outcome == "stopped" and sentence in ("", words) else "BROKEN"
        return word, sentence or words or f"The run ended: {outcome}."
    if verdict:
        return "BROKEN", sentence
    if status:
        return "UNFINISHED", "The ranks ended, but the run has no verdict yet: `benchlib report` makes it."
    return "UNFINISHED", "Nothing says how this run ended: it was killed with its supervisor, or never started."


def state(run: Run, verdict: Mapping[str, Any] | None = None) -> tuple[str, str, list[str]]:
    """Return the word of a run, its sentence and its damage, for ``verdict`` or the stored one."""
    read, faults = tolerant(run, []), damage(run)
    verdict = verdict or read(lambda: run.verdict)
    result, status = read(lambda: run.result), read(lambda: run.status)
    at_work = verdict is None and run_folder.at_work(run.path)
    return *judgement(verdict, status, skip_reason(result), faults, at_work), faults


def named(folder: Path | str) -> tuple[str, str, str]:
    """Return benchmark, tier and backend by the names of ``<tier>-<day>/<benchmark>-<backend>-<time>-<id>``, else '?'."""
    day, run = (pattern.match(name) for pattern, name in zip((DAY, RUN), _names(folder), strict=True))
    return run["benchmark"] if run else "?", day["tier"] if day else "?", run["backend"] if run else "?"


def _names(folder: Path | str) -> list[str]:
    return f"/{folder}".rsplit("/", 2)[-2:]


def _started(folder: str) -> float:
    """Return the start of a run by the names of its folders, else by the folder's time of change."""
    day, run = (pattern.match(name) for pattern, name in zip((DAY, RUN), _names(folder), strict=True))
    try:
        return datetime.datetime.strptime(f"{day['day']} {run['time']}", "%Y%m%d %H%M%S").timestamp()  # type: ignore[index]
    except (TypeError, ValueError, OverflowError):
        return os.stat(folder).st_mtime


def skip_reason(result: Result | None) -> str | None:
    """Return why a result was skipped, None for any other result."""
    return result.reason if result and result.status == "skipped" else None


def identity(run: Run, config: BaseConfig | None, result: Result | None) -> tuple[str, str, str]:
    """Return benchmark, tier and backend of a run: from its records, else from the name of its folder."""
    source = config or result
    if source:
        return source.benchmark, source.tier, source.backend
    return named(run.path)


def span(result: Result | None, status: dict[str, Any] | None) -> tuple[float | None, float | None]:
    """Return when a run started and ended, in unix seconds, as far as its records say.

    Both times come from one record: the result, or for a run that broke or was skipped the supervisor's status.
    """
    return _span(result.model_dump(include={"status", "started_at", "ended_at"}) if result else {}, status or {})


def _span(result: Mapping[str, Any], status: Mapping[str, Any]) -> tuple[float | None, float | None]:
    # The times of a skipped result are when it was written; nothing took that long.
    measured = result.get("ended_at") and result.get("status") != "skipped"
    times = result if measured else status if status.get("ended_at") else {"started_at": result.get("started_at")}
    started, ended = (
        float(value) if isinstance(value := times.get(name), (int, float)) else None
        for name in ("started_at", "ended_at")
    )
    return started, ended


class _Changed(ValueError):
    """The files of a run are not what they were when it ended."""


class Reader:
    """Reads run folders and remembers what many of them share: equal configs and machines are examined once."""

    def __init__(self) -> None:
        self._configs: dict[bytes, tuple[dict[str, Any], BaseConfig | None]] = {}
        self._series: dict[tuple[Any, ...], str] = {}
        self._facts: dict[tuple[Any, ...], dict[str, str]] = {}

    def read(self, folder: str) -> StoredRun:
        """Return what a run folder says; what is damaged is named in ``damaged``."""
        summary = _summary(folder)
        run = self.fill(folder, summary) if summary else None
        return run if run and not run.damaged else self.fill(folder, {})

    def fill(self, folder: str, parts: dict[str, Any]) -> StoredRun:
        """Return a run from its files, of which those in ``parts`` are not opened; the others are added to it."""
        run = StoredRun("/".join(_names(folder)), *named(folder), started=0.0)
        run.report = os.path.exists(f"{folder}/report.html")
        check = [] if parts else [("files.json", _intact)]
        steps: list[tuple[str, Callable[[StoredRun, str, str, dict[str, Any]], None]]]
        steps = [
            *((name, self._part) for name in FILES),
            ("machine.json", self._place),
            ("status.json", _judge),
            *check,
        ]
        for name, step in steps:
            try:
                step(run, folder, name, parts)
            except KeyError as error:
                run.damaged = run.damaged or f"{name} is not readable: it has no {error}"
            except _Changed as error:
                run.damaged = run.damaged or str(error)
            except (OSError, ValueError, TypeError, AttributeError, ArithmeticError) as error:
                reason = (str(error) or type(error).__name__).splitlines()[0].replace(f"{folder}/{name}: ", "")
                run.damaged = run.damaged or f"{name} is not readable: {reason}"
        if "config.json" not in parts:
            run.damaged = run.damaged or "the folder has no config.json"
        run.started = run.started or _started(folder)
        run.facts = self._facts.setdefault(tuple(run.facts.items()), run.facts)
        run.digest = parts.get("digest", "")
        if run.damaged:
            run.word = "DAMAGED"
        return run

    def _part(self, run: StoredRun, folder: str, name: str, parts: dict[str, Any]) -> None:
        path = f"{folder}/{name}"
        if name == "config.json" and ("config" in parts or os.path.exists(path)):
            content = parts.get("config") or read_bytes(path)
            parts[name], parts["config"] = self._config(content)[0], content
        elif name not in parts and os.path.exists(path):
            content = read_bytes(path)  # refuses a pipe, which open() would wait for
            parts[name] = _object(content)
            check_schema(path, parts[name], 1)
            if name == "verdict.json":
                parts[name] = one_word(parts[name])
            if name == "result.json" and "config" in parts:
                parts["digest"] = hashlib.blake2b(parts["config"] + content, digest_size=12).hexdigest()
        if name in parts:
            FILL[name](run, parts[name])

    def _config(self, content: bytes) -> tuple[dict[str, Any], BaseConfig | None]:
        """Return the values and the config they make; None where no benchmark of this version has such a config."""
        if content not in self._configs:
            values, config = _object(content), None
            with contextlib.suppress(UserError):
                fields = config_class(str(values["benchmark"])).model_fields
                config = build(values["benchmark"], {name: value for name, value in values.items() if name in fields})
            self._configs[content] = values, config
        return self._configs[content]

    def _place(self, run: StoredRun, _folder: str, _name: str, parts: dict[str, Any]) -> None:
        """Fill in the series, which stands for config, hardware and data."""
        machine = parts.get("machine.json")
        config = self._config(parts["config"])[1] if "config" in parts else None
        if config is None or machine is None:
            return
        facts = parts.get("result.json", {}).get("facts", {})
        key = (id(config), run.hardware, machine.get("memory_bytes"), str(facts.get("identity")), *run.facts.values())
        if key not in self._series:
            factors = fingerprint(config, machine, facts)
            same = {name: value for name, value in factors.items() if name not in VERSIONS}
            self._series[key] = fingerprint_key(same | {"benchmark": config.benchmark, "tier": config.tier})
        run.series = self._series[key]


def _object(content: bytes) -> dict[str, Any]:
    # Three times as fast as the json module; its errors are ValueErrors as well.
    value = from_json(content, allow_inf_nan=False)
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


def _configured(run: StoredRun, config: dict[str, Any]) -> None:
    run.benchmark, run.tier, run.backend = (str(config[name]) for name in ("benchmark", "tier", "backend"))
    run.planted = _number(config.get("planted_slowdown") or 0.0)


def _machine(run: StoredRun, machine: dict[str, Any]) -> None:
    devices = machine.get("devices", {})
    drivers = {f"driver {name}": version for name, version in machine.get("drivers", {}).items()}
    facts = {"host": machine.get("host", ""), "system": machine.get("system", "")} | drivers
    facts |= devices.get("versions", {}) | machine.get("versions", {})
    run.facts = {name: str(value) for name, value in facts.items() if value}
    cpu, names = machine.get("cpu", {}), devices.get("backends", {}).get(run.backend, {}).get("names", [])
    processor = f"{cpu.get('model', 'unknown processor')} × {cpu.get('usable_cores', '?')}"
    counted = {name: names.count(name) for name in names} if run.backend != "cpu" else {}
    run.hardware = ", ".join(f"{count} × {name}" for name, count in counted.items()) or processor


def _result(run: StoredRun, result: dict[str, Any]) -> None:
    run.benchmark, run.tier, run.backend = (str(result[name]) for name in ("benchmark", "tier", "backend"))
    run.started, ended = _moment(result["started_at"]), _moment(result.get("ended_at") or 0.0)
    run.ended = ended if ended and result.get("status") != "skipped" else None
    run.ranks = int(_number(result.get("world_size") or 0))
    rows = result["rows"] if "rows" in result else _rows(result["metrics"])
    run.metrics = [_measured(*row) for row in rows]


def _rows(metrics: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Return the fields of ``Measured`` for each metric that was measured."""
    return [
        (m["name"], m["value"], m.get("ci_low"), m.get("ci_high"), m["unit"], m["direction"])
        for m in metrics
        if m.get("value") not in (None, *NOT_FINITE) and m.get("provenance") != "claimed"
    ]


def _measured(name: Any, value: Any, low: Any, high: Any, unit: Any, direction: Any) -> Measured:
    if not type(name) is type(unit) is type(direction) is str:
        raise ValueError("a metric has numbers where texts belong")
    ends = [None if end is None else _number(end) for end in (low, high)]
    return Measured(name, _number(value), ends[0], ends[1], unit, direction)


def _number(value: Any) -> float:
    """Return a stored number; refuse texts and what no float holds: a JSON number may have 400 digits."""
    if type(value) not in (float, int):
        raise ValueError(f"{str(value)[:40]!r} stands where a number belongs")
    if not -LARGEST < value < LARGEST:
        raise ValueError("a number in it is too large")
    return float(value)


def _moment(value: Any) -> float:
    moment = _number(value)
    if not 0 <= moment <= LATEST:
        raise ValueError(f"{moment} is no time")
    return moment


def _checks(run: StoredRun, verdict: dict[str, Any]) -> None:
    if verdict["verdict"] not in VERDICTS:
        raise ValueError(f"not a verdict of benchlib: {str(verdict['verdict'])[:40]!r}")
    for check in _failed_regressions(verdict):
        name, reason = str(check["name"]), str(check.get("reason", ""))
        if name.endswith(GATE):
            run.regressions.append((name.removesuffix(GATE), reason))
        else:  # a baseline that cannot be read fails the gate, but nothing got slower
            run.unreadable = reason or name


def _failed_regressions(verdict: dict[str, Any]) -> list[dict[str, Any]]:
    checks = verdict.get("checks", [])
    return [check for check in checks if check.get("kind") == "regression" and check.get("status") == "FAIL"]


FILL = {"config.json": _configured, "machine.json": _machine, "result.json": _result, "verdict.json": _checks}


def _judge(run: StoredRun, folder: str, name: str, parts: dict[str, Any]) -> None:
    verdict, status, result = parts.get("verdict.json"), None, parts.get("result.json", {})
    if (verdict is None or verdict.get("verdict") == "BROKEN" or run.ended is None) and os.path.exists(
        f"{folder}/{name}"
    ):
        status = _object(read_bytes(f"{folder}/{name}"))
        if not run.damaged:
            started, ended = _span(result, status)
            run.started, run.ended = _moment(started or run.started), _moment(ended) if ended else None
    skipped = str(result.get("reason", "")) if result.get("status") == "skipped" else None
    at_work = verdict is None and run_folder.at_work(folder)
    run.word, run.sentence = judgement(verdict, status, skipped, at_work=at_work)


def _intact(_run: StoredRun, folder: str, name: str, _parts: dict[str, Any]) -> None:
    """Raise where files are not as they were when the run ended; of the samples of a run of benchlib 0.1 only the ends tell."""
    samples = f"{folder}/samples.parquet"
    if os.path.lexists(samples) and (fault := run_folder.samples_fault(samples)):
        raise _Changed(f"samples.parquet is not readable: {fault}")
    if faults := run_folder.file_faults(Path(folder)):
        raise _Changed("; ".join(faults))


def summarize(folder: Path | str) -> None:
    """Write ``summary.json`` from the files of a run, atomically; a damaged run gets none.

    A summary only saves time: where it cannot be written, the run is read from its files.
    """
    parts: dict[str, Any] = {}
    states = _states(str(folder))  # before reading: what changes meanwhile makes the summary outdated
    run = Reader().fill(str(folder), parts)
    with contextlib.suppress(OSError, ValueError):
        if run.damaged or set(FILES) - parts.keys():
            (Path(folder) / SUMMARY).unlink(missing_ok=True)
            return
        kept: dict[str, Any] = {
            name: {key: parts[name][key] for key in keys if key in parts[name]} for name, keys in PICKED.items()
        }
        kept |= {"config": parts["config"].decode(), "digest": run.digest}
        facts = parts["result.json"].get("facts", {})
        kept["result.json"] |= {
            "rows": run.metrics,
            "facts": {key: facts[key] for key in ("identity",) if key in facts},
        }
        kept["verdict.json"]["checks"] = _failed_regressions(parts["verdict.json"])
        content = {"schema_version": SUMMARY_SCHEMA, "states": states, "parts": kept}
        write_bytes(Path(folder) / SUMMARY, to_json(content))


# The fields of a run's files that a summary holds.
PICKED: dict[str, tuple[str, ...]] = {
    "machine.json": ("host", "system", "cpu", "memory_bytes", "versions", "drivers", "devices"),
    "result.json": ("benchmark", "tier", "backend", "world_size", "started_at", "ended_at", "status", "reason"),
    "verdict.json": ("verdict", "sentence"),
}


def _states(folder: str) -> dict[str, list[int]]:
    """Return what tells whether the files of a run changed: their sizes and times of change, without those that are absent."""
    states = {}
    with os.scandir(folder) as items:
        for item in items:
            if item.name in CHECKED or item.name.startswith("events-"):
                about = item.stat()
                states[item.name] = [about.st_size, about.st_mtime_ns]
    return states


def _summary(folder: str) -> dict[str, Any] | None:
    """Return the parts of a run that its summary holds; None where it is absent, damaged or outdated."""
    try:
        content = _object(read_bytes(f"{folder}/{SUMMARY}"))
        if content["schema_version"] != SUMMARY_SCHEMA or content["states"] != _states(folder):
            return None
        parts: dict[str, Any] = content["parts"]
        parts["config"] = parts["config"].encode()
        return parts
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


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
    reader = Reader()
    with _no_collection():
        runs = [reader.read(folder) for folder in run_folders(Path(store))]
    runs.sort(key=lambda run: (run.started, run.path))
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
