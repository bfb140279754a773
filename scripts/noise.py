"""What unchanged runs look like on machines that disturb them, made up: to ask of a gate how often it is wrong.

A run is a series of n samples about its own level, which differs between runs by the standard deviation ``between`` of its
logarithm. Notation: R runs, n samples.
"""

from collections.abc import Callable

import numpy as np

SAMPLES = 200
WITHIN = 0.10  # standard deviation of the samples of a run, of their logarithm
MEMORY = 0.7  # correlation of neighbours in autocorrelated noise: 200 samples say as much as 35
TAIL = 3  # degrees of freedom of the heavy tails
THIRD = 1 / 3  # of the machine that the neighbour takes, in every third run, for half of it

Kind = Callable[[np.random.Generator, int], np.ndarray]


def steady(generator: np.random.Generator, runs: int) -> np.ndarray:
    """Independent normal noise, (R, n)."""
    return WITHIN * generator.standard_normal((runs, SAMPLES))


def autocorrelated(generator: np.random.Generator, runs: int) -> np.ndarray:
    """Return noise whose neighbours resemble each other (first order), (R, n)."""
    noise = generator.standard_normal((runs, SAMPLES))
    for place in range(1, SAMPLES):
        noise[:, place] = MEMORY * noise[:, place - 1] + np.sqrt(1 - MEMORY**2) * noise[:, place]
    return WITHIN * noise


def heavy_tailed(generator: np.random.Generator, runs: int) -> np.ndarray:
    """Return noise with rare far outliers, (R, n)."""
    return WITHIN * generator.standard_t(TAIL, (runs, SAMPLES)) / np.sqrt(TAIL / (TAIL - 2))


def drifting(generator: np.random.Generator, runs: int) -> np.ndarray:
    """Return a drift by ``WITHIN`` over the run, up or down, with a third as much noise, (R, n)."""
    slope = generator.choice([-1, 1], (runs, 1)) * np.linspace(-0.5, 0.5, SAMPLES)
    return WITHIN * slope + steady(generator, runs) / 3


def neighbour(generator: np.random.Generator, runs: int) -> np.ndarray:
    """Return independent noise; every third run shares the machine for half of its time, (R, n)."""
    noise = steady(generator, runs)
    starts = generator.integers(0, SAMPLES // 2 + 1, runs)
    for run in np.flatnonzero(generator.random(runs) < 1 / 3):
        noise[run, starts[run] : starts[run] + SAMPLES // 2] += np.log(1 - THIRD)
    return noise


KINDS: dict[str, Kind] = {
    "steady": steady,
    "autocorrelated": autocorrelated,
    "heavy-tailed": heavy_tailed,
    "drifting": drifting,
    "neighbour": neighbour,
}


def runs_of(kind: str, between: float, runs: int, seed: int = 0) -> np.ndarray:
    """Return made-up runs of a rate about 100, (R, n)."""
    generator = np.random.default_rng(seed)
    levels = between * generator.standard_normal((runs, 1))
    return 100.0 * np.exp(levels + KINDS[kind](generator, runs))
