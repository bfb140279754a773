"""Results and run folders: what a run left, read and written as a whole."""

import functools
import hashlib
import io
import json
import math
import os
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    create_model,
)
from pydantic_core import from_json

from benchlib.config.schema import BaseConfig, load_config
from benchlib.core.errors import UserError, explained
from benchlib.core.events import Event, read_events
from benchlib.core.files import atomic_path, check_schema, read_bytes, unmarked, write_text, writing
from benchlib.core.terminal import harmless
from benchlib.results.metrics import Metric
from benchlib.results.verdict import Verdict

SCHEMA = 1
LATEST = 32_503_680_000.0  # the year 3000: a later clock is wrong
# A folder that holds one of these is a run, whatever else it lost; nothing is written into one that does not hold two.
PARTS = ("config.json", "machine.json", "job.json", "status.json", "result.json", "verdict.json")

NOT_COLUMNS = ("why", "status", "reason", "gates")  # that any row may have beside what its table declares
Tables: TypeAlias = Mapping[str, Sequence[Mapping[str, Any]]]
Moment = Annotated[float, Field(ge=0, le=LATEST)]  # unix seconds
NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}  # as pydantic writes them


def _with_texts(value: Any, change: Callable[[str], Any]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(name): _with_texts(item, change) for name, item in value.items()}
    return [_with_texts(item, change) for item in value] if isinstance(value, list) else value


def with_numbers(value: Any) -> Any:
    return _with_texts(value, lambda text: NOT_FINITE.get(text, text))


def printable(value: Any) -> Any:
    """Return JSON values whose texts hold no control characters: pages, tables and other tools show them."""
    return _with_texts(value, harmless)


class Result(BaseModel):
    """What a benchmark measured: ``facts`` are JSON values that are no metrics, ``tables`` lists of rows, ``notes`` sentences.

    NaN and infinity are written as ``"NaN"`` and ``"Infinity"`` and read back as numbers: null is for what was not measured.
    """

    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="strings")

    schema_version: int = SCHEMA
    status: Literal["running", "complete", "partial", "skipped", "broken"] = "running"
    reason: str = ""
    benchmark: str
    tier: str
    backend: str
    world_size: int
    started_at: Moment = Field(default_factory=time.time)
    ended_at: Moment | None = None
    metrics: list[Metric] = []
    facts: Annotated[dict[str, Any], BeforeValidator(with_numbers)] = {}
    tables: Annotated[dict[str, list[dict[str, Any]]], BeforeValidator(with_numbers)] = {}
    notes: list[str] = []

    @classmethod
    def of(cls, config: BaseConfig, **fields: Any) -> "Result":
        return cls(
            benchmark=config.benchmark, tier=config.tier, backend=config.backend, world_size=config.world_size, **fields
        )

    def metric(self, name: str) -> Metric | None:
        return next((metric for metric in self.metrics if metric.name == name), None)

    def value(self, name: str) -> float | None:
        """Return the value of the metric of this name, or None where it is absent or has no finite one."""
        metric = self.metric(name)
        return metric.value if metric else None


def _with(*required: str, **parts: Any) -> AfterValidator:
    """Check the types of the parts of a JSON object that are read by name; those that are not ``required`` may be absent."""
    fields: dict[str, Any] = {name: (kind, ... if name in required else None) for name, kind in parts.items()}
    model = create_model("Part", __config__=ConfigDict(extra="allow", strict=True), **fields)

    def check(value: dict[str, Any]) -> dict[str, Any]:
        try:
            model.model_validate(value)
        except ValidationError as error:
            raise ValueError(explained(error)) from None
        return value  # in the order in which it was written

    return AfterValidator(check)


_Object: TypeAlias = dict[str, Any]
_Texts: TypeAlias = dict[str, str]
_Backends = dict[str, Annotated[_Object, _with(names=list[str])]]
_Devices = Annotated[_Object, _with(backends=_Backends, versions=_Texts)]
_HARDWARE = {"cpu": _Object, "memory_bytes": float, "load_average": list[float] | None, "devices": _Devices}
_TIMES = {"started_at": Moment | None, "ended_at": Moment | None}
_ATTEMPTS = {"ranks": list[_Object], "earlier_attempts": list[_Object], "restarts": int}
_CONFIG = {"benchmark": str, "tier": str, "backend": str, "planted_slowdown": float}
Config: TypeAlias = Annotated[_Object, _with(**_CONFIG)]
Machine: TypeAlias = Annotated[
    _Object, _with(host=str, system=str, code=str, versions=_Texts, drivers=_Texts, **_HARDWARE)
]
Status: TypeAlias = Annotated[_Object, _with("outcome", "reason", outcome=str, reason=str, **_TIMES, **_ATTEMPTS)]
READ: dict[str, TypeAdapter[Any]] = {
    "config.json": TypeAdapter(Annotated[_Object, _with("benchmark", "tier", "backend", **_CONFIG)]),
    "machine.json": TypeAdapter(Machine),
    "status.json": TypeAdapter(Status),
    "result.json": TypeAdapter(Result),
    "verdict.json": TypeAdapter(Verdict),
    "origins.json": TypeAdapter(dict[str, str]),
}


