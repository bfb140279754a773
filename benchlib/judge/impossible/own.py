"""What a result of the kit states, as claims: each benchmark says what its numbers are, and all values are finite."""

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from benchlib.benchmarks import of_run
from benchlib.config.schema import BaseConfig
from benchlib.core.errors import explained
from benchlib.core.events import read_events
from benchlib.judge.impossible.claim import Claim, Quantity, Whole
from benchlib.judge.numbers import InvalidNumber, within
from benchlib.results.run import Result, Run

MIN_KEPT = 10  # samples of a longer series that tell where its median was
CLOCKS_S = 1.0  # between the wall clock and the monotonic one


@dataclass(frozen=True)
class Numbers:
    """A result with what lies beside it: raw samples (by metric, and of rows), config and machine.

    ``folder`` is that of the run, where it lies on this machine: what it keeps beside its result is held against it.
    """

    result: Result
    samples: Mapping[str, Sequence[float]] = field(default_factory=dict)
    config: BaseConfig | None = None
    machine: Mapping[str, Any] = field(default_factory=dict)
    folder: Path | None = None

    @classmethod
    def of_run(cls, run: Run) -> "Numbers":
        """Return those of a run that has a result."""
        assert run.result is not None
        return cls(run.result, {**run.samples, **run.row_samples}, run.config, run.machine, run.path)

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
            return [*stated, Claim(quantities=[*quantities(self), *_recorded(self)], wholes=_whole_run(self))]
        except (ValidationError, TypeError, KeyError) as error:
            why = explained(error) if isinstance(error, ValidationError) else f"a table: {error}"
            raise InvalidNumber(f"the result of {name} states an invalid number: {why}") from None

    def __iter__(self) -> Iterator[Claim]:
        """Yield the claims when a rule asks for them, so that what is missing fails the check that asks."""
        return iter(self.claims)


def quantities(numbers: Numbers) -> list[Quantity]:
    stated = []
    for metric in numbers.result.metrics:
        if metric.value is None and metric.provenance not in ("measured", "derived"):
            continue
        raw = list(numbers.samples.get(metric.name, metric.samples))
        finite = all(map(math.isfinite, raw))
        fields: dict[str, Any] = {"unit": metric.unit, "most": _most(numbers, metric.name, metric.unit)}
        fields |= {"low": metric.ci_low, "high": metric.ci_high, "samples": raw if finite else []}
        # Fewer raw samples than the value is of were thinned, as in a baseline.
        fields |= {"value": metric.value if finite else None, "median_of_samples": len(raw) == metric.n}
        stated.append(Quantity(name=metric.name, **fields))
        if finite and MIN_KEPT <= len(raw) < metric.n and metric.value is not None:
            # Of thinned samples the middle fifth holds the median of all.
            ordered, fifth = sorted(raw), (len(raw) - 1) / 10
            ends = {"low": ordered[math.floor(4 * fifth)], "high": ordered[math.ceil(6 * fifth)]}
            stated.append(Quantity(name=f"{metric.name} beside its kept samples", value=metric.value, **ends))
    return stated


def _most(numbers: Numbers, name: str, unit: str) -> float | None:
    """Return the most that a reading of the run's machine can be, by what the machine has; None where that is not known."""
    if unit == "points":  # of F1 and exact match
        return 100.0
    backend = numbers.config.backend if numbers.config else ""
    cores, memory = (numbers.machine.get("cpu") or {}).get("logical_cores"), numbers.machine.get("memory_bytes")
    if name == "utilization" and unit == "%":
        # Processor time is counted in hundredths of a second: a reading a second may be some percent too high.
        return 100.0 if backend not in ("", "cpu") else 110.0 * cores if isinstance(cores, int) else None
    if name.startswith("resident_memory_gb") and isinstance(memory, (int, float)):
        return memory / 1e9
    if not name.startswith("device_memory_gb") or getattr(numbers.config, "workers", None):  # theirs are other devices
        return None
    device = ((numbers.machine.get("devices") or {}).get("backends") or {}).get(backend) or {}
    sizes = device.get("memory_bytes") or []
    return max(sizes) / 1e9 if isinstance(sizes, list) and sizes else None


def _whole_run(numbers: Numbers) -> list[Whole]:
    """Return what the clocks of a run say of its duration; writing its files comes after the last look at them."""
    total_s, ended_at = numbers.result.value("total_s"), numbers.result.ended_at
    if total_s is None or not ended_at or (elapsed_s := ended_at - numbers.result.started_at) <= 0:
        return []
    return [Whole(name="the time from begin to end", whole=elapsed_s + CLOCKS_S, parts={"total_s": total_s})]


def _recorded(numbers: Numbers) -> list[Quantity]:
    """Return the series of steps beside those of the events, which were written while a training went on."""
    if numbers.folder is None:
        return []
    # A step that was done again after a failure is written again: the later line counts.
    steps = {event.get("step"): event for event in read_events(numbers.folder, {"step"}) if event["source"] == "rank0"}
    events = [steps[step] for step in sorted(step for step in steps if isinstance(step, int))]
    stated = list[Quantity]()
    for name in ("loss", "step_s"):
        recorded = [event.get(name) for event in events]
        # A stand-in's name goes on with a suffix.
        named = [metric for metric in numbers.result.metrics if f"{metric.name}_".startswith(f"{name}_")]
        metric = min(named, key=lambda metric: len(metric.name), default=None)
        samples = list(numbers.samples.get(metric.name, ())) if metric else []
        if metric and metric.value is not None and len(samples) == metric.n and all(map(within, recorded)):
            both = {"samples": samples, "recorded": recorded}
            stated.append(Quantity(name=f"{name} of each step", value=metric.value, **both))
    return stated
