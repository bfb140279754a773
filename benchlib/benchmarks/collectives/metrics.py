"""What a curve of times by size says: start-up time and bandwidth, and where two curves cross; the rows and metrics of a run."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchlib.benchmarks.collectives.bench import Row, Taken
from benchlib.benchmarks.collectives.config import FASTER_FROM, FASTER_UP_TO
from benchlib.core.definitions import algbw_gbps, busbw_gbps, size_text
from benchlib.core.files import atomic_path
from benchlib.core.stats import fit_alpha_beta, summary
from benchlib.results.metrics import Metric, derived, measured, not_available
from benchlib.workloads.collective_timing import Series


def crossover(sizes: Sequence[float], own: Sequence[float], other: Sequence[float]) -> tuple[float | None, str]:
    """Return the size from which on ``own`` is faster than ``other``, or None, and a sentence.

    Between two sizes the times are taken as straight lines of logarithms. Curves that cross several times, by noise or
    not, have no size from which on one of them is faster: None.
    """
    order = np.argsort(np.asarray(sizes, dtype=float))
    x = np.log(np.asarray(sizes, dtype=float)[order])
    gap = np.log(np.asarray(own, dtype=float)[order]) - np.log(np.asarray(other, dtype=float)[order])
    if len(x) < 2:
        return None, "fewer than two sizes"
    if (gap < 0).all():
        return None, "faster at every size"
    if (gap >= 0).all():
        return None, "slower at every size"
    changes = [index for index in range(len(gap) - 1) if (gap[index] < 0) != (gap[index + 1] < 0)]
    if len(changes) > 1:
        return None, f"neither consistently faster nor slower: the curves cross {len(changes)} times"
    (last,) = changes
    at = float(np.exp(x[last] + (x[last + 1] - x[last]) * gap[last] / (gap[last] - gap[last + 1])))
    return at, FASTER_FROM if gap[last + 1] < 0 else FASTER_UP_TO


# From series to what a run leaves: rows of tables, metrics, and the raw ledger of every rank and run.


US = 1e6
LEDGER_ROWS = 200_000  # that are written at once


def bus(operation: str, series: Series) -> list[float]:
    """Return the bus bandwidth of each run in Gbps; empty for a barrier and for one rank, which has no bus."""
    ranks = series.times_s.shape[1]
    if ranks < 2 or not series.bytes:
        return []
    return [busbw_gbps(operation, series.bytes, seconds, ranks) for seconds in series.seconds]


def series_row(taken: Taken) -> Row:
    """Return the row of a case for the table ``series``; without ``busbw_gbps`` where there is no bus."""
    case, series = taken.case, taken.series
    stats = summary(series.seconds.tolist())
    rates = bus(case.operation, series)
    return {
        "operation": case.operation,
        "variant": case.variant,
        "dtype": "" if case.operation == "barrier" else case.dtype,
        "reduction": case.reduction,
        "in_place": case.in_place,
        "bytes": series.bytes,
        "elements": taken.elements,
        "rounds": stats.n,
        "median_us": US * stats.median,
        "p95_us": US * stats.p95,
        "p99_us": US * stats.p99,
        "ci_low_us": None if stats.ci_low is None else US * stats.ci_low,
        "ci_high_us": None if stats.ci_high is None else US * stats.ci_high,
        "algbw_gbps": algbw_gbps(series.bytes, stats.median) if series.bytes else None,
        **({"busbw_gbps": float(busbw_gbps(case.operation, series.bytes, stats.median, series.times_s.shape[1]))} if rates else {}),
        "wrong_elements": series.wrong,
        "checked_elements": series.checked,
        "skew_us": US * series.skew_s,
        "slowest_rank": int(series.slowest_shares.argmax()),
    }  # fmt: skip


def rank_rows(taken: Taken, hosts: Sequence[str] = ()) -> list[Row]:
    """Return the ledger of a case in short, one row a rank; ``hosts`` are the names of the ranks' hosts."""
    case, series = taken.case, taken.series
    medians, high = (np.percentile(series.times_s, q, axis=0) for q in (50, 95))
    return [
        {
            "operation": case.operation,
            "variant": case.variant,
            "dtype": "" if case.operation == "barrier" else case.dtype,
            "bytes": series.bytes,
            "rank": rank,
            "host": hosts[rank] if hosts else "",
            "median_us": US * float(medians[rank]),
            "p95_us": US * float(high[rank]),
            "slowest_share": float(series.slowest_shares[rank]),
        }
        for rank in range(series.times_s.shape[1])
    ]


