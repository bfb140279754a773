"""Results and run folders: what a run left, read and written as a whole."""

import functools
import time
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from benchlib.config import BaseConfig, load_config
from benchlib.errors import UserError
from benchlib.events import Event, read_events
from benchlib.files import atomic_path, read_json, write_json
from benchlib.metrics import Metric

if TYPE_CHECKING:
    pass

SCHEMA = 1


class Result(BaseModel):
    """What a benchmark measured.

    ``facts`` are plain JSON values that are no metrics (versions, counts, flags), ``tables`` lists of rows for the
    report, ``notes`` sentences for the reader.
    """

    model_config = ConfigDict(extra="forbid")

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
        """Return the value of the metric of this name, or None where it is absent or has none."""
        metric = self.metric(name)
        return metric.value if metric else None


def save_result(run_dir: Path | str, result: Result) -> None:
    """Write ``result.json``, and ``samples.parquet`` where metrics carry samples (columns metric, index, value)."""
    if any(metric.samples for metric in result.metrics):
        import pandas as pd

        rows = [(metric.name, index, value) for metric in result.metrics for index, value in enumerate(metric.samples)]
        frame = pd.DataFrame(rows, columns=["metric", "index", "value"])
        with atomic_path(Path(run_dir) / "samples.parquet") as temporary:
            frame.to_parquet(temporary, index=False)
    write_json(Path(run_dir) / "result.json", result.model_dump(mode="json"))


def load_result(run_dir: Path | str) -> Result:
    """Read ``result.json``; ``UserError`` where it is missing, cut or of another schema."""
    path = Path(run_dir) / "result.json"
    try:
        return Result.model_validate(read_json(path))
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(
            f"{path}: not a result of this version ({'.'.join(map(str, first['loc']))}: {first['msg']})"
        ) from None


def load_samples(run_dir: Path | str) -> dict[str, list[float]]:
    """Read ``samples.parquet`` into lists by metric, in the order they were taken; empty where there is none."""
    path = Path(run_dir) / "samples.parquet"
    if not path.exists():
        return {}
    import pyarrow
    import pyarrow.parquet as parquet

    try:
        table = parquet.read_table(path)
        names, values = table["metric"].to_pylist(), table["value"].to_pylist()
    except (pyarrow.ArrowException, KeyError, OSError) as error:
        raise UserError(f"{path}: not readable samples ({error}); the file may be cut") from None
    samples: dict[str, list[float]] = {}
    for name, value in zip(names, values, strict=True):
        samples.setdefault(name, []).append(value)
    return samples


class Run:
    """A run folder. Each part is read at first use and is None (or empty) where it is absent.

    A part that is damaged raises ``UserError``.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise UserError(f"{path}: no such run folder; `benchlib list --runs` shows the stored ones")

    def _json(self, name: str) -> Any:
        return read_json(self.path / name) if (self.path / name).exists() else None

    @functools.cached_property
    def config(self) -> BaseConfig:
        """The config that ran."""
        return load_config(self.path)

    @functools.cached_property
    def machine(self) -> dict[str, Any]:
        """What machine it was, see ``benchlib.machine.describe``."""
        return self._json("machine.json") or {}

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
        return self._json("status.json")  # type: ignore[no-any-return]

    @functools.cached_property
    def verdict(self) -> dict[str, Any] | None:
        """What the checks said."""
        return self._json("verdict.json")  # type: ignore[no-any-return]

    @functools.cached_property
    def events(self) -> list[Event]:
        """All events in the order of time."""
        return read_events(self.path)

    def refresh(self) -> "Run":
        """Return the same run with nothing read yet."""
        return Run(self.path)


def new_run_dir(config: BaseConfig, out: Path, now: float | None = None) -> Path:
    """Create and return ``OUT/<tier>-<YYYYMMDD>/<benchmark>-<backend>-<HHMMSS>-<id>/``, which did not exist before."""
    moment = time.localtime(time.time() if now is None else now)
    day = out / f"{config.tier}-{time.strftime('%Y%m%d', moment)}"
    path = day / f"{config.benchmark}-{config.backend}-{time.strftime('%H%M%S', moment)}-{uuid.uuid4().hex[:6]}"
    try:
        path.mkdir(parents=True, exist_ok=False)
        (path / "logs").mkdir()
    except OSError as error:
        raise UserError(
            f"cannot make the run folder {path}: {error.strerror}; choose another place with --out DIR"
        ) from None
    return path


def find_runs(outputs: Path) -> Iterable[Path]:
    """Return the run folders below ``outputs``, the newest first by name of day and time."""
    runs = [path.parent for path in outputs.glob("*-*/*/config.json")]
    return sorted(runs, key=lambda path: (path.parent.name[-8:], path.name.rsplit("-", 2)[-2:]), reverse=True)
