"""What a parity run is judged by, and what its numbers say in sentences.

Each member is judged against the reference, the reference against double precision, and the tolerance by whether bf16
misses it. The reading says which members match, where results diverge, and whether it matters.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchlib.benchmarks.parity import tolerances
from benchlib.benchmarks.parity.config import ONE_TOKEN, ParityConfig
from benchlib.benchmarks.parity.golden import refuse as refuse
from benchlib.config.schema import EMBEDDED_MODEL
from benchlib.core.text import capitalized, counted, days, quantity
from benchlib.judge.baselines import Comparison, regression_checks
from benchlib.judge.checks import Ask, Check, Status, agreement_check, asks, budget_check, finite_check
from benchlib.judge.impossible.claim import Claim, Latency
from benchlib.judge.impossible.own import Numbers, OwnClaims
from benchlib.judge.numbers import within
from benchlib.judge.regression import RegressionLimit
from benchlib.results.run import Result, Run

# The rules that a check of its own shows; the consistency check stands for all others.
SHOWN = ("possible values",)
DIFFERENCE, COSINE, LATENCY = "_logits_max_difference", "_one_minus_cosine", "_latency_ms"
DOUBLE = 1.0  # a driver that computes otherwise moves a difference by its order of magnitude, not by a few percent
LATENCY_SHARE = 0.5  # milliseconds on a shared machine
COMPARED = ("PASS", "FAIL")
OUTCOMES = (*COMPARED, "SKIPPED", "NOT COMPARED")
NAMED = 3  # of what failed in a member that are listed in full
LONG = 12  # members that are listed by name

Row = dict[str, Any]
FP64 = ("truth_max_abs", "reference_truth_max_abs")  # of a case of logits


def lacks(table: str, row: Mapping[str, Any], column: str) -> bool:
    """Say whether a null has a reason, which its row states: what failed or was skipped has no number."""
    status, reason = row.get("status"), str(row.get("reason") or "")
    if table == "quantities":
        return column == "value" and status != "PASS" and reason != ""
    if table == "logits":  # without a recording in double precision both distances to it are missing
        no_angle = column == "one_minus_cosine" and row.get("case") == ONE_TOKEN
        return no_angle or (column in FP64 and all(row.get(name) is None for name in FP64))
    if table in ("layers", "gradients"):  # a tensor with NaN or of another shape; runs of 0.2 stored a cosine as well
        return (column == "relative_l2" and row.get("beyond") is True) or column == "one_minus_cosine"
    if table == "attention" and status == "MEASURED":
        of_math, gradient = column.endswith("_math"), column.startswith("gradient")
        return (of_math and (row.get("kernel") == "math" or "no math" in reason)) or (
            gradient and "no gradients" in reason
        )
    if table == "attention":
        return column.endswith(("_truth", "_math", "_us")) and reason != ""
    return table == "facts" and ".switches." in column  # torch may refuse to say


def limits(run: Run) -> list[RegressionLimit]:
    """Return how much worse than the baseline: differences may double, latencies grow by half."""
    assert run.result is not None
    shares = {DIFFERENCE: DOUBLE, LATENCY: LATENCY_SHARE}
    return [
        RegressionLimit(metric=metric.name, share=share)
        for metric in run.result.metrics
        for part, share in shares.items()
        if part in metric.name
    ]


def claims(numbers: Numbers) -> Iterator[Claim]:
    """Yield the percentiles of each member's latency, which have to be in order."""
    columns = {50.0: "p50_ms", 95.0: "p95_ms", 99.0: "p99_ms"}
    for row in numbers.rows("latency"):
        times = {key: 1e-3 * row[name] for key, name in columns.items()}
        latency = Latency(name=f"inputs of {row['member']}", percentiles_s=times)
        yield Claim(subject="latency", latencies=[latency])


