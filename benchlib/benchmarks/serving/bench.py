"""What a run of the serving benchmark has so far, and how it reaches its workers."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchlib.benchmarks.serving.config import ServingConfig
from benchlib.core.events import EventWriter, keep_alive
from benchlib.workloads.llm.dispatch import Dispatcher, Policy
from benchlib.workloads.llm.engines import Settings
from benchlib.workloads.llm.load import Client
from benchlib.workloads.llm.pool import Pool

Row = dict[str, Any]


@dataclass
class Bench:
    """What a run has so far. Rates by round: ``alone[worker][round]``, ``together[round]``, ``equal[round]``.

    ``predicted`` has the rows of ``metrics.predict`` of each round, made before its joint runs.
    """

    config: ServingConfig
    events: EventWriter
    urls: list[str]
    token: str
    prompts: list[list[int]]
    pool: Pool | None = None
    engines: list[str] = field(default_factory=list)  # as each worker names its own; '': it does not
    alone: list[list[float]] = field(default_factory=list)
    together: list[Row] = field(default_factory=list)
    equal: list[Row] = field(default_factory=list)
    predicted: list[dict[str, Row]] = field(default_factory=list)
    groups: dict[int, list[float]] = field(default_factory=dict)  # joint rates of the first k workers
    sweep: list[Row] = field(default_factory=list)
    knee: Row | None = None
    knee_samples: dict[str, np.ndarray] = field(default_factory=dict)
    closed: list[Row] = field(default_factory=list)
    recovery: Row = field(default_factory=dict)
    inflight: list[Row] = field(default_factory=list)
    losses: list[Row] = field(default_factory=list)
    issued: int = 0
    failed: int = 0
    repeated: int = 0
    errors: list[str] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)
    says: list[Row] = field(default_factory=list)  # what /metrics of each worker says of its last run: CPU, memory

    @property
    def scope(self) -> str:
        """The end of metrics' names, see ``ServingConfig.scope``."""
        return self.config.scope(self.engines)

    @contextlib.contextmanager
    def client(self, urls: list[str], weighted: bool = True) -> Iterator[Client]:
        """Open a dispatcher to some workers, and a client that drives it."""
        config = self.config
        policy = Policy(
            cap=config.concurrency, weighted=weighted, deadline_s=config.deadline_s, stall_s=config.stall_s, gone_s=config.gone_s,
            start_s=config.startup_timeout_s,
        )  # fmt: skip
        dispatcher = Dispatcher(Settings(urls=tuple(urls), token=self.token), policy)
        with keep_alive(self.events, config.startup_timeout_s):
            dispatcher.start()
        try:
            yield Client(dispatcher, self.prompts, config.max_new, config.deadline_s + 1, self.alive)
        finally:
            dispatcher.stop()

    def alive(self) -> None:
        """Say that the run goes on."""
        self.events.emit("heartbeat")

    def count(self, client: Client, table: np.ndarray) -> np.ndarray:
        """Add a run to the sums over the whole benchmark."""
        self.issued += len(table)
        self.failed += int(table["failed"].sum())
        self.repeated += client.log.repeated
        self.errors += [why for why in client.log.errors.values() if why not in self.errors][: 5 - len(self.errors)]
        return table
