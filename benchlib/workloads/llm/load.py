"""Raw samples of queries, what follows from them, and load on an engine. No torch.

    scheduled   when the load was to be sent       (NaN: as soon as possible)
    issued      when our client was asked to send it
    first       when its first token came          (NaN: none came)
    last        when its last token came           (NaN: it never ended)

All in seconds of ``time.monotonic()`` of one machine. A query starts when it was scheduled, or issued where no schedule is
known: what a late client adds is part of a latency, as in LoadGen. Definitions, n tokens:

    TTFT  first - start                time per output token (TPOT)  (last - first) / (n - 1)
    end to end  last - start           rate  completed / (last completion - first start)

Percentiles interpolate linearly between two samples (``benchlib.core.stats.percentile``); inference judges by those of LoadGen.

Load comes at once, as an open loop (a rate) or a closed loop (a concurrency). Open loop sends by a schedule, whatever the server
does: users who do not know of each other. Closed loop sends the next query when one is answered: so many users, each of whom
waits. They answer different questions and belong in different charts. The knee is the highest rate at which every limit was met,
with all lower ones, and again in a longer run, which shows it with 99% confidence if it has the queries that this takes.
"""

import itertools
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import numpy as np

from benchlib.core.stats import percentile, queries_needed
from benchlib.workloads.llm.engines import Query

LATE_SHARE = 0.1  # of the limit of the first token that a client's lateness (p99) may take
LATE_S = 0.010  # that it may always take
RATE_SHARE = 0.05  # by which the rate that was sent may differ from the schedule's
TRIES = 3  # of a rate at which the client was late
LONGER = 3  # times the queries of a rate, to confirm it
IN_SAMPLE = ("proven", "unproven", "met")  # outcomes of a run whose own percentiles are within the limits
CONFIRMED = ("proven", "met")  # those that a longer run leaves: no number of queries like its own would show more
BEAT_S = 2.0  # between signs of life to the caller
_NUMBERS = itertools.count(1)  # of queries, over all runs of a process: a late answer must not meet another query

Row = dict[str, Any]


@dataclass(slots=True)
class Noted:
    """What is known of a query. One that has not ended has failed."""

    query: int  # LoadGen's id of the query, or its number
    sample: int  # row of the data set
    scheduled_s: float
    issued_s: float
    prompt_tokens: int
    first_s: float = math.nan
    last_s: float = math.nan
    tokens: int = 0
    worker: int = -1  # the engine in this process
    attempt: int = 1  # it was sent once
    failed: bool = True


QUERY = np.dtype([(name, {int: "i8", float: "f8", bool: "?"}[kind]) for name, kind in Noted.__annotations__.items()])


class QueryLog:
    """Notes what happens to each query, from any thread. ``errors`` has the reasons of failures.

    ``repeated`` counts first tokens and completions that came again: a query has one of each, whoever sends it how often.
    """

    def __init__(self) -> None:
        self.queries: dict[int, Noted] = {}
        self.errors: dict[int, str] = {}
        self.repeated = 0
        self.ended = 0
        self._lock = threading.Lock()

    def issue(
        self,
        queries: Sequence[int],
        samples: Sequence[int],
        issued_s: float,
        prompt_tokens: Sequence[int],
        scheduled_s: float = math.nan,
    ) -> None:
        """Note that the client was asked to send queries, all at one time."""
        for query, sample, tokens in zip(queries, samples, prompt_tokens, strict=True):
            self.queries[query] = Noted(query, sample, scheduled_s, issued_s, tokens)

    def send(self, query: int, worker: int, attempt: int) -> None:
        """Note which worker a query went to, and which attempt (from 1) this is."""
        noted = self.queries[query]
        noted.worker, noted.attempt = worker, attempt

    def first(self, query: int, time_s: float) -> bool:
        """Note the first token; False where the query already had one, which stays, or has ended."""
        with self._lock:
            noted = self.queries[query]
            new = math.isnan(noted.first_s) and math.isnan(noted.last_s)
            self.repeated += not new
            if not math.isnan(noted.last_s):
                self.errors.setdefault(query, "the engine reported a first token of a query that had ended")
            if new:
                noted.first_s = time_s
            return new

    def done(self, query: int, time_s: float, tokens: int, error: str = "") -> bool:
        """Note the end of a query; False where it has already ended."""
        with self._lock:
            noted = self.queries[query]
            new = math.isnan(noted.last_s)
            self.repeated += not new
            if new:
                if not error and (noted.first_s > time_s or noted.first_s < noted.issued_s):
                    error = "the engine timed a first token before its query or after its end"
                noted.last_s, noted.tokens, noted.failed = time_s, tokens, bool(error)
                self.ended += 1
                self.errors |= {query: error} if error else {}
            return new

    def overdue(self, now_s: float, limit_s: float) -> list[int]:
        """Return the queries that were issued more than ``limit_s`` ago and have not ended."""
        noted = [*self.queries.values()]
        return [one.query for one in noted if math.isnan(one.last_s) and now_s - one.issued_s > limit_s]

    @property
    def unended(self) -> int:
        """How many queries have not ended."""
        return len(self.queries) - self.ended

    def table(self) -> np.ndarray:
        """Return all queries in the order of issue, (n,) of ``QUERY``."""
        with self._lock:
            return np.array([*map(attrgetter(*Noted.__slots__), [*self.queries.values()])], QUERY)


