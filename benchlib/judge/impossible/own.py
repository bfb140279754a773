"""What a result of the kit states, as claims: each benchmark says what its numbers are, and all values are finite."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from benchlib.benchmarks import of_run
from benchlib.config.schema import BaseConfig
from benchlib.core.errors import UserError
from benchlib.judge.impossible.claim import Claim, Quantity
from benchlib.results.metrics import Metric
from benchlib.results.run import Result, Run

Samples = Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class Numbers:
    """The metrics of a run with its facts, tables, raw samples (by metric) and config."""

    benchmark: str
    metrics: Sequence[Metric]
    world_size: int
    facts: Mapping[str, Any] = field(default_factory=dict)
    tables: Mapping[str, Any] = field(default_factory=dict)
    samples: Samples = field(default_factory=dict)
    config: BaseConfig | None = None

    @classmethod
    def of(cls, result: Result, samples: Samples | None = None, config: BaseConfig | None = None) -> "Numbers":
        """Return those of a result; the config says how many ranks ran, where there is one."""
        ranks = config.world_size if config else max(1, result.world_size)
        return cls(result.benchmark, result.metrics, ranks, result.facts, result.tables, samples or {}, config)

    @classmethod
    def of_run(cls, run: Run) -> "Numbers":
        """Return those of a run folder that has a result."""
        assert run.result is not None
        return cls.of(run.result, run.samples, run.config)

    def metric(self, start: str) -> Metric | None:
        """Return the metric of this name, else the first whose name goes on with the suffix of a stand-in."""
        exact = next((metric for metric in self.metrics if metric.name == start), None)
        return exact or next((metric for metric in self.metrics if metric.name.startswith(f"{start}_")), None)

    def value(self, start: str) -> float | None:
        """Return the value of ``metric(start)``."""
        metric = self.metric(start)
        return metric.value if metric else None

    def positive(self, start: str) -> float | None:
        """Return the value of ``metric(start)`` where it is above zero: what something is divided by."""
        value = self.value(start)
        return value if value and value > 0 else None

    def raw(self, start: str) -> list[float]:
        """Return the raw samples of ``metric(start)``; none where some were left out, as in a baseline or a report."""
        metric = self.metric(start)
        samples = list(self.samples.get(metric.name, [])) if metric else []
        return samples if metric and len(samples) == metric.n else []

    def count(self, name: str) -> int | None:
        """Return a fact that is a count; a list is summed."""
        value = self.facts.get(name)
        parts = value if isinstance(value, list) else [value]
        if not parts or not all(isinstance(part, int) and not isinstance(part, bool) and part >= 0 for part in parts):
            return None
        return sum(parts)

    def rows(self, table: str) -> list[dict[str, Any]]:
        """Return the rows of a table, none where there is no such table."""
        rows = self.tables.get(table)
        return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


def own_claims(numbers: Numbers) -> list[Claim]:
    """Return what a result states, nothing for a skipped run; ``UserError`` where a value is outside its field's range.

    Of a benchmark that this version does not know only the values themselves can be judged.
    """
    if not numbers.metrics and not numbers.tables:
        return []
    try:
        stated = own.claims(numbers) if (own := of_run(numbers.benchmark)) else []
        return [*stated, Claim(quantities=quantities(numbers))]
    except (ValidationError, TypeError) as error:
        first = error.errors()[0] if isinstance(error, ValidationError) else {"loc": ("a table",), "msg": str(error)}
        where = ".".join(map(str, first["loc"]))
        raise UserError(f"the result of {numbers.benchmark} states an invalid {where}: {first['msg']}") from None


def quantities(numbers: Numbers) -> list[Quantity]:
    """Return every measured or derived value with its raw samples."""
    stated = []
    for metric in numbers.metrics:
        if metric.value is None and metric.provenance not in ("measured", "derived"):
            continue
        raw = list(numbers.samples.get(metric.name, metric.samples))
        finite = all(map(math.isfinite, raw))
        stated.append(
            Quantity(
                name=metric.name,
                value=metric.value if finite else None,
                unit=metric.unit,
                samples=raw if finite else [],
                # Fewer raw samples than the value is of were thinned, as in a baseline.
                median_of_samples=len(raw) == metric.n,
                low=metric.ci_low,
                high=metric.ci_high,
            )
        )
    return stated
