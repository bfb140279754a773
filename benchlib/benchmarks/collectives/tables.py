"""The series behind the pictures and tables of collectives: what a run recorded, as small frames.

All functions read only what is there: a missing or damaged table gives an empty frame with its columns, a value that
is no number NaN, never an error. Bandwidths are Gbps, times us, S is the bytes of an operation's larger side.
"""

import contextlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd

from benchlib.core import definitions
from benchlib.core.definitions import NO_LIMIT, size_text
from benchlib.core.stats import LEAST_FOR_P95
from benchlib.core.text import quantity, seconds
from benchlib.results import frames
from benchlib.results.frames import Records, indexed, row_dicts

SERIES = {
    "operation": "", "variant": "", "dtype": "", "reduction": "", "in_place": False, "bytes": 0.0, "elements": 0.0, "rounds": 0.0,
    "median_us": 0.0, "p95_us": 0.0, "p99_us": 0.0, "ci_low_us": 0.0, "ci_high_us": 0.0, "algbw_gbps": 0.0, "busbw_gbps": 0.0, "wrong_elements": 0.0, "checked_elements": 0.0,
    "skew_us": 0.0, "slowest_rank": 0.0,
}  # fmt: skip
COLUMNS: dict[str, dict[str, Any]] = {
    "series": SERIES,
    "ranks": {"operation": "", "variant": "", "dtype": "", "bytes": 0.0, "rank": 0.0, "median_us": 0.0, "p95_us": 0.0, "slowest_share": 0.0},
    "bounds": {"bound": "", "bytes": 0.0, "gbps": 0.0, "latency_us": 0.0, "provenance": "", "source": ""},
    "shares": {"operation": "", "variant": "", "bytes": 0.0, "busbw_gbps": 0.0, "bound": "", "bound_gbps": 0.0, "share": 0.0, "target": 0.0},
    "fits": {"operation": "", "variant": "", "dtype": "", "alpha_us": 0.0, "bandwidth_gbps": 0.0, "residual": 0.0, "points": 0.0,
             "from_bytes": 0.0, "to_bytes": 0.0},
    "crossover": {"algorithm": "", "against": "", "bytes": 0.0, "reason": ""},
    "pairs": {"source": 0.0, "target": 0.0, "bytes": 0.0, "gbps": 0.0, "latency_us": 0.0},
    "overlap": {"operation": "", "bytes": 0.0, "alone_us": 0.0, "compute_us": 0.0, "together_us": 0.0},
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
    "rs_ag": "reduce-scatter + all-gather", "flat": "gloo without groups",
}  # fmt: skip
# Every rank sends and receives at once in the first group; in the second one rank is the source or the target.
TOGETHER = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
ROOTED = ("broadcast", "reduce", "gather", "scatter", "send_recv")
ALGORITHMS = ("ring", "tree", "rs_ag", "flat")
CLAIMED = "claimed link"


def words(operation: str, variant: str = "library") -> str:
    """Write an operation for a reader: ``all-gather, direct``."""
    more = VARIANTS.get(variant, variant)
    return WORDS.get(operation, operation) + (f", {more}" if more else "")


def share_text(value: float) -> str:
    """Write a share of a limit; above 1 by more than noise, what it is a share of was no limit."""
    return definitions.share_text(value) + (" (no limit)" if value > NO_LIMIT else "")


def table(run: Records, name: str) -> pd.DataFrame:
    """Return a table of ``COLUMNS`` with its columns: texts as they are, numbers as floats (NaN where there is none)."""
    return frames.typed(run, name, COLUMNS[name])


def main(run: Records) -> pd.DataFrame:
    """Return of each operation and variant one series by size: the type, reduction and placement that were measured first.

    ``metrics.curves`` chooses alike, so that metrics and pictures are of the same data.
    """
    frame, case, kind = table(run, "series"), ["operation", "variant"], ["dtype", "reduction", "in_place"]
    first = frame.drop_duplicates(case)[[*case, *kind]]
    rows_of_first = frame.merge(first).drop_duplicates([*case, "bytes"])
    return rows_of_first.sort_values([*case, "bytes"], ignore_index=True)


def series_lines(run: Records, column: str) -> dict[tuple[str, str], pd.DataFrame]:
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
    return {(str(row["operation"]), str(row["variant"])) for row in row_dicts(frame[frame["wrong_elements"] > 0])}


def bounds(run: Records) -> dict[str, pd.DataFrame]:
    """Return the measured and claimed limits by name: columns ``bytes`` (NaN for any size) and ``gbps``, by size."""
    frame = table(run, "bounds")
    frame = frame[frame["gbps"] > 0]
    return {str(name): group.sort_values("bytes") for name, group in frame.groupby("bound", sort=False)}


