"""From logits to answers and their scores: the best span over all windows of a question, F1 and exact match.

Notation: F windows, L longest window, T tokens of all windows, k = ``n_best``.
"""

import collections
import re
import string
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchlib.workloads.features import Features
from benchlib.workloads.squad_text import Example

# What the usual recipe predicts where no span is possible; kept, so that predictions compare equal.
NO_SPAN = "empty"

_CHUNK = 512
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def best_answers(
    examples: Sequence[Example],
    features: Features,
    start_logits: np.ndarray,
    end_logits: np.ndarray,
    n_best: int = 20,
    max_answer_tokens: int = 30,
) -> dict[str, str]:
    """Return the answer to each question, by id, in the order of ``examples``.

    ``features`` are those of ``examples`` with ``training=False``. The logits are flat, float (T,), one after the other
    like ``features.input_ids``.

    The rule is the usual one: in each window the ``n_best`` highest starts and ends make pairs; a pair counts when both
    lie in the context, the end not before the start and at most ``max_answer_tokens`` tokens with it; the highest sum
    over all windows wins. Equal logits are taken in the order of their tokens and equal sums in the order of windows,
    then of ranks, so the same logits always give the same answer. NaN is never chosen.
    """
    assert features.char_start is not None and features.char_end is not None  # training=False
    score = np.full(len(features), -np.inf, np.result_type(start_logits, end_logits, np.float32))
    span = np.zeros((len(features), 2), np.int64)
    for low in range(0, len(features), _CHUNK):
        rows = np.arange(low, min(low + _CHUNK, len(features)))
        score[rows], span[rows] = _best_pairs(features, rows, start_logits, end_logits, n_best, max_answer_tokens)

    answers = {example.id: NO_SPAN for example in examples}
    leading = [-np.inf] * len(examples)
    # Windows come in order, and only a higher score replaces an earlier one: the first of equal scores stays.
    for window in np.flatnonzero(score > -np.inf).tolist():
        index = int(features.example_index[window])
        if score[window] > leading[index]:
            leading[index] = score[window]
            at = features.starts[window] + span[window]
            example = examples[index]
            answers[example.id] = example.context[features.char_start[at[0]] : features.char_end[at[1]]]
    return answers


def _padded(features: Features, rows: np.ndarray, logits: np.ndarray) -> np.ndarray:
    """Return the logits of ``rows`` as (rows, L), -inf behind each window's end and in the place of NaN."""
    lengths = features.lengths[rows]
    columns = np.arange(int(lengths.max(initial=1)))
    real = columns < lengths[:, None]
    values = logits[np.where(real, features.starts[rows][:, None] + columns, 0)]
    return np.where(real & ~np.isnan(values), values, -np.inf)


def _best_pairs(
    features: Features,
    rows: np.ndarray,
    start_logits: np.ndarray,
    end_logits: np.ndarray,
    n_best: int,
    max_answer_tokens: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Return score (rows,) and first and last token (rows, 2) of each window's best pair; score -inf for none."""
    starts, ends = (_padded(features, rows, logits) for logits in (start_logits, end_logits))
    # Stable sorts of the negated values: the highest first, equal ones in the order of their tokens.
    s = np.argsort(-starts, axis=1, kind="stable")[:, :n_best]
    e = np.argsort(-ends, axis=1, kind="stable")[:, :n_best]
    low = features.context_start[rows][:, None]
    high = features.lengths[rows][:, None] - features.suffix
    pairs = ((s >= low) & (s < high))[:, :, None] & ((e >= low) & (e < high))[:, None, :]
    size = e[:, None, :] - s[:, :, None] + 1
    pairs &= (size >= 1) & (size <= max_answer_tokens)
    total = np.take_along_axis(starts, s, axis=1)[:, :, None] + np.take_along_axis(ends, e, axis=1)[:, None, :]
    total = np.where(pairs, total, -np.inf).reshape(len(rows), -1)
    best = total.argmax(axis=1)  # the first of equal ones: the highest start, then the highest end
    each = np.arange(len(rows))
    return total[each, best], np.stack([s[each, best // e.shape[1]], e[each, best % e.shape[1]]], axis=1)


def score(predictions: Mapping[str, str], examples: Sequence[Example]) -> dict[str, Any]:
    """Score ``predictions`` (question id to text) by the rules of the official SQuAD v1.1 script.

    Texts are compared in lower case, without ASCII punctuation, without the words a, an and the, with single blanks. Exact
    match is equality, F1 the harmonic mean of the shares of common words; the best of the gold answers counts. Two answers
    that have no words left do not share a word: their F1 is 0 although they match exactly (the script of SQuAD 2.0 says 1).

    Returns {"f1", "exact_match"} in percent over all ``examples`` and "per_question": (exact match, F1) in percent by id. An
    example without a prediction counts 0.
    """
    scores = {
        example.id: _score(predictions[example.id], [text for text, _ in example.answers])
        if example.id in predictions
        else (0.0, 0.0)
        for example in examples
    }
    exact, f1 = (sum(part) / len(examples) for part in zip(*scores.values(), strict=True))
    return {"f1": f1, "exact_match": exact, "per_question": scores}


def _score(prediction: str, answers: Sequence[str]) -> tuple[float, float]:
    """Return (exact match, F1) in percent of a prediction against the best of its gold answers."""
    words, gold = _words(prediction), [_words(answer) for answer in answers]
    return 100.0 * (words in gold), max(_f1(words, other) for other in gold)


def _words(text: str) -> list[str]:
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def _f1(predicted: Sequence[str], gold: Sequence[str]) -> float:
    common = (collections.Counter(predicted) & collections.Counter(gold)).total()
    return 200 * common / (len(predicted) + len(gold)) if common else 0.0
