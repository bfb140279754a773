"""What a parity run states: each difference of each member with its limit, and how far all are from double precision."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import Any

from benchlib.benchmarks.parity import golden
from benchlib.benchmarks.parity.config import chosen
from benchlib.core.stats import percentile
from benchlib.core.text import counted, listing, stand_ins
from benchlib.judge.checks import Check as Judged
from benchlib.judge.numbers import InvalidNumber, within
from benchlib.spec.charts import Chart, Line, Title, bars, grid, lines
from benchlib.spec.checks import Check, above_zero, below, compare, judge, zero
from benchlib.spec.spec import Metric, Show, Spec, each, run_metrics, run_table
from benchlib.spec.tables import Col, Row, Rows, Table, cols, write
from benchlib.workloads.numerics import COSINE, CURVE, F1, GRADIENTS, LAYERS, LOGITS, QUANTITIES, SPANS, Limit, limit

FACTOR = 2  # two roundings of one sum differ by as much from the exact one by chance
DOUBLE = 1.0  # a driver that computes otherwise moves a difference by its order of magnitude, not by a few percent
NAMED = 3
WITHIN = partial(within, most=1)  # of a difference's share of its limit
COMPARED = ("PASS", "FAIL")
OUTCOMES = "member word computes max_difference limit one_minus_cosine accuracy latency_ms latency_p95_ms latency_p99_ms queries_per_s reason"
COSTS = {  # of bf16
    LOGITS: "moves a logit by up to {:.2g}",
    SPANS: "changes the span of {:.0%} of the decided rows",
    F1: "moves F1 by {:.2g} points",
}


def _accuracy(own: float, reference: float) -> str:
    return "closer" if own < reference / FACTOR else "farther" if own > FACTOR * reference else "as close"


def _share(value: float, limit: float) -> float:
    return value / limit if limit else 2.0 * (value != 0)  # of zero nothing is a share


def _others(weights: str, inputs: str, *reference: str) -> int:
    return sum(own != other for own, other in zip((weights, inputs), reference, strict=True))


scope = Col("scope", of=str, needs="stand_in")
hashes = "model_sha256 inputs_sha256 weights_sha256 cases_sha256"
members = Table(
    "members",
    "{member}",
    [
        *cols("member what backend device precision mode executor model_sha256 inputs_sha256"),
        Col("others", "count", "hashes that are not the reference's", _others, hashes),
        Col("seconds", "s", "process"),
        Col("latency_ms", "ms", "latency p50", samples=True),
        Col("latency_p95_ms", "ms", "p95", lambda times: percentile(times, 0.95), "latency_ms"),
        Col("latency_p99_ms", "ms", "p99", lambda times: percentile(times, 0.99), "latency_ms"),
        Col("queries_per_s", "queries/s", "queries/s", lambda times: 1e3 / fmean(times), "latency_ms"),
        Col("fp64_max_abs", "error", "distance from fp64", quality=1e-4),
        Col("reference_max_abs", "error", "the reference's"),
        Col("twice", "error", of=lambda own: FACTOR * own, needs="reference_max_abs"),
        Col("accuracy", of=_accuracy, needs="fp64_max_abs reference_max_abs"),
        scope,
    ],
)
differences = Table(
    "differences",
    "{quantity} {at}",
    [
        *cols("member precision quantity at note eased"),
        Col("index", "number"),
        Col("value", "error", "difference", derived=True),
        Col("limit", "error"),
        Col("share", "ratio", "share of the limit", _share, "value limit"),
        Col("because", "", "why", str, "reason"),
        scope,
    ],
    note="{note}",
)
recorded = replace(differences, name="recorded")
environment = Table("environment", "{fact}", cols("fact reference members"))
run = run_table(
    *cols("model init description stand_in identity golden weights_sha256 cases_sha256 outputs_sha256"),
    *cols("reference_backend reference_torch"),
    *cols("parameters cases", "count"),
    Col("dev_f1", "number", "F1 of the reference", quality=0.5),
    Col("last_loss", "number", "last loss of the reference", quality=1e-4),
    Col("reference_error", "error", "distance of the reference from fp64"),
    Col("reference_limit", "error"),
    Col("golden_age_s", "s", "age of the recording"),
)


def _in_order(quantity: str, heading: str) -> Table:
    """Return the differences of a quantity, with a column of their places."""
    place = Col("index", "number", heading)
    return replace(differences, title="{member}, {at}", cols=[place, *differences.cols]).where(quantity=quantity)


compared = members.ran()
precise = compared.where(precision=("fp32", "fp64"))
worst = differences.most("share", per="member quantity")
largest = differences.most("value", per="member quantity")
logits, cosines = largest.where(quantity=LOGITS), largest.where(quantity=COSINE)
layers = _in_order(LAYERS, "embeddings, then layers")
curve = _in_order(CURVE, "step")
gradients = replace(worst.where(quantity=GRADIENTS), title="{member}: {at}")
recorded_logits = recorded.where(quantity=LOGITS).most("value")


def _all_skipped(run: Rows) -> str:
    return "" if compared.rows(run) else "no member was compared"


def _outcome(check: Check, run: Rows) -> Judged:
    """Judge a member: what became of its process, then each difference by its own limit."""
    (member, *_), (differing, bound) = check.over[0][0].table.rows(run), check.over[1]
    status, reason, gates = member.get("status", "ok"), str(member.get("reason") or ""), bool(member.get("gates", True))
    if status != "ok":
        return check.answer("SKIPPED" if status == "skipped" and reason else "FAIL", reason, gates=gates)
    return _located(replace(check, over=[(differing, bound)]), run).model_copy(update={"gates": gates})


def _valued(row: Row) -> bool:
    return "value" not in getattr(row, "faults", ())


def _located(check: Check, run: Rows) -> Judged:
    """Judge differences. A layer beyond its limit says where; whether it matters is for the outputs to say."""
    differing, bound = check.over[0]
    own, more = differing.table, dict[str, Any]()
    try:
        answer = compare(replace(check, over=[(own.unless(quantity=LAYERS)["value"], bound)]), run)
        for row in own.where(quantity=LOGITS).most("value").rows(run):
            more |= {"value": own["value"].finite(row, run), "limit": f"<= {own['limit'].text(row, run)}"}
    except InvalidNumber:  # a difference of what cannot be compared says why in its note
        wrong = [row for row in own.rows(run) if not _valued(row) and row["note"]]
        if not wrong:
            raise
        words = [f"{row['quantity']} {row['at']}: {row['note']}" for row in wrong]
        answer = check.answer("FAIL", "not comparable: " + "; ".join(words[:NAMED]))
    valued = own.where(quantity=LAYERS).pick(lambda run, rows: [row for row in rows if _valued(row)])
    if answer.status == "FAIL" and (beyond := valued.unless(share=WITHIN).rows(run)):
        more["reason"] = f"{answer.reason}; the first layer beyond its limit is {beyond[0]['at']}"
    return answer.model_copy(update=more)


MATCHES = below(
    "parity {member}",
    "Does it match the reference, each quantity within its limit?",
    (members["member"], 0.0),
    (differences["value"], differences["limit"]),
    judge=_outcome,
    when=lambda config: not config.record,
    kind="target",
)


def outcomes(run: Rows) -> list[tuple[Row, Judged]]:
    """Return each member's row with the answer to whether it matches the reference."""
    return list(zip(members.rows(run), judge(MATCHES, run, []), strict=False))


