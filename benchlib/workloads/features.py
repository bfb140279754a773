"""SQuAD features: windows of tokens of questions with their contexts.

A window is a question and a part of its context, with the tokenizer's special tokens; the tokenizer cuts and joins
them. Notation: F windows, T tokens of all windows.
"""

import functools
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import Encoding, Tokenizer

from benchlib.core.errors import UserError
from benchlib.workloads.squad_text import Example

BATCH = 1024  # questions that are tokenised together
# A question so long that its windows would advance by fewer tokens is cut: one context could give hundreds of windows.
MIN_ADVANCE = 16

Progress = Callable[[int, int], None]  # questions done, questions
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
    start_positions: np.ndarray | None  # int32 (F,): first token of the answer, or cls_index; with training=True
    end_positions: np.ndarray | None  # int32 (F,): last token of the answer, or cls_index; with training=True
    char_start: np.ndarray | None  # int32 (T,): first character in the context, -1 elsewhere; with training=False
    char_end: np.ndarray | None  # int32 (T,): behind the last character, -1 elsewhere; with training=False
    max_length: int
    suffix: int
    cls_index: int
    token_types: bool
    questions_cut: int  # questions that were too long to leave room for a context

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
    progress: Progress | None = None,
) -> Features:
    """Cut ``examples`` into windows of at most ``max_length`` tokens, special ones too, that share ``doc_stride``.

    ``tokenizer`` is a fast tokenizer of transformers; it is not changed. ``training`` asks for answer positions (of the
    first gold answer), else the characters of the tokens are kept. Raises ``UserError`` when the windows leave no room for
    a context, and for a tokenizer that does not join a question and a context as BERT's does.
    """
    # Without the truncation and padding that the tokenizer's last user left in it.
    content = json.loads(tokenizer.backend_tokenizer.to_str()) | {"truncation": None, "padding": None}
    joining = Tokenizer.from_str(json.dumps(content))
    layout = _layout(tokenizer, joining)
    special = joining.num_special_tokens_to_add(True)
    budget = max_length - special - doc_stride
    if budget < 4:
        raise UserError(
            f"max_length = {max_length} with doc_stride = {doc_stride} and {special} special tokens leaves {budget} tokens "
            f"for the question and new context: set max_length to {doc_stride + special + 4} or more, or a smaller doc_stride"
        )
    joining.enable_truncation(max_length, stride=doc_stride, strategy="only_second")
    longest = budget - min(MIN_ADVANCE, budget // 4)
    # Without its post-processor, which is for the joined text and would trim offsets twice.
    plain = Tokenizer.from_str(json.dumps(content | {"post_processor": None}))

    rows: list[Row] = []
    questions_cut = 0
    for low in range(0, len(examples), BATCH):
        part = examples[low : low + BATCH]
        # White space before a question is no information, and there are questions with thousands of blanks.
        questions = plain.encode_batch_fast([example.question.lstrip() for example in part])
        # About five questions share a context: each is tokenised once.
        texts = list(dict.fromkeys(example.context for example in part))
        contexts = dict(zip(texts, plain.encode_batch(texts), strict=True))
        for index, (example, question) in enumerate(zip(part, questions, strict=True), low):
            if len(question) > longest:
                question, questions_cut = _shortened(plain, example.question.lstrip(), longest), questions_cut + 1
            joined = joining.post_process(question, contexts[example.context])
            windows = [_window(item, example, layout, training) for item in (joined, *joined.overflowing)]
            rows += [window | {"example_index": index} for window in windows]
        if progress:
            progress(low + len(part), len(examples))
    arrays: Row = dict.fromkeys(("start_positions", "end_positions", "char_start", "char_end"))
    for name, value in rows[0].items():
        join = np.concatenate if isinstance(value, np.ndarray) else functools.partial(np.array, dtype=np.int32)
        arrays[name] = join([row[name] for row in rows])
    starts = np.cumsum([0, *(len(row["input_ids"]) for row in rows)])
    return Features(starts=starts, **arrays, max_length=max_length, questions_cut=questions_cut, **layout)


def _layout(tokenizer: Any, joining: Tokenizer) -> Row:
    """Find out how ``tokenizer`` joins two texts, by letting it join two."""
    pair = joining.encode("who is it", "it is me")
    order = [key for key, _ in itertools.groupby(pair.sequence_ids) if key is not None]
    if order != [0, 1]:
        raise UserError(
            f"tokenizer {type(tokenizer).__name__} does not write a pair as question, context: choose a BERT-like encoder"
        )
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


def _shortened(tokenizer: Tokenizer, question: str, longest: int) -> Encoding:
    """Tokenise the beginning of a question, at most ``longest`` tokens."""
    encoding = tokenizer.encode(question)
    while len(encoding) > longest:
        question = question[: encoding.offsets[longest][0]]  # pieces of one character share their offsets
        encoding = tokenizer.encode(question)
    return encoding


def _window(encoding: Encoding, example: Example, layout: Row, training: bool) -> Row:
    """Return the columns of a window, ``Features``' names."""
    size = encoding.sequence_ids.count(1)  # of the context's part
    first = len(encoding) - layout["suffix"] - size
    characters = np.array(encoding.offsets, np.int32).reshape(-1, 2)
    row: Row = {"input_ids": np.array(encoding.ids, np.int32), "context_start": first}
    if training:
        text, begin = example.answers[0]
        span = _answer(characters[first : first + size], begin, begin + len(text))
        ends = (layout["cls_index"],) * 2 if span is None else (first + span[0], first + span[1])
        return row | dict(zip(("start_positions", "end_positions"), ends, strict=True))
    characters[:first] = characters[first + size :] = -1
    return row | {"char_start": characters[:, 0], "char_end": characters[:, 1]}


def _answer(characters: np.ndarray, begin: int, end: int) -> tuple[int, int] | None:
    """Return the first and the last token of the answer, counted in the context's part of a window; None if outside.

    The rule is the usual recipe's: the start is the last token that begins at or before the answer, the end the first
    token that ends at or after it. Two of its slips are not followed: an answer that begins with the last context token
    of a window is labelled with that token (the recipe walks on to the last token of the padded window), and a start
    never lies behind its end (byte-level pieces of one character share their offsets).
    """
    if not len(characters) or characters[0, 0] > begin or characters[-1, 1] < end:
        return None
    last = int(np.searchsorted(characters[:, 1], end, side="left"))
    return min(int(np.searchsorted(characters[:, 0], begin, side="right")) - 1, last), last
