"""The regression gate: how much worse than the accepted run a metric may get, judged by a ratio and its interval."""

import math
from collections.abc import Iterable
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from benchlib.checks import Check, Status
from benchlib.metrics import Metric, quantity
from benchlib.results import Result
from benchlib.stats import ratio_interval


class RegressionLimit(BaseModel):
    """How much worse a metric may get. Either a share of the baseline or an absolute amount in the metric's unit."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    metric: str
    share: float | None = None
    amount: float | None = None

    def text(self, direction: str) -> str:
        """The limit for a reader, as in ``-20 %`` or ``-1 point``."""
        sign = "-" if direction == "higher" else "+"
        return f"{sign}{self.share:.0%}" if self.share is not None else f"{sign}{self.amount:g}"


def regression_check(
    limit: RegressionLimit, new: Metric, new_samples: list[float], old: Metric, old_samples: list[float]
) -> Check:
    """Compare a metric with its baseline, by the ratio of the medians and its 95 % interval.

    FAIL when the whole interval is worse than the limit, PASS when the whole interval is within it, else AMBIGUOUS.
    A boundary value passes; better is never a regression. The direction is the metric's.
    """
    name, question = f"{new.name} vs baseline", f"Is {new.name} no worse than in the accepted run?"
    common: dict[str, Any] = {
        "name": name,
        "kind": "regression",
        "question": question,
        "unit": new.unit,
        "source": "baseline",
    }
    if new.value is None or old.value is None or not math.isfinite(new.value):
        if new.value is None and new.provenance != "not_available":
            return Check(**common, status="FAIL", reason=f"not a number: {new.reason}")
        which = "this run" if new.value is None else "the baseline"
        return Check(
            **common,
            status="NOT_COMPARABLE",
            reason=f"{which} has no value: {(new if new.value is None else old).reason}",
            value=new.value,
        )
    shown = f"{new.text} against {old.text}"
    text = f"{limit.text(new.direction)} of {old.text}"
    higher = new.direction == "higher"
    if limit.amount is not None or old.value <= 0:
        # Points and counts: one number a run, and a ratio has no meaning near zero.
        allowed = limit.amount if limit.amount is not None else (limit.share or 0) * abs(old.value)
        loss = old.value - new.value if higher else new.value - old.value
        # Decimal numbers such as 88.5 - 87.5 miss the exact boundary by rounding, which must still pass.
        passed = loss <= allowed + 1e-9 * max(1.0, abs(old.value))
        return Check(
            **common,
            status="PASS" if passed else "FAIL",
            reason=f"{shown}: {_change(-loss if higher else loss, new.unit)}",
            value=new.value,
            limit=text,
        )
    ratio, low, high = ratio_interval(new_samples or [new.value], old_samples or [old.value])
    assert limit.share is not None
    # The side of the interval that is better for the run, and the one that is worse.
    best, worst, bound = (high, low, 1 - limit.share) if higher else (low, high, 1 + limit.share)
    edge = 1e-9
    outside = (best < bound - edge) if higher else (best > bound + edge)
    inside = (worst >= bound - edge) if higher else (worst <= bound + edge)
    status: Status = "FAIL" if outside else "PASS" if inside else "AMBIGUOUS"
    advice = "; the interval spans the limit: repeat the run" if status == "AMBIGUOUS" else ""
    reason = f"{shown}: ratio {ratio:.3f}, 95 % interval {low:.3f} to {high:.3f}{advice}"
    return Check(**common, status=status, reason=reason, value=new.value, limit=text)


def _change(amount: float, unit: str) -> str:
    return f"{'+' if amount >= 0 else '-'}{quantity(abs(amount), unit)}"


def open_checks(
    limits: Iterable[RegressionLimit], result: Result, status: Literal["NO_BASELINE", "NOT_COMPARABLE"], reason: str
) -> list[Check]:
    """Make the regression checks of a run that has nothing to compare with."""
    checks = []
    for limit in limits:
        metric = result.metric(limit.metric)
        if metric is None or metric.value is None:
            continue
        checks.append(
            Check(
                name=f"{metric.name} vs baseline",
                kind="regression",
                question=f"Is {metric.name} no worse than in the accepted run?",
                status=status,
                reason=f"measured {metric.text}; {reason}",
                value=metric.value,
                unit=metric.unit,
                limit=limit.text(metric.direction),
                source="baseline",
            )
        )
    return checks
