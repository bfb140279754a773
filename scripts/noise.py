"""What unchanged runs look like on machines that disturb them, made up: to ask of a gate how often it is wrong.

A run is a series of n step rates about its own level, which differs between runs by the standard deviation ``between`` of its
logarithm. Notation: R runs, n samples.
"""

from collections.abc import Callable

import numpy as np

from benchlib.core.stats import windows

SAMPLES = 200
WITHIN = 0.10  # standard deviation of the samples of a run, of their logarithm
MEMORY = 0.7  # correlation of neighbours in autocorrelated noise: 200 samples say as much as 35
TAIL = 3  # degrees of freedom of the heavy tails
SHARED = 120  # samples of a run that may share the machine, their correlation, how many stall, and how much longer these take
SHARED_MEMORY, STALLED, STALL = 0.85, 0.05, 3.0

Kind = Callable[[np.random.Generator, int], np.ndarray]


def steady(generator: np.random.Generator, runs: int) -> np.ndarray:
    """Independent normal noise, (R, n)."""
    return WITHIN * generator.standard_normal((runs, SAMPLES))


def autocorrelated(
    generator: np.random.Generator, runs: int, samples: int = SAMPLES, memory: float = MEMORY
) -> np.ndarray:
    """Return noise whose neighbours resemble each other (first order), (R, n)."""
    noise = generator.standard_normal((runs, samples))
    for place in range(1, samples):
        noise[:, place] = memory * noise[:, place - 1] + np.sqrt(1 - memory**2) * noise[:, place]
    return WITHIN * noise


def heavy_tailed(generator: np.random.Generator, runs: int) -> np.ndarray:
    """Return noise with rare far outliers, (R, n)."""
    return WITHIN * generator.standard_t(TAIL, (runs, SAMPLES)) / np.sqrt(TAIL / (TAIL - 2))


def drifting(generator: np.random.Generator, runs: int) -> np.ndarray:
    """Return a drift by ``WITHIN`` over the run, up or down, with a third as much noise, (R, n)."""
    slope = generator.choice([-1, 1], (runs, 1)) * np.linspace(-0.5, 0.5, SAMPLES)
    return WITHIN * slope + steady(generator, runs) / 3


def stalling(generator: np.random.Generator, runs: int) -> np.ndarray:
    """Return autocorrelated noise in which one step of twenty stalls, (R, n)."""
    noise = autocorrelated(generator, runs, SHARED, SHARED_MEMORY)
    return noise - np.log(STALL) * (generator.random(noise.shape) < STALLED)


def neighbour(generator: np.random.Generator, runs: int) -> np.ndarray:
    """Return ``stalling`` noise; half of the runs have 40 to 80% of their speed for a third to all of the steps, (R, n)."""
    noise = stalling(generator, runs)
    for run in np.flatnonzero(generator.random(runs) < 1 / 2):
        start, length = generator.integers(0, SHARED // 2), generator.integers(SHARED // 3, SHARED)
        noise[run, start : start + length] += np.log(generator.uniform(0.4, 0.8))
    return noise


KINDS: dict[str, Kind] = {
    "steady": steady,
    "autocorrelated": autocorrelated,
    "heavy-tailed": heavy_tailed,
    "drifting": drifting,
    "stalling": stalling,
    "neighbour": neighbour,
}


def runs_of(kind: str, between: float, runs: int, seed: int = 0) -> np.ndarray:
    """Return made-up runs of a rate about 100, (R, n)."""
    generator = np.random.default_rng(seed)
    levels = between * generator.standard_normal((runs, 1))
    return 100.0 * np.exp(levels + KINDS[kind](generator, runs))


def windows_of(rates: np.ndarray) -> list[tuple[float, ...]]:
    """Return what each run keeps of its steps of equal work, (R, n): the rates of windows."""
    return [tuple(windows([1.0] * len(run), 1 / run)) for run in rates]
