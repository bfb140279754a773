"""Raw samples of queries, and what follows from them. No torch.

    scheduled   when the load was to be sent       (NaN: as soon as possible)
    issued      when our client was asked to send it
    first       when its first token came          (NaN: none came)
    last        when its last token came           (NaN: it never ended)

All in seconds of ``time.monotonic()`` of one machine. A query starts when it was scheduled, or issued where no schedule is
known: what a late client adds is part of a latency, as in LoadGen. Definitions, n tokens:

    TTFT  first - start                time per output token (TPOT)  (last - first) / (n - 1)
    end to end  last - start           rate  completed / (last completion - first start)

A percentile is a value that was measured, ``sorted[int(n p)]``, as LoadGen takes it; p99 of up to 100 samples is the largest.
"""

import math
import threading
from collections.abc import Mapping, Sequence

import numpy as np

QUERY = np.dtype(
    [
        ("query", "i8"),  # LoadGen's id of the query, or its number
        ("sample", "i8"),  # row of the data set
        ("scheduled_s", "f8"),
        ("issued_s", "f8"),
        ("first_s", "f8"),
        ("last_s", "f8"),
        ("prompt_tokens", "i4"),
        ("tokens", "i4"),
        ("worker", "i4"),  # -1: the engine in this process
        ("attempt", "i4"),  # 1: it was sent once
        ("failed", "?"),
    ]
)
ISSUED = np.array(
    (0, 0, math.nan, math.nan, math.nan, math.nan, 0, 0, -1, 1, True), QUERY
)  # what has not ended has failed


class QueryLog:
    """Notes what happens to each query, from any thread. ``errors`` has the reasons of failures.

    ``repeated`` counts first tokens and completions that came again: a query has one of each, whoever sends it how often.
    """

    def __init__(self) -> None:
        self.errors: dict[int, str] = {}
        self.repeated = 0
        self.ended = 0
        self._place: dict[int, int] = {}  # of each query in the table, which has room for more
        self._table = np.empty(1024, QUERY)
        self._lock = threading.Lock()

    def issue(
        self,
        queries: Sequence[int],
        samples: Sequence[int],
        issued_s: float,
        prompt_tokens: Sequence[int] | np.ndarray,
        scheduled_s: float = math.nan,
    ) -> None:
        """Note that the client was asked to send queries, all at one time."""
        with self._lock:
            begin, end = len(self._place), len(self._place) + len(queries)
            if end > len(self._table):
                self._table = np.concatenate([self._table[:begin], np.empty(2 * end, QUERY)])
            rows = self._table[begin:end]
            rows[:] = ISSUED
            rows["query"], rows["sample"], rows["prompt_tokens"] = queries, samples, prompt_tokens
            rows["issued_s"], rows["scheduled_s"] = issued_s, scheduled_s
            self._place.update(zip(queries, range(begin, end), strict=True))

    def send(self, query: int, worker: int, attempt: int) -> None:
        """Note which worker a query went to, and which attempt (from 1) this is."""
        with self._lock:
            row = self._table[self._place[query]]
            row["worker"], row["attempt"] = worker, attempt

    def first(self, query: int, time_s: float) -> bool:
        """Note the first token; False where the query already had one, which stays, or has ended."""
        with self._lock:
            row = self._table[self._place[query]]
            new = math.isnan(row["first_s"]) and math.isnan(row["last_s"])
            self.repeated += not new
            if new:
                row["first_s"] = time_s
            return new

    def done(self, query: int, time_s: float, tokens: int, error: str = "") -> bool:
        """Note the end of a query; False where it has already ended."""
        with self._lock:
            row = self._table[self._place[query]]
            new = math.isnan(row["last_s"])
            self.repeated += not new
            if new:
                row["last_s"], row["tokens"], row["failed"] = time_s, tokens, bool(error)
                self.ended += 1
        if new and error:
            self.errors[query] = error
        return new

    def overdue(self, now_s: float, limit_s: float) -> list[int]:
        """Return the queries that were issued more than ``limit_s`` ago and have not ended."""
        table = self.table()
        return table["query"][np.isnan(table["last_s"]) & (now_s - table["issued_s"] > limit_s)].tolist()  # type: ignore[no-any-return]

    @property
    def unended(self) -> int:
        """How many queries have not ended."""
        return len(self._place) - self.ended

    def has_first(self, query: int) -> bool:
        """Whether the first token of a query came."""
        with self._lock:
            return not math.isnan(self._table[self._place[query]]["first_s"])

    def table(self) -> np.ndarray:
        """Return all queries in the order of issue, (n,) of ``QUERY``; one that has not ended counts as failed."""
        with self._lock:
            return self._table[: len(self._place)].copy()


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
    return late[~np.isnan(late)]  # type: ignore[no-any-return]


def span_s(table: np.ndarray) -> float:
    """Return the time from the first start to the last completion, in s; NaN of no queries."""
    return float(np.nanmax(table["last_s"]) - np.min(start_s(table))) if len(table) else math.nan


def meets(table: np.ndarray, limits_s: Mapping[str, float]) -> np.ndarray:
    """Return which queries completed below every limit, (n,) of bool; limits by ``ttft``, ``tpot`` and ``latency``."""
    times = each_s(table)
    below = [times[name] < limit for name, limit in limits_s.items()]  # NaN is not
    return np.all([~table["failed"], *below], axis=0)  # type: ignore[no-any-return]