def _computes(precision: str, mode: str, gates: bool) -> str:
    return f"{precision}, {mode}" + ", informative" * (not gates)


def _answered(run: Rows, rows: list[Row]) -> list[Row]:
    wider = list[Row]()
    for row, answer in outcomes(run):
        first, angle = (next(iter(table.where(member=row["member"]).rows(run)), {}) for table in (logits, cosines))
        cells = {
            "max_difference": first.get("value"),
            "limit": first.get("limit"),
            "one_minus_cosine": angle.get("value"),
        }
        cells |= {"outcome": answer.status, "word": answer.word, "gates": answer.gates}
        wider.append({**row, **cells, "reason": answer.reason if answer.status != "PASS" else ""})
    return wider


# Each member with what the check of it answers, its reason where it did not pass, and its largest differences.
answered = replace(
    members,
    cols=[
        *members.cols,
        *cols("outcome reason"),
        Col("word", "", "outcome"),
        Col("computes", of=_computes, needs="precision mode gates"),
        Col("max_difference", "error", "difference"),
        Col("limit", "error"),
        Col("one_minus_cosine", "error", "1 - cosine"),
    ],
).pick(_answered)


def _names(table: Table, run: Rows, **wanted: Any) -> list[str]:
    return [row["member"] for row in table.where(**wanted).rows(run)]


