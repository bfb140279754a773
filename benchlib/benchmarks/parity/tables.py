"""Tables of parity for notebooks and reports, and the series behind its pictures: what a run recorded, as small frames.

All functions read only what is there: a missing or damaged table gives an empty frame with its columns, a value that is not
a number NaN, never an error. Differences are absolute, of logits, unless a column says otherwise.
"""

import math
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pandas as pd

from benchlib.benchmarks.parity import matrix
from benchlib.benchmarks.parity import tolerances as table_of_limits
from benchlib.benchmarks.parity.config import ParityConfig, chosen
from benchlib.benchmarks.parity.matrix import SIGNS
from benchlib.core.errors import UserError
from benchlib.core.text import text
from benchlib.results import frames
from benchlib.results.frames import Records, indexed, row_dicts
from benchlib.results.run import Run

COLUMNS: dict[str, dict[str, Any]] = {
    "members": {"member": "", "precision": ""},
    "quantities": {"member": "", "quantity": "", "value": 0.0, "limit": 0.0, "limit_text": "", "unit": "", "status": "", "gates": False,
                   "worst": "", "why": "", "reason": ""},
    "logits": {"member": "", "case": "", "kind": "", "max_abs": 0.0, "max_relative": 0.0, "max_ulp": 0.0, "one_minus_cosine": 0.0},
    "histogram": {"member": "", "low": 0.0, "high": 0.0, "count": 0.0},
    "layers": {"member": "", "index": 0.0, "layer": "", "relative_l2": 0.0, "limit": 0.0, "beyond": False},
    "gradients": {"member": "", "parameter": "", "relative_l2": 0.0, "limit": 0.0, "beyond": False},
    "curves": {"member": "", "step": 0.0, "loss": 0.0, "reference_loss": 0.0, "truth_loss": 0.0},
    "latency": {"member": "", "batch": 0.0, "length": 0.0, "n": 0.0, "mean_ms": 0.0, "p50_ms": 0.0, "p95_ms": 0.0, "p99_ms": 0.0,
                "qps": 0.0},
    "truth": {"member": "", "max_abs": 0.0, "reference_max_abs": 0.0, "verdict": ""},
    "attention": {"kernel": "", "dtype": "", "length": 0.0, "scale": 0.0, "status": "", "reason": "", "max_abs_truth": 0.0,
                  "one_minus_cosine_truth": 0.0, "max_abs_math": 0.0, "gradient_max_abs_math": 0.0, "masked_row": ""},
}  # fmt: skip
REFERENCE, TRUTH = "reference", "truth"  # recordings beside the members' own
NOT_FINITE = "not finite"
NOTHING = "–"
NO_BREAK_SPACE, JOINER = "\u00a0", "\u2060"


def table(run: Records, name: str) -> pd.DataFrame:
    """Return a table of ``COLUMNS`` with its columns; rows that name no member (or kernel) are left out.

    Another benchmark may have a table of the same name: it then gives none.
    """
    frame = frames.typed(run, name, COLUMNS[name])
    return frame[frame["kernel" if name == "attention" else "member"] != ""].reset_index(drop=True)


def members(run: Records) -> list[str]:
    """Return the candidates in the order of the table ``members``, without reference and truth."""
    return [name for name in dict.fromkeys(table(run, "members")["member"]) if name not in (REFERENCE, TRUTH)]


def ordered(run: Records, names: Iterable[str]) -> list[str]:
    """Return the names in the order of :func:`members`; those that it does not know come last."""
    wanted = dict.fromkeys(names)
    own = [name for name in members(run) if name in wanted]
    return own + [name for name in wanted if name not in own and name not in (REFERENCE, TRUTH)]


def facts(run: Records) -> Mapping[str, Any]:
    """Return the facts of the result; empty where there is none."""
    result = frames.readable(run, "result")
    return result.facts if result else {}


def scope(run: Records) -> str:
    """Say what stands in for real weights, '' where nothing does: pictures carry it in their titles."""
    model = facts(run).get("model")
    model = model if isinstance(model, dict) else {}
    name, init = (str(model.get(key) or "") for key in ("name", "init"))
    size = "tiny model" if name == "tiny" else ""
    return ", ".join(part for part in (size, "random weights" if init == "random" else "") if part)


def outcomes(run: Records) -> list[matrix.MemberResult]:
    """Return what the run says of each member; nothing where it is damaged or no member took part."""
    try:
        return [row for row in matrix.read_run(run, planted=True).members if row.member != matrix.WHOLE]
    except (UserError, OSError):
        return []


