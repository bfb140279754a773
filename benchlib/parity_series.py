"""The series behind the pictures and tables of parity: what a run recorded, as small frames.

All functions read only what is there: a missing or damaged table gives an empty frame with its columns, a value that
is no number NaN, never an error. Differences are absolute, of logits, unless a column says otherwise.
"""

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd

from benchlib import curves, parity_matrix
from benchlib.curves import Records
from benchlib.labels import text

TABLES: dict[str, dict[str, Any]] = {
    "members": {"member": "", "backend": "", "device": "", "precision": "", "mode": "", "gates": False, "outcome": "", "reason": "",
                "seconds": 0.0, "what": ""},
    "quantities": {"member": "", "quantity": "", "value": 0.0, "limit": 0.0, "limit_text": "", "unit": "", "status": "", "gates": False,
                   "worst": "", "why": "", "reason": ""},
    "logits": {"member": "", "case": "", "kind": "", "batch": 0.0, "length": 0.0, "max_abs": 0.0, "max_relative": 0.0, "max_ulp": 0.0,
               "one_minus_cosine": 0.0, "truth_max_abs": 0.0, "reference_truth_max_abs": 0.0, "limit": 0.0},
    "histogram": {"member": "", "low": 0.0, "high": 0.0, "count": 0.0},
    "layers": {"member": "", "index": 0.0, "layer": "", "kind": "", "depth": 0.0, "max_abs": 0.0, "relative_l2": 0.0,
               "one_minus_cosine": 0.0, "limit": 0.0, "beyond": False},
    "gradients": {"member": "", "parameter": "", "elements": 0.0, "norm": 0.0, "relative_l2": 0.0, "max_abs": 0.0,
                  "one_minus_cosine": 0.0, "limit": 0.0, "beyond": False},
    "curves": {"member": "", "step": 0.0, "loss": 0.0, "reference_loss": 0.0, "truth_loss": 0.0},
    "latency": {"member": "", "batch": 0.0, "length": 0.0, "n": 0.0, "mean_ms": 0.0, "p50_ms": 0.0, "p95_ms": 0.0, "p99_ms": 0.0,
                "qps": 0.0},
    "truth": {"member": "", "max_abs": 0.0, "reference_max_abs": 0.0, "verdict": ""},
    "attention": {"device": "", "kernel": "", "dtype": "", "length": 0.0, "mask": "", "scale": 0.0, "status": "", "reason": "",
                  "max_abs_truth": 0.0, "one_minus_cosine_truth": 0.0, "max_abs_math": 0.0, "one_minus_cosine_math": 0.0,
                  "gradient_max_abs_math": 0.0, "masked_row": "", "median_us": 0.0},
}  # fmt: skip
REFERENCE, TRUTH = "reference", "truth"  # recordings beside the members' own
NOT_FINITE = "not finite"
SIGNS = {"PASS": "✓", "FAIL": "✗", "DIFFERS": "≈", "SKIPPED": "–", "NOT COMPARED": "○"}


def table(run: Records, name: str) -> pd.DataFrame:
    """Return a table of ``TABLES`` with its columns; rows that name no member (or kernel) are left out.

    Another benchmark may have a table of the same name: it then gives none.
    """
    frame = curves.typed(run, name, TABLES[name])
    return frame[frame["kernel" if name == "attention" else "member"] != ""].reset_index(drop=True)


def rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the rows of a frame as plain values by column."""
    return [{str(name): value for name, value in row.items()} for row in frame.to_dict("records")]


def members(run: Records) -> list[str]:
    """Return the candidates in the order of the table ``members``, without reference and truth."""
    return [name for name in dict.fromkeys(table(run, "members")["member"]) if name not in (REFERENCE, TRUTH)]


def ordered(run: Records, names: Iterable[str]) -> list[str]:
    """Return the names in the order of :func:`members`; those that it does not know come last."""
    wanted = dict.fromkeys(names)
    known = [name for name in members(run) if name in wanted]
    return known + [name for name in wanted if name not in known and name not in (REFERENCE, TRUTH)]


def facts(run: Records) -> Mapping[str, Any]:
    """Return the facts of the result; empty where there is none."""
    result = curves.readable(run, "result")
    return result.facts if result else {}


def scope(run: Records) -> str:
    """Say what stands in for real weights, '' where nothing does: pictures carry it in their titles."""
    model = facts(run).get("model")
    model = model if isinstance(model, dict) else {}
    name, init = (str(model.get(key) or "") for key in ("name", "init"))
    size = "tiny model" if name == "tiny" else ""
    return ", ".join(part for part in (size, "random weights" if init == "random" else "") if part)


def word(outcome: str, gates: bool, compared: bool) -> str:
    """Return the outcome of a member as readers meet it: beyond tolerance where nothing gates is a difference, no failure."""
    return "DIFFERS" if outcome == "FAIL" and not gates and compared else outcome


def outcomes(run: Records) -> pd.DataFrame:
    """Return one row a member: the columns of ``members``, its word, and its largest difference and cosine with their limits.

    A difference that is not finite is infinite here; one that was not computed is NaN.
    """
    frame, values = table(run, "members"), table(run, "quantities")
    frame = frame[frame["member"].isin(members(run))].drop_duplicates("member", keep="last").reset_index(drop=True)
    for column, quantity in (("max_abs", "logits max difference"), ("one_minus_cosine", "logits cosine")):
        found = {row["member"]: row for row in rows(values[values["quantity"] == quantity])}
        frame[column] = [_value(found.get(name)) for name in frame["member"]]
        ends = {name: row["limit"] for name, row in found.items()}
        frame[f"{column}_limit".replace("max_abs_", "")] = [ends.get(name, math.nan) for name in frame["member"]]
    compared = frame["max_abs"].notna()
    frame["word"] = [word(*row) for row in zip(frame["outcome"], frame["gates"], compared, strict=True)]
    return frame


def _value(row: Mapping[str, Any] | None) -> float:
    """Return the value of a quantity; JSON has no infinity, so one that failed without a value was not finite."""
    if row is None:
        return math.nan
    return math.inf if math.isnan(row["value"]) and row["status"] == "FAIL" else float(row["value"])


def matrix(run: Records, grid: pd.DataFrame | None = None) -> pd.DataFrame:
    """Return the rows of :mod:`benchlib.parity_matrix` with their ``word``: of ``grid``, else of the run and its neighbours."""
    frame = parity_matrix.around(run) if grid is None else grid
    compared = frame["max_difference"].notna()
    words = [word(*row) for row in zip(frame["outcome"], frame["gates"], compared, strict=True)]
    return frame.assign(word=words)


def layers(run: Records) -> dict[str, pd.DataFrame]:
    """Return by member the relative L2 distance of each compared layer in forward order."""
    frame = table(run, "layers").dropna(subset=["index"])
    found = {str(name): group.sort_values("index") for name, group in frame.groupby("member", sort=False)}
    return {name: found[name] for name in ordered(run, found)}


def first_beyond(run: Records) -> dict[str, dict[str, Any]]:
    """Return by member the first layer, in forward order, that is beyond its limit; members without one are left out."""
    found = {name: rows(frame[frame["beyond"]]) for name, frame in layers(run).items()}
    return {name: beyond[0] for name, beyond in found.items() if beyond}


def latencies(run: Records) -> pd.DataFrame:
    """Return the rows of ``latency`` with a median, and ``ratio``: the median over the reference's (NaN without one)."""
    frame = table(run, "latency")
    frame = frame[frame["p50_ms"] > 0].drop_duplicates("member", keep="last").reset_index(drop=True)
    names = set(frame["member"])
    own = facts(run).get("reference")
    named = str(own.get("member") or "") if isinstance(own, dict) else ""
    base = REFERENCE if REFERENCE in names else named if named in names else ""
    median = frame.loc[frame["member"] == base, "p50_ms"]
    frame["ratio"] = frame["p50_ms"] / float(median.iloc[0]) if len(median) else math.nan
    frame["is_reference"] = frame["member"] == base
    return frame


def closeness(run: Records) -> dict[str, pd.DataFrame]:
    """Return by member and case the distance to the truth: the member's ``own`` and the ``reference``'s, above zero."""
    frame = table(run, "logits").dropna(subset=["truth_max_abs", "reference_truth_max_abs"])
    frame = frame[frame["reference_truth_max_abs"] > 0]
    frame = frame.rename(columns={"truth_max_abs": "own", "reference_truth_max_abs": REFERENCE})
    found = {
        str(name): group[["case", "kind", "own", REFERENCE]] for name, group in frame.groupby("member", sort=False)
    }
    return {name: found[name] for name in ordered(run, found)}


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
    found = re.search(r"(?:^|\.)(?:layers?|block|h)\.(\d+)(?:\.|$)", name)
    return int(found[1]) if found else None


def sides(run: Records) -> list[tuple[str, str, str]]:
    """Return (fact, reference, candidate) of both environments, nested parts with dots; '' where a side does not say."""
    about = facts(run)
    reference = about.get("reference")
    one = _flat(reference.get("environment") if isinstance(reference, dict) else None)
    other = _flat(about.get("environment"))
    return [(name, one.get(name, ""), other.get(name, "")) for name in dict.fromkeys([*one, *other])]


def executors(run: Records) -> list[tuple[str, dict[str, str]]]:
    """Return of each member what really ran: runtime, attention, kernel, precision, as far as it said."""
    found = facts(run).get("executors")
    found = found if isinstance(found, dict) else {}
    return [(name, _flat(found[name])) for name in ordered(run, found) if isinstance(found[name], dict)]


def _flat(value: Any, begin: str = "") -> dict[str, str]:
    if not isinstance(value, Mapping):
        return {begin: text(value)} if begin else {}
    found: dict[str, str] = {}
    for name, item in value.items():
        found |= _flat(item, f"{begin}.{name}" if begin else str(name))
    return found