def save_ledger(run_dir: Path, everything: Sequence[Taken]) -> None:
    """Write ``ledger.parquet``: the seconds of every run on every rank, as they were taken. No file for no series."""
    if not everything:
        return
    import pyarrow
    from pyarrow.parquet import ParquetWriter

    with atomic_path(run_dir / "ledger.parquet") as temporary:
        writer, waiting = None, []
        for taken in everything:  # in pieces: with a thousand ranks the whole would fill the memory
            waiting.append(pyarrow.table(_ledger_columns(taken)))
            if sum(len(table) for table in waiting) >= LEDGER_ROWS or taken is everything[-1]:
                whole = pyarrow.concat_tables(waiting)
                writer = writer or ParquetWriter(temporary, whole.schema)
                writer.write_table(whole)
                waiting = []
        assert writer is not None
        writer.close()


def _ledger_columns(taken: Taken) -> dict[str, Any]:
    """Return the columns of a case, one row for each run and rank."""
    case, (rounds, ranks) = taken.case, taken.series.times_s.shape
    kind = {
        "operation": case.operation,
        "variant": case.variant,
        "dtype": "" if case.operation == "barrier" else case.dtype,
        "reduction": case.reduction,
        "in_place": case.in_place,
        "bytes": taken.series.bytes,
    }
    return {name: [value] * (rounds * ranks) for name, value in kind.items()} | {
        "round": np.repeat(np.arange(rounds), ranks),
        "rank": np.tile(np.arange(ranks), rounds),
        "seconds": taken.series.times_s.ravel(),
    }


def curves(everything: Sequence[Taken]) -> dict[tuple[str, str], list[Taken]]:
    """Return the series by size of each operation and variant, in the type, reduction and placement that came first.

    ``tables.main`` chooses alike, so that metrics and pictures are of the same data.
    """
    by_line: dict[tuple[str, str], dict[int, Taken]] = {}
    kinds: dict[tuple[str, str], tuple[Any, ...]] = {}
    for taken in everything:
        case, key = taken.case, (taken.case.operation, taken.case.variant)
        # The plan begins with the kind of which headline figures are.
        if kinds.setdefault(key, case.kind) == case.kind:
            by_line.setdefault(key, {}).setdefault(taken.series.bytes, taken)
    return {key: [of[size] for size in sorted(of)] for key, of in by_line.items()}


def fit_rows(lines: dict[tuple[str, str], list[Taken]]) -> list[Row]:
    """Return alpha and beta of every curve, or the reason why there is no fit."""
    rows = []
    for (operation, variant), line in lines.items():
        if operation == "barrier" or variant == "async" or line[0].series.times_s.shape[1] < 2:
            continue
        sizes = [taken.series.bytes for taken in line]
        line_fit = fit_alpha_beta(sizes, [float(np.median(taken.series.seconds)) for taken in line])
        factor = busbw_gbps(operation, 1e9, 1.0, line[0].series.times_s.shape[1]) / 8  # bus bytes per byte of S
        rows.append(
            {
                "operation": operation,
                "variant": variant,
                "dtype": line[0].case.dtype,
                "alpha_us": None if line_fit.reason else US * line_fit.alpha_s,
                "bandwidth_gbps": None if line_fit.reason else 8e-9 * factor / line_fit.beta_s_per_byte,
                "half_bytes": None if line_fit.reason else line_fit.half_bytes,
                "residual": None if math.isnan(line_fit.residual) else line_fit.residual,
                "points": line_fit.points,
                "from_bytes": min(sizes),
                "to_bytes": max(sizes),
                "reason": line_fit.reason,
            }
        )
    return rows


