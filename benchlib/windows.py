"""Questions and contexts as windows of tokens: the arithmetic of SQuAD features, on whole arrays.

A window is ``prefix question middle context-part suffix``, where prefix, middle and suffix are the tokenizer's special
tokens. Letters: N questions, C distinct contexts, F windows, T tokens of all windows. Arrays are ragged: a flat array
and, for row i, the bounds ``starts[i]`` and ``starts[i + 1]``.

Every distinct text is tokenised once, although about five questions share a context: this is what makes it fast.
"""

import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import Encoding, Tokenizer

from benchlib.errors import UserError
from benchlib.example import Example

_BATCH = 1024
# A question so long that its windows would advance by fewer tokens is cut: one context could give hundreds of windows.
_LEAST_STEP = 16

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Template:
    """How a tokenizer joins a question and a context. ``tokenizer`` neither truncates nor pads."""

    tokenizer: Tokenizer
    prefix: tuple[int, ...]
    middle: tuple[int, ...]
    suffix: tuple[int, ...]
    cls_index: int
    token_types: bool

    @property
    def special(self) -> int:
        """Special tokens of a window."""
        return len(self.prefix) + len(self.middle) + len(self.suffix)


@dataclass(frozen=True)
class Texts:
    """Tokenised texts: ids int32 (T,), starts int64 (texts + 1,), characters int32 (T,) or None."""

    ids: np.ndarray
    starts: np.ndarray
    char_start: np.ndarray | None = None
    char_end: np.ndarray | None = None


def plain_tokenizer_json(tokenizer: Any) -> str:
    """Return a fast tokenizer as JSON without the truncation and padding that its last user left in it."""
    if not getattr(tokenizer, "is_fast", False):
        raise UserError(f"tokenizer {type(tokenizer).__name__} is not a fast one: choose a model with a tokenizer.json")
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    return json.dumps(content | {"truncation": None, "padding": None}, sort_keys=True)


def template(tokenizer: Any) -> Template:
    """Find out how ``tokenizer`` (a fast tokenizer of transformers) joins two texts, by letting it join two.

    Works on a copy: the caller's tokenizer keeps its state. Raises ``UserError`` for a tokenizer that is slow or does
    not put the question before the context.
    """
    copy = Tokenizer.from_str(plain_tokenizer_json(tokenizer))
    pair = copy.encode("who is it", "it is me")
    parts = [
        (key, list(group)) for key, group in itertools.groupby(range(len(pair.ids)), key=pair.sequence_ids.__getitem__)
    ]
    keys = [key for key, _ in parts]
    first, second = keys.index(0) if 0 in keys else -1, keys.index(1) if 1 in keys else -1
    middle = tuple(pair.ids[index] for key, group in parts[first + 1 : second] for index in group if key is None)
    prefix = tuple(pair.ids[index] for _, group in parts[:first] for index in group) if first > 0 else ()
    suffix = tuple(pair.ids[index] for _, group in parts[second + 1 :] for index in group)
    question = copy.encode("who is it", add_special_tokens=False).ids
    context = copy.encode("it is me", add_special_tokens=False).ids
    if not 0 <= first < second or [*prefix, *question, *middle, *context, *suffix] != pair.ids:
        raise UserError(
            f"tokenizer {type(tokenizer).__name__} does not write a pair as question, context: choose a BERT-like encoder"
        )
    token_types = "token_type_ids" in tokenizer.model_input_names
    start = len(prefix) + len(question) + len(middle)
    if token_types and pair.type_ids not in ([0] * start + [1] * (len(pair.ids) - start), [0] * len(pair.ids)):
        raise UserError(
            f"tokenizer {type(tokenizer).__name__} numbers its segments unlike BERT: choose a BERT-like encoder"
        )
    marks = [token for token in (tokenizer.cls_token_id, tokenizer.bos_token_id) if token in prefix]
    # Segment numbers that are 0 throughout need no array of their own.
    return Template(
        copy, prefix, middle, suffix, prefix.index(marks[0]) if marks else 0, token_types and 1 in pair.type_ids
    )