def checks(run: Run, comparison: Comparison) -> list[Check]:
    """Judge a run that has a result. Where nothing but the reference ran, no check passes, and the first says why."""
    config, result = run.config, run.result
    assert isinstance(config, ParityConfig) and result is not None
    members = result.tables.get("members", [])
    whole = _whole(result, members)
    if not members:
        return [whole]
    stated = OwnClaims(Numbers.of_run(run))
    judged = [
        whole,
        *(
            Ask(f"parity {row['member']}", f"Does {row['member']} match the reference ({row['what']})?", "target").by(
                _parity, row, result
            )
            for row in members
        ),
        _same_work(result, members),
        _sensitivity(config, result, members),
        _reference_accuracy(config, result),
        _not_worse(result),
        _kernels(result),
        finite_check(stated),
        agreement_check(stated, SHOWN),
        _same_numerics(result, comparison),
        budget_check(run),
        *regression_checks(run, limits(run), comparison),
    ]
    return judged if whole.status != "SKIPPED" else [_without_pass(check) for check in judged]


def _without_pass(check: Check) -> Check:
    """Return a check of a run that compared nothing: what holds of the reference alone is no pass."""
    if check.status != "PASS" or check.kind == "budget":
        return check
    return check.model_copy(
        update={"status": "SKIPPED", "reason": f"no gating member was compared; {check.reason}", "gates": False}
    )


def _rows(result: Result, table: str, member: str) -> list[Row]:
    return [row for row in result.tables.get(table, []) if row["member"] == member]


@asks("parity", "Does this backend match the reference?", kind="target")
def _whole(ask: Ask, result: Result, members: list[Row]) -> Check:
    """Sum the members up. Without any beside the reference this must never look like a pass."""
    judged = {
        outcome: [row["member"] for row in members if row["gates"] and row["outcome"] == outcome]
        for outcome in OUTCOMES
    }
    if judged["FAIL"] or judged["PASS"]:
        groups = [f"{', '.join(listed)}: {outcome}" for outcome, listed in judged.items() if listed]
        # Each member has a gating check of its own: this one repeats them.
        return _informs(ask, "FAIL" if judged["FAIL"] else "PASS", "; ".join(groups))
    reasons = list(dict.fromkeys(str(row["reason"]) for row in members if row["outcome"] not in COMPARED))
    informative = ", ".join(row["member"] for row in members if row["outcome"] in COMPARED)
    if informative and not reasons:
        reason = (
            f"no gating member was compared: {informative} is informative only; name a gating member, or none for all"
        )
        return ask.skipped(reason, gates=True)
    backend = result.facts["reference"]["backend"]
    more = f"; and {len(reasons) - NAMED} other reasons" if len(reasons) > NAMED else ""
    why = "; ".join(reasons[:NAMED]) or "no member was requested"
    reason = f"nothing to compare with the reference on {backend} ({why}{more})"
    if any("the budget of" in text for text in reasons):
        reason += "; raise budget_s, or name fewer members"
    return ask.skipped(reason, gates=True)


def _informs(ask: Ask, status: Status, reason: str) -> Check:
    return Check(**ask._asdict(), status=status, reason=reason, gates=False)


def _parity(ask: Ask, row: Row, result: Result) -> Check:
    """Judge a member anew by its numbers and their limits: a word in a table proves nothing."""
    judged = [
        entry
        for entry in _rows(result, "quantities", row["member"])
        if entry["quantity"] not in tolerances.LOCATES and (entry["gates"] or not row["gates"])
    ]
    status, reason = _judged(row, judged, _rows(result, "logits", row["member"]))
    if status == "FAIL":
        reason += _first(result, row["member"])
    first = next((entry for entry in judged if entry["quantity"] == tolerances.LOGITS), None)
    return Check(
        **ask._asdict(),
        status=status,
        reason=reason,
        value=first["value"] if first else None,
        limit=first["limit_text"] if first else "",
        source=_basis(first["why"]) if first else "",
        gates=bool(row["gates"]),
    )


def _basis(why: str) -> str:
    """Return in short what a limit of logits rests on; the whole reason stands beside the quantity."""
    first, last = why.split("; ")[0], why.split("; ")[-1]
    return last if last.startswith(("here ", "times ")) else "set by the benchmark" if first == "set" else first