def _whole(check: Check, run: Rows) -> Judged:
    """Sum the members up: each has a gating check of its own. Without any that gates and was compared nothing passes."""
    groups = dict[str, list[str]]()
    answers = outcomes(run)  # and not ``answered``: a number that is missing in one member fails that one alone
    for row, answer in answers:
        if answer.gates:
            groups.setdefault(answer.status, []).append(row["member"])
    if set(groups) & set(COMPARED):
        words = "; ".join(f"{', '.join(names)}: {status}" for status, names in groups.items())
        return check.answer("FAIL" if "FAIL" in groups else "PASS", words)
    reasons = list(dict.fromkeys(answer.reason for _, answer in answers if answer.status not in COMPARED))
    informative = [row["member"] for row, answer in answers if answer.status in COMPARED]
    reasons += [f"{', '.join(informative)} only informs: name a member that gates"] * bool(informative)
    reasons = reasons or ["only the reference was asked for"]
    return check.answer("SKIPPED", f"no member that gates was compared: {'; '.join(reasons[:NAMED])}", gates=True)


def _sensitive(check: Check, run: Rows) -> Judged:
    """Compare bf16 with the limits of fp32, which it must miss: one that cannot fail proves nothing."""
    backends, blind, words = (run.config.backend, run.run["reference_backend"]), list[str](), list[str]()
    allowed = {quantity: limit(backends[0], "fp32", quantity, backends[1]).value for quantity in (LOGITS, COSINE)}
    eased = differences.where(quantity=tuple(allowed), precision="fp32").most("limit", per="quantity")
    allowed |= {row["quantity"]: row["limit"] for row in eased.rows(run)}
    bf16 = _names(compared, run, precision="bf16", mode="exact")
    for member in bf16:
        own = {row["quantity"]: row["value"] for row in largest.where(member=member, quantity=tuple(allowed)).rows(run)}
        words += [f"{member} {name} {write(own[name], 'error')}, fp32 {allowed[name]:.2g}" for name in own]
        blind += [member] * all(within(own[name], allowed[name]) for name in own)
    if not bf16:
        return check.answer("SKIPPED", "no bf16 member was compared: whether the limits detect an error is unknown")
    wrong = f": {', '.join(blind)} computed in full precision, or the comparison detects nothing" if blind else ""
    return check.answer("FAIL" if blind else "PASS", "; ".join(words) + wrong)


def _unchanged(check: Check, run: Rows) -> Judged:
    """Compare the distances with the accepted run digit by digit: a driver that computes otherwise changes them."""
    comparison = run.comparison
    if comparison.baseline is None:
        comparable = comparison.status == "NOT_COMPARABLE"
        return check.answer("NOT_COMPARABLE" if comparable else "NO_BASELINE", comparison.reason)
    latest = comparison.baseline.latest
    accepted = {metric.name: metric.value for metric in latest.metrics}
    exact = _names(compared, run, mode="exact")
    pairs = [
        (name, accepted[name], metric.of.number(row, run))
        for metric in (LOGITS_METRIC, COSINE_METRIC)
        for name, row in metric.rows(run)
        if row["member"] in exact and name in accepted
    ]
    if not pairs:
        return check.answer("SKIPPED", "the baseline has no difference in common with this run")
    changed = [f"{name} was {was:.6g}, is {now:.6g}" for name, was, now in pairs if now != was]
    more = f"; and {len(changed) - NAMED} more" if len(changed) > NAMED else ""
    same = f"{len(pairs)} differences equal those of {latest.run}"
    return check.answer("FAIL" if changed else "PASS", "; ".join(changed[:NAMED]) + more if changed else same)


def _not_finite(row: Row, run: Rows) -> str:
    """Return why a row does not count: what only informs must not fail the run."""
    finite = differences["value"].finite(row, run) is not None
    return "" if row.get("gates", True) or finite else f"not finite: {row.get('note') or row['at']}"


apart = partial(Metric, basis="the worst case, {at}", better="lower", unless=_not_finite)
LOGITS_METRIC = apart(
    "{member}_logits_max_difference{scope}",
    logits["value"],
    "{member}: difference of logits",
    may_lose=DOUBLE,
    headline=True,
)
COSINE_METRIC = apart("{member}_one_minus_cosine{scope}", cosines["value"], "{member}: 1 - cosine of logits")
LATENCY, QUERIES = compared["latency_ms"], compared["queries_per_s"]


