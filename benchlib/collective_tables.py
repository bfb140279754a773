"""Tables of collectives for notebooks and reports: what was verified, bandwidth and time by size, shares, fits, what is missing."""

import math
from collections.abc import Callable
from typing import Any

import pandas as pd

from benchlib import collective_series as series
from benchlib.collective_series import ROOTED, TOGETHER, share_text, words
from benchlib.collectives.sizes import size_text
from benchlib.curves import Records
from benchlib.labels import seconds
from benchlib.metrics import quantity

MOST_SIZES = 7
NOTHING, NOT_TOLD = "–", "not told"
BANDWIDTH, TIME = "Gbps (bus)", "median time"


def verified(run: Records) -> pd.DataFrame:
    """Return by operation what was timed and compared, and how many elements were wrong."""
    frame = series.table(run, "series")
    found = []
    for operation in _order(frame["operation"]):
        part = frame[frame["operation"] == operation]
        sizes = part.loc[part["bytes"] > 0, "bytes"]
        found.append({
            "operation": words(operation),
            "types": _listed(part["dtype"]),
            "reductions": _listed(part["reduction"]),
            "variants": _listed(part["variant"]),
            "sizes": f"{size_text(sizes.min())} to {size_text(sizes.max())}" if len(sizes) else NOTHING,
            "series": len(part),
            "elements compared": f"{part['checked_elements'].sum():,.0f}",
            "wrong": f"{part['wrong_elements'].sum():,.0f}",
        })  # fmt: skip
    return _indexed(found, "operation", "No collective was timed.")


def wrong(run: Records) -> pd.DataFrame:
    """Return the cases with wrong elements, and the first of them with its rank."""
    found = [
        {
            "case": row["case"],
            "wrong": f"{row['wrong_elements']:,.0f}",
            "compared": f"{row['checked_elements']:,.0f}",
            "first": row["first"],
        }
        for row in series.rows(series.table(run, "wrong"))
    ]
    return _indexed(found, "case", "No element was wrong.")


def bandwidth(run: Records) -> pd.DataFrame:
    """Return the bus bandwidth in Gbps by operation and variant (rows) and size (columns); the limits come last."""
    found = _by_size(run, BANDWIDTH, "busbw_gbps", quantity)
    sizes = [column for column in found[0] if column != BANDWIDTH] if found else []
    for name, frame in series.bounds(run).items():
        if name != "claimed link":
            at = {size_text(row["bytes"]): quantity(row["gbps"]) for row in series.rows(frame) if row["bytes"] > 0}
        else:
            at = dict.fromkeys(sizes, quantity(float(frame["gbps"].max())))
        if found:
            found.append({BANDWIDTH: name.replace("tcp", "TCP")} | {size: at.get(size, NOTHING) for size in sizes})
    return _indexed(found, BANDWIDTH, "No bandwidth between ranks was measured.")


def times(run: Records) -> pd.DataFrame:
    """Return the median time of the slowest rank by operation and variant (rows) and size (columns)."""
    found = _by_size(run, TIME, "median_us", lambda value: seconds(1e-6 * value))
    return _indexed(found, TIME, "No time was recorded.")