def _judged(row: Row, judged: list[Row], cases: list[Row]) -> tuple[Status, str]:
    if row["outcome"] not in COMPARED:
        return "SKIPPED", row["reason"]
    failed = [entry for entry in judged if entry["status"] == "FAIL" or _beyond(entry)]
    beyond = [entry for entry in cases if not within(entry["max_abs"], entry["limit"])]
    if beyond and not failed:  # no row of quantities may hide one of its cases
        first = beyond[0]
        return "FAIL", f"logits of {first['case']} differ by {first['max_abs']}, beyond {first['limit']:g}"
    if failed:
        return "FAIL", _some([_quantity(entry) for entry in failed])
    passed = [entry for entry in judged if entry["status"] == "PASS"]
    if row["outcome"] == "FAIL" or not passed:
        return "FAIL", row["reason"] or "its recording holds nothing to compare"
    absent = [entry["quantity"] for entry in judged if entry["status"] == "SKIPPED"]
    shown = [entry for entry in passed if entry["quantity"] in (tolerances.LOGITS, tolerances.COSINE)]
    summary = "; ".join(map(_quantity, shown)) + f"; {len(passed)} quantities within their limits"
    return "PASS", summary + (f"; not compared: {', '.join(absent)}" if absent else "")


def _some(parts: list[str]) -> str:
    return "; ".join(parts[:NAMED]) + (f"; and {len(parts) - NAMED} more" if len(parts) > NAMED else "")


def _beyond(row: Row) -> bool:
    """Tell whether a row is beyond the limit that it states itself; a value that is no number is beyond every limit."""
    if row["status"] == "SKIPPED":
        return False
    if row["limit_text"].startswith(">"):
        return not within(row["value"], least=row["limit"])
    return not within(row["value"], row["limit"])


def _quantity(row: Row) -> str:
    name = "1 - cosine of the logits" if row["quantity"] == tolerances.COSINE else row["quantity"]
    if row["value"] is None:
        return f"{name}: {row['reason'] or 'not finite'}" + (f" at {row['worst']}" if row["worst"] else "")
    value = quantity(row["value"])
    limit = f" ({row['limit_text']})" if row["limit_text"] else ""
    return f"{name} {value}{limit}" + (f" at {row['worst']}" if row["worst"] else "")


def _first(result: Result, member: str) -> str:
    """Name the first layer beyond its limit, and how deep it lies."""
    beyond = [row for row in _rows(result, "layers", member) if row["beyond"]]
    if not beyond:
        return ""
    first = min(beyond, key=lambda row: row["index"])
    size = f"{first['relative_l2']:.2g} relative" if first["relative_l2"] is not None else "not finite"
    return f"; it first diverges in {first['layer']}, at {first['depth']:.0%} of the depth ({size})"


@asks("same weights and inputs", "Did every member use the reference's weights and inputs?")
def _same_work(ask: Ask, result: Result, members: list[Row]) -> Check:
    """Check by hash that every member had the reference's weights and inputs."""
    wanted = (result.facts["model_sha256"], result.facts["inputs_sha256"])
    recorded = [row for row in members if row.get("model_sha256") or row.get("inputs_sha256")]
    wrong = [row["member"] for row in recorded if (row.get("model_sha256"), row.get("inputs_sha256")) != wanted]
    if not recorded:
        return ask.skipped("no member left a recording")
    reason = f"{counted(len(recorded), 'recording')} with weights {wanted[0][:12]} and inputs {wanted[1][:12]}"
    return ask.fact(not wrong, reason + (f"; others: {', '.join(wrong)}" if wrong else ""))


