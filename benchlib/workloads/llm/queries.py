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
from array import array
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
Ints = Sequence[int]
_OPEN, _DONE, _FAILED = range(3)
_NAN = array("d", [math.nan])


class QueryLog:
    """Notes what happens to each query, from any thread; queries are issued by one. ``errors`` has the reasons of failures.

    ``repeated`` counts first tokens and completions that came again: a query has one of each, whoever sends it how often.
    A column is one array for all queries: at 100,000 queries/s there is no time for an object for each.
    """

    def __init__(self) -> None:
        self.errors: dict[int, str] = {}
        self.repeated = 0
        self.ended = 0
        self._place: dict[int, int] = {}  # of each query in the columns
        self._sample, self._prompt, self._tokens = array("q"), array("i"), array("i")
        self._scheduled, self._issued, self._first, self._last = (array("d") for _ in range(4))
        self._worker, self._attempt = array("i"), array("i")
        self._state = bytearray()  # _OPEN, _DONE, _FAILED
        self._lock = threading.Lock()

    def issue(
        self, query: int, sample: int, issued_s: float, scheduled_s: float = math.nan, prompt_tokens: int = 0
    ) -> None:
        """Note that the client was asked to send a query."""
        self.issue_many([query], [sample], issued_s, [prompt_tokens], scheduled_s)

    def issue_many(
        self, queries: Ints, samples: Ints, issued_s: float, prompt_tokens: Ints, scheduled_s: float = math.nan
    ) -> None:
        """Note that the client was asked to send queries, all at one time."""
        begin, count = len(self._state), len(queries)
        self._sample.extend(samples)
        self._prompt.extend(prompt_tokens)
        self._tokens.extend(array("i", [0]) * count)
        self._scheduled.extend(array("d", [scheduled_s]) * count)
        self._issued.extend(array("d", [issued_s]) * count)
        self._first.extend(_NAN * count)
        self._last.extend(_NAN * count)
        self._worker.extend(array("i", [-1]) * count)
        self._attempt.extend(array("i", [1]) * count)
        self._state.extend(bytes(count))
        self._place.update(zip(queries, range(begin, begin + count), strict=True))
        if len(self._place) != begin + count:
            raise ValueError("a query was issued twice: each needs an id of its own")

    @property
    def issued(self) -> int:
        """How many queries were issued."""
        return len(self._place)

    def send(self, query: int, worker: int, attempt: int) -> None:
        """Note which worker a query went to, and which attempt (from 1) this is."""
        place = self._place[query]
        self._worker[place], self._attempt[place] = worker, attempt

    def first(self, query: int, time_s: float) -> bool:
        """Note the first token; False where the query already had one, which stays, or has ended."""
        place = self._place[query]
        with self._lock:
            if self._state[place] or not math.isnan(self._first[place]):
                self.repeated += 1
                return False
            self._first[place] = time_s
            return True

    def done(self, query: int, time_s: float, tokens: int, error: str = "") -> bool:
        """Note the end of a query; False where it has already ended."""
        place = self._place[query]
        with self._lock:
            if self._state[place]:
                self.repeated += 1
                return False
            self._state[place] = _FAILED if error else _DONE
            self._last[place], self._tokens[place] = time_s, tokens
            self.ended += 1
        if error:
            self.errors[query] = error
        return True

    def overdue(self, now_s: float, limit_s: float) -> list[int]:
        """Return the queries that were issued more than ``limit_s`` ago and have not ended."""
        names = list(self._place)  # a column without its copy could not grow while numpy looks at it
        state, issued = np.frombuffer(self._state[: len(names)], "u1"), np.frombuffer(self._issued[: len(names)])
        late = (state == _OPEN) & (now_s - issued > limit_s)
        return [names[place] for place in np.flatnonzero(late)]

    @property
    def unended(self) -> int:
        """How many queries have not ended."""
        return self.issued - self.ended

    def has_first(self, query: int) -> bool:
        """Whether the first token of a query came."""
        return not math.isnan(self._first[self._place[query]])

    def table(self) -> np.ndarray:
        """Return all queries in the order of issue, (n,) of ``QUERY``; one that has not ended counts as failed."""
        names = list(self._place)
        table = np.empty(len(names), QUERY)
        table["query"] = names
        columns: dict[str, array[int] | array[float]] = {
            "sample": self._sample, "scheduled_s": self._scheduled, "issued_s": self._issued, "first_s": self._first,
            "last_s": self._last, "prompt_tokens": self._prompt, "tokens": self._tokens, "worker": self._worker,
            "attempt": self._attempt,
        }  # fmt: skip
        for name, column in columns.items():
            table[name] = column[: len(names)]
        table["failed"] = np.frombuffer(self._state[: len(names)], "u1") != _DONE
        return table


def completed(table: np.ndarray) -> np.ndarray:
    """Return the queries that ended without an error."""
    return table[~table["failed"]]  # type: ignore[no-any-return]


def start_s(table: np.ndarray) -> np.ndarray:
    """Return when each query started: scheduled, or issued."""
    return np.where(np.isnan(table["scheduled_s"]), table["issued_s"], table["scheduled_s"])


def ttft_s(table: np.ndarray) -> np.ndarray:
    """Return the time to the first token of each query, in s; NaN where none came."""
    return table["first_s"] - start_s(table)  # type: ignore[no-any-return]


def tpot_s(table: np.ndarray) -> np.ndarray:
    """Return the time per output token after the first of each query, in s; NaN with fewer than two tokens."""
    gaps = np.where(table["tokens"] > 1, table["tokens"] - 1, np.nan)
    return (table["last_s"] - table["first_s"]) / gaps  # type: ignore[no-any-return]


def latency_s(table: np.ndarray) -> np.ndarray:
    """Return the time from start to last token of each query, in s."""
    return table["last_s"] - start_s(table)  # type: ignore[no-any-return]


def times_s(table: np.ndarray) -> dict[str, np.ndarray]:
    """Return ``ttft``, ``tpot`` and ``latency`` of the queries that have them, in s: one token has no time per token."""
    every = {"ttft": ttft_s(table), "tpot": tpot_s(table), "latency": latency_s(table)}
    return {name: values[~np.isnan(values)] for name, values in every.items()}


def lateness_s(table: np.ndarray) -> np.ndarray:
    """Return by how much each scheduled query was issued late, in s; empty where nothing was scheduled."""
    late = table["issued_s"] - table["scheduled_s"]
    return late[~np.isnan(late)]  # type: ignore[no-any-return]


def span_s(table: np.ndarray) -> float:
    """Return the time from the first start to the last completion, in s; NaN of no queries."""
    return float(np.nanmax(table["last_s"]) - np.min(start_s(table))) if len(table) else math.nan


def meets(table: np.ndarray, limits_s: Mapping[str, float]) -> np.ndarray:
    """Return which queries completed below every limit, (n,) of bool; limits by ``ttft``, ``tpot`` and ``latency``."""
    good = ~table["failed"]
    for name, limit in limits_s.items():
        with np.errstate(invalid="ignore"):
            good &= {"ttft": ttft_s, "tpot": tpot_s, "latency": latency_s}[name](table) < limit
    return good
