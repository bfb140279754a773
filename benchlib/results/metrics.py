"""Metrics: named values that say where they come from, and how much worse than accepted ones they may get."""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from benchlib.core.errors import UserError
from benchlib.core.stats import Average, Summary, summary
from benchlib.core.text import quantity

Direction = Literal["higher", "lower", "none"]
Provenance = Literal["measured", "derived", "claimed", "not_available"]
MAX_VALUE = 1e100  # no unit comes near it, and its square is still a float


def _possible(value: float) -> float:
    if math.isfinite(value) and abs(value) > MAX_VALUE:
        raise ValueError(f"{value:g} is too large")
    return value


Number = Annotated[float, AfterValidator(_possible)]


class Metric(BaseModel):
    """A named value with unit, direction (which way is better) and provenance.

    ``stored`` is the ``average`` of ``n`` samples, or the one sample; NaN and infinity are kept and written as such
    (under the name ``value``). It is None where the provenance is ``not_available``; ``reason`` then says why. The raw
    samples go to ``samples.parquet``.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings", serialize_by_alias=True)

    name: str
    stored: Number | None = Field(alias="value")
    unit: str
    direction: Direction
    provenance: Provenance
    n: int = 1
    average: Average = "median"
    ci_low: Number | None = None
    ci_high: Number | None = None
    reason: str = ""
    samples: list[float] = Field(default_factory=list, exclude=True, repr=False)

    @property
    def value(self) -> float | None:
        return self.stored if self.stored is not None and math.isfinite(self.stored) else None

    @property
    def fault(self) -> str:
        """Why the metric has no value although it should: ``missing``, ``nan``, ``inf``; '' where it has one or is not available."""
        if self.stored is None:
            return "" if self.provenance == "not_available" else "missing"
        ends = (self.stored, self.ci_low, self.ci_high)
        return next((str(end) for end in ends if end is not None and not math.isfinite(end)), "")

    @property
    def text(self) -> str:
        """The value for a reader: three digits and the unit, ``not available``, or what stands in place of a number."""
        if self.value is None:
            return "not available" if self.provenance == "not_available" else self.fault
        return quantity(self.value, self.unit)


def measured(
    name: str,
    samples: float | Sequence[float],
    unit: str,
    direction: Direction = "none",
    *,
    derived: bool = False,
    reason: str = "",
    average: Average = "median",
) -> Metric:
    """Make a metric of samples: their average, with its interval from five on. ``derived``: computed from measured values.

    A sample that is not finite becomes the value: such a metric fails its checks.
    """
    values = [float(value) for value in ([samples] if isinstance(samples, (int, float)) else samples)]
    if not values:
        return not_available(name, unit, direction, reason or "no samples were taken")
    if wrong := [value for value in values if not math.isfinite(value)]:
        stats = Summary(wrong[0], None, None)
        reason = f"{len(wrong)} of {len(values)} samples are not finite ({wrong[0]})"
    else:
        stats = summary(values, average)
    ends = {
        "value": stats.value,
        "ci_low": stats.ci_low,
        "ci_high": stats.ci_high,
        "n": len(values),
        "average": average,
        "samples": values,
    }
    provenance: Provenance = "derived" if derived else "measured"
    return Metric(name=name, unit=unit, direction=direction, provenance=provenance, reason=reason, **ends)


def not_available(name: str, unit: str, direction: Direction, reason: str) -> Metric:
    return Metric(name=name, value=None, unit=unit, direction=direction, provenance="not_available", n=0, reason=reason)


class RegressionLimit(BaseModel):
    """How much worse a metric may get: a share of the baseline (of a rate 1 allows anything) or an amount in its unit."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    metric: str
    share: float | None = Field(None, ge=0, le=1)
    amount: float | None = Field(None, ge=0)

    def text(self, direction: str) -> str:
        sign = "-" if direction == "higher" else "+"
        return f"{sign}{self.share:.0%}" if self.share is not None else f"{sign}{self.amount:g}"


def adjusted(limits: Sequence[RegressionLimit], wanted: Mapping[str, float]) -> list[RegressionLimit]:
    """Return limits with the shares and amounts that a user ``wanted``, by the beginning of a metric's name; ``UserError`` for a
    share above 1."""
    changed = []
    for limit in limits:
        name = max((name for name in wanted if named(name, limit.metric)), key=len, default=None)
        if name is not None and limit.share is not None and wanted[name] > 1:
            raise UserError(f"limits.{name} = {wanted[name]:g}: a share of the baseline from 0 to 1, as in 0.2 for 20%")
        part = "share" if limit.share is not None else "amount"
        changed.append(limit if name is None else limit.model_copy(update={part: wanted[name]}))
    return changed


def named(name: str, metric: str) -> bool:
    """Tell whether a name stands for a metric: it is its own, or that without its scope."""
    return metric == name or metric.startswith(f"{name}_")