def _limits(run: Rows) -> list[dict[str, str]]:
    """Return the limits that the config's members are judged by, and where each comes from."""
    if run.config is None or run.config.record:
        return []
    rows, precisions = [], dict.fromkeys(way.precision for way in chosen(run.config))
    for quantity, measures in QUANTITIES.items():
        of = dict[Limit, list[str]]()
        for precision in precisions:
            of.setdefault(limit(run.config.backend, precision, quantity, run.config.reference), []).append(precision)
        for entry, names in of.items():
            about = {"precision": ", ".join(names), "limit": f"{entry.value:g}", "why": entry.why}
            rows.append({"quantity": quantity, "measures": measures, **about})
    return rows


def _executors(run: Rows) -> list[dict[str, str]]:
    """Return what really ran for each member, as it said itself; its switches are in the result."""
    rows = [{"member": row["member"], **(row.get("executor") or {})} for row in compared.rows(run)]
    names = dict.fromkeys(name for row in rows for name, value in row.items() if not isinstance(value, dict))
    return [{name: str(row.get(name, "")) for name in names} for row in rows]


def _matching(run: Rows) -> str:
    """Title the picture of all members by what came of them."""
    gated, failed = _names(answered, run, outcome=COMPARED, gates=True), _names(answered, run, outcome="FAIL")
    passed = f"{len({*gated} - {*failed})} of {len(gated)} members match the reference"
    return f"{passed}; beyond a limit: {listing(failed)}" if failed else passed


def _diverging(run: Rows) -> str:
    """Title the picture of layers by the first one beyond its limit."""
    first = {row["member"]: row["at"] for row in reversed(layers.unless(share=WITHIN).rows(run))}
    words = listing([f"{name} from {at} on" for name, at in first.items()])
    return f"Beyond its limit: {words}" if first else "No layer is beyond its limit"


def _apart(run: Rows) -> str:
    last = {row["member"]: row for row in curve.rows(run) if curve["value"].finite(row, run) is not None}
    far = max(last.values(), key=lambda row: row["value"])
    return f"After {far['index']} steps the loss of {far['member']} is {curve['value'].text(far, run)} away"


