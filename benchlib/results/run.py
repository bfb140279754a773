"""Results and run folders: what a run left, read and written as a whole."""

import contextlib
import errno
import functools
import hashlib
import json
import math
import os
import time
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, Field, field_validator

from benchlib.config.schema import BaseConfig, load_config
from benchlib.core import run_folder
from benchlib.core.errors import UserError
from benchlib.core.events import Event, read_events
from benchlib.core.files import atomic_path, not_written, read_bytes, read_model, read_object, write_text
from benchlib.results.metrics import Metric

SCHEMA = 1
VERDICTS = ("PASS", "FAIL", "BROKEN", "STOPPED", "AMBIGUOUS", "SKIPPED")
# A folder that holds two of these is a run's, whatever is damaged in it; one that does not is left alone.
_OWN_FILES = ("config.json", "machine.json", "job.json", "status.json", "result.json", "verdict.json", "logs")

# Any of them makes a folder a run: a damaged run may have lost the others.
PARTS = ("config.json", "result.json", "verdict.json", "status.json", "machine.json", "report.html", "notebook.ipynb")

# Checks as stored runs of benchlib 0.1 name them, and what they are called now. A renamed check gets a row here.
RENAMED = {
    "files whole": "files intact",
    "the reference is one": "reference accuracy",
    "the tolerance can fail": "tolerance sensitivity",
    "no worse than the reference": "accuracy against double precision",
    "same numerics as accepted": "numerics unchanged",
}

T = TypeVar("T")


def one_word(verdict: dict[str, Any]) -> dict[str, Any]:
    """Return a stored verdict with its state in one word: older versions wrote FAIL and a flag ``broken``."""
    if verdict.get("broken") and verdict.get("verdict") == "FAIL":
        verdict = verdict | {"verdict": "BROKEN"}
    return {name: value for name, value in verdict.items() if name != "broken"}


NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}  # as pydantic writes them


def with_numbers(value: Any) -> Any:
    """Return JSON values with the words for NaN and infinity replaced by the numbers."""
    if isinstance(value, dict):
        return {name: with_numbers(item) for name, item in value.items()}
    if isinstance(value, list):
        return [with_numbers(item) for item in value]
    return NOT_FINITE.get(value, value) if isinstance(value, str) else value


class Result(BaseModel):
    """What a benchmark measured.

    ``facts`` are plain JSON values that are no metrics (versions, counts, flags), ``tables`` lists of rows for the
    report, ``notes`` sentences for the reader. NaN and infinity are written as ``"NaN"`` and ``"Infinity"`` and read back
    as numbers: null is for what was not measured.
    """

    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="strings")

    schema_version: int = SCHEMA
    status: Literal["running", "complete", "partial", "skipped", "broken"] = "running"
    reason: str = ""
    benchmark: str
    tier: str
    backend: str
    world_size: int
    started_at: float = Field(default_factory=time.time)
    ended_at: float | None = None
    metrics: list[Metric] = Field(default_factory=list)
    facts: dict[str, Any] = Field(default_factory=dict)
    tables: dict[str, list[dict[str, Any]]] = Field(default_factory=dict)
    notes: list[str] = Field(default_factory=list)

    @field_validator("facts", "tables", mode="before")
    @classmethod
    def _numbers(cls, value: Any) -> Any:
        return with_numbers(value)

    @classmethod
    def of(cls, config: BaseConfig, **fields: Any) -> "Result":
        """Start the result of a run with this config."""
        return cls(
            benchmark=config.benchmark, tier=config.tier, backend=config.backend, world_size=config.world_size, **fields
        )

    def metric(self, name: str) -> Metric | None:
        """Return the metric of this name, or None."""
        return next((metric for metric in self.metrics if metric.name == name), None)

    def value(self, name: str) -> float | None:
        """Return the value of the metric of this name, or None where it is absent or has no finite one."""
        metric = self.metric(name)
        return metric.value if metric else None


def save_result(run_dir: Path | str, result: Result) -> None:
    """Write ``result.json``, and ``samples.parquet`` where metrics carry samples (columns metric, index, value)."""
    if any(metric.samples for metric in result.metrics):
        import pyarrow
        import pyarrow.parquet as parquet

        rows = [(metric.name, index, value) for metric in result.metrics for index, value in enumerate(metric.samples)]
        columns = zip(("metric", "index", "value"), zip(*rows, strict=True), strict=True)
        table = pyarrow.table({name: list(column) for name, column in columns})  # pandas would write NaN as null
        with atomic_path(Path(run_dir) / "samples.parquet") as temporary:
            parquet.write_table(table, temporary)
    write_text(Path(run_dir) / "result.json", result.model_dump_json(indent=2) + "\n")


def load_result(run_dir: Path | str) -> Result:
    """Read ``result.json``; ``UserError`` where it is missing, cut or of another schema."""
    return read_model(Path(run_dir) / "result.json", Result, "a result of this version", SCHEMA)


