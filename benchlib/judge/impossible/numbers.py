"""What the names of the kit's own metrics stand for: a unit by their ending, and what was measured by their scope."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from benchlib.config.schema import BaseConfig
from benchlib.results.metrics import Metric
from benchlib.results.run import Result

# What may stand in for a real model on the whole of SQuAD v1.1; these words end a name (SquadConfig.quality_scope).
SCOPES = ("minisquad", "files", "subset", "tiny", "random", "cut")
SCOPE = re.compile(rf"(?:_(?:{'|'.join(SCOPES)}))*$")

SCORES = ("loss", "loss_first", "loss_final", "f1", "exact_match")
RATIOS = ("padding_share", "exchange_overlap", "rank_skew", "mfu")
ENDINGS = {
    "gbytes_per_s": "GB/s",
    "samples_per_s": "samples/s",
    "tokens_per_s": "tokens/s",
    "flops_per_s": "FLOP/s",
    "flops": "FLOP/s",
    "gbps": "Gbps",
    "socket_share": "ratio",
    "gb": "GB",
    "us": "us",
    "ms": "ms",
    "s": "s",
    "w": "W",
    "c": "°C",
    "j": "J",
}  # the first that fits counts


def base(name: str) -> str:
    """Return a name without its scope: ``f1_minisquad_tiny`` -> ``f1``."""
    return SCOPE.sub("", name)


def unit_of(name: str) -> str | None:
    """Return the unit that a name stands for, None for a name that stands for none."""
    plain = base(name)
    if plain in SCORES:
        return ""
    if plain in RATIOS:
        return "ratio"
    ending = next((ending for ending in ENDINGS if plain.endswith(f"_{ending}") or plain == ending), None)
    if ending == "s" and plain.endswith("_per_s"):
        return None  # a rate of something that the table does not name
    return ENDINGS[ending] if ending else None


# The numbers of a run of the kit, found by the names that its metrics have with or without the suffix of a stand-in.


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