def _golden(run: Rows) -> Iterator[str]:
    if run.run.get("golden"):
        rows = [row for row in environment.rows(run) if row["members"] not in ("", row["reference"])]
        other = "; ".join(environment.text("{fact} {reference} there, {members} here", row, run) for row in rows)
        name, age = run.run["golden"], counted(int(run.run["golden_age_s"] // 86_400), "day")
        yield f"The reference is the golden folder {name}, recorded {age} ago{other and f'; other: {other}'}."


def _members(run: Rows) -> Iterator[str]:
    """Say what matches, what bf16 costs and what was not computed."""
    matching = answered.where(outcome="PASS", gates=True)
    if passed := _names(matching, run):
        bits = _names(matching, run, max_difference=0)
        yield f"Within the limits: {listing(passed)}" + f"; equal bit by bit: {listing(bits)}" * bool(bits) + "."
    for row in compared.where(precision="bf16").rows(run):
        values = [
            (words, largest["value"].finite(item, run))
            for quantity, words in COSTS.items()
            for item in largest.where(member=row["member"], quantity=quantity).rows(run)
        ]
        costs = [words.format(value) for words, value in values if value is not None]
        yield from [f"{row['member']} {listing(costs)}."] * bool(costs)
    if worse := _names(precise, run, accuracy="farther"):
        yield f"More than twice as far from double precision as the reference, so worse and not only different: {listing(worse)}."
    missing: dict[str, list[str]] = {}
    for row in answered.unless(outcome=COMPARED).rows(run):
        missing.setdefault(row["reason"], []).append(row["member"])
    yield from (f"Not computed: {listing(names)} ({reason})." for reason, names in missing.items())


def _warnings(run: Rows) -> list[str]:
    """Return what limits the meaning of the result: stand-ins for the model, an injected difference."""
    layer = run.config.planted_layer
    changed = f"The output of encoder layer {layer} was changed on purpose in every member"
    injected = [f"{changed} (planted_layer), to test whether the comparison detects it."] * (layer >= 0)
    return stand_ins([run.run.get("model"), run.run.get("init")]) + injected


def _missed(run: Rows) -> dict[str, list[str]]:
    ran = _names(members.unless(status="skipped"), run)
    return {"members": [name for name in run.config.members if name not in ran]}


def _asked(config: Any) -> bool:
    return not config.record


def _by_place(name: str, table: Table, y: str, title: Title, empty: str) -> Chart:
    """Draw differences in the order of their places, by member, with their limits."""
    curves = Line(table["value"], "member"), Line(table["limit"], "precision", "limit")
    return lines(name, *curves, x="index", y=y, title=title, empty=empty, even=True)


VERIFIED = (
    each(run, "{cases} inputs: logits, layers, gradients and a loss curve, against fp64"),
    each(recorded_logits, "the shipped recording of the same work, logits {value} apart"),
)
SPEC = Spec(
    tables=[members, differences, recorded, environment, run],
    metrics=[
        LOGITS_METRIC,
        COSINE_METRIC,
        Metric("{member}_latency_ms{scope}", LATENCY, "{member}: latency", "one row, synchronised", "lower"),
        Metric("{member}_queries_per_s{scope}", QUERIES, "{member}: queries", "1 / mean latency", "higher"),
        *run_metrics(run),
    ],
    checks=[
        Check(
            "parity", "Does this backend match the reference?", judge=_whole, kind="target", informs=True, when=_asked
        ),
        MATCHES,
        below(
            "shipped recording",
            "Does this machine compute what the machine of the shipped recording did?",
            (recorded["value"], recorded["limit"]),
            judge=_located,
            unless=lambda run: "" if recorded.rows(run) else "no recording of this work comes with the kit",
            when=_asked,
        ),
        above_zero(
            "recorded",
            "Did the reference compute the inputs of the recording?",
            run["cases"],
            when=lambda config: config.record,
        ),
        zero(
            "same weights and inputs",
            "Did every member use the reference's weights and inputs?",
            members["others"],
            when=_asked,
        ),
        Check(
            "tolerance sensitivity",
            "Does bf16 exceed the limits of fp32, as it must?",
            [(logits["value"], logits["limit"])],
            judge=_sensitive,
            when=_asked,
        ),
        below(
            "reference accuracy",
            "Is the reference itself close enough to double precision?",
            (run["reference_error"], run["reference_limit"]),
            unless=_all_skipped,
        ),
        below(
            "accuracy against double precision",
            "Is every member but bf16 within twice the reference's distance from double precision?",
            (precise["fp64_max_abs"], precise["twice"]),
            unless=lambda run: "" if precise.rows(run) else "no member but bf16 was compared",
            kind="target",
            informs=True,
        ),
        Check(
            "numerics unchanged",
            "Are all differences identical to those of the baseline?",
            judge=_unchanged,
            unless=_all_skipped,
            kind="target",
            informs=True,
        ),
    ],
    says=[
        each(
            run,
            "{model}, {parameters} parameters, computed on {cases} inputs; the reference is eager attention in fp32 on {reference_backend}.",
        ),
        _golden,
        each(
            recorded_logits,
            "The logits of the reference are {value} from those of the shipped recording, limit {limit}.",
        ),
        _members,
    ],
    shows=[
        Show("Outcomes", answered, OUTCOMES),
        Show("Beyond a limit", differences.ran().unless(share=WITHIN), "member quantity at value limit note"),
        Show("Not compared", differences.where(status="skipped"), "member quantity because"),
        Show("Eased limits of logits", worst.where(eased=bool, quantity=LOGITS), "member at limit eased"),
        Show("Limits and their sources", members, make=_limits),
        Show("Executed configuration", members, make=_executors),
        Show("Environments of reference and members", environment),
    ],
    charts=[
        grid(
            "members",
            replace(worst, title="{member}, {quantity}")["share"],
            x="member",
            y="quantity",
            title=_matching,
            empty="No member was compared.",
        ),
        _by_place(
            "divergence-by-depth", layers, "relative L2 distance of hidden states", _diverging, "No layer was compared."
        ),
        bars(
            "gradients",
            gradients["share"],
            title="The gradient farthest from the reference's is at {share} of its limit: {member}, {at}",
            empty="No gradients were compared.",
            line=1.0,
        ),
        _by_place("loss-curves", curve, "|loss - the reference's|", _apart, "No training steps were compared."),
    ],
    verified=lambda rows: [text for say in VERIFIED for text in say(rows)],
    warnings=_warnings,
    refuse=golden.refuse,
    missed=_missed,
)
