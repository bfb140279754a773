"""The numbers of a run of the kit, found by the names that its metrics have with or without the suffix of a stand-in."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchlib.config import BaseConfig
from benchlib.metrics import Metric
from benchlib.results import Result

Samples = Mapping[str, Sequence[float]]


class Numbers:
    """The metrics of a run by name or by the start of a name, with its facts, raw samples and config."""

    def __init__(
        self,
        metrics: Sequence[Metric],
        *,
        world_size: int,
        facts: Mapping[str, Any] | None = None,
        tables: Mapping[str, Any] | None = None,
        samples: Samples | None = None,
        config: BaseConfig | None = None,
        result: Result | None = None,
    ) -> None:
        self.result = result
        self.metrics, self.world_size, self.config = metrics, world_size, config
        self.facts, self.tables, self.samples = facts or {}, tables or {}, samples or {}

    @classmethod
    def of(cls, result: Result, samples: Samples, config: BaseConfig | None) -> "Numbers":
        """Return those of a whole result; the config says how many ranks ran, where there is one."""
        return cls(
            result.metrics,
            world_size=config.world_size if config else max(1, result.world_size),
            facts=result.facts,
            tables=result.tables,
            samples=samples,
            config=config,
            result=result,
        )

    def metric(self, start: str) -> Metric | None:
        """Return the metric of this name, else the first whose name goes on with the suffix of a stand-in."""
        exact = next((metric for metric in self.metrics if metric.name == start), None)
        return exact or next((metric for metric in self.metrics if metric.name.startswith(f"{start}_")), None)

    def value(self, start: str) -> float | None:
        """Return the value of ``metric(start)``."""
        metric = self.metric(start)
        return metric.value if metric else None

    def raw(self, start: str) -> list[float]:
        """Return the raw samples of ``metric(start)``; none where some were left out, as in a baseline or a report."""
        metric = self.metric(start)
        found = list(self.samples.get(metric.name, [])) if metric else []
        return found if metric and len(found) == metric.n else []

    def count(self, name: str) -> int | None:
        """Return a fact that is a count; a list is summed."""
        value = self.facts.get(name)
        parts = value if isinstance(value, list) else [value]
        if not parts or not all(isinstance(part, int) and not isinstance(part, bool) and part >= 0 for part in parts):
            return None
        return sum(parts)
