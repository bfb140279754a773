"""One LoadGen test in a process of its own.

LoadGen keeps static state, cannot be aborted and waits for ever for a query that is not completed. So each test is a
process: ``StartTest`` blocks a daemon thread of it, its main thread watches. A query that is not answered within its
deadline is completed with two filler tokens and counts as failed; a test that does not end in time ends with its process.

``issue`` notes the queries and hands them to another thread: it runs on LoadGen's issuing thread, and whatever it does
makes later queries late. No torch here: the engine loads what it needs.
"""

import array
import gc
import queue
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchlib.benchmarks.inference.rules import Conf
from benchlib.core.errors import RunBroken
from benchlib.runtime import child
from benchlib.workloads.llm.engines import ENGINES, Engine, Settings, make
from benchlib.workloads.llm.load import Client
from benchlib.workloads.llm.queries import QueryLog

SUT = "Network SUT"  # in the name that the system tells LoadGen: MLPerf's rules for the network division
FILLER = (0, 0)
TICK_S = 0.05
SAY_S = 1.0  # between signs of life
WARM_UP_S = 120.0


@dataclass(frozen=True)
class Test:
    """What a test process is told."""

    name: str
    mode: str  # PerformanceOnly, AccuracyOnly
    engine: str
    settings: Settings
    conf: Conf
    prompts: list[list[int]]
    warm_up: list[list[int]]  # prompts that are not in the data set
    max_new: int
    folder: Path
    deadline_s: float
    limit_s: float
    sent: int = 0  # queries that LoadGen will send


@dataclass
class Outcome:
    """What a test process leaves: ``reason`` says why it has no log, '' where it ended by itself."""

    reason: str = ""
    skipped: bool = False
    table: np.ndarray | None = None
    errors: list[str] = field(default_factory=list)
    repeated: int = 0
    facts: dict[str, Any] = field(default_factory=dict)


