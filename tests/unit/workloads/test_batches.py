"""Batches: each sample once, the same for any number of ranks, little padding, right arrays."""

import numpy as np
import pytest

from benchlib.workloads.features import Features, collate, cut, epoch_batches, samples_of, share, steps_per_epoch

LENGTHS = np.random.Generator(np.random.PCG64(1)).integers(40, 385, 1003)


def _features(lengths, training=True):
    starts = np.concatenate([[0], np.cumsum(lengths)])
    count = len(lengths)
    return Features(
        input_ids=np.arange(1, starts[-1] + 1, dtype=np.int32), starts=starts, context_start=np.full(count, 3, np.int32),
        example_index=np.arange(count, dtype=np.int32), start_positions=np.arange(count, dtype=np.int32) if training else None,
        end_positions=np.arange(count, dtype=np.int32) + 1 if training else None, char_start=None, char_end=None, max_length=20, suffix=1,
        cls_index=0, token_types=True,
    )  # fmt: skip


def test_an_epoch_has_each_sample_once_and_the_incomplete_batch_last():
    batches = epoch_batches(LENGTHS, 16, seed=3, epoch=0)
    assert sorted(np.concatenate(batches).tolist()) == list(range(len(LENGTHS)))
    assert [len(batch) for batch in batches] == [16] * 62 + [11]
    for seed, epoch in ((3, 0), (3, 1), (4, 0)):
        same = (np.concatenate(batches) == np.concatenate(epoch_batches(LENGTHS, 16, seed, epoch))).all()
        assert same == ((seed, epoch) == (3, 0))


def test_grouping_leaves_little_padding_and_no_order_by_length():
    batches = epoch_batches(LENGTHS, 16, 0, 0)[:-1]
    padded = sum(len(batch) * LENGTHS[batch].max() for batch in batches)
    assert padded / sum(LENGTHS[batch].sum() for batch in batches) < 1.03
    means = np.array([LENGTHS[batch].mean() for batch in batches])
    assert abs(np.corrcoef(means, np.arange(len(means)))[0, 1]) < 0.4


@pytest.mark.parametrize("shares", [[16], [8, 8], [6, 5, 5], [12, 4], [1, 15], [0, 16], [7, 0, 9], [1] * 16])
def test_shares_of_a_batch_are_whole_and_of_like_length(shares):
    batch = np.arange(16)
    mine = [share(batch, LENGTHS, shares, rank) for rank in range(len(shares))]
    assert [len(samples) for samples in mine] == shares
    assert sorted(np.concatenate(mine).tolist()) == batch.tolist()
    ordered = batch[np.argsort(-LENGTHS[batch], kind="stable")].tolist()
    for samples in filter(len, mine):
        # Where a rank's turns come on average: in the middle of the batch, to within the distance of two of its turns.
        middle = np.mean([ordered.index(sample) for sample in samples])
        assert abs(middle - 7.5) <= 16 / len(samples) / 2
        parts = cut(samples, 3)
        assert np.concatenate(parts).tolist() == samples.tolist() and 0 < len(parts) <= 3
    with pytest.raises(ValueError, match="must add up"):
        share(batch, LENGTHS, [*shares, 1], 0)


@pytest.mark.parametrize(("steps", "samples"), [(0, 0), (1, 16), (6, 96), (7, 100), (8, 116), (14, 200)])
def test_samples_of_steps(steps, samples):
    assert steps_per_epoch(100, 16) == 7
    assert samples_of(steps, 100, 16) == samples


def test_collate_pads_to_the_longest_and_keeps_every_token():
    features = _features([5, 11, 7])
    batch = collate(features, np.array([1, 2]), pad_id=0, multiple=8)
    assert (batch.shape, batch.tokens) == ((2, 16), 18)
    for row, window in enumerate((1, 2)):
        length, first = int(features.lengths[window]), int(features.starts[window]) + 1
        lines = [list(range(first, first + length)), [1] * length, [0] * 3 + [1] * (length - 3)]
        for name, line in zip(("input_ids", "attention_mask", "token_type_ids"), lines, strict=True):
            assert batch.inputs[name][row].tolist() == line + [0] * (16 - length), name
    assert (batch.start.tolist(), batch.end.tolist()) == ([1, 2], [2, 3])


def test_padding_never_exceeds_the_longest_window_allowed():
    assert collate(_features([18]), np.array([0]), 0, multiple=8).shape == (1, 20)
    assert len(collate(_features([18], training=False), np.array([0]), 0).start) == 0