def layers(run: Records) -> dict[str, pd.DataFrame]:
    """Return by member the relative L2 distance of each compared layer in forward order."""
    frame = table(run, "layers").dropna(subset=["index"])
    frames = {str(name): group.sort_values("index") for name, group in frame.groupby("member", sort=False)}
    return {name: frames[name] for name in ordered(run, frames)}


def first_beyond(run: Records) -> dict[str, dict[str, Any]]:
    """Return by member the first layer, in forward order, that is beyond its limit; members without one are left out."""
    rows = {name: row_dicts(frame[frame["beyond"]]) for name, frame in layers(run).items()}
    return {name: beyond[0] for name, beyond in rows.items() if beyond}


def latencies(run: Records) -> pd.DataFrame:
    """Return the rows of ``latency`` with a median, and ``ratio``: the median over the reference's (NaN without one)."""
    frame = table(run, "latency")
    frame = frame[frame["p50_ms"] > 0].drop_duplicates("member", keep="last").reset_index(drop=True)
    frame["is_reference"] = frame["member"] == REFERENCE
    median = frame.loc[frame["is_reference"], "p50_ms"]
    frame["ratio"] = frame["p50_ms"] / float(median.iloc[0]) if len(median) else math.nan
    return frame


def difference(value: float) -> str:
    """Write a difference with two digits: ``3.0e-7``; an exact 0 as 0, and what is no number in words."""
    if not math.isfinite(value):
        return NOT_FINITE
    if value == 0 or 1e-3 <= abs(value) < 1e4:
        return f"{value:.2g}" if abs(value) < 100 else f"{value:,.0f}"
    number, power = f"{value:.1e}".split("e")
    return f"{number}e{int(power)}"


def short(name: str) -> str:
    """Shorten the name of a layer or parameter: ``bert.encoder.layer.3.output.dense.weight`` → ``layer 3 output.dense.weight``."""
    inner = re.search(r"(?:^|\.)(?:layers?|block|h)\.(\d+)(?:\.(.*))?$", name)
    if inner:
        return f"layer {inner[1]} {inner[2]}" if inner[2] else f"layer {inner[1]}"
    head, _, rest = name.partition(".")
    return rest if rest and head not in ("qa_outputs", "classifier") else name


def layer_number(name: str) -> int | None:
    """Return the number of the encoder layer that a module or parameter lies in; None outside of them."""
    match = re.search(r"(?:^|\.)(?:layers?|block|h)\.(\d+)(?:\.|$)", name)
    return int(match[1]) if match else None


def _flat(value: Any, begin: str = "") -> dict[str, str]:
    if not isinstance(value, Mapping):
        return {begin: text(value)} if begin else {}
    texts: dict[str, str] = {}
    for name, item in value.items():
        texts |= _flat(item, f"{begin}.{name}" if begin else str(name))
    return texts


def tolerances(run: Run) -> pd.DataFrame:
    """Return the limits that the members of this run will be judged by, known before it, and where each comes from."""
    config = run.config
    assert isinstance(config, ParityConfig)
    rows: list[dict[str, str]] = []
    for quantity in table_of_limits.QUANTITIES:
        judged: dict[table_of_limits.Tolerance, list[str]] = {}
        for member in chosen(config):
            limit = table_of_limits.between(config.reference, config.backend, member.precision, quantity)
            judged.setdefault(limit, []).append(member.precision)
        for limit, precisions in judged.items():
            of = ", ".join(dict.fromkeys(precisions))
            rows.append(
                {
                    "quantity": quantity,
                    "precision": of,
                    "limit": _whole(f"{'≥' if limit.at_least else '≤'} {difference(limit.value)}"),
                    "unit": limit.unit,
                    "why": limit.why,
                }
            )
    return indexed(rows, "quantity", "Only the reference is recorded: nothing will be judged.")


def outcomes_table(run: Records) -> pd.DataFrame:
    """Return by member its outcome with the reason, and its difference and 1 - cosine, largest beside their limits."""
    rows = [
        {
            "member": row.member,
            "outcome": matrix.signed(matrix.word(row.outcome, row.gates, row.max_difference is not None)),
            "computes": f"{row.precision}, {row.mode}" + ("" if row.gates else ", informative"),
            "difference": _whole(_or_nothing(row.max_difference)),
            "limit": _whole(_or_nothing(row.limit)),
            "1 - cosine": _or_nothing(row.one_minus_cosine),
            "accuracy": row.truth or NOTHING,
            "reason": _brief(row.reason, 200),
        }
        for row in outcomes(run)
    ]
    return indexed(rows, "member", "Nothing was compared: no member was requested.")


