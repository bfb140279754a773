"""What the numbers of a parity run say, in sentences: who computes the same, where not, and whether it matters."""

from collections.abc import Iterator
from typing import Any

from benchlib.metrics import quantity
from benchlib.parity import tolerances
from benchlib.parity.config import ParityConfig
from benchlib.results import Result, Run
from benchlib.squad.config import EMBEDDED_MODEL

Row = dict[str, Any]
DAY_S = 86400.0
SLOWER, FASTER = 1.1, 0.9  # of the reference's latency: what is between may be noise
LONG = 12  # members that are listed by name


def reading(run: Run) -> list[str]:
    """Return sentences about what is equal, where it first differs, worse or merely different, bf16, latency, and what is missing."""
    config, result = run.config, run.result
    assert isinstance(config, ParityConfig) and result is not None
    found = [
        _what(result),
        _age(result),
        _planted(config),
        _equal(result),
        *_failed(result),
        *_informative(result),
        _truth(result),
        _rounded(result),
        *_latency(result),
        *_attention(result),
        _missing(result),
    ]
    return [sentence for sentence in found if sentence]


def _rows(result: Result, table: str) -> list[Row]:
    return result.tables.get(table, [])


def _names(rows: list[Row]) -> str:
    listed = [row["member"] for row in rows]
    return ", ".join(listed[:LONG]) + (f" and {len(listed) - LONG} more" if len(listed) > LONG else "")


def _value(result: Result, member: str, name: str) -> float | None:
    rows = (row for row in _rows(result, "quantities") if (row["member"], row["quantity"]) == (member, name))
    return next((row["value"] for row in rows), None)


def _what(result: Result) -> str:
    """Say what was computed; a stand-in is named first, since it bounds what everything else says."""
    model, reference = result.facts["model"], result.facts["reference"]
    if not model:
        return ""
    kind = "small stand-in model" if model["name"] == EMBEDDED_MODEL else "model"
    weights = (
        "Its weights are random: numerics are those of a real model's size and shapes, but not of trained values. "
        if model["init"] == "random"
        else ""
    )
    return (
        f"{model['name']}, a {kind} of {model['parameters']:,} parameters, was computed on {result.facts['cases']} inputs; "
        f"the reference is eager attention in fp32 on {reference['backend']}. {weights}"
    ).strip()


def _age(result: Result) -> str:
    golden = result.facts.get("golden", {})
    if not golden.get("given"):
        return ""
    there, here = result.facts["reference"].get("environment", {}), result.facts.get("environment", {})
    other = [
        f"{name} {there[name]} there, {here[name]} here" for name in there if name in here and there[name] != here[name]
    ]
    told = f"what differs beside the backend: {'; '.join(other)}" if other else "in the same environment as here"
    return f"The reference was recorded {golden['age_s'] / DAY_S:.1f} days ago, {told}."


def _planted(config: ParityConfig) -> str:
    if config.planted_layer < 0:
        return ""
    return f"A fault was planted in encoder layer {config.planted_layer} of every candidate: what fails here says that it is found."


def _equal(result: Result) -> str:
    rows = [row for row in _rows(result, "members") if row["gates"] and row["outcome"] == "PASS"]
    if not rows:
        return "" if _rows(result, "members") else "Nothing but the reference was there: nothing was compared."
    same = [row for row in rows if _value(result, row["member"], tolerances.LOGITS) == 0]
    bits = f"; {_names(same)} bit by bit" if same else ""
    text = f"{_names(rows)} compute{'s' * (len(rows) == 1)} the same as the reference within the limits{bits}."
    apart = [
        (value, row["member"])
        for row in rows
        if row["precision"] == "fp32" and (value := _value(result, row["member"], tolerances.LOGITS))
    ]
    if apart:
        value, member = max(apart)
        text += f" In fp32 the largest difference of a logit is {value:.2g} ({member})."
    return text


def _failed(result: Result) -> Iterator[str]:
    for row in _rows(result, "members"):
        if row["gates"] and row["outcome"] == "FAIL":
            yield f"{row['member']} does not compute the same: {row['reason']}.{_first(result, row['member'])}"


def _first(result: Result, member: str) -> str:
    """Name the first layer beyond its limit, and how deep it lies."""
    beyond = [row for row in _rows(result, "layers") if row["member"] == member and row["beyond"]]
    if not beyond:
        return ""
    first = min(beyond, key=lambda row: row["index"])
    size = "not finite" if first["relative_l2"] is None else f"{first['relative_l2']:.2g} relative"
    return f" It first diverges in {first['layer']}, at {first['depth']:.0%} of the depth ({size})."


def _informative(result: Result) -> Iterator[str]:
    """Tell what torch's own defaults cost; they do not decide the verdict."""
    for row in _rows(result, "members"):
        value = _value(result, row["member"], tolerances.LOGITS)
        if not row["gates"] and row["outcome"] in ("PASS", "FAIL") and value is not None:
            judged = "within" if row["outcome"] == "PASS" else "beyond"
            yield f"{row['member']} ({row['what']}) differs by {value:.2g} in a logit, {judged} the limits; it is informative."