def load_samples(run_dir: Path | str) -> dict[str, list[float]]:
    """Read ``samples.parquet`` into lists by metric, in the order they were taken; empty where there is none."""
    path = Path(run_dir) / "samples.parquet"
    if not path.exists():
        return {}
    import pyarrow
    import pyarrow.parquet as parquet

    data = read_bytes(path)  # read_table() would also take a folder, and wait for a pipe
    if fault := run_folder.samples_fault(str(path)):
        raise UserError(f"{path}: {fault}")
    try:
        table = parquet.read_table(pyarrow.BufferReader(data), columns=["metric", "value"])
        names, values = table["metric"].to_pylist(), table["value"].to_pylist()
    except (pyarrow.ArrowException, KeyError, OSError, ValueError, OverflowError):
        # What pyarrow says of a damaged file is about its own buffers and thrift.
        raise UserError(f"{path}: no table of samples can be read from it; it was altered or damaged") from None
    samples: dict[str, list[float]] = {}
    for name, value in zip(names, values, strict=True):
        if not isinstance(name, str) or type(value) not in (float, int):
            raise UserError(f"{path}: not samples of benchlib ({str(name)[:40]}: {str(value)[:40]} is no number)")
        samples.setdefault(name, []).append(float(value))
    return samples


class Run:
    """A run folder. Each part is read at first use and is None (or empty) where it is absent.

    A part that is damaged raises ``UserError``.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise UserError(f"{path}: no such run folder; `benchlib list --runs` shows the stored ones")

    @property
    def begun(self) -> bool:
        """Whether ranks were started in the folder."""
        return (self.path / "status.json").exists() or any(self.path.glob("events-*.jsonl"))

    def __repr__(self) -> str:
        read = tolerant(self, [])
        config, verdict = read(lambda: self.config), read(lambda: self.verdict)
        about = [config.benchmark, f"{config.tier} tier", config.backend] if config else ["damaged config"]
        word = str((verdict or {}).get("verdict", "not judged yet"))
        return f"{', '.join(about)}: {word}, in {self.path}"

    @property
    def recognised(self) -> bool:
        """Whether the folder is a run's at all, whole or damaged: nothing may be written into another one."""
        return sum((self.path / name).exists() for name in _OWN_FILES) > 1

    def _object(self, name: str, **required: type) -> dict[str, Any] | None:
        return read_object(self.path / name, required) if (self.path / name).exists() else None

    @functools.cached_property
    def config(self) -> BaseConfig:
        """The config that ran."""
        return load_config(self.path)

    @functools.cached_property
    def origins(self) -> dict[str, str]:
        """Where the values of the config came from, by field: a file of params, by hand, a validator; none is the default."""
        return {name: str(origin) for name, origin in (self._object("origins.json") or {}).items()}

    @functools.cached_property
    def machine(self) -> dict[str, Any]:
        """The machine of the run, see ``benchlib.core.machine.describe``."""
        machine = self._object("machine.json") or {}
        kinds = {"cpu": dict, "versions": dict, "devices": dict, "memory_bytes": (int, float)}
        wrong = [name for name, kind in kinds.items() if name in machine and not isinstance(machine[name], kind)]  # type: ignore[arg-type]
        if wrong or not all(isinstance(version, str) for version in machine.get("versions", {}).values()):
            raise UserError(
                f"{self.path / 'machine.json'}: not a machine of benchlib ({', '.join(wrong) or 'versions'})"
            )
        return machine

    @functools.cached_property
    def result(self) -> Result | None:
        """What was measured."""
        return load_result(self.path) if (self.path / "result.json").exists() else None

    @functools.cached_property
    def samples(self) -> dict[str, list[float]]:
        """Raw samples by metric."""
        return load_samples(self.path)

    @functools.cached_property
    def status(self) -> dict[str, Any] | None:
        """How the ranks ended, written by the supervisor."""
        return self._object("status.json", outcome=str, reason=str, ranks=list)

    @functools.cached_property
    def verdict(self) -> dict[str, Any] | None:
        """What the checks said: the fields of ``benchlib.judge.checks.Verdict``."""
        path = self.path / "verdict.json"
        verdict = self._object(path.name, verdict=str, sentence=str, checks=list)
        if verdict is None:
            return None
        verdict = one_word(verdict)
        if verdict["verdict"] not in VERDICTS:
            raise UserError(f"{path}: not a verdict of benchlib: {verdict['verdict'][:40]!r}")
        for row in verdict["checks"]:
            kinds = {"name": str, "status": str, "reason": str, "kind": str, "gates": bool}
            if not isinstance(row, dict) or any(not isinstance(row.get(name), kind) for name, kind in kinds.items()):
                raise UserError(f"{path}: not a verdict of benchlib: {str(row)[:80]} is no check")
            row["name"] = RENAMED.get(row["name"], row["name"])
        return verdict

    @functools.cached_property
    def events(self) -> list[Event]:
        """All events in the order of time."""
        return read_events(self.path)

    def refresh(self) -> "Run":
        """Return the same run with nothing read yet."""
        return Run(self.path)


class Reader(Protocol):
    """Reads a part of a run, None where it is damaged."""

    def __call__(self, part: Callable[[], T]) -> T | None:
        """Return ``part()`` or None."""