def by_quantity(run: Records) -> pd.DataFrame:
    """Return the value of every quantity (row) of every member (column), with a sign where it is not within its limit."""
    rows = dict[str, dict[str, Any]]()
    for row in row_dicts(table(run, "quantities")):
        word = _word(row)
        sign = f"{SIGNS[word]} " if word in ("FAIL", "DIFFERS") else ""
        rows.setdefault(row["quantity"], {"quantity": row["quantity"]})[row["member"]] = _whole(sign + _value_text(row))
    return indexed(list(rows.values()), "quantity", "No quantity was compared.").fillna(NOTHING)


def limits(run: Records) -> pd.DataFrame:
    """Return each limit that judged something, once, with the members it holds for and where it comes from."""
    frame = table(run, "quantities").dropna(subset=["limit"])
    everyone, rows = set(frame["member"]), []
    for (quantity, _, why), part in frame.groupby(["quantity", "limit", "why"], sort=False):
        rows.append({
            "quantity": str(quantity), "limit": _limit(row_dicts(part)[0]), "unit": part["unit"].iloc[0],
            "members": "all" if set(part["member"]) == everyone else ", ".join(dict.fromkeys(part["member"])), "why": str(why) or NOTHING,
        })  # fmt: skip
    return indexed(rows, "quantity", "Nothing was judged by a limit.")


def beyond(run: Records) -> pd.DataFrame:
    """Return what is beyond its limit or was not compared, with the reason: quantities, and whole members (``all``)."""
    rows: list[dict[str, str]] = []

    def add(member: str, quantity: str, word: str, reason: str, *numbers: str) -> None:
        value, limit, place = numbers or (NOTHING,) * 3
        status = _whole(matrix.signed(word))
        rows.append({"member": member, "quantity": quantity, "status": status, "value": value, "limit": limit,
                     "worst at": place, "reason": reason or NOTHING})  # fmt: skip

    for whole in outcomes(run):
        if whole.outcome in ("SKIPPED", "NOT COMPARED") or not whole.quantities:
            add(whole.member, "all", whole.outcome, whole.reason)
    frame = table(run, "quantities")
    for row in row_dicts(frame[frame["status"] == "FAIL"]):
        numbers = _whole(_value_text(row)), _limit(row), short(row["worst"]) or NOTHING
        add(row["member"], row["quantity"], _word(row), row["reason"], *numbers)
    for (member, reason), part in frame[frame["status"] == "SKIPPED"].groupby(["member", "reason"], sort=False):
        add(str(member), ", ".join(part["quantity"]), "SKIPPED", str(reason))
    return indexed(rows, "member", "Every quantity was compared and is within its limit.")


def worst(run: Records) -> pd.DataFrame:
    """Return of each member its edge case and its other case with the largest difference, the largest of all first."""
    frame = table(run, "logits").dropna(subset=["max_abs"]).sort_values("max_abs", ascending=False, kind="stable")
    frame = frame[~frame.assign(edge=frame["kind"] == "edge").duplicated(["member", "edge"])]
    rows = [
        {
            "member": row["member"],
            "case": row["case"],
            "difference": _or_nothing(row["max_abs"]),
            "relative": _or_nothing(row["max_relative"]),
            "ULP": f"{row['max_ulp']:,.0f}" if math.isfinite(row["max_ulp"]) else NOTHING,
            "1 - cosine": _or_nothing(row["one_minus_cosine"]),
        }
        for row in row_dicts(frame)
    ]
    return indexed(rows, "member", "No logits were compared.")


def truth(run: Records) -> pd.DataFrame:
    """Return of each member how far it and the reference are from the fp64 truth, and which of the two is nearer."""
    rows = [
        {
            "member": row["member"],
            "from truth": _or_nothing(row["max_abs"]),
            "reference": _or_nothing(row["reference_max_abs"]),
            "verdict": row["verdict"] or NOTHING,
        }
        for row in row_dicts(table(run, "truth"))
    ]
    return indexed(rows, "member", "Nothing was compared with an fp64 truth.")


def latency(run: Records) -> pd.DataFrame:
    """Return the times of a forward pass by member, with the ratio of the medians to the reference's."""
    rows = [
        {
            "member": row["member"],
            "rows × tokens": f"{row['batch']:.0f} × {row['length']:.0f}",
            "n": f"{row['n']:.0f}",
            "mean (ms)": _time(row["mean_ms"]),
            "median (ms)": _time(row["p50_ms"]),
            "95% (ms)": _time(row["p95_ms"]),
            "99% (ms)": _time(row["p99_ms"]),
            "queries/s": _time(row["qps"]),
            "median / reference": f"{row['ratio']:.2f}" if row["ratio"] > 0 else NOTHING,
        }
        for row in row_dicts(latencies(run).fillna({"batch": 0, "length": 0, "n": 0}))
    ]
    return indexed(rows, "member", "No member was timed.")