def spread(run: Records) -> pd.DataFrame:
    """Return how the times of each operation are spread, and both its bandwidths: at the smallest, a middle and the largest size."""
    found = []
    for _, group in series.main(run).groupby(["operation", "variant"], sort=False):
        items = series.rows(group.dropna(subset=["median_us"]))
        found += [items[at] for at in sorted({0, len(items) // 2, len(items) - 1}) if items]
    order = _order(pd.Series([item["operation"] for item in found], dtype=str))
    found.sort(key=lambda item: (order.index(item["operation"]), item["variant"] != "library", item["variant"]))
    return _indexed([_spread_row(item) for item in found], "operation", "No time was recorded.")


def _spread_row(item: dict[str, Any]) -> dict[str, str]:
    def micros(name: str) -> str:
        return _or(item[name], lambda value: seconds(1e-6 * value), NOTHING)

    ends = [micros("ci_low_us"), micros("ci_high_us")]
    return {
        "operation": words(item["operation"], item["variant"]),
        "size": size_text(item["bytes"]) if item["bytes"] > 0 else NOTHING,
        "rounds": _or_nothing(item["rounds"], "{:.0f}"),
        "median": micros("median_us"),
        "95 % interval": NOTHING if NOTHING in ends else " to ".join(ends),
        "p95": micros("p95_us"),
        "p99": micros("p99_us"),
        "algbw": _or(item["algbw_gbps"], lambda value: quantity(value, "Gbps"), NOTHING),
        "busbw": _or(item["busbw_gbps"], lambda value: quantity(value, "Gbps"), NOTHING),
    }


def _by_size(run: Records, head: str, column: str, write: Any) -> list[dict[str, str]]:
    lines = series.lines(run, column)
    sizes = sorted({float(size) for frame in lines.values() for size in frame["bytes"]})
    step = max(1, -(-len(sizes) // MOST_SIZES))
    kept = sizes[::-1][::step][::-1]
    order = _order(pd.Series([key[0] for key in lines], dtype=str))
    found = []
    for operation, variant in sorted(lines, key=lambda key: (order.index(key[0]), key[1] != "library", key[1])):
        at = {row["bytes"]: write(row["value"]) for row in series.rows(lines[operation, variant])}
        if set(at) & set(kept):
            found.append({head: words(operation, variant)} | {size_text(size): at.get(size, NOTHING) for size in kept})
    return found


def shares(run: Records) -> pd.DataFrame:
    """Return the share of each limit, with its target where there is one."""
    found = [
        {
            "operation": words(row["operation"], row["variant"]),
            "size": size_text(row["bytes"]),
            "bus bandwidth": quantity(row["busbw_gbps"], "Gbps"),
            "limit": row["bound"].replace("tcp", "TCP"),
            "of the limit": quantity(row["bound_gbps"], "Gbps"),
            "share": share_text(row["share"]),
            "target": _or_nothing(row["target"], "{:.2f}"),
        }
        for row in series.rows(series.shares(run))
    ]
    return _indexed(found, "operation", "No operation was measured beside a limit.")


def fits(run: Records) -> pd.DataFrame:
    """Return start-up time and bandwidth of each operation, and what the line t = α + S·factor/B leaves.

    Neither is told of times that are on no line.
    """
    frame = series.table(run, "fits").dropna(subset=["residual"])  # of too few sizes there is no line at all
    frame = frame[frame["variant"] != "async"]  # measured at both ends of the range only
    found = [
        {
            "operation": words(row["operation"], row["variant"]),
            "α": _or(row["alpha_us"], lambda value: seconds(1e-6 * value), NOT_TOLD),
            "B (bus)": _or(row["bandwidth_gbps"], lambda value: quantity(value, "Gbps"), NOT_TOLD),
            "residual (rms)": _or_nothing(100 * row["residual"], "{:.1f} %"),
            "sizes": f"{row['points']:.0f}, {size_text(row['from_bytes'])} to {size_text(row['to_bytes'])}",
        }
        for row in series.rows(frame)
    ]
    return _indexed(found, "operation", "No start-up time and bandwidth were fitted.")


def gradients(run: Records) -> pd.DataFrame:
    """Return how far the gradients of one training step over each collective library are from the single process."""
    found = [
        {
            "library": row["collective"],
            "largest difference": _or_nothing(row["max_difference"], "{:.2g}"),
            "tolerance": _or_nothing(row["tolerance"], "{:.2g}"),
            "status": row["status"],
            "reason": row["reason"],
        }
        for row in series.rows(series.table(run, "gradients"))
    ]
    return _indexed(found, "library", "No gradients were compared.")


def unsupported(run: Records) -> pd.DataFrame:
    """Return what the collective library does not have, with its own words."""
    frame = series.table(run, "unsupported")
    found = []
    for (operation, reason), part in frame.groupby(["operation", "reason"], sort=False):
        found.append({
            "operation": words(str(operation)),
            "types": _listed(part["dtype"]),
            "reductions": _listed(part["reduction"]),
            "reason": str(reason),
        })  # fmt: skip
    return _indexed(found, "operation", "The library has everything that was asked for.")


def others(run: Records) -> pd.DataFrame:
    """Return what the file of nccl-tests states beside this run's own bus bandwidth at the same size."""
    frame = series.table(run, "nccl_tests")
    own = {
        (operation, row["bytes"]): row["value"]
        for (operation, variant), line in series.lines(run, "busbw_gbps").items()
        if variant == "library"
        for row in series.rows(line)
    }
    found = []
    for row in series.rows(frame[frame["busbw_gbps"].notna()]):
        here = own.get((row["operation"], row["bytes"]))
        ratio = quantity(here / row["busbw_gbps"]) if here and row["busbw_gbps"] > 0 else NOTHING
        found.append({
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
    return _indexed(found, "operation", "No results of nccl-tests were named (parameter nccl_tests).")


def _order(operations: pd.Series) -> list[str]:
    known = [name for name in (*TOGETHER, *ROOTED, "barrier") if name in set(operations)]
    return known + sorted(set(operations) - set(known))


def _listed(values: pd.Series) -> str:
    return ", ".join(dict.fromkeys(value for value in values.astype(str) if value)) or NOTHING


def _or_nothing(value: float, form: str) -> str:
    return _or(value, form.format, NOTHING)


def _or(value: float, write: Callable[[float], str], missing: str) -> str:
    return missing if math.isnan(value) else write(value)


def _indexed(found: list[dict[str, Any]], index: str, missing: str) -> pd.DataFrame:
    """Return the rows, or one row that says what is missing."""
    return pd.DataFrame(found).set_index(index) if found else pd.DataFrame({"": [missing]}).set_index("")


# What a report shows in place of the raw tables, under these headings; all rows are in result.json.
VIEWS: dict[str, Callable[[Records], pd.DataFrame]] = {
    "Wrong results": wrong,
    "Verified": verified,
    "Bus bandwidth by size": bandwidth,
    "Median time by size": times,
    "Spread of the times, and both bandwidths": spread,
    "Shares of the limits": shares,
    "Start-up time and bandwidth": fits,
    "The same gradients over each library": gradients,
    "What the library lacks": unsupported,
    "Results of nccl-tests beside it": others,
}


def report(run: Records) -> dict[str, list[dict[str, Any]]]:
    """Return the views that have something to show, as rows of texts."""
    frames = {heading: view(run) for heading, view in VIEWS.items()}
    return {heading: series.rows(frame.reset_index()) for heading, frame in frames.items() if len(frame.columns)}