def shares(run: Records) -> pd.DataFrame:
    """Return the table ``shares``, with the shares of the claimed link.

    Those follow from the series by size: only the sockets are measured in turns with the operations.
    """
    frame, limits = table(run, "shares").dropna(subset=["share", "bytes"]), bounds(run)
    lines = {
        key: dict(zip(line["bytes"], line["value"], strict=True))
        for key, line in series_lines(run, "busbw_gbps").items()
    }
    more = []
    for row in row_dicts(frame) if CLAIMED in limits else ():
        if rate := lines.get((row["operation"], row["variant"]), {}).get(row["bytes"]):
            gbps = float(limits[CLAIMED]["gbps"].iloc[0])
            rates = {"busbw_gbps": rate, "bound_gbps": gbps, "share": rate / gbps}
            more.append(row | rates | {"bound": CLAIMED, "target": math.nan})
    return pd.concat([frame, pd.DataFrame(more)], ignore_index=True) if more else frame


def ranks(run: Records) -> int:
    """Return the number of ranks of the result, 0 where there is none."""
    result = frames.readable(run, "result")
    return int(result.world_size) if result else 0


def ratios(run: Records) -> dict[str, pd.DataFrame]:
    """Return for each algorithm the ratio of its time to the library's all-reduce by size: ``bytes``, ``ratio``.

    None for one rank, which exchanges nothing by any algorithm.
    """
    entries = series_lines(run, "median_us") if ranks(run) > 1 else {}
    base = entries.get(("all_reduce", "library"))
    if base is None:
        return {}
    merged = {
        name: entries["all_reduce", name].merge(base, on="bytes", suffixes=("", "_library"))
        for name in ALGORITHMS
        if ("all_reduce", name) in entries
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
    first = row_dicts(chosen)[0]
    same = raw["bytes"].isin(chosen["bytes"])
    for name in ("operation", "variant", "dtype", "reduction", "in_place"):
        same &= raw[name] == first[name]
    times = raw[same].groupby(["bytes", "round"])["seconds"].agg(["min", "max", "size"])
    times = times[times["size"] > 1].reset_index()
    entries = []
    for size in sorted({float(value) for value in times["bytes"]}):
        group = times[times["bytes"] == size]
        gaps = 1e6 * (group["max"] - group["min"])
        ends = {f"p{q:02d}": float(gaps.quantile(q / 100)) for q in (5, 25, 50, 75, 95)}
        entries.append({"bytes": size, **ends, "time_us": 1e6 * float(group["max"].median())})
    return pd.DataFrame(entries)


# Tables of collectives for notebooks and reports: what was verified, bandwidth and time by size, shares, fits, what is missing.


MOST_SIZES = 7
NOTHING, NOT_TOLD = "–", "not on a line"
OTHERS = "limits, turns, pairs, overlap, buckets"
LEAST_FOR_P99 = 5 * LEAST_FOR_P95
BANDWIDTH, TIME = "Gbps (bus)", "median time"


def verified(run: Records) -> pd.DataFrame:
    """Return by operation what was timed and compared, and how many elements were wrong.

    What no series has (limits, turns, pairs, overlap, buckets) is a row of its own, so that the sum is that of the run.
    """
    frame, result = table(run, "series"), frames.readable(run, "result")
    entries: list[dict[str, Any]] = []
    for operation in _order(frame["operation"]):
        part = frame[frame["operation"] == operation]
        sizes = part.loc[part["bytes"] > 0, "bytes"]
        entries.append({
            "operation": words(operation),
            "types": _listed(part["dtype"]),
            "reductions": _listed(part["reduction"]),
            "variants": _listed(part["variant"].map(VARIANTS).fillna(part["variant"]).replace("", "library")),
            "sizes": f"{size_text(sizes.min())} to {size_text(sizes.max())}" if len(sizes) else NOTHING,
            "series": len(part),
            "elements compared": f"{part['checked_elements'].sum():,.0f}",
            "wrong": f"{part['wrong_elements'].sum():,.0f}",
        })  # fmt: skip
    facts = result.facts if result else {}
    checked, bad = (facts.get(f"{name}_elements") for name in ("checked", "wrong"))
    if entries and isinstance(checked, int) and isinstance(bad, int) and checked > frame["checked_elements"].sum():
        rest = [checked - frame["checked_elements"].sum(), max(0, bad - frame["wrong_elements"].sum())]
        counts = dict(zip(("elements compared", "wrong"), (f"{count:,.0f}" for count in rest), strict=True))
        entries.append(dict.fromkeys(entries[0], NOTHING) | {"operation": OTHERS} | counts)
    return indexed(entries, "operation", "No collective was timed.")


def wrong_table(run: Records) -> pd.DataFrame:
    """Return the cases with wrong elements, and the first of them with its rank."""
    entries = [
        {
            "case": row["case"],
            "wrong": f"{row['wrong_elements']:,.0f}",
            "compared": f"{row['checked_elements']:,.0f}",
            "first": row["first"],
        }
        for row in row_dicts(table(run, "wrong"))
    ]
    return indexed(entries, "case", "No element was wrong.")


def bandwidth(run: Records) -> pd.DataFrame:
    """Return the bus bandwidth in Gbps by operation and variant (rows) and size (columns); the limits come last."""
    entries = _by_size(run, BANDWIDTH, "busbw_gbps", quantity)
    sizes = [column for column in entries[0] if column != BANDWIDTH] if entries else []
    for name, frame in bounds(run).items():
        if name != "claimed link":
            at = {size_text(row["bytes"]): quantity(row["gbps"]) for row in row_dicts(frame) if row["bytes"] > 0}
        else:
            at = dict.fromkeys(sizes, quantity(float(frame["gbps"].max())))
        if entries:
            entries.append({BANDWIDTH: name.replace("tcp", "TCP")} | {size: at.get(size, NOTHING) for size in sizes})
    return indexed(entries, BANDWIDTH, "No bandwidth between ranks was measured.")


def times(run: Records) -> pd.DataFrame:
    """Return the median time of the slowest rank by operation and variant (rows) and size (columns)."""
    entries = _by_size(run, TIME, "median_us", lambda value: seconds(1e-6 * value))
    return indexed(entries, TIME, "No time was recorded.")


def spread(run: Records) -> pd.DataFrame:
    """Return how the times of each operation are spread, and both its bandwidths: at the smallest, a middle and the largest size."""
    entries = []
    for _, group in main(run).groupby(["operation", "variant"], sort=False):
        items = row_dicts(group.dropna(subset=["median_us"]))
        entries += [items[at] for at in sorted({0, len(items) // 2, len(items) - 1}) if items]
    order = _order(pd.Series([item["operation"] for item in entries], dtype=str))
    entries.sort(key=lambda item: (order.index(item["operation"]), item["variant"] != "library", item["variant"]))
    return indexed([_spread_row(item) for item in entries], "operation", "No time was recorded.")


def _spread_row(item: dict[str, Any]) -> dict[str, str]:
    def micros(name: str) -> str:
        return _or(item[name], lambda value: seconds(1e-6 * value), NOTHING)

    ends = [micros("ci_low_us"), micros("ci_high_us")]
    return {
        "operation": words(item["operation"], item["variant"]),
        "size": size_text(item["bytes"]) if item["bytes"] > 0 else NOTHING,
        "rounds": _or_nothing(item["rounds"], "{:.0f}"),
        "median": micros("median_us"),
        "95% interval": NOTHING if NOTHING in ends else " to ".join(ends),
        "p95": micros("p95_us") if item["rounds"] >= LEAST_FOR_P95 else NOTHING,
        "p99": micros("p99_us") if item["rounds"] >= LEAST_FOR_P99 else NOTHING,
        "algbw": _or(item["algbw_gbps"], lambda value: quantity(value, "Gbps"), NOTHING),
        "busbw": _or(item["busbw_gbps"], lambda value: quantity(value, "Gbps"), NOTHING),
    }


def _by_size(run: Records, head: str, column: str, write: Any) -> list[dict[str, str]]:
    lines = series_lines(run, column)
    sizes = sorted({float(size) for frame in lines.values() for size in frame["bytes"]})
    step = max(1, -(-len(sizes) // MOST_SIZES))
    kept = sizes[::-1][::step][::-1]
    order = _order(pd.Series([key[0] for key in lines], dtype=str))
    entries = []
    for operation, variant in sorted(lines, key=lambda key: (order.index(key[0]), key[1] != "library", key[1])):
        at = {row["bytes"]: write(row["value"]) for row in row_dicts(lines[operation, variant])}
        if set(at) & set(kept):
            entries.append(
                {head: words(operation, variant)} | {size_text(size): at.get(size, NOTHING) for size in kept}
            )
    return entries


def shares_table(run: Records) -> pd.DataFrame:
    """Return the share of each limit, with its target where there is one.

    Of what was measured in turns it is the median of the rounds' ratios, and no ratio of the two medians beside it.
    """
    entries = [
        {
            "operation": words(row["operation"], row["variant"]),
            "size": size_text(row["bytes"]),
            "bus bandwidth": quantity(row["busbw_gbps"], "Gbps"),
            "limit": row["bound"].replace("tcp", "TCP"),
            "of the limit": quantity(row["bound_gbps"], "Gbps"),
            "share (in turns: median of ratios)": share_text(row["share"]),
            "target": _or(row["target"], definitions.share_text, NOTHING),
            "measured": "in turns" if row["bound"].startswith("tcp") else "by size",
        }
        for row in row_dicts(shares(run))
    ]
    return indexed(entries, "operation", "No operation was measured beside a limit.")


def fits(run: Records) -> pd.DataFrame:
    """Return start-up time and bandwidth of each operation, and what the line t = α + S·factor/B leaves.

    Neither is stated of times that are on no line.
    """
    frame = table(run, "fits").dropna(subset=["residual"])  # of too few sizes there is no line at all
    frame = frame[frame["variant"] != "async"]  # measured at both ends of the range only
    entries = [
        {
            "operation": words(row["operation"], row["variant"]),
            "α": _or(row["alpha_us"], lambda value: seconds(1e-6 * value), NOT_TOLD),
            "B (bus)": _or(row["bandwidth_gbps"], lambda value: quantity(value, "Gbps"), NOT_TOLD),
            "residual (rms)": _or_nothing(100 * row["residual"], "{:.1f}%"),
            "sizes": f"{row['points']:.0f}, {size_text(row['from_bytes'])} to {size_text(row['to_bytes'])}",
        }
        for row in row_dicts(frame)
    ]
    return indexed(entries, "operation", "No start-up time and bandwidth were fitted.")


def gradients(run: Records) -> pd.DataFrame:
    """Return how far the gradients of one training step over each collective library are from the single process."""
    entries = [
        {
            "library": row["collective"],
            "largest difference": _or_nothing(row["max_difference"], "{:.2g}"),
            "tolerance": _or_nothing(row["tolerance"], "{:.2g}"),
            "status": row["status"],
            "reason": row["reason"],
        }
        for row in row_dicts(table(run, "gradients"))
    ]
    return indexed(entries, "library", "No gradients were compared.")


def unsupported(run: Records) -> pd.DataFrame:
    """Return what the collective library does not have, with its own words."""
    frame = table(run, "unsupported")
    entries = []
    for (operation, reason), part in frame.groupby(["operation", "reason"], sort=False):
        entries.append({
            "operation": words(str(operation)),
            "types": _listed(part["dtype"]),
            "reductions": _listed(part["reduction"]),
            "reason": str(reason),
        })  # fmt: skip
    return indexed(entries, "operation", "The library has everything that was asked for.")


def others(run: Records) -> pd.DataFrame:
    """Return what the file of nccl-tests states beside this run's own bus bandwidth at the same size."""
    frame = table(run, "nccl_tests")
    own = {
        (operation, row["bytes"]): row["value"]
        for (operation, variant), line in series_lines(run, "busbw_gbps").items()
        if variant == "library"
        for row in row_dicts(line)
    }
    entries = []
    for row in row_dicts(frame[frame["busbw_gbps"].notna()]):
        here = own.get((row["operation"], row["bytes"]))
        ratio = quantity(here / row["busbw_gbps"]) if here and row["busbw_gbps"] > 0 else NOTHING
        entries.append({
            "operation": words(row["operation"]),
            "size": size_text(row["bytes"]),
            "placement": row["placement"],
            "claimed": quantity(row["busbw_gbps"], "Gbps"),
            "ranks": _or_nothing(row["ranks"], "{:.0f}"),
            "here": quantity(here, "Gbps") if here else NOTHING,
            "here / claimed": ratio,
            "wrong": _or_nothing(row["wrong_elements"], "{:,.0f}"),
            "source": row["source"],
        })  # fmt: skip
    return indexed(entries, "operation", "No results of nccl-tests were named (parameter nccl_tests).")


def _order(operations: pd.Series) -> list[str]:
    ordered = [name for name in (*TOGETHER, *ROOTED, "barrier") if name in set(operations)]
    return ordered + sorted(set(operations) - set(ordered))


def _listed(values: pd.Series) -> str:
    return ", ".join(dict.fromkeys(value for value in values.astype(str) if value)) or NOTHING


def _or_nothing(value: float, form: str) -> str:
    return _or(value, form.format, NOTHING)


def _or(value: float, write: Callable[[float], str], missing: str) -> str:
    return missing if math.isnan(value) else write(value)


# What a report shows in place of the raw tables, under these headings; all rows are in result.json.
TABLES: dict[str, Callable[[Records], pd.DataFrame]] = {
    "Wrong results": wrong_table,
    "Verified": verified,
    "Bus bandwidth by size": bandwidth,
    "Median time by size": times,
    "Spread of the times, and both bandwidths": spread,
    "Shares of the limits": shares_table,
    "Start-up time and bandwidth": fits,
    "The same gradients over each library": gradients,
    "Unsupported": unsupported,
    "Results of nccl-tests beside it": others,
}


def report(run: Records) -> dict[str, list[dict[str, Any]]]:
    """Return the views that have something to show, as rows of texts."""
    return frames.report(run, TABLES)