def attention(run: Records) -> pd.DataFrame:
    """Return of each attention kernel, type and scale of the inputs its worst errors over lengths and masks.

    What ran in no case has one row with its reason; cases are those that were measured of those asked for.
    """
    frame, last = table(run, "attention"), "fully masked row, or reason for not running"
    rows, nowhere = [], dict[tuple[str, str], list[str]]()
    for (kernel, dtype, scale), part in frame.groupby(["kernel", "dtype", "scale"], sort=False, dropna=False):
        ran = part[part["max_abs_truth"].notna()]
        if ran.empty:
            reason = next((word for word in part["reason"] if word), NOTHING)
            nowhere.setdefault((str(kernel), reason), []).append(str(dtype))
            continue
        rows.append({
            "kernel": str(kernel), "type": str(dtype), "q, k ×": f"{scale:g}", "cases": f"{len(ran)} of {len(part)}",
            "from fp64": _most(ran["max_abs_truth"]), "1 - cosine": _most(ran["one_minus_cosine_truth"]),
            "from math": _most(ran["max_abs_math"]), "gradient from math": _most(ran["gradient_max_abs_math"]),
            last: "; ".join(dict.fromkeys(word for word in ran["masked_row"] if word)) or NOTHING,
        })  # fmt: skip
    for (kernel, reason), types in nowhere.items():
        rows.append({"kernel": kernel, "type": ", ".join(dict.fromkeys(types)), "cases": "none", last: reason})
    return indexed(rows, "kernel", "No attention kernels were compared.").fillna(NOTHING)


def executors_table(run: Records) -> pd.DataFrame:
    """Return what really ran for each member, as it said itself; its switches are in the result's facts."""
    described = facts(run).get("executors")
    described = described if isinstance(described, dict) else {}
    rows = [
        {"member": name} | {key: fact for key, fact in _flat(described[name]).items() if "." not in key}
        for name in ordered(run, described)
    ]
    return indexed(rows, "member", "No member described its configuration.").fillna("")


def environments(run: Records) -> pd.DataFrame:
    """Return the environments of reference and candidates side by side, what differs first; nested parts with dots."""
    reference = facts(run).get("reference")
    entry = _flat(reference.get("environment") if isinstance(reference, dict) else None)
    other = _flat(facts(run).get("environment"))
    rows = [
        {
            "fact": name.replace("_", " "),
            "reference": entry.get(name) or NOTHING,
            "members": other.get(name) or NOTHING,
            "": "" if entry.get(name, "") == other.get(name, "") else "differs",
        }
        for name in dict.fromkeys([*entry, *other])
    ]
    return indexed(sorted(rows, key=lambda row: row[""] == ""), "fact", "No environment was recorded.")


def matrix_table(run: Records) -> pd.DataFrame:
    """Return the outcomes of the store's other runs, on all machines and backends, with age and versions."""
    frame = matrix.around(run)
    left_out = frame.attrs.get("left_out", [])
    rows = [
        {
            "member": row["member"],
            "machine": row["machine"],
            "backend": row["backend"],
            "outcome": matrix.signed(row["word"]),
            "difference": _whole(_or_nothing(row["max_difference"])),
            "limit": _whole(_or_nothing(row["limit"])),
            "model": row["model"],
            "age (days)": f"{row['age_days']:.1f}",
            "versions": row["versions"] or NOTHING,
            "reason": _brief(row["reason"], 80),
        }
        for row in row_dicts(frame[~frame["own"]])
    ]
    rows += [{"member": "left out", "reason": text} for text in left_out]
    return indexed(rows, "member", "This store holds no other parity results.").fillna("")


def _word(row: dict[str, Any]) -> str:
    return matrix.word(row["status"], row["gates"], not math.isnan(row["value"]))


def _value_text(row: dict[str, Any]) -> str:
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


def _or_nothing(value: float | None) -> str:
    return NOTHING if value is None or math.isnan(value) else difference(value)


def _most(values: pd.Series) -> str:
    return _or_nothing(float(values.max()))


def _time(value: float) -> str:
    return NOTHING if math.isnan(value) else f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


# What a report shows in place of the raw tables, under these headings; all rows are in result.json.
TABLES: dict[str, Callable[[Records], pd.DataFrame]] = {
    "Outcomes": outcomes_table,
    "Outcomes by quantity": by_quantity,
    "Beyond limits, or not compared": beyond,
    "Worst cases of each member": worst,
    "Distance to double precision": truth,
    "Latency": latency,
    "Attention kernels": attention,
    "Limits and their sources": limits,
    "Executed configuration": executors_table,
    "Environments of reference and members": environments,
    "Other runs and machines": matrix_table,
}
MORE = {"Tolerances": tolerances}  # of the notebook alone
