"""What a run of collectives states in two places: its metrics and the rows of its tables, bounds and their times.

Only what both places hold is compared; a difference beyond rounding is told with both values.
"""

import math
import statistics
from collections.abc import Iterator
from typing import Any

from benchlib.core.definitions import BUS_FACTORS, algbw_gbps, busbw_gbps
from benchlib.judge.impossible.numbers import Numbers

ROUNDING = 1e-6
BOTH_WAYS = 2  # a copy reads and writes
Pair = tuple[str, Any, Any, str]
Rows = list[dict[str, Any]]


def restated_series(numbers: Numbers) -> Iterator[Pair]:
    """Yield (name, stated, other, source) of every value that stands in two places of a run of collectives."""
    series, ranks = _rows(numbers, "series"), numbers.world_size
    for operation in BUS_FACTORS if ranks > 1 else ():
        for variant, suffix in (("library", ""), ("direct", "_direct")):
            rows = [row for row in series if (row.get("operation"), row.get("variant")) == (operation, variant)]
            yield from _speeds(numbers, operation.replace("all_reduce", "allreduce") + suffix, operation, rows)
            yield from _shares(numbers, operation, variant, suffix)
    yield from _start_up(numbers)
    yield from _bounds(numbers)
    counted, checked = [row.get("checked_elements") for row in series], numbers.count("checked_elements")
    if checked is not None and all(isinstance(count, int) for count in counted):
        total = sum(counted)  # type: ignore[arg-type]
        told = checked if total <= checked else f"{total:,} at least"
        yield "checked_elements", checked, told, "the rows of the table of series"


def _rows(numbers: Numbers, name: str) -> Rows:
    rows = numbers.tables.get(name)
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


def _number(value: Any) -> float | None:
    known = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if known else None


def _same(kind: str, what: str, stated: float, others: list[float], source: str) -> Iterator[Pair]:
    """Yield the pair of a value and the one of ``others`` that is nearest to it; none where there is no other."""
    if others:
        nearest = min(others, key=lambda other: abs(other - stated))
        equal = math.isclose(stated, nearest, rel_tol=ROUNDING)
        yield kind, f"{what} {stated:.6g}", f"{what} {stated if equal else nearest:.6g}", source


def _speeds(numbers: Numbers, name: str, operation: str, rows: Rows) -> Iterator[Pair]:
    """Compare the metrics of an operation with its rows at the largest and the smallest size, by the median time.

    A median of bandwidths is no bandwidth of a median where the number of rounds is even, so the raw samples count.
    """
    sizes = [size for row in rows if (size := _number(row.get("bytes")))]
    if not sizes:
        return

    def medians(size: float) -> list[float]:
        found = (_number(row.get("median_us")) for row in rows if row.get("bytes") == size)
        return [median for median in found if median is not None]

    rates = [rate for rate in _exactly(numbers, f"{name}_busbw_gbps") if rate > 0]
    if rates:
        times = [1e6 * busbw_gbps(operation, max(sizes), rate, numbers.world_size) for rate in rates]  # S·factor/busbw
        yield from _same(
            "bandwidths",
            f"{name}_busbw_gbps, as a time in us:",
            statistics.median(times),
            medians(max(sizes)),
            "its series",
        )
    waits = _exactly(numbers, f"{name}_latency_us")
    if waits:
        yield from _same("latencies", f"{name}_latency_us", statistics.median(waits), medians(min(sizes)), "its series")


def _exactly(numbers: Numbers, name: str) -> list[float]:
    metric = numbers.metric(name)
    return numbers.raw(name) if metric is not None and metric.name == name else []


def _shares(numbers: Numbers, operation: str, variant: str, suffix: str) -> Iterator[Pair]:
    rows = [
        row for row in _rows(numbers, "shares")
        if (row.get("operation"), row.get("variant")) == (operation, variant) and "rounds" in row
    ]  # fmt: skip
    name = operation.replace("all_reduce", "allreduce") + f"{suffix}_socket_share"
    metric = numbers.metric(name)
    if rows and metric is not None and metric.name == name and metric.value is not None:
        largest = max(rows, key=lambda row: _number(row.get("bytes")) or 0.0)
        share = _number(largest.get("share"))
        yield from _same("shares", name, metric.value, [share] if share is not None else [], "the table of shares")


def _start_up(numbers: Numbers) -> Iterator[Pair]:
    metric = numbers.metric("allreduce_alpha_us")
    rows = [
        row for row in _rows(numbers, "fits") if (row.get("operation"), row.get("variant")) == ("all_reduce", "library")
    ]
    found = [value for row in rows if (value := _number(row.get("alpha_us"))) is not None]
    if metric is not None and metric.value is not None:
        yield from _same("start-up time", "allreduce_alpha_us", metric.value, found, "the table of fits")


def _bounds(numbers: Numbers) -> Iterator[Pair]:
    for row in _rows(numbers, "bounds"):
        size, rate, took = (_number(row.get(name)) for name in ("bytes", "gbps", "latency_us"))
        if size and rate and took and took > 0 and row.get("provenance") == "measured":
            moved = size * (BOTH_WAYS * numbers.world_size if row.get("bound") == "memory copy" else 1)
            what = f"Gbps of {row.get('bound')}, {size:,.0f} bytes:"
            yield from _same("limits", what, rate, [algbw_gbps(moved, 1e-6 * took)], "its bytes and its time")