def _truth(result: Result) -> str:
    """Tell "different" and "worse" apart, by the distance to double precision."""
    precise = {row["member"] for row in _rows(result, "members") if row["precision"] == "fp32"}
    rows = [row for row in _rows(result, "truth") if row["member"] in precise]
    if not rows:
        return "Whether a member is worse or merely different cannot be told: there is no recording in double precision." if (
            _rows(result, "members") and not result.facts.get("truth")
        ) else ""  # fmt: skip
    worse = [row for row in rows if row["verdict"] == "farther"]
    own = next((row["reference_max_abs"] for row in rows if row["reference_max_abs"] is not None), None)
    far = "" if own is None else f" The reference itself is {own:.2g} from double precision."
    if not worse:
        closer = [row for row in rows if row["verdict"] == "closer"]
        also = f"; {_names(closer)} even closer" if closer else ""
        return f"No fp32 member is farther from double precision than twice the reference{also}: they are different, not worse.{far}"
    told = ", ".join(f"{row['member']} ({_size(row['max_abs'])})" for row in worse)
    return f"Worse than the reference, and not merely different: {told}, measured against double precision.{far}"


def _size(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.2g}"


def _rounded(result: Result) -> str:
    """Say what bf16 costs, in logits, in answers, and in time."""
    rows = [
        row for row in _rows(result, "members") if row["precision"] == "bf16" and row["outcome"] in ("PASS", "FAIL")
    ]
    told = []
    for row in rows:
        value = _value(result, row["member"], tolerances.LOGITS)
        if value is None:
            continue
        spans, points = (_value(result, row["member"], name) for name in (tolerances.SPANS, tolerances.F1))
        more = [f"{spans:.1%} of the decided spans agree"] if spans is not None else []
        more += [f"F1 changes by {points:.2g} points"] if points is not None else []
        told.append(f"{row['member']} moves a logit by up to {value:.2g}" + (f" ({', '.join(more)})" if more else ""))
    return f"What bf16 costs: {'; '.join(told)}." if told else ""


def _latency(result: Result) -> Iterator[str]:
    """Compare medians with the reference's, where it was timed on this machine and at the same length."""
    rows = {row["member"]: row for row in _rows(result, "latency")}
    base = rows.pop("reference", None)
    if not rows:
        return
    if base is None or result.facts.get("golden", {}).get("given"):
        best = min(rows.values(), key=lambda row: row["p50_ms"])
        yield f"The fastest is {best['member']} with {quantity(best['p50_ms'])} ms for an input of {best['length']} tokens."
        return
    same = {name: row["p50_ms"] / base["p50_ms"] for name, row in rows.items() if row["length"] == base["length"]}
    groups = {
        "faster": {name: ratio for name, ratio in same.items() if ratio < FASTER},
        "slower": {name: ratio for name, ratio in same.items() if ratio > SLOWER},
    }
    told = [
        f"{word} {', '.join(f'{name} ({ratio:.2f})' for name, ratio in sorted(found.items(), key=lambda one: one[1]))}"
        for word, found in groups.items()
        if found
    ]
    rest = "; the others are within 10 %" if sum(map(len, groups.values())) < len(same) else ""
    text = "; ".join(told) + rest if told else "all members are within 10 % of it"
    yield f"The reference takes {quantity(base['p50_ms'])} ms for an input of {base['length']} tokens; as shares of that: {text}."


def _attention(result: Result) -> Iterator[str]:
    """Say by type how far the attention kernels are from math at the usual scale, and what a row without a key gives."""
    rows = _rows(result, "attention")
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        usual = [row for row in rows if row["dtype"] == dtype and row["scale"] == 1]
        ran = [row for row in usual if row["kernel"] != "math" and row["max_abs_math"] is not None]
        own = [row["max_abs_truth"] for row in usual if row["kernel"] == "math" and row["max_abs_truth"] is not None]
        if ran and own:
            worst = max(ran, key=lambda row: row["max_abs_math"])
            yield (
                f"Attention in {dtype}: {worst['kernel']} is up to {worst['max_abs_math']:.2g} from the math kernel "
                f"(length {worst['length']}), which is itself up to {max(own):.2g} from double precision."
            )
    without_key: dict[str, set[str]] = {}
    for row in rows:
        if row["masked_row"]:
            without_key.setdefault(row["masked_row"], set()).add(row["kernel"])
    if len(without_key) > 1:
        told = "; ".join(f"{', '.join(sorted(kernels))}: {word}" for word, kernels in without_key.items())
        yield f"A row that may attend to nothing is not the same everywhere ({told})."


def _missing(result: Result) -> str:
    skipped = [row for row in _rows(result, "members") if row["outcome"] in ("SKIPPED", "NOT COMPARED")]
    reasons: dict[str, list[Row]] = {}
    for row in skipped:
        reasons.setdefault(row["reason"], []).append(row)
    told = [f"{_names(rows)} ({reason})" for reason, rows in reasons.items()]
    known = {row["member"] for row in skipped}
    told += [text for text in result.facts.get("cut", []) if text.partition(":")[0] not in known]
    return f"Not computed: {'; '.join(told)}." if told else ""
