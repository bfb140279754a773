"""A run as one value, wherever it is stored: what lists, judges, pages and exports see of it.

``load`` reads a run folder, whole, partial or damaged. It raises nothing for what is damaged: that is a sentence in ``problems``.
"""

import contextlib
import datetime
import functools
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from benchlib.benchmarks import BENCHMARKS, spec_of
from benchlib.config.schema import BaseConfig, build
from benchlib.core import run_folder
from benchlib.core.errors import UserError
from benchlib.core.events import read_events
from benchlib.core.stats import thinned
from benchlib.core.terminal import harmless
from benchlib.core.text import capitalized
from benchlib.results.metrics import Metric, RegressionLimit, adjusted
from benchlib.results.run import Config, Machine, Moment, Result, Run, Status, fingerprint, fingerprint_key, read_part
from benchlib.results.verdict import Verdict

KEPT_SAMPLES = 200  # of a metric, where a run is carried elsewhere
DAY = re.compile(r".+-\d{8}$", re.DOTALL)
VERSIONS = ("benchlib", "torch", "transformers")  # of the fingerprint: a series runs across them, to show what they do
NAMING = ("benchmark", "tier", "backend")


class Record(BaseModel):
    """A run. ``fingerprint`` are the factors that make it comparable, none where this version cannot read its config.

    ``samples`` are raw samples by metric, ``limits`` how much worse the benchmark lets its metrics get, ``others`` the share of the
    processors that others took; ``sensed`` says whether that was measured. ``reason`` and ``accepted_at`` are those of an accepted run.
    """

    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="strings")

    schema_version: Literal[1] = 1
    run: str
    benchmark: str = "?"
    tier: str = "?"
    backend: str = "?"
    started_at: Moment = 0.0
    ended_at: Moment | None = None
    running: bool = False
    config: Config = {}
    machine: Machine = {}
    result: Result | None = None
    verdict: Verdict | None = None
    status: Status | None = None
    fingerprint: dict[str, str] = {}
    limits: list[RegressionLimit] = []
    samples: dict[str, list[float]] = {}
    others: float = Field(0.0, ge=0, lt=1)
    sensed: bool = False
    reason: str = ""
    accepted_at: Moment | None = None
    problems: list[str] = []
    # Where it and its report lie on this machine, '' where they do not, and whose copy it is: no part of the run.
    folder: str = Field("", exclude=True, repr=False)
    report: str = Field("", exclude=True, repr=False)
    copy_of: str = Field("", exclude=True, repr=False)

    def _end(self) -> tuple[str, str]:
        if self.problems:
            return "DAMAGED", f"Files are unreadable or changed: {'; '.join(self.problems)}."
        if self.verdict:
            return self.verdict.verdict, f"accepted: {self.reason}" if self.reason else self.verdict.sentence
        if self.running:
            return "RUNNING", "The run is still going on."
        if self.result and self.result.status == "skipped":
            return "SKIPPED", capitalized(self.result.reason)
        if self.status is None:
            return "UNFINISHED", "Nothing says how this run ended: it was killed with its supervisor, or never started."
        outcome, reason = self.status["outcome"], self.status["reason"]
        if outcome == "complete":
            return "UNFINISHED", "The ranks ended, but the run has no verdict yet: `benchlib report` makes it."
        words = {"skipped": "SKIPPED", "stopped": "STOPPED"}
        return words.get(outcome, "BROKEN"), capitalized(reason) or f"The run ended: {outcome}."

    @property
    def word(self) -> str:
        """The one word for how the run went: DAMAGED, RUNNING, its verdict, or how its ranks ended."""
        return self._end()[0]

    @property
    def sentence(self) -> str:
        """What is to be said beside the word."""
        return self._end()[1]

    @property
    def complete(self) -> bool:
        return self.result is not None and self.result.status == "complete" and bool(self.fingerprint)

    @property
    def path(self) -> str:
        return "/".join(f"/{harmless(self.folder)}".rsplit("/", 2)[-2:])

    @property
    def moment(self) -> datetime.datetime:
        return datetime.datetime.fromtimestamp(self.started_at).astimezone()

    @property
    def ranks(self) -> int:
        return self.result.world_size if self.result else 0

    @property
    def injected(self) -> float:
        return float(self.config.get("planted_slowdown") or 0.0)

    @property
    def host(self) -> str:
        return str(self.machine.get("host") or "")

    @property
    def device_names(self) -> list[str]:
        backends = self.machine.get("devices", {}).get("backends", {})
        return list(backends.get(self.backend, {}).get("names", [])) if self.backend != "cpu" else []

    @property
    def components(self) -> list[str]:
        """Its host, processor and accelerators, as far as they are known."""
        cpu, names = self.machine.get("cpu", {}), self.device_names
        processor = f"{cpu['model']} × {cpu.get('usable_cores', '?')}" if cpu.get("model") else ""
        accelerators = ", ".join(f"{names.count(name)} × {name}" for name in dict.fromkeys(names))
        return [part for part in (self.host, processor, accelerators) if part]

    @functools.cached_property
    def hardware(self) -> str:
        """Its accelerators, else its processor, in a line; '' where nothing says."""
        return "".join(self.components[-1:]) if self.components != [self.host] else ""

    @functools.cached_property
    def setup(self) -> dict[str, str]:
        machine = self.machine
        drivers = {f"driver {name}": version for name, version in machine.get("drivers", {}).items()}
        versions = machine.get("devices", {}).get("versions", {}) | machine.get("versions", {})
        places = {"host": self.host, "system": machine.get("system", ""), "code": machine.get("code", "")}
        facts = {**places, **drivers, **versions}
        return {name: value for name, value in facts.items() if value}

    @functools.cached_property
    def series(self) -> str:
        """Stands for the fingerprint without versions: runs of one series did the same work on the same hardware."""
        same = {name: value for name, value in self.fingerprint.items() if name not in VERSIONS}
        return fingerprint_key(same | {"benchmark": self.benchmark, "tier": self.tier}) if same else ""

    @property
    def metrics(self) -> list[Metric]:
        return self.result.metrics if self.result else []

    @functools.cached_property
    def measured(self) -> list[Metric]:
        """The metrics that have a value of this run."""
        return [metric for metric in self.metrics if metric.value is not None and metric.provenance != "claimed"]

    @property
    def key_numbers(self) -> list[tuple[str, Metric]]:
        """Its key numbers with their labels, in the order of the report."""
        measured = {metric.name: metric for metric in self.measured}
        return [(label, measured[name]) for name, label in spec_of(self.benchmark).first(measured).items()]

    def metric(self, name: str) -> Metric | None:
        return self.result.metric(name) if self.result else None

    def headline(self, prefix: str) -> Metric | None:
        """Return the measured metric of this name, else the first whose name goes on with a scope, or None."""
        named = [metric for metric in self.measured if f"{metric.name}_".startswith(f"{prefix}_")]
        return min(named, key=lambda metric: metric.name != prefix, default=None)

    def is_copy_of(self, other: "Record") -> bool:
        """Tell whether both are the same run, under whatever name: begun at the same microsecond with the same numbers."""
        return bool(self.metrics) and self.started_at == other.started_at and self._written() == other._written()

    def _written(self) -> list[str]:
        """Its metrics as text: NaN is equal to no number, not even to itself."""
        return [metric.model_dump_json() for metric in self.metrics]

    def thin(self, count: int = KEPT_SAMPLES, most_bytes: int = 0) -> "Record":
        """Return the run with up to ``count`` samples a metric, the outcome, and no tables and facts above ``most_bytes``."""

        def short(part: dict[str, Any]) -> dict[str, Any]:
            return {name: value for name, value in part.items() if len(repr(value)) <= most_bytes}

        if result := self.result:
            result = result.model_copy(update={"tables": short(result.tables), "facts": short(result.facts)})
        samples = {name: thinned(values, count) for name, values in self.samples.items()} if count else {}
        status = {name: self.status[name] for name in ("outcome", "reason")} if self.status else None
        return self.model_copy(update={"result": result, "samples": samples, "status": status})

    def kept(self, limits: Iterable[RegressionLimit], reason: str = "", accepted_at: float | None = None) -> "Record":
        """Return what a baseline, or a later repetition, keeps of the run: its metrics, with the samples of those with a limit."""
        thin, limited = self.thin(), {limit.metric for limit in limits}
        samples = {name: values for name, values in thin.samples.items() if name in limited}
        verdict = self.verdict.model_copy(update={"checks": [], "gate": None}) if self.verdict else None
        update = {"samples": samples, "verdict": verdict, "reason": reason, "accepted_at": accepted_at}
        left: dict[str, Any] = {"limits": [], "config": {}, "machine": {}, "status": None}
        return thin.model_copy(update=update | left)


