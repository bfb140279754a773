"""Synthetic pairs: the distribution against its formula, sample i against a second writing of the same definition."""

import dataclasses
import math
import threading

import numpy as np
import pytest

from benchlib.workloads.shards import Pairs, Source, entropy, generate

PAIRS = Pairs(samples=1000, sequence=32, vocabulary=64, seed=3)


def splitmix(counter, seed):
    """SplitMix64 as its authors print it, in Python's whole numbers."""
    mask = (1 << 64) - 1

    def mixed(state):
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & mask
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & mask
        return state ^ (state >> 31)

    golden = 0x9E3779B97F4A7C15
    return mixed((mixed(seed * golden & mask) + (counter + 1) * golden) & mask)


def test_a_sample_is_what_its_definition_says():
    got = generate(PAIRS, np.array([7, 999]))
    for row, index in enumerate((7, 999)):
        for token in range(PAIRS.sequence):
            draw = splitmix(index * PAIRS.sequence + token, PAIRS.seed)
            for part, uniform in enumerate((draw >> 32, draw & 0xFFFFFFFF)):
                assert got[row, part, token] == (uniform * uniform >> 32) * PAIRS.vocabulary >> 32
    assert got.dtype == np.int64 and got.shape == (2, 2, 32)


def test_a_sample_depends_on_seed_and_index_alone():
    whole = generate(PAIRS, np.arange(1000))
    order = np.random.default_rng(0).permutation(1000)
    assert np.array_equal(generate(PAIRS, order), whole[order])
    assert np.array_equal(generate(dataclasses.replace(PAIRS, samples=10**9), order[:5]), whole[order[:5]])
    assert len(np.unique(whole.reshape(1000, -1), axis=0)) == 1000
    other = generate(dataclasses.replace(PAIRS, seed=4), np.arange(1000))
    # Of equal tokens by chance: the sum of the squared shares is 0.039.
    assert abs(np.mean(other == whole) - 0.04) < 0.01


def test_the_tokens_have_the_stated_distribution_and_its_entropy():
    """Pearson's statistic of 2 million tokens, and the cross entropy of the counted shares beside the stated
    entropy."""
    tokens = generate(dataclasses.replace(PAIRS, samples=10**6), np.arange(31250))
    shares = np.bincount(tokens.ravel(), minlength=64) / tokens.size
    expected = np.array([math.sqrt((k + 1) / 64) - math.sqrt(k / 64) for k in range(64)])
    statistic = ((shares - expected) ** 2 / expected).sum() * tokens.size
    assert statistic < 113  # chi-square, 63 degrees: beyond it 1 in 10,000
    assert entropy(64) == pytest.approx(-(shares * np.log(shares)).sum(), abs=2e-3)
    assert entropy(1) == 0
    halves = [tokens[:, 0, 1:].ravel(), tokens[:, 0, :-1].ravel(), tokens[:, 1, 1:].ravel()]
    assert np.abs(np.corrcoef(halves) - np.eye(3)).max() < 0.005  # neither neighbours nor source and target go together


@pytest.mark.parametrize("read_ahead", [0, 1, 3])
def test_batches_come_in_order_no_further_than_the_read_ahead_and_their_threads_end(read_ahead):
    asked = []

    def orders():
        for step in range(100):
            asked.append(step)
            yield np.arange(step, 1000, 100) if step < 10 else np.array([1000])

    batches = Source(PAIRS, read_ahead=read_ahead).batches(orders())
    for step in range(10):
        assert np.array_equal(next(batches).numpy(), generate(PAIRS, np.arange(step, 1000, 100)))
        assert len(asked) == step + 1 + read_ahead
    with pytest.raises(IndexError, match="samples 1000 to 1000 of 1000"):
        list(batches)
    left = Source(PAIRS, read_ahead=read_ahead).batches([np.arange(9)] * 7)
    next(left)
    left.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("batches")]
