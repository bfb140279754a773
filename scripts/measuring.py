"""What the scripts that measure share: interleaved rounds, a median with its interval, the machine in one line."""

import argparse
import os
import statistics
from collections.abc import Iterator, Sequence
from typing import TypeVar

from benchlib.core.machine import cpu_model, usable_cores
from benchlib.core.stats import average_interval

T = TypeVar("T")


def options_of(doc: str | None) -> argparse.ArgumentParser:
    """A parser whose help is the script's docstring as it stands."""
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def machine() -> str:
    return f"{cpu_model()}, {usable_cores()} cores, load {os.getloadavg()[0]:.1f}"


def interleaved(cases: Sequence[T], rounds: int) -> Iterator[T]:
    """All cases once per round, every second round backwards, so that a busy neighbour slows all of them alike."""
    for number in range(rounds):
        yield from cases if number % 2 == 0 else reversed(cases)


def spread(values: Sequence[float], form: str = ".2f") -> str:
    """Median and 95% interval; of fewer than five values their range."""
    low, high = average_interval(values) if len(values) > 4 else (min(values), max(values))
    return f"{statistics.median(values):{form}} ({low:{form}} to {high:{form}}, n = {len(values)})"


def ratio(above: Sequence[float], below: Sequence[float]) -> str:
    """Ratio formed within each round: its median and interval."""
    return spread([a / b for a, b in zip(above, below, strict=True)])