def read_part(path: Path, tables: bool = True) -> Any:
    """Read a file of a run folder by its name, without control characters; None where it is absent, ``UserError`` where it is cut,
    foreign or of another version. A result without its ``tables`` is read sooner."""
    if not os.path.lexists(path):
        return None
    try:
        content = unmarked(read_bytes(path))
        value = from_json(content, allow_inf_nan=False)
        if path.name == "result.json" and not tables and isinstance(value, dict):
            value["tables"] = {}
        if not content.isascii() or b"\\u" in content or b"\x7f" in content:
            value = printable(value)
        check_schema(path, value, SCHEMA)
        return READ[path.name].validate_python(value)
    except ValidationError as error:
        raise UserError(f"{path}: not of this version ({explained(error)})") from None
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON ({error}); the file may be cut") from None


def save_result(run_dir: Path | str, result: Result, of_rows: Mapping[str, Sequence[float]] | None = None) -> None:
    """Write ``result.json`` and ``samples.parquet`` (metric, index, value); ``of_rows`` are samples by ``table[row].column``."""
    samples = {metric.name: metric.samples for metric in result.metrics if metric.samples} | dict(of_rows or {})
    if samples:
        import pyarrow
        import pyarrow.parquet as parquet

        rows = [
            {"metric": name, "index": index, "value": value}
            for name, values in samples.items()
            for index, value in enumerate(values)
        ]
        table = pyarrow.Table.from_pylist(rows)  # pandas would write NaN as null
        with atomic_path(Path(run_dir) / "samples.parquet") as temporary:
            parquet.write_table(table, temporary)
    write_text(Path(run_dir) / "result.json", result.model_dump_json(indent=2) + "\n")


def load_samples(run_dir: Path | str) -> dict[str, list[float]]:
    """Read ``samples.parquet`` into lists in the order they were taken, by metric or ``table[row].column``; empty without one."""
    path = Path(run_dir) / "samples.parquet"
    if not os.path.lexists(path):
        return {}
    import pandas as pd

    data = read_bytes(path)  # read_parquet() would also take a folder, and wait for a pipe
    try:
        frame = pd.read_parquet(io.BytesIO(data), columns=["metric", "value"]).astype({"metric": str, "value": float})
    except Exception:  # of many kinds; what pyarrow says of a damaged file is about its own buffers and thrift
        raise UserError(f"{path}: no table of samples can be read from it; it was altered or damaged") from None
    return {str(name): values.tolist() for name, values in frame.groupby("metric", sort=False)["value"]}


def _part(name: str, otherwise: Any = None) -> Any:
    return functools.cached_property(lambda run: read_part(run.path / name) or otherwise)


class Run:
    """A run folder. Each part is read at first use: None (or empty) where it is absent, ``UserError`` where it is damaged."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise UserError(f"{path}: no such run folder; `benchlib list --runs` shows the stored ones")

    @functools.cached_property
    def config(self) -> BaseConfig:
        return load_config(self.path)

    # Where the values of the config came from, by field: a file of params, by hand, a validator; none is the default.
    origins: dict[str, str] = _part("origins.json", {})
    machine: Machine = _part("machine.json", {})
    result: Result | None = _part("result.json")
    status: Status | None = _part("status.json")
    verdict: Verdict | None = _part("verdict.json")

    @functools.cached_property
    def fingerprint(self) -> dict[str, str]:
        return fingerprint(self.config, self.machine, self.result.facts if self.result else {})

    @functools.cached_property
    def _stored_samples(self) -> dict[str, list[float]]:
        return load_samples(self.path)

    @functools.cached_property
    def samples(self) -> dict[str, list[float]]:
        return {name: values for name, values in self._stored_samples.items() if "[" not in name}

    @functools.cached_property
    def row_samples(self) -> dict[str, list[float]]:
        """Raw samples of the rows of tables, by ``table[row].column``."""
        return {name: values for name, values in self._stored_samples.items() if "[" in name}

    @functools.cached_property
    def events(self) -> list[Event]:
        return read_events(self.path)


def is_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in PARTS) or any(folder.glob("events-*.jsonl"))


def run_path(config: BaseConfig, out: Path, now: float | None = None) -> Path:
    """Return ``OUT/<tier>-<YYYYMMDD>/<benchmark>-<backend>-<HHMMSS>-<id>/``."""
    day, clock = time.strftime("%Y%m%d %H%M%S", time.localtime(now)).split()
    return out / f"{config.tier}-{day}" / f"{config.benchmark}-{config.backend}-{clock}-{uuid.uuid4().hex[:6]}"


def new_run_dir(config: BaseConfig, out: Path, now: float | None = None) -> Path:
    path = run_path(config, out, now)
    with writing(path):
        (path / "logs").mkdir(parents=True)
    return path


def check_place(out: Path) -> None:
    """Raise ``StorageError`` where no run can be stored in the folder ``out``, which is made."""
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out).close()


def no_runs(folder: Path) -> str:
    return f"{folder} holds no runs as <tier>-<day>/<run>: `benchlib run` makes the first, --out names another store"


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
    return hashlib.sha256(json.dumps(factors, sort_keys=True).encode()).hexdigest()[:12]
