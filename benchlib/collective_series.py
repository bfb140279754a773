"""The series behind the pictures and tables of collectives: what a run recorded, as small frames.

All functions read only what is there: a missing or damaged table gives an empty frame with its columns, a value that
is no number NaN, never an error. Bandwidths are Gbps, times us, S is the bytes of an operation's larger side.
"""

import contextlib
import math
from pathlib import Path
from typing import Any

import pandas as pd

from benchlib import curves
from benchlib.bandwidth import NO_LIMIT
from benchlib.curves import Records

SERIES = {
    "operation": "", "variant": "", "dtype": "", "reduction": "", "in_place": False, "bytes": 0.0, "elements": 0.0, "rounds": 0.0,
    "median_us": 0.0, "p95_us": 0.0, "p99_us": 0.0, "ci_low_us": 0.0, "ci_high_us": 0.0, "algbw_gbps": 0.0, "busbw_gbps": 0.0, "wrong_elements": 0.0, "checked_elements": 0.0,
    "skew_us": 0.0, "slowest_rank": 0.0,
}  # fmt: skip
TABLES: dict[str, dict[str, Any]] = {
    "series": SERIES,
    "ranks": {"operation": "", "variant": "", "dtype": "", "bytes": 0.0, "rank": 0.0, "median_us": 0.0, "p95_us": 0.0, "slowest_share": 0.0},
    "bounds": {"bound": "", "bytes": 0.0, "gbps": 0.0, "latency_us": 0.0, "provenance": "", "source": ""},
    "shares": {"operation": "", "variant": "", "bytes": 0.0, "busbw_gbps": 0.0, "bound": "", "bound_gbps": 0.0, "share": 0.0, "target": 0.0},
    "fits": {"operation": "", "variant": "", "dtype": "", "alpha_us": 0.0, "bandwidth_gbps": 0.0, "residual": 0.0, "points": 0.0,
             "from_bytes": 0.0, "to_bytes": 0.0},
    "crossover": {"algorithm": "", "against": "", "bytes": 0.0, "reason": ""},
    "pairs": {"source": 0.0, "target": 0.0, "bytes": 0.0, "gbps": 0.0, "latency_us": 0.0},
    "overlap": {"operation": "", "bytes": 0.0, "alone_us": 0.0, "compute_us": 0.0, "together_us": 0.0, "hidden_share": 0.0},
    "gradients": {"collective": "", "max_difference": 0.0, "tolerance": 0.0, "status": "", "reason": ""},
    "wrong": {"case": "", "wrong_elements": 0.0, "checked_elements": 0.0, "first": ""},
    "unsupported": {"operation": "", "dtype": "", "reduction": "", "reason": ""},
    "nccl_tests": {"operation": "", "placement": "", "bytes": 0.0, "ranks": 0.0, "time_us": 0.0, "algbw_gbps": 0.0, "busbw_gbps": 0.0,
                   "wrong_elements": 0.0, "provenance": "", "source": ""},
}  # fmt: skip
WORDS = {
    "all_reduce": "all-reduce", "all_gather": "all-gather", "reduce_scatter": "reduce-scatter", "all_to_all": "all-to-all",
    "send_recv": "send/recv",
}  # fmt: skip
VARIANTS = {
    "library": "", "async": "async", "overlap": "overlapped", "direct": "direct", "ring": "ring", "tree": "recursive doubling",
    "rs_ag": "reduce-scatter + all-gather",
}  # fmt: skip
# Every rank sends and receives at once in the first group; in the second one rank is the source or the target.
TOGETHER = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
ROOTED = ("broadcast", "reduce", "gather", "scatter", "send_recv")
ALGORITHMS = ("ring", "tree", "rs_ag")


def words(operation: str, variant: str = "library") -> str:
    """Write an operation for a reader: ``all-gather, direct``."""
    more = VARIANTS.get(variant, variant)
    return WORDS.get(operation, operation) + (f", {more}" if more else "")


def share_text(value: float) -> str:
    """Write a share of a limit; above 1 by more than noise, what it is a share of was no limit."""
    text = f"{value:.2f}" if value >= 0.01 else f"{value:.1g}"
    return f"{text} (no limit)" if value > NO_LIMIT else text


def table(run: Records, name: str) -> pd.DataFrame:
    """Return a table of ``TABLES`` with its columns: texts as they are, numbers as floats (NaN where there is none)."""
    return curves.typed(run, name, TABLES[name])


def rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the rows of a frame as plain values by column."""
    return [{str(name): value for name, value in row.items()} for row in frame.to_dict("records")]


def main(run: Records) -> pd.DataFrame:
    """Return of each operation and variant one series by size: the type, reduction and place with most sizes.

    Where several have as many, fp32, the sum and out of place come first.
    """
    frame = table(run, "series")
    order = {"fp32": 0, "bf16": 1, "fp16": 2}
    keys = ["dtype", "reduction", "in_place"]
    kept = []
    for _, group in frame.groupby(["operation", "variant"], sort=False):
        kinds = group.groupby(keys, sort=False)["bytes"].nunique()
        best = min(
            kinds.index, key=lambda kind: (-kinds[kind], order.get(kind[0], 9), kind[1] not in ("", "sum"), kind[2])
        )
        kept.append(group[(group[keys] == list(best)).all(axis=1)].drop_duplicates("bytes", keep="last"))
    found = pd.concat(kept, ignore_index=True) if kept else frame
    return found.sort_values(["operation", "variant", "bytes"], ignore_index=True)


def lines(run: Records, column: str) -> dict[tuple[str, str], pd.DataFrame]:
    """Return the sizes and the values of ``column`` (above zero) of each operation and variant of :func:`main`."""
    frame = main(run)
    frame = frame[(frame[column] > 0) & (frame["bytes"] > 0)]
    return {
        (str(operation), str(variant)): group[["bytes", column]].rename(columns={column: "value"})
        for (operation, variant), group in frame.groupby(["operation", "variant"], sort=False)
    }


def wrong(run: Records) -> set[tuple[str, str]]:
    """Return the operations and variants of which any series had a wrong element: their speed counts for nothing."""
    frame = table(run, "series")
    return {(str(row["operation"]), str(row["variant"])) for row in rows(frame[frame["wrong_elements"] > 0])}


def bounds(run: Records) -> dict[str, pd.DataFrame]:
    """Return the measured and claimed limits by name: columns ``bytes`` (NaN for any size) and ``gbps``, by size."""
    frame = table(run, "bounds")
    frame = frame[frame["gbps"] > 0]
    return {str(name): group.sort_values("bytes") for name, group in frame.groupby("bound", sort=False)}


def shares(run: Records) -> pd.DataFrame:
    """Return the table ``shares``, with the shares of the memory copy and of the claimed link where it has none of them.

    They follow from the bandwidths of the same rows: only the sockets are measured in turns with the operations.
    """
    frame, limits = table(run, "shares").dropna(subset=["share", "bytes"]), bounds(run)
    more = []
    for name in ("memory copy", "claimed link"):
        known = {(row["operation"], row["variant"]) for row in rows(frame[frame["bound"] == name])}
        for row in rows(frame.drop_duplicates(["operation", "variant", "bytes"])):
            if (row["operation"], row["variant"]) in known or name not in limits:
                continue
            at = limits[name][limits[name]["bytes"].isna() | (limits[name]["bytes"] == row["bytes"])]["gbps"]
            if len(at):
                gbps = float(at.iloc[0])
                more.append(
                    row | {"bound": name, "bound_gbps": gbps, "share": row["busbw_gbps"] / gbps, "target": math.nan}
                )
    return pd.concat([frame, pd.DataFrame(more)], ignore_index=True) if more else frame


def ranks(run: Records) -> int:
    """Return the number of ranks of the result, 0 where there is none."""
    result = curves.readable(run, "result")
    return int(result.world_size) if result else 0


def ratios(run: Records) -> dict[str, pd.DataFrame]:
    """Return for each algorithm the ratio of its time to the library's all-reduce by size: ``bytes``, ``ratio``.

    None for one rank, which exchanges nothing by any algorithm.
    """
    found = lines(run, "median_us") if ranks(run) > 1 else {}
    base = found.get(("all_reduce", "library"))
    if base is None:
        return {}
    merged = {
        name: found["all_reduce", name].merge(base, on="bytes", suffixes=("", "_library"))
        for name in ALGORITHMS
        if ("all_reduce", name) in found
    }
    return {
        name: pd.DataFrame({"bytes": frame["bytes"], "ratio": frame["value"] / frame["value_library"]})
        for name, frame in merged.items()
        if len(frame)
    }


def last_shares(run: Records) -> pd.Series:
    """Return how often each rank was the last to finish, as a share of all timed rounds: a mean over operations and sizes."""
    frame = table(run, "ranks").dropna(subset=["rank", "slowest_share"])
    shares = frame.groupby("rank")["slowest_share"].mean()
    shares.index = shares.index.astype(int)
    return shares


def ledger(run: Records) -> pd.DataFrame:
    """Return the raw times of each rank and round as they lie in the run's folder; empty where there is no such file."""
    folder = getattr(run, "path", None)
    path = Path(folder) / "ledger.parquet" if folder else None
    if path is None or not path.is_file():
        return pd.DataFrame()
    from pyarrow import ArrowException

    # A damaged file, or one of another user, costs its picture, which then says so.
    with contextlib.suppress(OSError, ValueError, ArrowException):
        return pd.read_parquet(path)
    return pd.DataFrame()


def apart(run: Records, operation: str) -> pd.DataFrame:
    """Return by size how far the ranks of an operation of the library end apart: percentiles over the rounds, in us.

    Columns ``bytes``, ``p05``, ``p25``, ``p50``, ``p75``, ``p95`` and ``time_us``, the median time of the slowest rank;
    of the type, reduction and place of :func:`main`. Empty with one rank and where no ledger was kept.
    """
    chosen = main(run).query("operation == @operation and variant == 'library'")
    raw = ledger(run)
    wanted = {"operation", "variant", "dtype", "reduction", "in_place", "bytes", "round", "rank", "seconds"}
    if chosen.empty or not wanted <= set(raw.columns):
        return pd.DataFrame()
    first = rows(chosen)[0]
    same = raw["bytes"].isin(chosen["bytes"])
    for name in ("operation", "variant", "dtype", "reduction", "in_place"):
        same &= raw[name] == first[name]
    times = raw[same].groupby(["bytes", "round"])["seconds"].agg(["min", "max", "size"])
    times = times[times["size"] > 1].reset_index()
    found = []
    for size in sorted({float(value) for value in times["bytes"]}):
        group = times[times["bytes"] == size]
        gaps = 1e6 * (group["max"] - group["min"])
        ends = {f"p{q:02d}": float(gaps.quantile(q / 100)) for q in (5, 25, 50, 75, 95)}
        found.append({"bytes": size, **ends, "time_us": 1e6 * float(group["max"].median())})
    return pd.DataFrame(found)
