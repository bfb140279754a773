"""Tables of parity for notebooks and reports: outcomes, quantities with their limits, worst cases, what was skipped and why."""

import math
import re
import textwrap
from collections.abc import Callable
from typing import Any

import pandas as pd

from benchlib import parity_series as series
from benchlib.curves import Records
from benchlib.parity import tolerances as table_of_limits
from benchlib.parity.config import ParityConfig
from benchlib.parity.members import chosen
from benchlib.parity_series import NOT_FINITE, SIGNS, difference, short
from benchlib.results import Run

NOTHING = "–"
NO_BREAK_SPACE, JOINER = "\u00a0", "\u2060"
WORST = 12  # rows of the worst cases


def tolerances(run: Run) -> pd.DataFrame:
    """Return the limits that the members of this run will be judged by, known before it, and where each comes from."""
    config = run.config
    assert isinstance(config, ParityConfig)
    found: list[dict[str, str]] = []
    for quantity in table_of_limits.QUANTITIES:
        judged: dict[table_of_limits.Tolerance, list[str]] = {}
        for member in chosen(config):
            limit = table_of_limits.between(config.reference, config.backend, member.precision, quantity)
            judged.setdefault(limit, []).append(member.precision)
        for limit, precisions in judged.items():
            of = ", ".join(dict.fromkeys(precisions))
            found.append(
                {
                    "quantity": quantity,
                    "precision": of,
                    "limit": _whole(f"{'≥' if limit.at_least else '≤'} {difference(limit.value)}"),
                    "unit": limit.unit,
                    "why": limit.why,
                }
            )
    return _indexed(found, "quantity", "Only the reference is recorded: nothing will be judged.")


def outcomes(run: Records) -> pd.DataFrame:
    """Return by member its outcome with the reason, and its difference and 1 - cosine, largest beside their limits."""
    verdicts = {row["member"]: row["verdict"] for row in series.rows(series.table(run, "truth"))}
    found = [
        {
            "member": row["member"],
            "outcome": f"{SIGNS.get(row['word'], '?')} {row['word']}",
            "computes": f"{row['precision']}, {row['mode']}" + ("" if row["gates"] else ", informative"),
            "difference": _whole(_or_nothing(row["max_abs"])),
            "limit": _whole(_or_nothing(row["limit"])),
            "1 - cosine": _or_nothing(row["one_minus_cosine"]),
            "to the truth": verdicts.get(row["member"]) or NOTHING,
            "reason": _brief(row["reason"], 200),
        }
        for row in series.rows(series.outcomes(run))
    ]
    return _indexed(found, "member", "No member was asked for: nothing was compared.")


def quantities(run: Records) -> pd.DataFrame:
    """Return every compared quantity with its limit, why the limit is what it is, and where the value is from."""
    found = [
        {
            "member": row["member"],
            "quantity": row["quantity"],
            "status": f"{SIGNS.get(word := _word(row), '?')} {word}",
            "value": _value(row),
            "limit": _limit(row),
            "unit": row["unit"],
            "worst at": short(row["worst"]) or NOTHING,
            "reason": row["reason"],
        }
        for row in series.rows(series.table(run, "quantities"))
    ]
    return _indexed(found, "member", "No quantity was compared.")


def by_quantity(run: Records) -> pd.DataFrame:
    """Return the value of every quantity (row) of every member (column), with a sign where it is not within its limit."""
    frame, found = series.table(run, "quantities"), dict[str, dict[str, Any]]()
    for row in series.rows(frame):
        word = _word(row)
        sign = f"{SIGNS[word]} " if word in ("FAIL", "DIFFERS") else ""
        found.setdefault(row["quantity"], {"quantity": row["quantity"], "unit": row["unit"]})[row["member"]] = (
            sign + _value(row)
        )
    return _indexed(list(found.values()), "quantity", "No quantity was compared.").fillna(NOTHING)


def limits(run: Records) -> pd.DataFrame:
    """Return each limit that judged something, once, with the members it holds for and where it comes from."""
    frame = series.table(run, "quantities").dropna(subset=["limit"])
    everyone, found = list(dict.fromkeys(frame["member"])), []
    for (quantity, _, why), part in frame.groupby(["quantity", "limit", "why"], sort=False):
        found.append({
            "quantity": str(quantity), "limit": _limit(series.rows(part)[0]), "unit": part["unit"].iloc[0],
            "members": _who(list(dict.fromkeys(part["member"])), everyone), "why": str(why) or NOTHING,
        })  # fmt: skip
    return _indexed(found, "quantity", "Nothing was judged by a limit.")


def _who(names: list[str], everyone: list[str]) -> str:
    missing = [name for name in everyone if name not in names]
    if not missing or len(missing) > len(names):
        return ", ".join(names) if missing else "all"
    return f"all but {', '.join(missing)}" if len(missing) < 4 else ", ".join(names)


def beyond(run: Records) -> pd.DataFrame:
    """Return the quantities beyond their limits."""
    frame = quantities(run)
    return frame[frame["status"].str.contains("FAIL|DIFFERS")] if "status" in frame else frame


