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

from benchlib.core.early_stopping import set_aside

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
_SAMPLE, _SCHEDULED, _ISSUED, _FIRST, _LAST, _PROMPT, _TOKENS, _WORKER, _ATTEMPT, _FAILED, _DONE = range(11)


class QueryLog:
    """Notes what happens to each query, from any thread. ``errors`` has the reasons of failures by query.

    ``repeated`` counts first tokens and completions that came again: a query has one of each, whoever sends it how often.
    """

    def __init__(self) -> None:
        self.errors: dict[int, str] = {}
        self.repeated = 0
        self._ended = 0
        self._rows: dict[int, list[float]] = {}
        self._lock = threading.Lock()

    def issue(
        self, query: int, sample: int, issued_s: float, scheduled_s: float = math.nan, prompt_tokens: int = 0
    ) -> None:
        """Note that the client was asked to send a query."""
        self._rows[query] = [sample, scheduled_s, issued_s, math.nan, math.nan, prompt_tokens, 0, -1, 1, False, False]

    def send(self, query: int, worker: int, attempt: int) -> None:
        """Note which worker a query went to, and which attempt (from 1) this is."""
        row = self._rows[query]
        row[_WORKER], row[_ATTEMPT] = worker, attempt

    def first(self, query: int, time_s: float) -> bool:
        """Note the first token; False where the query already had one, which stays, or has ended."""
        with self._lock:
            row = self._rows[query]
            if not math.isnan(row[_FIRST]) or row[_DONE]:
                self.repeated += 1
                return False
            row[_FIRST] = time_s
            return True

    def done(self, query: int, time_s: float, tokens: int, error: str = "") -> bool:
        """Note the end of a query; False where it has already ended."""
        with self._lock:
            row = self._rows[query]
            if row[_DONE]:
                self.repeated += 1
                return False
            self._ended += 1
            row[_LAST], row[_TOKENS], row[_FAILED], row[_DONE] = time_s, tokens, bool(error), True
            if error:
                self.errors[query] = error
            return True

    def overdue(self, now_s: float, limit_s: float) -> list[int]:
        """Return the queries that were issued more than ``limit_s`` ago and have not ended."""
        return [key for key, row in list(self._rows.items()) if not row[_DONE] and now_s - row[_ISSUED] > limit_s]

    @property
    def unended(self) -> int:
        """How many queries have not ended."""
        return sum(not row[_DONE] for row in list(self._rows.values()))

    @property
    def ended(self) -> int:
        """How many queries have ended."""
        return self._ended

    def has_first(self, query: int) -> bool:
        """Whether the first token of a query came."""
        return not math.isnan(self._rows[query][_FIRST])

    def table(self) -> np.ndarray:
        """Return all queries in the order of issue, (n,) of ``QUERY``; one that has not ended counts as failed."""
        rows = [(query, *row[:_FAILED], bool(row[_FAILED] or not row[_DONE])) for query, row in self._rows.items()]
        return np.array(rows, QUERY)


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


def lateness_s(table: np.ndarray) -> np.ndarray:
    """Return by how much each scheduled query was issued late, in s; empty where nothing was scheduled."""
    late = table["issued_s"] - table["scheduled_s"]
    return late[~np.isnan(late)]  # type: ignore[no-any-return]


def span_s(table: np.ndarray) -> float:
    """Return the time from the first start to the last completion, in s; NaN of no queries."""
    return float(np.nanmax(table["last_s"]) - np.min(start_s(table))) if len(table) else math.nan


def percentile(samples: Sequence[float] | np.ndarray, share: float) -> float:
    """Return ``sorted[int(n share)]`` with ``share`` from 0 to 1; NaN of no samples."""
    ordered = np.sort(np.asarray(samples, float))
    return float(ordered[min(int(len(ordered) * share), len(ordered) - 1)]) if len(ordered) else math.nan


def conservative(samples: Sequence[float] | np.ndarray, share: float) -> float:
    """Return the latency that the percentile is at most, with 99 % confidence; NaN where n does not suffice.

    The largest limit that early stopping would pass: ``sorted[n - t]`` for the most queries t that n may have above it.
    """
    ordered = np.sort(np.asarray(samples, float))
    aside = set_aside(share, len(ordered))
    return math.nan if aside is None else float(ordered[len(ordered) - 1 - aside])


def meets(table: np.ndarray, limits_s: Mapping[str, float]) -> np.ndarray:
    """Return which queries completed below every limit, (n,) of bool; limits by ``ttft``, ``tpot`` and ``latency``."""
    good = ~table["failed"]
    for name, limit in limits_s.items():
        with np.errstate(invalid="ignore"):
            good &= {"ttft": ttft_s, "tpot": tpot_s, "latency": latency_s}[name](table) < limit
    return good