def completed(table: np.ndarray) -> np.ndarray:
    """Return the queries that ended without an error."""
    return table[~table["failed"]]  # type: ignore[no-any-return]


def start_s(table: np.ndarray) -> np.ndarray:
    """Return when each query started: scheduled, or issued."""
    return np.where(np.isnan(table["scheduled_s"]), table["issued_s"], table["scheduled_s"])


def each_s(table: np.ndarray) -> dict[str, np.ndarray]:
    """Return ``ttft``, ``tpot`` and ``latency`` of each query, in s; NaN where it has none: one token has no time per token."""
    first, last, start = table["first_s"], table["last_s"], start_s(table)
    gaps = np.where(table["tokens"] > 1, table["tokens"] - 1, np.nan)
    return {"ttft": first - start, "tpot": (last - first) / gaps, "latency": last - start}


def times_s(table: np.ndarray) -> dict[str, np.ndarray]:
    """Return the times of the queries that have them, by ``ttft``, ``tpot`` and ``latency``, in s."""
    return {name: values[~np.isnan(values)] for name, values in each_s(table).items()}


def lateness_s(table: np.ndarray) -> np.ndarray:
    """Return by how much each scheduled query was issued late, in s; empty where nothing was scheduled."""
    late = table["issued_s"] - table["scheduled_s"]
    return np.maximum(late[~np.isnan(late)], 0.0)  # type: ignore[no-any-return]  # two clocks, rounded


def span_s(table: np.ndarray) -> float:
    """Return the time from the first start to the last completion, in s; NaN of no queries."""
    return float(np.nanmax(table["last_s"]) - np.min(start_s(table))) if len(table) else math.nan


def meets(table: np.ndarray, limits_s: Mapping[str, float]) -> np.ndarray:
    """Return which queries completed below every limit, (n,) of bool; limits by ``ttft``, ``tpot`` and ``latency``."""
    times = each_s(table)
    below = [times[name] < limit for name, limit in limits_s.items()]  # NaN is not
    return np.all([~table["failed"], *below], axis=0)  # type: ignore[no-any-return]


def schedule(arrivals: str, rate: float, count: int, seed: int) -> np.ndarray:
    """Return when each of ``count`` queries is due, in s from the beginning: Poisson arrivals or equal distances."""
    if arrivals == "constant":
        return np.arange(count) / rate  # type: ignore[no-any-return]
    return np.cumsum(np.random.default_rng(seed).exponential(1 / rate, count))


@dataclass(eq=False)
class Client:
    """Sends the prompts to an engine, one run at a time, from the calling thread. ``answers`` are tokens by prompt.

    A run returns the table of its queries; those open when nothing was sent or ended for ``limit_s`` have failed. ``alive`` is
    called now and then while it goes on.
    """

    engine: Any
    prompts: Sequence[Sequence[int]]
    max_new: int
    limit_s: float
    alive: Callable[[], None] = lambda: None
    log: QueryLog = field(default_factory=QueryLog)
    answers: dict[int, list[int]] = field(default_factory=dict)
    wall_s: float = 0.0

    def at_once(self, count: int) -> np.ndarray:
        """Send all queries at once: the engine orders the work."""
        return self.closed_loop(count, count)

    def open_loop(self, due_s: np.ndarray) -> np.ndarray:
        """Send each query when it is due, in s from now."""
        return self._run(np.asarray(due_s) + time.monotonic() + 0.005, len(due_s))

    def closed_loop(self, concurrency: int, count: int) -> np.ndarray:
        """Keep ``concurrency`` queries under way until ``count`` were sent."""
        return self._run(np.full(count, math.nan), concurrency)

    def _run(self, due: np.ndarray, concurrency: int) -> np.ndarray:
        self.log, self.answers = log, answers = QueryLog(), dict[int, list[int]]()
        room, over, samples = threading.Semaphore(concurrency), threading.Event(), dict[int, int]()
        began = moved = beaten = time.monotonic()

        def on_done(rid: int, ids: Sequence[int], error: str) -> None:
            nonlocal moved
            if log.done(rid, time.monotonic(), len(ids), error):
                if not error:
                    answers[samples[rid]] = list(ids)
                moved = time.monotonic()
                room.release()
                if log.ended == len(due):
                    over.set()

        self.engine.on_send = log.send
        for number, scheduled in enumerate(due):
            if (wait := scheduled - time.monotonic()) > 0:
                time.sleep(wait)
            if time.monotonic() - beaten > BEAT_S:
                beaten = time.monotonic()
                self.alive()
            if not room.acquire(timeout=self.limit_s):
                break  # nothing ended for so long: the rest is not sent
            rid, sample = next(_NUMBERS), number % len(self.prompts)
            samples[rid], ids = sample, self.prompts[sample]
            log.issue([rid], [sample], time.monotonic(), [len(ids)], scheduled)
            self.engine.submit(Query(rid, ids, self.max_new, lambda rid, time_s, _: log.first(rid, time_s), on_done))
        moved = time.monotonic()
        while not over.wait(min(BEAT_S, self.limit_s)) and time.monotonic() - moved <= self.limit_s:
            self.alive()
        self.wall_s = time.monotonic() - began
        return log.table()


