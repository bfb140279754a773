"""What a result of the kit states, as claims: each benchmark says what its numbers are, and all values are finite."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pydantic import ValidationError

from benchlib.benchmarks import of_run
from benchlib.config.schema import BaseConfig
from benchlib.core.errors import explained
from benchlib.judge.impossible.ceilings import FLOP, ceiling, least_parameters
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
        """Yield each metric by its least sample, since one below zero may be hidden behind the median, and with its physical ceiling."""
        for metric in self.result.metrics:
            if metric.value is not None or metric.provenance in ("measured", "derived"):
                values = [metric.stored, *self.samples.get(metric.name, metric.samples)]
                numbers = [value for value in values if value is not None and within(value)]
                least = min(numbers) if len(numbers) == len(values) else None
                yield self._bounded(Quantity(name=metric.name, unit=metric.unit, value=least, stated=metric.value))
                if metric.unit == "tokens/s" and metric.value and self._parameters:
                    name = f"{metric.name} x 2 FLOP x {self._parameters / 1e9:g} billion parameters"
                    flops = 2 * self._parameters * metric.value
                    yield self._bounded(Quantity(name=name, unit=FLOP, value=flops, stated=flops))

    def _bounded(self, value: Quantity) -> Quantity:
        served = len(getattr(self.config, "workers", ()))
        ranks = max(1, self.result.world_size)
        if served and value.unit == FLOP:
            kind, devices = "server", served
        elif self.result.backend == "cpu":
            kind, devices = "processors", self.config.nnodes if self.config else ranks
        else:
            kind, devices = "accelerator", ranks
        precision = str(self.result.facts.get("precision") or getattr(self.config, "precision", ""))
        bound = ceiling(value.name, value.unit, kind, devices, precision)
        if bound is None or value.stated is None:
            return value
        return value.model_copy(update={"most": bound.most, "least": bound.least, "ceiling_source": bound.why})

    @functools.cached_property
    def _parameters(self) -> float:
        """The fewest parameters of the models that the run names; 0 where no name says it."""
        config = self.config
        named = [row["model"] for row in self.result.tables.get("workers", []) if isinstance(row.get("model"), str)]
        asked = getattr(config, "model", "")
        return 0.0 if getattr(config, "shrink", 1) > 1 else least_parameters(named or [str(asked)])