@asks("tolerance sensitivity", "Does bf16 exceed the fp32 tolerance, as it must?")
def _sensitivity(ask: Ask, config: ParityConfig, result: Result, members: list[Row]) -> Check:
    """Compare bf16 with the tolerance of fp32, which it must miss: one that cannot fail proves nothing."""
    rounded = [row["member"] for row in members if row["precision"] == "bf16" and row["mode"] == "exact"]
    difference, cosine = (_of_fp32(config, result, members, name) for name in (tolerances.LOGITS, tolerances.COSINE))
    seen = []
    for member in rounded:
        rows = {row["quantity"]: row for row in _rows(result, "quantities", member)}
        pair = [rows[name]["value"] for name in (tolerances.LOGITS, tolerances.COSINE) if name in rows]
        if len(pair) == 2 and None not in pair:
            seen.append((member, pair[0], pair[1]))
    if not seen:
        return ask.skipped("no bf16 member was compared, so it is unknown whether the tolerance detects an error")
    blind = [member for member, first, second in seen if within(first, difference) and within(second, cosine)]
    distances = ", ".join(f"{member} is {first:.2g} off, 1 - cosine {second:.2g}" for member, first, second in seen)
    reason = f"{distances}; fp32 allows {difference:.3g} and {cosine:.3g}"
    if blind:
        reason += f": {', '.join(blind)} computed in full precision, or the comparison detects nothing"
    return ask.fact(not blind, reason)


def _of_fp32(config: ParityConfig, result: Result, members: list[Row], quantity: str) -> float:
    """Return the limit of fp32 that lets most through: the table's, or one that a member of this run was given."""
    precise = {row["member"] for row in members if row["precision"] == "fp32"}
    rows = (row for row in result.tables.get("quantities", []) if row["member"] in precise)
    given = [row["limit"] for row in rows if row["quantity"] == quantity]
    reference = str(result.facts["reference"]["backend"])
    return max([tolerances.between(reference, config.backend, "fp32", quantity).value, *given])


@asks("reference accuracy", "Is the reference itself close enough to double precision?")
def _reference_accuracy(ask: Ask, config: ParityConfig, result: Result) -> Check:
    """Compare the reference itself with double precision. One farther off than limits are ever eased fails the run."""
    compared = [row for row in result.tables.get("logits", []) if row["reference_truth_max_abs"] is not None]
    if not compared:
        return ask.skipped(_without_truth(result))
    backend = str(result.facts["reference"]["backend"])
    table = tolerances.between(backend, config.backend, "fp32", tolerances.LOGITS).value
    limit = tolerances.MOST_EASED * table
    worst = max(compared, key=lambda row: row["reference_truth_max_abs"])
    distance = (
        f"its logits are within {worst['reference_truth_max_abs']:.2g} of double precision, worst at {worst['case']}"
    )
    return ask.fact(within(worst["reference_truth_max_abs"], limit), f"{distance}; allowed {limit:.2g}")


def _without_truth(result: Result) -> str:
    """Return why no distance to double precision is known."""
    if not result.facts["truth"]:
        return "there is no recording in double precision"
    if broken := result.facts["truth_nonfinite"]:
        return f"{broken} numbers of the recording in double precision are NaN or infinite"
    return "no compared member has a known distance to double precision"


@asks(
    "accuracy against double precision",
    "Is every member within twice the reference's distance to double precision?",
    kind="target",
)
def _not_worse(ask: Ask, result: Result) -> Check:
    """Tell "different" and "worse" apart, by the distance of each member to double precision. Informative."""
    precise = {row["member"] for row in result.tables.get("members", []) if row["precision"] != "bf16"}
    rows = [row for row in result.tables.get("truth", []) if row["member"] in precise]
    if not rows:
        return ask.skipped(_without_truth(result))
    own = f"{rows[0]['reference_max_abs']:.2g}"
    worse = [f"{row['member']} ({row['max_abs']:.2g})" for row in rows if row["verdict"] == "farther"]
    if worse:
        reason = f"worse than the reference ({own} from double precision), not only different: {', '.join(worse)}"
        return _informs(ask, "FAIL", reason)
    closer = [row for row in rows if row["verdict"] == "closer"]
    also = f"; {_names(closer)} even closer" if closer else ""
    reason = f"apart from bf16 no member is more than twice as far from double precision as the reference ({own}): different, not worse{also}"
    return _informs(ask, "PASS", reason)