def measure(table: np.ndarray, limits_s: Mapping[str, float], share: float, repeated: int = 0) -> Row:
    """Return the row of a run of queries: rates in 1/s, samples of times in ms. ``share`` is the percentile of the limits (0.99).

    ``outcome`` is that of the limits (``judged``), or ``late`` if the client was, so that the run says nothing about the server.
    """
    done = completed(table)
    span, times = span_s(done) if len(done) else 0.0, times_s(done) | {"late": lateness_s(table)}
    failed, good = int(table["failed"].sum()), int(meets(table, limits_s).sum())
    per_s = {"samples": len(done), "tokens": float(done["tokens"].sum()), "goodput": good}
    row: Row = {"queries": len(table), "failed": failed, "repeated": repeated}
    row |= {f"{name}_per_s": count / span if span else 0.0 for name, count in per_s.items()}
    row |= {f"{name}_ms": (1e3 * values).tolist() for name, values in times.items()}
    lacking = [name for name, values in times.items() if not len(values)]
    why = {f"{name}_ms": "nothing was scheduled" if name == "late" else "no query was completed" for name in lacking}
    late = any(not value <= limit for _, value, limit in client_limits(table, limits_s.get("ttft", 0.0)))
    outcome = "missed" if failed or repeated else judged(times, limits_s, share)
    return row | {"outcome": "late" if late else outcome, "why": why}


def judged(times: Mapping[str, np.ndarray], limits_s: Mapping[str, float], share: float) -> str:
    """Return what the times of queries, in s, say of their limits at a percentile (0.99); each limit counts on its own.

    ``missed``: the percentile of the sample is not below a limit. ``proven``: so few are late that all queries meet the percentile
    with 99% confidence (``queries_needed``). ``unproven``: too many are late for that. ``met``: too few queries to show it at all.
    """
    if not all(percentile(times[name], share) < limit for name, limit in limits_s.items()):
        return "missed"
    late = {name: int((times[name] >= limit).sum()) for name, limit in limits_s.items()}
    if all(queries_needed(share, count) <= len(times[name]) for name, count in late.items()):
        return "proven"
    return "unproven" if all(queries_needed(share, 0) <= len(times[name]) for name in late) else "met"


def client_limits(table: np.ndarray, ttft_limit_s: float) -> list[tuple[str, float, float]]:
    """Return what a fair client keeps to, with what it did and the limit: its lateness in s, and its rate beside the schedule's.

    Nothing where there was no schedule.
    """
    late = lateness_s(table)
    if len(late) < 2:
        return []
    limits = [("late_client", percentile(late, 0.99), max(LATE_S, LATE_SHARE * ttft_limit_s))]
    planned, sent = (float(np.ptp(table[name])) for name in ("scheduled_s", "issued_s"))
    return [*limits, ("client_rate", abs(sent / planned - 1), RATE_SHARE)] if planned > 0 else limits


def find_knee(probe: Callable[[float, int], Row], rates: Sequence[float], refine: int = 2) -> list[Row]:
    """Return all rows of a sweep over rising rates; the last one that is a ``confirmation`` and ``CONFIRMED`` is the knee.

    ``probe(rate, times)`` measures, with so many times the usual queries. After the first rate that misses, ``refine`` rates
    between it and the last that met are tried, each in the middle; then the highest that met is run again with ``LONGER`` times
    the queries, and where that misses the next lower one. A rate at which the client was late is tried up to ``TRIES`` times.
    """
    rows: list[Row] = []

    def meets(phase: str, rate: float, times: int = 1) -> bool:
        for _ in range(TRIES):  # a late client says nothing about the server
            rows.append({"phase": phase, "rate": rate, **probe(rate, times)})
            if rows[-1]["outcome"] != "late":
                break
        return rows[-1]["outcome"] in (CONFIRMED if phase == "confirmation" else IN_SAMPLE)

    rates = sorted(rates)
    met = list(itertools.takewhile(lambda rate: meets("sweep", rate), rates))
    missed = rates[len(met)] if len(met) < len(rates) else math.inf
    for _ in range(refine if met and math.isfinite(missed) else 0):
        middle = (met[-1] + missed) / 2
        if meets("between", middle):
            met.append(middle)
        else:
            missed = middle
    while met and not meets("confirmation", met[-1], LONGER):
        met.pop()
    return rows