def tokenize(
    tokenizer: Tokenizer, texts: Sequence[str], offsets: bool, progress: Callable[[int], None] | None = None
) -> Texts:
    """Tokenise ``texts`` without special tokens; ``progress`` gets the number of texts done after each batch."""
    encode = tokenizer.encode_batch if offsets else tokenizer.encode_batch_fast
    ids, characters = [np.zeros(0, np.int32)], [np.zeros((0, 2), np.int32)]
    lengths = np.zeros(len(texts) + 1, np.int64)
    for low in range(0, len(texts), _BATCH):
        batch = encode(list(texts[low : low + _BATCH]), add_special_tokens=False)
        sizes = [len(encoding) for encoding in batch]
        lengths[low + 1 : low + 1 + len(batch)] = sizes
        ids.append(_flat((encoding.ids for encoding in batch), sum(sizes)))
        if offsets:
            characters.append(_flat_pairs(batch, sum(sizes)))
        if progress:
            progress(low + len(batch))
    starts = np.cumsum(lengths)
    if not offsets:
        return Texts(np.concatenate(ids), starts)
    both = np.concatenate(characters)
    return Texts(np.concatenate(ids), starts, np.ascontiguousarray(both[:, 0]), np.ascontiguousarray(both[:, 1]))


def _flat(rows: Iterable[list[int]], count: int) -> np.ndarray:
    return np.fromiter(itertools.chain.from_iterable(rows), np.int32, count)


def _flat_pairs(batch: list[Encoding], count: int) -> np.ndarray:
    pairs = itertools.chain.from_iterable(encoding.offsets for encoding in batch)
    return np.fromiter(itertools.chain.from_iterable(pairs), np.int32, 2 * count).reshape(-1, 2)


