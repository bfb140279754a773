"""What a result of the kit states, as claims: each benchmark says what its numbers are, and all values are finite."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pydantic import ValidationError

from benchlib.benchmarks import of_run
from benchlib.config.schema import BaseConfig
from benchlib.core.errors import explained
from benchlib.judge.impossible.claim import Claim, Quantity
from benchlib.judge.numbers import InvalidNumber, within
from benchlib.results.run import Result, Run


@dataclass(frozen=True)
class Numbers:
    """A result with what lies beside it: raw samples (by metric, and of rows) and config."""

    result: Result
    samples: Mapping[str, Sequence[float]] = field(default_factory=dict)
    config: BaseConfig | None = None

    @classmethod
    def of_run(cls, run: Run) -> "Numbers":
        """Return those of a run that has a result."""
        assert run.result is not None
        return cls(run.result, {**run.samples, **run.row_samples}, run.config)

    @functools.cached_property
    def claims(self) -> list[Claim]:
        """What the result states, nothing for a skipped run; ``InvalidNumber`` where a value is outside its field's range.

        Of a benchmark that this version does not know only the values themselves can be judged.
        """
        name = self.result.benchmark
        if not self.result.metrics and not self.result.tables:
            return []
        try:
            stated = own.spec.claims(self) if (own := of_run(name)) else []
            return [*stated, Claim(quantities=list(self._quantities()))]
        except (ValidationError, TypeError, KeyError) as error:
            why = explained(error) if isinstance(error, ValidationError) else f"a table: {error}"
            raise InvalidNumber(f"the result of {name} states an invalid number: {why}") from None

    def __iter__(self) -> Iterator[Claim]:
        """Yield the claims when a rule asks for them, so that what is missing fails the check that asks."""
        return iter(self.claims)

    def _quantities(self) -> Iterator[Quantity]:
        """Yield each metric by its least sample: one below zero may be hidden behind the median."""
        for metric in self.result.metrics:
            if metric.value is not None or metric.provenance in ("measured", "derived"):
                values = [metric.stored, *self.samples.get(metric.name, metric.samples)]
                numbers = [value for value in values if value is not None and within(value)]
                least = min(numbers) if len(numbers) == len(values) else None
                yield Quantity(name=metric.name, unit=metric.unit, value=least)
