"""Checks: a question about columns, of a kind that says how a number is compared.

There is one comparison for all kinds: a number that is missing or not finite FAILS, unless its row says why it is
missing. Where fewer than three checks would share a kind, ``Check(..., judge=function)`` has a function of its own.
"""

import math
import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from benchlib.core.text import shortened
from benchlib.judge.checks import Ask, Kind, Status
from benchlib.judge.checks import Check as Judged
from benchlib.judge.impossible.claim import Claim
from benchlib.judge.impossible.rules import ask
from benchlib.judge.numbers import InvalidNumber
from benchlib.spec.tables import Ref, Row, Rows, write

listed = partial(shortened, between="; ")  # the first of some reasons, and how many more there are
Limit = float | Ref | Callable[[Any], float | None]  # a number, a column of the same row, or of the config


HOLDS = {"=": operator.eq, ">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}


@dataclass(frozen=True)
class Check:
    """One question. A name with columns in braces makes a check for each name, over the rows of that name.

    ``over`` are the columns that gate, each with its limit, with which a number is compared by ``sign``; up to a ``share`` of
    the limit it may miss an equal one, and none may be above ``most``. ``unless`` returns why a run leaves the question open
    (SKIPPED), ``when`` whether a config asks it at all. ``asked`` is the field of the config that sets a target, ``rule`` the
    rule of impossible numbers that the check shows. One that ``informs`` gates nothing.
    """

    name: str
    question: str
    over: Sequence[tuple[Ref, Limit]] = ()
    sign: str = "="
    share: float = 0.0
    most: float = math.inf
    judge: "Callable[[Check, Rows], Judged] | None" = None
    unless: Callable[[Rows], str] = lambda run: ""
    when: Callable[[Any], bool] = lambda config: True
    kind: Kind = "sanity"
    asked: str = ""
    rule: str = ""
    source: str = ""
    informs: bool = False

    @property
    def ask(self) -> Ask:
        return Ask(self.name, self.question, self.kind)

    def answer(self, status: Status, reason: str, **more: Any) -> Judged:
        """Return the answer; SKIPPED gates nothing unless it says so."""
        more = {"gates": status != "SKIPPED" and not self.informs, "source": self.source} | more
        return self.ask.answer(status, reason, **more)

    def miss(self, value: float, limit: float) -> float:
        """Return how far a number is from its limit: up to 1 passes."""
        if self.share:
            return off(value, limit) / self.share
        if self.sign == "<=" and limit > 0:
            return value / limit
        return 0.0 if HOLDS[self.sign](value, limit) and value <= self.most else math.inf

    def bound(self, limit: float, ref: Ref) -> str:
        most = f"<= {self.most:g}, " if self.most < math.inf else ""
        sign = f"within {self.share:.0%} of" if self.share else self.sign
        return f"{most}{sign} {write(limit, ref.col.unit)}"


def zero(name: str, question: str, *refs: Ref, **more: Any) -> Check:
    """Every number is 0."""
    return Check(name, question, [(ref, 0.0) for ref in refs], **more)


above_zero = partial(zero, sign=">")


def held(sign: str, name: str, question: str, *over: tuple[Ref, Limit], **more: Any) -> Check:
    """Every number is at most (``below``) or at least (``above``) its limit, or ``near`` it: up to a ``share`` of it."""
    return Check(name, question, over, sign, **more)


below, above, near = partial(held, "<="), partial(held, ">="), partial(held, "=")


def off(value: float, other: float) -> float:
    return abs(value / other - 1) if other else abs(value)


def reached(name: str, question: str, ref: Ref, asked: str, sign: str = ">=", **more: Any) -> Check:
    """The number is at least (``sign``: ``>=``, ``>`` or ``<``) the target that the field ``asked`` of the config sets.

    Without a target the reason says what was measured; a target that nothing was measured for is INCOMPLETE.
    """
    target = operator.attrgetter(asked)
    asks: dict[str, Any] = {"when": lambda config: "{" not in name or target(config) is not None, "kind": "target"}
    return Check(name, question, [(ref, target)], sign, judge=_target, asked=asked, **(asks | more))


def rule(name: str, question: str, of: str, needed: bool = False, **more: Any) -> Check:
    """A rule of impossible numbers holds for the columns with roles; ``needed``: FAIL where they state too little."""
    return Check(name, question, rule=of, sign="needed" if needed else "", **more)


def judge(check: Check, run: Rows, claims: Iterable[Claim]) -> Iterator[Judged]:
    """Yield the answers to a question: one, or one for each name."""
    try:
        reason = check.unless(run)
        checks = [] if reason else _by_name(check, run)
    except InvalidNumber as error:  # of what decides whether it is asked, or of what names the rows
        yield replace(check, name=check.name.split("{")[0].strip()).ask.fact(False, f"cannot be evaluated: {error}")
        return
    if reason:
        aim = f"{check.sign} {getattr(run.config, check.asked)}" if check.asked else ""
        yield check.answer("SKIPPED", reason, limit=aim)
    for one in checks:
        decide = partial(_rule, one, claims) if one.rule and not one.over else partial(one.judge or compare, one, run)
        yield one.ask.by(lambda _, decide=decide: decide())


def _by_name(check: Check, run: Rows) -> list[Check]:
    """Return a check for each name that its rows give it; without a row the check by its bare name."""
    if "{" not in check.name:
        return [check]
    groups = defaultdict[str, list[list[Row]]](lambda: [[] for _ in check.over])
    for place, (ref, _) in enumerate(check.over):
        for row in ref.table.rows(run):
            groups[ref.table.text(check.name, row, run)][place].append(row)
    if not groups:
        return [replace(check, name=" ".join(check.name.split("{")[0].split()).removesuffix(" at"))]
    return [
        replace(
            check, name=name, over=[(ref.of(rows), limit) for (ref, limit), rows in zip(check.over, own, strict=True)]
        )
        for name, own in groups.items()
    ]


def _limit(limit: Limit, row: Row, run: Rows) -> float | None:
    return limit.number(row, run) if isinstance(limit, Ref) else limit(run.config) if callable(limit) else limit


def compare(check: Check, run: Rows) -> Judged:
    """Judge every row: the one comparison of all kinds."""
    wrong, skipped, good, worst = list[str](), list[str](), 0, (-1.0, "", 0.0, "", "", "")
    for ref, threshold in check.over:
        for row in ref.table.rows(run):
            title, value, limit = ref.table.name_of(row, run), ref.number(row, run), _limit(threshold, row, run)
            numbers = [value] if ref.col.samples and value is not None else ref.numbers(row, run)
            if not numbers or limit is None:
                lacking = threshold if numbers else ref
                reason = lacking.why(row) if isinstance(lacking, Ref) else ""
                text = reason or f"no {lacking.col.heading if isinstance(lacking, Ref) else 'limit'}"
                (skipped if reason else wrong).append(f"{title}: {text}")
                continue
            shares = [(check.miss(item, limit) if math.isfinite(item) else math.inf, item) for item in numbers]
            share, item = max(shares, key=lambda pair: (pair[0], not math.isfinite(pair[1])))
            measured, bound = f"{ref.col.heading} {write(item, ref.col.unit)}", check.bound(limit, ref)
            if share > 1 or not math.isfinite(limit):
                note = f" ({text})" if (text := ref.table.text(ref.table.note, row, run)) else ""
                wrong.append(f"{title}: {measured}, not {bound}{note}")
            good += share <= 1
            if share > worst[0]:
                worst = (share, title, item, measured, bound, _unit(ref))
    share, title, value, measured, bound, unit = worst
    more: dict[str, Any] = {"limit": bound, "unit": unit} | ({"value": value} if title and math.isfinite(value) else {})
    tail = f"; skipped: {listed(skipped)}" if skipped else ""
    if wrong:
        return check.answer("FAIL", listed(wrong) + tail, **more)
    if not good:
        return check.answer("SKIPPED" if skipped else "FAIL", listed(skipped) or "there is no row to judge", **more)
    farthest = f", at the most {measured} ({title})" if share else ""
    text = f"{title}: {measured}" if good == 1 else f"{good:,} compared{farthest}"
    return check.answer("PASS", text + tail, **more)


def _unit(ref: Ref) -> str:
    return "" if ref.col.unit in ("count", "number", "error", "ratio") else ref.col.unit


def _target(check: Check, run: Rows) -> Judged:
    """Judge a target. One that is not set is no question; one that nothing was measured for is not met."""
    (ref, target), rows = check.over[0], check.over[0][0].table.rows(run)
    wanted = _limit(target, {}, run)
    if wanted is None:
        measured = ", ".join(ref.text(row, run) for row in rows if ref.number(row, run) is not None)
        unset = f"the {run.config.tier} tier sets no target for {run.config.backend}"
        reason = f"measured {measured}; {unset}" if measured else unset
        return check.answer("SKIPPED", reason, unit=_unit(ref))
    check = replace(check, source=check.source or f"target of the {run.config.tier} tier")
    judged = compare(check, run) if rows else check.answer("SKIPPED", "nothing that the target is for was measured")
    return judged.model_copy(update={"limit": check.bound(wanted, ref), "gates": not check.informs})


def _rule(check: Check, claims: Iterable[Claim]) -> Judged:
    """Name the claims that break the rule, else the one that comes nearest to it."""
    asked = ask(check.rule, claims)
    # One machine measured both sides of its own run: what is only rare elsewhere is a fault of the measurement here.
    for status, found in (("FAIL", ("FAIL", "AMBIGUOUS")), ("PASS", ("PASS",))):
        chosen = sorted((pair for pair in asked if pair[1].status in found), key=lambda pair: -(pair[1].value or 0.0))
        if chosen:
            words = [f"{subject}: {finding.reason}" for subject, finding in chosen]
            first, reason = chosen[0][1], listed(words if status == "FAIL" else words[:1])
            return check.answer(status, reason, limit=first.limit, value=first.value, unit=first.unit)  # type: ignore[arg-type]
    reason = "; ".join(finding.reason for _, finding in asked) or "the run does not report enough to evaluate it"
    return check.answer("FAIL" if check.sign else "SKIPPED", reason)
