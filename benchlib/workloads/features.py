"""SQuAD features: windows of tokens of questions with their contexts; which of them a step trains on, and their arrays.

A window is a question and a part of its context, with the tokenizer's special tokens; the tokenizer cuts and joins
them. Batches are grouped by length and padded to the longest of the micro-batch.

Notation: F windows, T tokens of all windows, G samples of a global batch, B samples of a micro-batch, S its padded length.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tokenizers import Encoding

from benchlib.core.errors import UserError
from benchlib.workloads.squad_data import Example

BATCH = 1024  # questions that are tokenised together
# A question so long that its windows would advance by fewer tokens is cut: one context could give hundreds of windows.
MIN_ADVANCE = 16
# Global batches whose samples are sorted together. Larger pads less but makes batches less random; at 50 the padding
# on SQuAD is below 2%.
BUCKET = 50

Row = dict[str, Any]


@dataclass(frozen=True)
class Features:
    """Windows as flat arrays without padding; window i holds the tokens ``starts[i]`` to ``starts[i + 1]``.

    Tokens of a window count from 0. The context is the tokens from ``context_start[i]`` on, except the last ``suffix``
    ones. ``token_types`` says that the model takes segment numbers: 0 before ``context_start``, 1 from there on.
    The windows of a question are neighbours and in the order of the context.
    """

    input_ids: np.ndarray  # int32 (T,)
    starts: np.ndarray  # int64 (F + 1,)
    context_start: np.ndarray  # int32 (F,)
    example_index: np.ndarray  # int32 (F,): place in the list of examples
    max_length: int
    suffix: int
    cls_index: int
    token_types: bool
    start_positions: np.ndarray | None = None  # int32 (F,): first token of the answer, or cls_index; with training=True
    end_positions: np.ndarray | None = None  # int32 (F,): last token of the answer, or cls_index; with training=True
    char_start: np.ndarray | None = (
        None  # int32 (T,): first character in the context, -1 elsewhere; with training=False
    )
    char_end: np.ndarray | None = None  # int32 (T,): behind the last character, -1 elsewhere; with training=False

    def __len__(self) -> int:
        return len(self.example_index)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each window, int64 (F,)."""
        return np.diff(self.starts)


def build(
    examples: Sequence[Example],
    tokenizer: Any,
    max_length: int,
    doc_stride: int,
    training: bool,
    progress: Callable[..., object] = lambda **counts: None,
) -> Features:
    """Cut ``examples`` into windows of at most ``max_length`` tokens, special ones too, that share ``doc_stride``.

    ``tokenizer`` is a fast tokenizer of transformers. ``training`` asks for answer positions (of the first gold answer), else the
    characters of the tokens are kept. ``progress`` is called with how many questions are ``done`` of the ``total``. Raises ``UserError``
    when the windows leave no room for a context, and for a tokenizer that does not number its segments as BERT's does.
    """
    layout = _layout(tokenizer)
    special = tokenizer.num_special_tokens_to_add(pair=True)
    budget = max_length - special - doc_stride
    if budget < 4:
        raise UserError(
            f"max_length = {max_length} with doc_stride = {doc_stride} and {special} special tokens leaves {budget} tokens "
            f"for the question and new context: set max_length to {doc_stride + special + 4} or more, or a smaller doc_stride"
        )
    longest = budget - min(MIN_ADVANCE, budget // 4)
    rows = list[Row]()
    for low in range(0, len(examples), BATCH):
        part = examples[low : low + BATCH]
        # White space before a question is no information, and there are questions with thousands of blanks.
        questions = [example.question.lstrip() for example in part]
        alone = tokenizer(questions, add_special_tokens=False, return_offsets_mapping=True)
        for place, offsets in enumerate(alone["offset_mapping"]):
            if len(offsets) > longest:
                questions[place] = questions[place][: offsets[longest][0]]
        windows = tokenizer(
            questions,
            [example.context for example in part],
            truncation="only_second",
            max_length=max_length,
            stride=doc_stride,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
        )
        for index, window in zip(windows["overflow_to_sample_mapping"], windows.encodings, strict=True):
            rows.append(_window(window, part[index], layout, training) | {"example_index": low + index})
        progress(done=low + len(part), total=len(examples))
    arrays: Row = {}
    for name, value in rows[0].items():
        join = np.concatenate if isinstance(value, np.ndarray) else functools.partial(np.array, dtype=np.int32)
        arrays[name] = join([row[name] for row in rows])
    starts = np.cumsum([0, *(len(row["input_ids"]) for row in rows)])
    return Features(starts=starts, **arrays, max_length=max_length, **layout)


def _layout(tokenizer: Any) -> Row:
    """Find out how ``tokenizer`` joins two texts, by letting it join two."""
    (pair,) = tokenizer("who is it", "it is me").encodings
    context_start = pair.sequence_ids.index(1)
    token_types = "token_type_ids" in tokenizer.model_input_names
    bert_like = [0] * context_start + [1] * (len(pair) - context_start)
    if token_types and pair.type_ids not in (bert_like, [0] * len(pair)):
        raise UserError(
            f"tokenizer {type(tokenizer).__name__} numbers its segments unlike BERT: choose a BERT-like encoder"
        )
    prefix = pair.ids[: pair.sequence_ids.index(0)]
    marks = [token for token in (tokenizer.cls_token_id, tokenizer.bos_token_id) if token in prefix]
    return {
        "suffix": pair.sequence_ids[::-1].index(1),
        "cls_index": prefix.index(marks[0]) if marks else 0,
        # Segment numbers that are 0 throughout need no array of their own.
        "token_types": token_types and 1 in pair.type_ids,
    }


def _window(encoding: Encoding, example: Example, layout: Row, training: bool) -> Row:
    """Return the columns of a window, ``Features``' names."""
    size = encoding.sequence_ids.count(1)  # of the context's part
    first = len(encoding) - layout["suffix"] - size
    characters = np.array(encoding.offsets, np.int32).reshape(-1, 2)
    row: Row = {"input_ids": np.array(encoding.ids, np.int32), "context_start": first}
    if training:
        # The usual recipe's rule: the answer starts with the last token that begins at or before it and ends with the first
        # token that ends at or after it. Two of its slips are not followed: an answer that begins with the last context token
        # of a window is labelled with that token (the recipe walks on to the last token of the padded window), and a start
        # never lies behind its end (byte-level pieces of one character share their offsets).
        text, begin = example.answers[0]
        context, end = characters[first : first + size], begin + len(text)
        start = last = layout["cls_index"]
        if size and context[0, 0] <= begin and context[-1, 1] >= end:
            last = first + int(np.searchsorted(context[:, 1], end, side="left"))
            start = min(first + int(np.searchsorted(context[:, 0], begin, side="right")) - 1, last)
        return row | {"start_positions": start, "end_positions": last}
    characters[:first] = characters[first + size :] = -1
    return row | {"char_start": characters[:, 0], "char_end": characters[:, 1]}


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
    return [part for part in np.array_split(samples, max(1, parts)) if len(part)]


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
    return min(-(-longest // multiple) * multiple, max_length)


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
