"""Which samples a step trains on, and their arrays: grouped by length, padded to the longest of the micro-batch.

Notation: F samples, G samples of a global batch, B samples of a micro-batch, S its padded length.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from benchlib.workloads.features import Features

# Global batches whose samples are sorted together. Larger pads less but makes batches less random; at 50 the padding
# on SQuAD is below 2%.
BUCKET = 50


def epoch_batches(lengths: np.ndarray, global_batch: int, seed: int, epoch: int) -> list[np.ndarray]:
    """Return the global batches of an epoch, indices int64 (G,) each; every sample comes exactly once.

    Depends on the lengths, the seed, the epoch and G only, not on how many ranks share a batch. Samples are shuffled,
    sorted by length inside buckets, cut into batches, and the batches are shuffled. What does not fill a batch makes a
    smaller last one, of samples that were drawn at random.
    """
    generator = np.random.Generator(np.random.PCG64([seed, epoch]))
    order = generator.permutation(len(lengths))
    whole = len(order) // global_batch * global_batch
    batches: list[np.ndarray] = []
    for low in range(0, whole, global_batch * BUCKET):
        bucket = order[low : min(low + global_batch * BUCKET, whole)]
        bucket = bucket[np.argsort(-lengths[bucket], kind="stable")]
        batches += np.split(bucket, len(bucket) // global_batch)
    shuffled = [batches[index] for index in generator.permutation(len(batches))]
    return [*shuffled, order[whole:]] if whole < len(order) else shuffled


def even(samples: int, world_size: int) -> list[int]:
    """Return how many samples each rank gets where all get the same, the first ones of what is left."""
    return [samples // world_size + (rank < samples % world_size) for rank in range(world_size)]


def share(batch: np.ndarray, lengths: np.ndarray, shares: Sequence[int], rank: int) -> np.ndarray:
    """Return the samples of a rank, ``shares[rank]`` of them; together the ranks hold each sample of the batch once.

    The batch is sorted by length and dealt round-robin, as often as a rank's share asks for, so that all ranks get samples
    of like length and wait little for each other.
    """
    if sum(shares) != len(batch):
        raise ValueError(
            f"shares of {'+'.join(map(str, shares))} samples for a batch of {len(batch)}: they must add up"
        )
    # A rank of n samples takes its turns at 1/2n, 3/2n, ... of the way.
    turns = np.concatenate([(np.arange(share) + 0.5) / share for share in shares if share])
    owners = np.repeat(np.arange(len(shares)), shares)[np.argsort(turns, kind="stable")]
    ordered = batch[np.argsort(-lengths[batch], kind="stable")]
    return ordered[owners == rank]  # type: ignore[no-any-return]


def cut(samples: np.ndarray, parts: int) -> list[np.ndarray]:
    """Return the micro-batches of a rank's samples: at most ``parts``, their sizes at most one apart, none empty."""
    return [part for part in np.array_split(samples, max(1, min(parts, len(samples)))) if len(part)]


def steps_per_epoch(samples: int, global_batch: int) -> int:
    """Return the global batches of an epoch, the incomplete one included."""
    return math.ceil(samples / global_batch)


def samples_of(steps: int, samples: int, global_batch: int) -> int:
    """Return how many samples the first ``steps`` steps train on, over all epochs."""
    epochs, rest = divmod(steps, steps_per_epoch(samples, global_batch))
    return epochs * samples + min(rest * global_batch, samples)


@dataclass(frozen=True)
class MicroBatch:
    """Tensors of B samples padded to S tokens. ``inputs`` are the model's keyword arguments."""

    inputs: dict[str, torch.Tensor]  # int64 (B, S) each
    start: torch.Tensor  # int64 (B,); (0,) of features without answers
    end: torch.Tensor
    tokens: int  # without padding

    @property
    def shape(self) -> tuple[int, int]:
        """(B, S) as processed."""
        rows, length = self.inputs["input_ids"].shape
        return rows, length

    def idle(self, tokens: int) -> "MicroBatch":
        """Return the beginning of the first sample, ``tokens`` long: what a rank without work computes, and nobody counts."""
        inputs = {name: tensor[:1, :tokens] for name, tensor in self.inputs.items()}
        first = torch.zeros(1, dtype=torch.int64)
        return MicroBatch(inputs, first, first, inputs["input_ids"].numel())

    def to(self, device: torch.device) -> "MicroBatch":
        def move(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(device, non_blocking=True)

        inputs = {name: move(tensor) for name, tensor in self.inputs.items()}
        return MicroBatch(inputs, move(self.start), move(self.end), self.tokens)


def padded_length(longest: int, multiple: int, max_length: int) -> int:
    """Return S: the longest sample, rounded up to a multiple, never above ``max_length``."""
    return max(longest, min(-(-longest // multiple) * multiple, max_length))


def collate(features: Features, indices: np.ndarray, pad_id: int, multiple: int = 8, pin: bool = False) -> MicroBatch:
    """Pad the windows ``indices`` to the longest of them, rounded up to ``multiple``.

    ``pin`` puts the tensors in page-locked memory, from where an accelerator copies them in the background.
    """
    lengths = features.lengths[indices]
    size = padded_length(int(lengths.max()), multiple, features.max_length)
    real = np.arange(size) < lengths[:, None]
    ids = np.full(real.shape, pad_id, np.int64)
    # One gather for the whole micro-batch: row by row in Python costs ten times as much.
    ids[real] = features.input_ids[(features.starts[indices][:, None] + np.arange(size))[real]]
    arrays = {"input_ids": ids, "attention_mask": real.astype(np.int64)}
    if features.token_types:
        second = np.arange(size) >= features.context_start[indices][:, None]
        arrays["token_type_ids"] = (second & real).astype(np.int64)

    def tensor(array: np.ndarray) -> torch.Tensor:
        line = torch.from_numpy(array)
        return line.pin_memory() if pin else line

    ends = (features.start_positions, features.end_positions)
    labels = (np.zeros(0, np.int64) if values is None else values[indices].astype(np.int64) for values in ends)
    start, end = map(tensor, labels)
    inputs = {name: tensor(array) for name, array in arrays.items()}
    return MicroBatch(inputs, start, end, int(lengths.sum()))