def crossover_rows(lines: dict[tuple[str, str], list[Taken]]) -> list[Row]:
    """Return from which size on each other all-reduce beats the library's."""
    library = {taken.series.bytes: taken for taken in lines.get(("all_reduce", "library"), [])}
    rows = []
    for name in ("ring", "tree", "rs_ag", "flat"):
        line = [taken for taken in lines.get(("all_reduce", name), []) if taken.series.bytes in library]
        if not line or line[0].series.times_s.shape[1] < 2:
            continue
        sizes = [taken.series.bytes for taken in line]
        own = [float(np.median(taken.series.seconds)) for taken in line]
        other = [float(np.median(library[size].series.seconds)) for size in sizes]
        at, reason = crossover(sizes, own, other)
        rows.append({"algorithm": name, "against": "library", "bytes": at, "points": len(sizes), "reason": reason})
    return rows


def metric_name(operation: str) -> str:
    """Return the beginning of the names of an operation's metrics."""
    return operation.replace("all_reduce", "allreduce")


def metrics(lines: dict[tuple[str, str], list[Taken]], fits: Sequence[Row], ranks: int) -> list[Metric]:
    """Return of each operation its bus bandwidth at the largest size, and of the library's its time at the smallest."""
    values: list[Metric] = []
    largest = max((line[-1].series.bytes for line in lines.values()), default=0)
    for (operation, variant), line in lines.items():
        name = metric_name(operation)
        if variant in ("library", "direct") and operation != "barrier":
            values.append(_bandwidth(name + ("_direct" if variant == "direct" else ""), line[-1], ranks, largest))
        if variant == "library":
            values.append(_latency(f"{name}_latency_us", line[0], ranks))
    return values + _of_fit(fits)


NO_BUS = "one rank has no bus to send on; set nproc to 2 or more"


def _bandwidth(name: str, large: Taken, ranks: int, largest: int) -> Metric:
    rates = bus(large.case.operation, large.series)
    if not rates:
        return not_available(f"{name}_busbw_gbps", "Gbps", "higher", NO_BUS)
    if large.series.bytes < largest / 2:  # what the ranks share is rounded to whole elements of each, so never equal
        cut = f"no size above {size_text(large.series.bytes)} was measured, and others reached {size_text(largest)}"
        return not_available(f"{name}_busbw_gbps", "Gbps", "higher", cut)
    reason = f"{large.case.label()}, {size_text(large.series.bytes)}, {ranks} ranks"
    return derived(f"{name}_busbw_gbps", rates, "Gbps", "higher", reason)


def _latency(name: str, small: Taken, ranks: int) -> Metric:
    if ranks < 2:
        return not_available(name, "us", "lower", NO_BUS)
    size = size_text(small.series.bytes) if small.series.bytes else "no data"
    reason = f"{small.case.label()}, {size}, {ranks} ranks"
    return measured(name, list(US * small.series.seconds), "us", "lower", reason=reason)


def _of_fit(fits: Sequence[Row]) -> list[Metric]:
    row = next((row for row in fits if (row["operation"], row["variant"]) == ("all_reduce", "library")), None)
    if row is None:
        return []
    if row["reason"]:
        return [not_available("allreduce_alpha_us", "us", "none", row["reason"])]
    reason = f"start-up time of t = alpha + S * beta over {row['points']} sizes, residual {row['residual']:.1%}"
    return [derived("allreduce_alpha_us", row["alpha_us"], "us", "none", reason)]