def cut(
    examples: Sequence[Example],
    joint: Template,
    max_length: int,
    doc_stride: int,
    training: bool,
    progress: Progress | None = None,
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Tokenise ``examples`` and cut them into windows of at most ``max_length`` tokens that share ``doc_stride``.

    Returns the arrays and the metadata of ``features.Features``. ``progress`` gets (contexts done, contexts).
    Raises ``UserError`` when the windows leave no room for a context.
    """
    budget = max_length - joint.special - doc_stride
    if budget < 4:
        raise UserError(
            f"max_length = {max_length} with doc_stride = {doc_stride} and {joint.special} special tokens leaves {budget} tokens "
            f"for the question and new context: set max_length to {doc_stride + joint.special + 4} or more, or a smaller doc_stride"
        )
    places: dict[str, int] = {}
    context_of = np.array([places.setdefault(example.context, len(places)) for example in examples], np.int64)
    total = len(places)
    contexts = tokenize(joint.tokenizer, list(places), True, progress and (lambda done: progress(done, total)))
    # White space before a question is no information, and there are questions with thousands of blanks.
    questions = tokenize(joint.tokenizer, [example.question.lstrip() for example in examples], False)

    longest = budget - min(_LEAST_STEP, budget // 4)
    whole = np.diff(questions.starts)
    question_size = np.minimum(whole, longest)
    room = max_length - joint.special - question_size
    step = room - doc_stride
    context_size = np.diff(contexts.starts)[context_of]
    count = 1 + np.maximum(0, -(-(context_size - room) // step))

    example_index = np.repeat(np.arange(len(examples)), count)
    number = np.arange(len(example_index)) - np.repeat(np.cumsum(count) - count, count)
    first = number * step[example_index]  # of the window's context tokens, counted in the context
    size = np.minimum(room[example_index], context_size[example_index] - first)
    context_start = len(joint.prefix) + question_size[example_index] + len(joint.middle)
    starts = np.concatenate([[0], np.cumsum(context_start + size + len(joint.suffix))])
    source = contexts.starts[context_of[example_index]] + first

    ids = np.empty(starts[-1], np.int32)
    for tokens, at in (
        (joint.prefix, starts[:-1]),
        (joint.middle, starts[:-1] + context_start - len(joint.middle)),
        (joint.suffix, starts[1:] - len(joint.suffix)),
    ):
        ids[at[:, None] + np.arange(len(tokens))] = np.array(tokens, np.int32)
    question_source = questions.starts[:-1][example_index]
    _copy_rows(ids, starts[:-1] + len(joint.prefix), questions.ids, question_source, question_size[example_index])
    _copy_rows(ids, starts[:-1] + context_start, contexts.ids, source, size)

    arrays = {
        "input_ids": ids,
        "starts": starts,
        "context_start": context_start.astype(np.int32),
        "example_index": example_index.astype(np.int32),
    }
    if training:
        labels = _labels(examples, contexts, context_of, example_index, first, size, context_start, joint.cls_index)
        arrays["start_positions"], arrays["end_positions"] = labels
    else:
        for name, characters in (("char_start", contexts.char_start), ("char_end", contexts.char_end)):
            assert characters is not None  # contexts are tokenised with offsets
            arrays[name] = np.full(starts[-1], -1, np.int32)
            _copy_rows(arrays[name], starts[:-1] + context_start, characters, source, size)
    meta = {
        "max_length": max_length,
        "suffix": len(joint.suffix),
        "cls_index": joint.cls_index,
        "token_types": joint.token_types,
        "questions": len(examples),
        "questions_cut": int((whole > longest).sum()),
    }
    return arrays, meta


def _copy_rows(target: np.ndarray, to: np.ndarray, source: np.ndarray, start: np.ndarray, size: np.ndarray) -> None:
    # A loop of slices: as fast as an index of all tokens and without its 24 bytes a token.
    for here, there, length in zip(to.tolist(), start.tolist(), size.tolist(), strict=True):
        target[here : here + length] = source[there : there + length]


def _labels(
    examples: Sequence[Example],
    contexts: Texts,
    context_of: np.ndarray,
    example_index: np.ndarray,
    first: np.ndarray,
    size: np.ndarray,
    context_start: np.ndarray,
    cls_index: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the start and end token, int32 (F,), of each window's answer; the class token where it is not inside.

    The rule is the usual recipe's: the start is the last token that begins at or before the answer, the end the first
    token that ends at or after it. Two of its slips are not followed: an answer that begins with the last context token
    of a window is labelled with that token (the recipe walks on to the last token of the padded window), and a start
    never lies behind its end (byte-level pieces of one character share their offsets).
    """
    assert contexts.char_start is not None  # contexts are tokenised with offsets
    assert contexts.char_end is not None
    if not len(contexts.ids):
        nothing = np.full(len(example_index), cls_index, np.int32)
        return nothing, nothing
    answers = np.array(
        [(start, start + len(text)) for text, start in (example.answers[0] for example in examples)], np.int64
    ).reshape(-1, 2)
    # One sorted array for all contexts: a context's characters are shifted behind those of the contexts before it.
    shift = max(int(contexts.char_end.max()), int(answers.max(initial=0))) + 1
    base = np.repeat(np.arange(len(contexts.starts) - 1) * shift, np.diff(contexts.starts))
    begins = np.maximum.accumulate(base + contexts.char_start)
    ends = np.minimum.accumulate((base + contexts.char_end)[::-1])[::-1]
    start_token = (
        np.searchsorted(begins, context_of * shift + answers[:, 0], side="right") - 1 - contexts.starts[context_of]
    )
    end_token = np.searchsorted(ends, context_of * shift + answers[:, 1], side="left") - contexts.starts[context_of]

    low, high = contexts.starts[context_of[example_index]] + first, np.maximum(size - 1, 0)
    top = len(contexts.ids) - 1
    inside = (
        (size > 0)
        & (contexts.char_start[np.minimum(low, top)] <= answers[example_index, 0])
        & (contexts.char_end[np.minimum(low + high, top)] >= answers[example_index, 1])
    )
    start = np.clip(start_token[example_index] - first, 0, high)
    end = np.clip(end_token[example_index] - first, 0, high)
    start = np.minimum(start, end)
    return (
        np.where(inside, context_start + start, cls_index).astype(np.int32),
        np.where(inside, context_start + end, cls_index).astype(np.int32),
    )