def tolerant(run: Run, problems: list[str]) -> Reader:
    """Return a reader of a run's parts that notes what is damaged in ``problems``, without the folder's path."""

    def read(part: Callable[[], T]) -> T | None:
        try:
            return part()
        except (UserError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            problems.append(str(error).strip().replace(f"{run.path}/", "") or type(error).__name__)
            return None

    return read


def damage(run: Run) -> list[str]:
    """Return what of a run's files cannot be read or was cut or altered after the run, one sentence each.

    A config of another version, or of a benchmark that is not there, is no damage.
    """
    problems: list[str] = []
    read = tolerant(run, problems)
    config = run.path / "config.json"
    read(lambda: read_object(config, {"benchmark": str, "tier": str, "backend": str}))
    for part in (lambda: run.machine, lambda: run.result, lambda: run.verdict, lambda: run.status, lambda: run.samples):
        read(part)
    faults = read(lambda: run_folder.file_faults(run.path)) or []
    named = tuple(fault.partition(" ")[0] for fault in faults)  # one sentence a file: how it changed says more
    problems = [problem for problem in problems if not (named and problem.startswith(named))]
    return list(dict.fromkeys([*problems, *faults]))


def is_run(folder: Path) -> bool:
    """Tell whether a folder holds a run, whole or damaged."""
    return any((folder / name).is_file() for name in PARTS) or any(folder.glob("events-*.jsonl"))


def run_path(config: BaseConfig, out: Path, now: float | None = None) -> Path:
    """Return ``OUT/<tier>-<YYYYMMDD>/<benchmark>-<backend>-<HHMMSS>-<id>/``, which does not exist yet."""
    moment = time.localtime(time.time() if now is None else now)
    day = out / f"{config.tier}-{time.strftime('%Y%m%d', moment)}"
    begin = f"{config.benchmark}-{config.backend}-{time.strftime('%H%M%S', moment)}"
    while (path := day / f"{begin}-{uuid.uuid4().hex[:6]}").exists():
        pass  # the same second and the same six digits
    return path


def new_run_dir(config: BaseConfig, out: Path, now: float | None = None) -> Path:
    """Create and return the folder of a run, see ``run_path``."""
    path = run_path(config, out, now)
    try:
        path.mkdir(parents=True)
        (path / "logs").mkdir()
    except OSError as error:
        with contextlib.suppress(OSError):
            path.rmdir()
        raise not_written(path, error) from error
    return path


def check_place(out: Path) -> None:
    """Raise ``StorageError`` where no run can be stored below ``out``; makes nothing."""
    place = next(folder for folder in (out.absolute(), *out.absolute().parents) if folder.exists())
    if not place.is_dir():
        raise not_written(out, NotADirectoryError(errno.ENOTDIR, ""))
    if not os.access(place, os.W_OK | os.X_OK):
        read_only = bool(os.statvfs(place).f_flag & os.ST_RDONLY)
        number = errno.EROFS if read_only else errno.EACCES
        raise not_written(out, OSError(number, os.strerror(number)))


def find_runs(outputs: Path) -> Iterable[Path]:
    """Return the run folders below ``outputs``, the newest first by name of day and time."""
    runs = [path.parent for path in outputs.glob("*-*/*/config.json")]
    return sorted(runs, key=lambda path: (path.parent.name[-8:], path.name.rsplit("-", 2)[-2:]), reverse=True)


def fingerprint(config: BaseConfig, machine: dict[str, Any], facts: dict[str, Any]) -> dict[str, str]:
    """Return the factors that have to be equal for two runs to be comparable, as texts by name.

    Hardware, backend, world size, the config fields that change the work and the versions: benchlib's and torch's
    major.minor, transformers' major. ``facts["identity"]`` replaces what a config names by path with what it is.
    """
    cpu, versions = machine.get("cpu", {}), machine.get("versions", {})
    device = machine.get("devices", {}).get("backends", {}).get(config.backend, {})
    factors = {
        "backend": config.backend,
        "world_size": str(config.world_size),
        "nodes": str(config.nnodes),
        "cpu": f"{cpu.get('model')} x {cpu.get('usable_cores')}",
        "memory_gib": str(round(machine.get("memory_bytes", 0) / 2**30)),
        "devices": ", ".join(device.get("names", [])) if config.backend != "cpu" else "",
        "benchlib": ".".join(versions.get("benchlib", "?").split(".")[:2]),
        "torch": ".".join(versions.get("torch", "?").split(".")[:2]),
        "transformers": versions.get("transformers", "?").split(".")[0],
    }
    identity = facts["identity"] if isinstance(facts.get("identity"), dict) else {}
    work = {name: identity.get(name, value) for name, value in config.work().items()}
    return factors | {f"config.{name}": json.dumps(value, sort_keys=True) for name, value in sorted(work.items())}


def fingerprint_key(factors: dict[str, str]) -> str:
    """Return twelve hex digits that stand for a fingerprint."""
    return hashlib.sha256(json.dumps(factors, sort_keys=True).encode()).hexdigest()[:12]