def limits_of(run: Run) -> list[RegressionLimit]:
    """Return the limits of a run: those of its benchmark, in place of which the user may have set others."""
    return adjusted(BENCHMARKS[run.config.benchmark].spec.limits(run), run.config.limits)


def others_share(folder: Path, machine: Machine, config: BaseConfig) -> float | None:
    """Return the share of the machine's processors that others took while a run on them was measured, beyond what was idle; None
    for an accelerator, several nodes and ``workers`` of others, which are not measured or not seen, and without readings."""
    cores, elsewhere = machine.get("cpu", {}).get("logical_cores"), getattr(config, "workers", None)
    if config.backend != "cpu" or config.nnodes > 1 or elsewhere or not isinstance(cores, int) or cores < 1:
        return None
    events = read_events(folder, {"sensor"}, "supervisor")
    readings = [[event.get(name) for name in ("cpu_percent", "others_percent")] for event in events]
    if not (readings := [reading for reading in readings if None not in reading]):
        return None
    own, others = np.mean(np.array(readings, dtype=float), axis=0) / (100 * cores)
    used = own + others  # more than all by the clocks' errors on a machine that is full
    return float(np.clip(others / used if used > 1 else 2 * others + own - 1, 0.0, 0.99)) if used else 0.0


def load(folder: Path | str, whole: bool = True, verdict: Verdict | None = None) -> Record:
    """Read a run folder. Raises nothing: what cannot be read, or changed after the run, is a sentence in ``problems``.

    Not ``whole``: without samples, tables and limits, as lists need it. ``verdict`` stands in for the stored one.
    """
    path, problems = Path(folder), dict[str, str]()  # a sentence a file

    def read(name: str, make: Callable[[], Any]) -> Any:
        try:
            return make()
        except (UserError, OSError, ValueError) as error:
            problems[name] = str(error).strip().replace(f"{path}/", "") or type(error).__name__
            return None

    names = [f"{name}.json" for name in ("config", "machine", "result", "verdict", "status")]
    parts = [read(name, functools.partial(read_part, path / name, whole)) for name in names]
    config, machine, result, stored, status = parts
    if config is None and not problems:
        problems["config.json"] = "the folder has no config.json"
    samples = read("samples.parquet", lambda: Run(path).samples) if whole else {}
    faults = read(run_folder.FILES, lambda: run_folder.file_faults(path)) or []
    problems |= {fault.partition(" ")[0]: fault for fault in faults}  # how a file changed says more
    started, ended = span(result, status)
    written = path / "config.json" if (path / "config.json").exists() else path
    source = config or (result.model_dump() if result else {})
    record = Record.model_construct(
        run=path.resolve().name.encode(errors="replace").decode(),  # a name need not be UTF-8
        **{name: source.get(name, "?") for name in NAMING},
        config=config or {},
        machine=machine or {},
        result=result,
        verdict=verdict or stored,
        status=status,
        started_at=max(0.0, written.stat().st_mtime) if started is None else started,
        ended_at=ended,
        running=verdict is stored is None and run_folder.is_running(path),
        samples=samples or {},
        problems=list(problems.values()),
        folder=str(path),
        report=str(path / "report.html") if os.path.exists(path / "report.html") else "",
    )
    # A damaged machine.json makes a run comparable with nothing.
    if not config or (machine is None and os.path.lexists(path / "machine.json")):
        return record
    with contextlib.suppress(UserError):  # this version has no such config
        built = build(record.benchmark, config)
        record.fingerprint = fingerprint(built, record.machine, result.facts if result else {})
        if whole and record.complete:
            with contextlib.suppress(Exception):  # a foreign result breaks it in many ways: its verdict says so
                others = others_share(path, record.machine, built)
                hidden = bool(record.machine.get("cpu", {}).get("virtual"))  # other guests, whom no sensor here sees
                record.others, record.sensed = others or 0.0, others is not None and not hidden
                record.limits = limits_of(Run(path))
    return record