class Sut:
    """The system under test: LoadGen's callbacks on one side, an engine's on the other."""

    def __init__(self, lg: Any, test: Test, engine: Engine) -> None:
        self.lg, self.test, self.engine = lg, test, engine
        self.log = QueryLog()
        self.expired: set[int] = set()
        self.lengths = [len(prompt) for prompt in test.prompts]
        self.needs_first = test.conf.scenario != "Offline"
        self._queue: queue.SimpleQueue[tuple[Sequence[int], Sequence[int]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._submit, name="submit", daemon=True).start()

    def issue(self, ids: Sequence[int], samples: Sequence[int]) -> None:
        """Take queries from LoadGen."""
        now = time.monotonic()
        self.log.issue_many(ids, samples, now, [*map(self.lengths.__getitem__, samples)])
        self._queue.put((ids, samples))

    def _submit(self) -> None:
        submit, prompts, most = self.engine.submit, self.test.prompts, self.test.max_new
        while (batch := self._queue.get()) is not None:
            for rid, sample in zip(*batch, strict=True):
                try:
                    submit(rid, prompts[sample], most, self.on_first, self.on_done)
                except Exception as error:  # the engine refuses it: the query failed, the test goes on
                    self.on_done(rid, [], f"{type(error).__name__}: {error}")

    def on_first(self, rid: int, time_s: float, token: int) -> None:
        """Report a first token to LoadGen, once."""
        if rid not in self.expired and self.log.first(rid, time_s) and self.needs_first:
            self._report(self.lg.FirstTokenComplete, rid, [token])

    def on_done(self, rid: int, ids: Sequence[int], error: str) -> None:
        """Report a completion to LoadGen, once; a failure with filler tokens."""
        if rid in self.expired or not self.log.done(rid, time.monotonic(), len(ids), error):
            return
        if error and self.needs_first and not self.log.has_first(rid):
            self._report(self.lg.FirstTokenComplete, rid, FILLER[:1])
        self._report(self.lg.QuerySamplesComplete, rid, FILLER if error else ids, count=True)

    def expire(self) -> None:
        """Fail the queries whose deadline has passed."""
        for rid in self.log.overdue(time.monotonic(), self.test.deadline_s):
            self.on_done(rid, [], f"no answer within {self.test.deadline_s:g} s")
            self.expired.add(rid)  # what still comes of it is late, and no second completion

    def _report(self, call: Callable[[Any], None], rid: int, ids: Sequence[int], count: bool = False) -> None:
        data = array.array("i", ids)
        address, size = data.buffer_info()
        more = (size,) if count else ()
        call([self.lg.QuerySampleResponse(rid, address, size * data.itemsize, *more)])


def settings_of(lg: Any, test: Test) -> Any:
    """Return LoadGen's settings from the conf; ``RunBroken`` where it did not take over what the conf says."""
    conf, file = test.conf, test.folder / "user.conf"
    file.write_text(conf.text, encoding="utf-8")
    settings = lg.TestSettings()
    code = settings.FromConfig(str(file), conf.model_key, conf.scenario)
    if code:
        raise RunBroken(f"LoadGen could not read {file.name} (code {code}):\n{conf.text}")
    for name, value in conf.expected.items():
        used = float(getattr(settings, name))
        if abs(used - value) > 1e-9 * max(1.0, abs(value)):
            raise RunBroken(
                f"LoadGen ignored a line of {file.name}: {name} is {used:g} and not {value:g}; the file:\n{conf.text}"
            )
    settings.scenario = getattr(lg.TestScenario, conf.scenario)
    settings.mode = getattr(lg.TestMode, test.mode)
    return settings


def _warm_up(engine: Engine, test: Test) -> None:
    client = Client(engine, test.warm_up, test.max_new, WARM_UP_S)
    if test.warm_up and client.at_once(len(test.warm_up))["failed"].any():
        why = next(iter(client.log.errors.values()), f"no answer within {WARM_UP_S:g} s")
        raise RunBroken(f"the engine failed at a warm-up query: {why}")


def measured(test: Test, tell: Callable[[tuple[int, int]], None]) -> Outcome:
    """Be the process of a test. It tells how many queries are completed and how many bytes are resident."""
    import mlperf_loadgen as lg

    test.folder.mkdir(parents=True)  # new and empty: what lies in it is of this test
    engine = make(test.engine, test.settings)
    engine.start()
    facts: dict[str, Any] = {"engine": dict(engine.facts)}
    _warm_up(engine, test)
    settings = settings_of(lg, test)
    output = lg.LogOutputSettings()
    output.outdir = str(test.folder)
    logging = lg.LogSettings()
    logging.log_output = output
    logging.enable_trace = test.conf.scenario == "Server" and test.mode == "PerformanceOnly"
    sut = Sut(lg, test, engine)
    if hasattr(engine, "on_send"):  # one that sends queries elsewhere says where to, and how often
        engine.on_send = sut.log.send
    count = len(test.prompts)
    handle = _handle(lg, test, sut)
    used = min(count, int(settings.performance_sample_count_override) or count)
    library = lg.ConstructQSL(count, used, _nothing, _nothing)
    failure: list[str] = []

    def start() -> None:
        try:
            lg.StartTestWithLogSettings(handle, library, settings, logging, "")
        except BaseException:  # an exception in a callback comes out here, and the process would die at its exit
            failure.append(traceback.format_exc())

    gc.freeze()  # what is loaded stays for good: collections look at queries alone
    process, wall, cpu = psutil.Process(), time.monotonic(), time.process_time()
    thread = threading.Thread(target=start, name="LoadGen", daemon=True)
    thread.start()
    reported, looked = 0.0, wall
    reason = ""
    while thread.is_alive():
        thread.join(TICK_S)
        now = time.monotonic()
        if now - looked > min(SAY_S, test.deadline_s / 4):  # looks at every query: not at each tick
            looked = now
            sut.expire()
        if now - wall > test.limit_s:
            reason = f"the test did not end within {test.limit_s:.0f} s; {sut.log.unended} queries were open"
            break
        if now - reported > SAY_S:
            reported = now
            tell((sut.log.ended, process.memory_info().rss))
    spent = time.monotonic() - wall
    share = (time.process_time() - cpu) / spent
    facts |= {"driver_cpu_share": share, "resident_bytes": process.memory_info().rss, "seconds": spent}
    if hasattr(engine, "record"):  # servers, of which some may have been lost
        facts["dispatch"] = engine.record(wall)
    else:
        facts["device_memory"] = engine.device_memory()
    reason = reason or (f"LoadGen's test ended with an exception: {failure[0]}" if failure else "")
    errors = sorted(set(sut.log.errors.values()))
    return Outcome(reason, False, sut.log.table(), errors, sut.log.repeated, facts)


def _handle(lg: Any, test: Test, sut: Sut) -> Any:
    """Return LoadGen's handle of a system: one that is reached over a network has a name that says so."""
    if test.engine != "http":
        return lg.ConstructFastSUT(sut.issue, _nothing)

    def issue(asked: Sequence[Any]) -> None:
        sut.issue([query.id for query in asked], [query.index for query in asked])

    return lg.ConstructQDL(issue, _nothing, lambda: f"{SUT}: {len(test.settings.urls)} servers")


def _nothing(*_: Any) -> None:
    """LoadGen asks for samples to be loaded, which are in memory, or says that no more queries come for now."""


def perform(test: Test, tell: Callable[[int, int], None]) -> Outcome:
    """Run a test in a process and return what it left. ``tell(completed queries, resident bytes)`` is called while it
    runs, with -1 for no news.

    The process is ended at the latest 30 s after the test's own limit, and on every exception here.
    """
    slow = ("batches", "dispatch") if ENGINES[test.engine].torch else ("dispatch",)
    ended = child.run(
        measured,
        test,
        timeout_s=test.limit_s + 2 * WARM_UP_S + 30,
        tell=lambda progress: tell(*(progress or (-1, 0))),
        preload=[f"benchlib.workloads.llm.{name}" for name in slow],
    )
    if ended.status == "done":
        return ended.value  # type: ignore[no-any-return]
    return Outcome(f"the process of the test: {ended.reason}", skipped=ended.status == "unavailable")
