"""Synthetic pairs of token sequences, source and target: what a sample is, wherever it lies.

Sample i depends on the seed and on i alone. Its tokens come from a counter, not from a generator with a state, so that memory,
any number of shards and any rank give the same sample. Notation: n samples, S tokens of a sequence, V tokens of the vocabulary.
"""

from dataclasses import dataclass

import numpy as np

_BLOCK = 1 << 14  # draws of 8 bytes at a time: the few arrays of a block stay in the second-level cache
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX = ((np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)), (np.uint64(27), np.uint64(0x94D049BB133111EB)))
_LAST, _HALF, _LOW = np.uint64(31), np.uint64(32), np.uint64(0xFFFFFFFF)


@dataclass(frozen=True)
class Pairs:
    """``samples`` pairs of S tokens each, below V. ``token_bytes`` (8 or 2) is the width of a token on a disk, not in memory."""

    samples: int
    sequence: int
    vocabulary: int
    seed: int
    token_bytes: int = 8

    @property
    def sample_bytes(self) -> int:
        """Bytes of a sample on a disk, source and target."""
        return 2 * self.sequence * self.token_bytes


def generate(pairs: Pairs, indices: np.ndarray) -> np.ndarray:
    """Return the samples ``indices``, int64 (n,), as int64 (n, 2, S): source and target.

    Token k has the probability sqrt((k + 1) / V) - sqrt(k / V): floor(V u^2) for a uniform u of 32 bits, in whole numbers,
    so that every machine gives the same. One draw of SplitMix64 (G. L. Steele, D. Lea and C. H. Flood, "Fast splittable
    pseudorandom number generators", OOPSLA 2014) at the counter i S + j gives token j of both sequences of sample i. Raises
    ``IndexError`` for an index beyond the samples.
    """
    indices = np.ascontiguousarray(indices, np.int64)
    if len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < pairs.samples:
        raise IndexError(f"samples {indices.min()} to {indices.max()} of {pairs.samples}")
    tokens = np.empty((len(indices), 2, pairs.sequence), np.int64)
    rows = max(1, _BLOCK // pairs.sequence)
    for low in range(0, len(indices), rows):
        _fill(pairs, indices[low : low + rows], tokens[low : low + rows].view(np.uint64))
    return tokens


def _fill(pairs: Pairs, indices: np.ndarray, tokens: np.ndarray) -> None:
    start = _mixed(np.array([pairs.seed % (1 << 64)], np.uint64) * _GOLDEN)  # neighbouring seeds start far apart
    counters = indices.astype(np.uint64)[:, None] * np.uint64(pairs.sequence)
    draws = _mixed((counters + np.arange(1, pairs.sequence + 1, dtype=np.uint64)) * _GOLDEN + start)
    for part, uniform in enumerate((draws >> _HALF, np.bitwise_and(draws, _LOW, out=draws))):
        np.multiply(uniform, uniform, out=uniform)
        np.right_shift(uniform, _HALF, out=uniform)
        np.multiply(uniform, np.uint64(pairs.vocabulary), out=uniform)
        np.right_shift(uniform, _HALF, out=tokens[:, part])


def _mixed(state: np.ndarray) -> np.ndarray:
    scratch = np.empty_like(state)
    for shift, factor in _MIX:
        np.right_shift(state, shift, out=scratch)
        np.bitwise_xor(state, scratch, out=state)
        np.multiply(state, factor, out=state)
    np.right_shift(state, _LAST, out=scratch)
    return np.bitwise_xor(state, scratch, out=state)


def entropy(vocabulary: int) -> float:
    """Return the entropy of a token in nats: the loss of a model that has learnt the distribution and nothing else can be."""
    edges = np.sqrt(np.arange(vocabulary + 1) / vocabulary)
    shares = np.diff(edges)
    return float(-(shares * np.log(shares)).sum())