def span(result: Result | None, status: Status | None) -> tuple[float | None, float | None]:
    """Return start and end in unix seconds, both from the result, or for a run that broke or was skipped from its status."""
    if result and result.ended_at and result.status != "skipped":  # the times of a skipped one are when it was written
        return result.started_at, result.ended_at
    if status and status.get("ended_at"):
        return status.get("started_at"), status["ended_at"]
    return result.started_at if result else None, None


def store_folders(store: Path) -> Iterator[Path]:
    """Yield the folders that lie where runs lie: two levels below ``store``, hidden ones left out."""
    for day in sorted(store.iterdir()) if store.is_dir() else []:
        if day.is_dir() and DAY.match(day.name):
            yield from (path for path in day.iterdir() if path.is_dir() and not path.name.startswith("."))


def load_all(store: Path | str, folders: Iterable[Path] | None = None) -> list[Record]:
    """Return all runs of a store, or those in some of its folders, the oldest first, without samples and tables; copies of a
    run name it in ``copy_of``."""
    records = [load(folder, whole=False) for folder in (store_folders(Path(store)) if folders is None else folders)]
    originals = dict[tuple[str, float], Record]()
    # Who copies a folder adds to its name ("-copy", "Copy of ").
    for record in sorted(records, key=lambda item: (len(item.run), item.path)):
        if record.result and not record.problems:
            first = originals.setdefault((record.benchmark, record.started_at), record)
            if first is not record and record.is_copy_of(first):
                record.copy_of = first.path if record.run == first.run else first.run
    return sorted(records, key=lambda item: (item.started_at, item.path))