def worst(run: Records) -> pd.DataFrame:
    """Return of each member its case with the largest difference, the largest of all first.

    ``from truth`` is its distance to the fp64 truth, ``reference`` the reference's own.
    """
    frame = (
        series.table(run, "logits").dropna(subset=["max_abs"]).sort_values("max_abs", ascending=False, kind="stable")
    )
    return _cases(frame.drop_duplicates("member").head(WORST), "No logits were compared.")


def edges(run: Records) -> pd.DataFrame:
    """Return the edge cases of every member: nearly all padding, the longest position, a row without any token."""
    frame = series.table(run, "logits")
    return _cases(frame[frame["kind"] == "edge"], "No edge case was compared.")


def _cases(frame: pd.DataFrame, missing: str) -> pd.DataFrame:
    found = [
        {
            "member": row["member"],
            "case": row["case"],
            "difference": _or_nothing(row["max_abs"]),
            "relative": _or_nothing(row["max_relative"]),
            "ULP": f"{row['max_ulp']:,.0f}" if math.isfinite(row["max_ulp"]) else NOTHING,
            "1 - cosine": _or_nothing(row["one_minus_cosine"]),
            "from truth": _or_nothing(row["truth_max_abs"]),
            "reference": _or_nothing(row["reference_truth_max_abs"]),
        }
        for row in series.rows(frame)
    ]  # fmt: skip
    return _indexed(found, "member", missing)


def first_layers(run: Records) -> pd.DataFrame:
    """Return of each member the first layer beyond its tolerance, or that there is none, and the layer that is worst."""
    first = series.first_beyond(run)
    found = []
    for name, frame in series.layers(run).items():
        known = frame.dropna(subset=["relative_l2"])
        top = series.rows(known.sort_values("relative_l2").tail(1)) if len(known) else []
        found.append({
            "member": name, "layers": len(frame), "first beyond": short(first[name]["layer"]) if name in first else "none",
            "there": _or_nothing(first[name]["relative_l2"]) if name in first else NOTHING,
            "limit": _or_nothing(float(frame["limit"].max())), "worst": short(top[0]["layer"]) if top else NOTHING,
            "relative L2": _or_nothing(top[0]["relative_l2"]) if top else NOT_FINITE,
        })  # fmt: skip
    return _indexed(found, "member", "No layer was compared.")


def skipped(run: Records) -> pd.DataFrame:
    """Return what was not compared, each with its reason: whole members, and quantities of members that ran."""
    whole = [
        {"member": row["member"], "what": "all", "reason": row["reason"] or NOTHING}
        for row in series.rows(series.outcomes(run))
        if row["outcome"] in ("SKIPPED", "NOT COMPARED")
    ]
    frame = series.table(run, "quantities")
    frame = frame[frame["status"] == "SKIPPED"]
    parts = [
        {"member": str(member), "what": ", ".join(part["quantity"]), "reason": str(reason) or NOTHING}
        for (member, reason), part in frame.groupby(["member", "reason"], sort=False)
    ]
    return _indexed(whole + parts, "member", "Nothing was skipped.")


def truth(run: Records) -> pd.DataFrame:
    """Return of each member how far it and the reference are from the fp64 truth, and which of the two is nearer."""
    found = [
        {
            "member": row["member"],
            "from truth": _or_nothing(row["max_abs"]),
            "reference": _or_nothing(row["reference_max_abs"]),
            "verdict": row["verdict"] or NOTHING,
        }
        for row in series.rows(series.table(run, "truth"))
    ]
    return _indexed(found, "member", "Nothing was compared with an fp64 truth.")


def latency(run: Records) -> pd.DataFrame:
    """Return the times of a forward pass by member, with the ratio of the medians to the reference's."""
    found = [
        {
            "member": row["member"],
            "rows × tokens": f"{row['batch']:.0f} × {row['length']:.0f}",
            "n": f"{row['n']:.0f}",
            "mean (ms)": _time(row["mean_ms"]),
            "median (ms)": _time(row["p50_ms"]),
            "95 % (ms)": _time(row["p95_ms"]),
            "99 % (ms)": _time(row["p99_ms"]),
            "queries/s": _time(row["qps"]),
            "median / reference": f"{row['ratio']:.2f}" if row["ratio"] > 0 else NOTHING,
        }
        for row in series.rows(series.latencies(run).fillna({"batch": 0, "length": 0, "n": 0}))
    ]
    return _indexed(found, "member", "No member was timed.")