@asks("attention kernels", "Does every attention kernel of the device return finite numbers?")
def _kernels(ask: Ask, result: Result) -> Check:
    """Report attention kernels that fail or return NaN. Informative: a member that uses them is judged itself."""
    rows = result.tables.get("attention", [])
    broken = [row for row in rows if row["status"] == "FAIL"]
    ran = [row for row in rows if row["status"] == "MEASURED"]
    failures = "; ".join(
        f"{row['kernel']} in {row['dtype']} at {row['length']}: {row['reason']}" for row in broken[:NAMED]
    )
    kernels = ", ".join(dict.fromkeys(row["kernel"] for row in ran))
    if not broken and not ran:
        return ask.skipped("no kernel was measured")
    return _informs(ask, "FAIL" if broken else "PASS", failures or f"{len(ran)} results of {kernels}")


@asks("numerics unchanged", "Are all differences identical to those of the baseline?", kind="target")
def _same_numerics(ask: Ask, result: Result, comparison: Comparison) -> Check:
    """Compare the distances with the accepted run digit by digit: a driver that computes otherwise changes them."""
    if comparison.baseline is None:
        status: Status = "NOT_COMPARABLE" if comparison.status == "NOT_COMPARABLE" else "NO_BASELINE"
        return _informs(ask, status, comparison.reason)
    exact = [row["member"] for row in result.tables["members"] if row["mode"] == "exact"]
    begins = tuple(f"{member}{quantity}" for member in exact for quantity in (DIFFERENCE, COSINE))
    accepted = {metric.name: metric.value for metric in comparison.baseline.latest.metrics}
    names = [metric.name for metric in result.metrics if metric.name in accepted and metric.name.startswith(begins)]
    compared = {name: (accepted[name], result.value(name)) for name in names}
    changed = [f"{name} was {_digits(was)}, is {_digits(now)}" for name, (was, now) in compared.items() if was != now]
    if not compared:
        return ask.skipped("the baseline has no difference in common with this run")
    more = f"; and {len(changed) - NAMED} more" if len(changed) > NAMED else ""
    same = f"{len(compared)} differences equal those of {comparison.baseline.latest.run}"
    reason = "; ".join(changed[:NAMED]) + more if changed else same
    return _informs(ask, "FAIL" if changed else "PASS", reason)


def _digits(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.6g}"


def reading(run: Run) -> list[str]:
    """Return sentences about what is equal, where it first differs, worse or merely different, bf16, latency, and what is missing."""
    result = run.result
    assert result is not None
    sentences = [
        _what(result),
        _age(run.config, result),
        _equal(result),
        *_failed(result),
        *_informative(result),
        f"{capitalized(_not_worse(result).reason)}." if result.tables.get("members") else "",
        _rounded(result),
        _latency(result),
        *_attention(result),
        _missing(result),
    ]
    return [sentence for sentence in sentences if sentence]


def _names(rows: list[Row]) -> str:
    listed = [row["member"] for row in rows]
    return ", ".join(listed[:LONG]) + (f" and {len(listed) - LONG} more" if len(listed) > LONG else "")


def _value(result: Result, member: str, name: str) -> float | None:
    rows = (row for row in result.tables.get("quantities", []) if (row["member"], row["quantity"]) == (member, name))
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


def _age(config: Any, result: Result) -> str:
    golden = result.facts.get("golden", {})
    if not golden.get("given"):
        return ""
    there, here = result.facts["reference"].get("environment", {}), result.facts.get("environment", {})
    other = [
        f"{name} {there[name]} there, {here[name]} here" for name in there if name in here and there[name] != here[name]
    ]
    where = f"in another environment: {'; '.join(other)}" if other else "in the same environment as this run"
    return (
        f"The reference is the golden folder {Path(config.golden).name}, recorded {days(golden['age_s'])} ago, {where}."
    )


def _equal(result: Result) -> str:
    rows = [row for row in result.tables.get("members", []) if row["gates"] and row["outcome"] == "PASS"]
    if not rows:
        return "" if result.tables.get("members", []) else "Nothing was compared: only the reference was computed."
    same = [row for row in rows if _value(result, row["member"], tolerances.LOGITS) == 0]
    bits = f", {_names(same)} bit by bit" if same else ""
    text = f"{_names(rows)} match{'es' * (len(rows) == 1)} the reference within the limits{bits}."
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
    for row in result.tables.get("members", []):
        if row["gates"] and row["outcome"] == "FAIL":
            reason = _some(row["reason"].split("; "))
            yield f"{row['member']} does not match the reference: {reason}{_first(result, row['member'])}."


