"""Load on an engine, and what came of it: at once, open loop (a rate) and closed loop (a concurrency). No torch.

Open loop sends by a schedule, whatever the server does: users who do not know of each other. Closed loop sends the next query
when one is answered: so many users, each of whom waits. They answer different questions and belong in different charts.

The knee is the highest rate at which every limit was met, with all lower ones, and again in a longer run.
"""

import itertools
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from benchlib.core.stats import percentile
from benchlib.workloads.llm import queries
from benchlib.workloads.llm.engines import Engine, Query
from benchlib.workloads.llm.queries import QueryLog

LATE_SHARE = 0.1  # of the limit of the first token that a client's lateness (p99) may take
LATE_S = 0.010  # that it may always take
RATE_SHARE = 0.05  # by which the rate that was sent may differ from the schedule's
TRIES = 3  # of a rate at which the client was late
BEAT_S = 2.0  # between signs of life to the caller
_NUMBERS = itertools.count(1)  # of queries, over all runs of a process: a late answer must not meet another query

Row = dict[str, Any]
Prompts = Sequence[Sequence[int]]
Alive = Callable[[], None]  # called now and then while a run goes on


def schedule(arrivals: str, rate: float, count: int, seed: int) -> np.ndarray:
    """Return when each of ``count`` queries is due, in s from the beginning: Poisson arrivals or equal distances."""
    if arrivals == "constant":
        return np.arange(count) / rate  # type: ignore[no-any-return]
    return np.cumsum(np.random.default_rng(seed).exponential(1 / rate, count))


class Client:
    """Sends the prompts to an engine, one run at a time, from the calling thread. ``answers`` are tokens by prompt.

    A run returns the table of its queries; those open when nothing was sent or ended for ``limit_s`` have failed.
    """

    def __init__(
        self, engine: Engine, prompts: Prompts, max_new: int, limit_s: float, alive: Alive = lambda: None
    ) -> None:
        self.engine, self.prompts, self.max_new, self.limit_s, self._alive = engine, prompts, max_new, limit_s, alive
        self.log = QueryLog()
        self.answers: dict[int, list[int]] = {}
        self.wall_s = 0.0

    def at_once(self, count: int) -> np.ndarray:
        """Send all queries at once: the engine orders the work."""
        return self._run(np.full(count, math.nan))

    def open_loop(self, due_s: np.ndarray) -> np.ndarray:
        """Send each query when it is due, in s from now."""
        return self._run(np.asarray(due_s) + time.monotonic() + 0.005)

    def closed_loop(self, concurrency: int, count: int) -> np.ndarray:
        """Keep ``concurrency`` queries under way until ``count`` were sent."""
        return self._run(np.full(count, math.nan), concurrency)

    def _run(self, due: np.ndarray, concurrency: int = 0) -> np.ndarray:
        self.log, self.answers = log, answers = QueryLog(), dict[int, list[int]]()
        room, over, samples = threading.Semaphore(concurrency or len(due)), threading.Event(), dict[int, int]()
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
                self._alive()
            if not room.acquire(timeout=self.limit_s):
                break  # nothing ended for so long: the rest is not sent
            rid, sample = next(_NUMBERS), number % len(self.prompts)
            samples[rid], ids = sample, self.prompts[sample]
            log.issue([rid], [sample], time.monotonic(), [len(ids)], scheduled)
            self.engine.submit(Query(rid, ids, self.max_new, lambda rid, time_s, _: log.first(rid, time_s), on_done))
        moved = time.monotonic()
        while not over.wait(min(BEAT_S, self.limit_s)) and time.monotonic() - moved <= self.limit_s:
            self._alive()
        self.wall_s = time.monotonic() - began
        return log.table()


def measure(table: np.ndarray, limits_s: Mapping[str, float], share: float, repeated: int = 0) -> Row:
    """Return the row of a run of queries: rates in 1/s, samples of times in ms. ``share`` is the percentile of the limits (0.99).

    ``outcome`` is ``met`` or ``missed``, of the limits, or ``late`` where the client was, so that the run says nothing about
    the server.
    """
    done = queries.completed(table)
    span, times = queries.span_s(done), queries.times_s(done)
    failed, good = int(table["failed"].sum()), int(queries.meets(table, limits_s).sum())
    per_s = {"samples": len(done), "tokens": float(done["tokens"].sum()), "goodput": good}
    row: Row = {"queries": len(table), "failed": failed, "repeated": repeated, "seconds": span if len(done) else 0.0}
    row |= {f"{name}_per_s": count / span if len(done) else 0.0 for name, count in per_s.items()}
    row |= {f"{name}_ms": (1e3 * values).tolist() for name, values in times.items()}
    row["late_ms"] = (1e3 * np.maximum(queries.lateness_s(table), 0.0)).tolist()
    why = {f"{name}_ms": "no query was completed" for name, values in times.items() if not len(values)}
    why |= {} if row["late_ms"] else {"late_ms": "nothing was scheduled"}
    late = any(not value <= limit for _, value, limit in client_limits(table, limits_s.get("ttft", 0.0)))
    below = all(percentile(times[name], share) < limit for name, limit in limits_s.items())
    met = below and not failed and not repeated
    return row | {"outcome": "late" if late else "met" if met else "missed", "why": why}


def client_limits(table: np.ndarray, ttft_limit_s: float) -> list[tuple[str, float, float]]:
    """Return what a fair client keeps to, with what it did and the limit: its lateness in s, and its rate beside the schedule's.

    Nothing where there was no schedule.
    """
    late = queries.lateness_s(table)
    if len(late) < 2:
        return []
    limits = [("late_client", percentile(late, 0.99), max(LATE_S, LATE_SHARE * ttft_limit_s))]
    planned, sent = (float(np.ptp(table[name])) for name in ("scheduled_s", "issued_s"))
    return [*limits, ("client_rate", abs(sent / planned - 1), RATE_SHARE)] if planned > 0 else limits


def find_knee(
    probe: Callable[[float, int], Row],
    rates: Sequence[float],
    queries_of: Callable[[float], int],
    *,
    refine: int = 2,
    longer: int = 3,
) -> list[Row]:
    """Return all rows of a sweep over rising rates; the last one that is a ``confirmation`` and ``met`` is the knee.

    ``probe(rate, queries)`` measures. After the first rate that misses, ``refine`` rates between it and the last that met are
    tried, each in the middle; then the highest that met is run again with ``longer`` times the queries, and where that
    misses the next lower one. A rate at which the client was late is tried up to ``TRIES`` times.
    """
    rows: list[Row] = []

    def meets(phase: str, rate: float, times: int = 1) -> bool:
        for _ in range(TRIES):  # a late client says nothing about the server
            rows.append({"phase": phase, "rate": rate, **probe(rate, times * queries_of(rate))})
            if rows[-1]["outcome"] != "late":
                break
        return bool(rows[-1]["outcome"] == "met")

    rates = sorted(rates)
    met = list(itertools.takewhile(lambda rate: meets("sweep", rate), rates))
    missed = rates[len(met)] if len(met) < len(rates) else math.inf
    for _ in range(refine if met and math.isfinite(missed) else 0):
        middle = (met[-1] + missed) / 2
        if meets("between", middle):
            met.append(middle)
        else:
            missed = middle
    while met and not meets("confirmation", met[-1], longer):
        met.pop()
    return rows