def attention(run: Records) -> pd.DataFrame:
    """Return of each attention kernel, type and scale of the inputs its worst errors over lengths and masks.

    What ran in no case has one row with its reason; cases are those that were measured of those asked for.
    """
    frame, last = series.table(run, "attention"), "fully masked row, or why it did not run"
    found, nowhere = [], dict[tuple[str, str], list[str]]()
    for (kernel, dtype, scale), part in frame.groupby(["kernel", "dtype", "scale"], sort=False, dropna=False):
        ran = part[part["max_abs_truth"].notna()]
        if ran.empty:
            reason = next((word for word in part["reason"] if word), NOTHING)
            nowhere.setdefault((str(kernel), reason), []).append(str(dtype))
            continue
        found.append({
            "kernel": str(kernel), "type": str(dtype), "q, k ×": f"{scale:g}", "cases": f"{len(ran)} of {len(part)}",
            "from fp64": _most(ran["max_abs_truth"]), "1 - cosine": _most(ran["one_minus_cosine_truth"]),
            "from math": _most(ran["max_abs_math"]), "gradient from math": _most(ran["gradient_max_abs_math"]),
            last: "; ".join(dict.fromkeys(word for word in ran["masked_row"] if word)) or NOTHING,
        })  # fmt: skip
    for (kernel, reason), types in nowhere.items():
        found.append({"kernel": kernel, "type": ", ".join(dict.fromkeys(types)), "cases": "none", last: reason})
    return _indexed(found, "kernel", "No attention kernels were compared.").fillna(NOTHING)


def executors(run: Records) -> pd.DataFrame:
    """Return what really ran for each member, as it said itself; its switches are in the result's facts."""
    told = [
        {"member": member} | {key: said for key, said in facts.items() if "." not in key}
        for member, facts in series.executors(run)
    ]
    return _indexed(told, "member", "No member said what ran.").fillna("")


def environments(run: Records) -> pd.DataFrame:
    """Return the environments of reference and candidates side by side, what differs first."""
    rows = sorted(series.sides(run), key=lambda row: row[1] == row[2])
    found = [
        {
            "fact": name.replace("_", " "),
            "reference": one or NOTHING,
            "candidates": other or NOTHING,
            "": "" if one == other else "differs",
        }
        for name, one, other in rows
    ]
    return _indexed(found, "fact", "No environment was recorded.")


def matrix(run: Records) -> pd.DataFrame:
    """Return the outcomes of all machines and backends of the store, with age, versions and the run that they are from."""
    frame = series.matrix(run)
    found = [
        {
            "member": row["member"],
            "machine": row["machine"],
            "backend": row["backend"],
            "outcome": f"{SIGNS.get(row['word'], '?')} {row['word']}",
            "difference": _whole(_or_nothing(row["max_difference"])),
            "limit": _whole(_or_nothing(row["limit"])),
            "model": row["model"],
            "age (days)": f"{row['age_days']:.1f}",
            "versions": row["versions"] or NOTHING,
            "reason": _brief(row["reason"], 80),
        }
        for row in series.rows(frame)
    ]
    found += [{"member": "left out", "reason": text} for text in frame.attrs.get("left_out", [])]
    return _indexed(found, "member", "No result of parity is in this store.").fillna("")


def _word(row: dict[str, Any]) -> str:
    return series.word(row["status"], row["gates"], not math.isnan(row["value"]))


def _value(row: dict[str, Any]) -> str:
    if math.isnan(row["value"]):
        return NOT_FINITE if row["status"] == "FAIL" else NOTHING
    return difference(row["value"])


def _limit(row: dict[str, Any]) -> str:
    if math.isnan(row["limit"]):
        return NOTHING
    return _whole(f"{'≥' if row['limit_text'].startswith('>') else '≤'} {difference(row['limit'])}")


def _whole(words: str) -> str:
    """Return words that a narrow column does not break: a browser would, at the space and after the hyphen."""
    return words.replace(" ", NO_BREAK_SPACE).replace("-", f"-{JOINER}")


def _brief(reason: str, room: int) -> str:
    """Return the beginning of a reason, with the names of layers and parameters shortened."""
    return textwrap.shorten(re.sub(r"\w+(?:\.\w+){3,}", lambda name: short(name[0]), reason), room, placeholder=" …")


def _or_nothing(value: float) -> str:
    return NOTHING if math.isnan(value) else difference(value)


def _most(values: pd.Series) -> str:
    return _or_nothing(float(values.max()))


def _time(value: float) -> str:
    return NOTHING if math.isnan(value) else f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _indexed(found: list[dict[str, Any]], index: str, missing: str) -> pd.DataFrame:
    """Return the rows, or one row that says what is missing."""
    return pd.DataFrame(found).set_index(index) if found else pd.DataFrame({"": [missing]}).set_index("")


# What a report shows in place of the raw tables, under these headings; all rows are in result.json.
VIEWS: dict[str, Callable[[Records], pd.DataFrame]] = {
    "Outcomes": outcomes,
    "Beyond their limits": beyond,
    "Worst case of each member": worst,
    "Edge cases": edges,
    "First layer beyond tolerance": first_layers,
    "Different or worse": truth,
    "Latency": latency,
    "Attention kernels": attention,
    "Not compared": skipped,
    "Limits and where they come from": limits,
    "What really ran": executors,
    "Environments of reference and candidates": environments,
    "All machines and backends": matrix,
}


def report(run: Records) -> dict[str, list[dict[str, Any]]]:
    """Return the views that have something to show, as rows of texts."""
    frames = {heading: view(run) for heading, view in VIEWS.items()}
    return {
        heading: series.rows(frame.reset_index())
        for heading, frame in frames.items()
        if len(frame) and len(frame.columns)
    }