def _informative(result: Result) -> Iterator[str]:
    """Tell what torch's own defaults cost; they do not decide the verdict."""
    for row in result.tables.get("members", []):
        value = _value(result, row["member"], tolerances.LOGITS)
        if not row["gates"] and row["outcome"] in COMPARED and value is not None:
            judged = "within" if row["outcome"] == "PASS" else "beyond"
            yield f"{row['member']} ({row['what']}) differs by up to {value:.2g} in a logit, {judged} the limits (informative)."


def _rounded(result: Result) -> str:
    """Say what bf16 costs, in logits and in answers."""
    costs = []
    for row in result.tables.get("members", []):
        value = _value(result, row["member"], tolerances.LOGITS)
        if row["precision"] != "bf16" or row["outcome"] not in COMPARED or value is None:
            continue
        spans, points = (_value(result, row["member"], name) for name in (tolerances.SPANS, tolerances.F1))
        more = [f"{spans:.1%} of the decided spans agree"] if spans is not None else []
        more += [f"F1 changes by {points:.2g} points"] if points is not None else []
        costs.append(f"{row['member']} moves a logit by up to {value:.2g}" + (f" ({', '.join(more)})" if more else ""))
    return f"What bf16 costs: {'; '.join(costs)}." if costs else ""


def _latency(result: Result) -> str:
    """Compare medians with the reference's, where it was timed on this machine and at the same length."""
    rows = {row["member"]: row for row in result.tables.get("latency", [])}
    base = rows.pop("reference", None)
    if not rows:
        return ""
    fastest = min(rows.values(), key=lambda row: row["p50_ms"])
    text = f"The fastest is {fastest['member']}: {quantity(fastest['p50_ms'])} ms for an input of {fastest['length']} tokens"
    if base is None or base["length"] != fastest["length"]:
        return f"{text}."
    ratios = sorted((row["p50_ms"] / base["p50_ms"], name) for name, row in rows.items())
    listed = ", ".join(f"{name} ({ratio:.2f})" for ratio, name in ratios)
    return f"{text}, the reference takes {quantity(base['p50_ms'])} ms. Relative to that: {listed}."


def _attention(result: Result) -> Iterator[str]:
    """Say by type how far the attention kernels are from math at the usual scale."""
    rows = [row for row in result.tables.get("attention", []) if row["scale"] == 1]
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        usual = [row for row in rows if row["dtype"] == dtype]
        ran = [row for row in usual if row["kernel"] != "math" and row["max_abs_math"] is not None]
        own = [row["max_abs_truth"] for row in usual if row["kernel"] == "math" and row["max_abs_truth"] is not None]
        if ran and own:
            worst = max(ran, key=lambda row: row["max_abs_math"])
            yield (
                f"Attention in {dtype}: {worst['kernel']} is up to {worst['max_abs_math']:.2g} from the math kernel "
                f"(length {worst['length']}), which is itself up to {max(own):.2g} from double precision."
            )


def _missing(result: Result) -> str:
    reasons: dict[str, list[Row]] = {}
    for row in result.tables.get("members", []):
        if row["outcome"] not in COMPARED:
            reasons.setdefault(row["reason"], []).append(row)
    named = {row["member"] for rows in reasons.values() for row in rows}
    missing = [f"{_names(rows)} ({reason})" for reason, rows in reasons.items()]
    missing += [text for text in result.facts.get("cut", []) if text.partition(":")[0] not in named]
    return f"Not computed: {'; '.join(missing)}." if missing else ""


def missed(run: Run) -> dict[str, list[str]]:
    """Return the members of the config that were not compared; a run without a result compared none."""
    rows = run.result.tables.get("members", []) if run.result else []
    compared = {row["member"] for row in rows if row["outcome"] in COMPARED}
    named = run.config.members if isinstance(run.config, ParityConfig) else []
    return {"members": [name for name in named if name not in compared]}
