"""From logits to answers and their scores: the best span over all windows of a question, F1 and exact match.

Notation: T tokens of all windows.
"""

import collections
import itertools
import re
import string
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchlib.workloads.features import Features
from benchlib.workloads.squad_data import Example

# What the usual recipe predicts where no span is possible; kept, so that predictions compare equal.
NO_SPAN = "empty"

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
    answers = {example.id: NO_SPAN for example in examples}
    leading = [-np.inf] * len(examples)
    # Windows come in order, and only a higher score replaces an earlier one: the first of equal scores stays.
    for window, (low, high) in enumerate(itertools.pairwise(features.starts.tolist())):
        first, behind = int(features.context_start[window]), high - low - features.suffix  # of the context
        logits = (start_logits[low:high], end_logits[low:high])
        start, end = (np.where(np.isnan(part), -np.inf, part) for part in logits)
        # Stable sorts of the negated values: the highest first, equal ones in the order of their tokens.
        s, e = (np.argsort(-part, kind="stable")[:n_best] for part in (start, end))
        s, e = (places[(places >= first) & (places < behind)] for places in (s, e))
        size, total = e - s[:, None] + 1, start[s][:, None] + end[e]
        pairs = total > -np.inf
        pairs &= (size >= 1) & (size <= max_answer_tokens)
        if not pairs.any():
            continue
        total = np.where(pairs, total, -np.inf)
        row, column = divmod(int(total.argmax()), len(e))  # of equal ones the highest start, then the highest end
        index = int(features.example_index[window])
        if total[row, column] > leading[index]:
            leading[index], example = float(total[row, column]), examples[index]
            span = slice(features.char_start[low + s[row]], features.char_end[low + e[column]])
            answers[example.id] = example.context[span]
    return answers


def score(predictions: Mapping[str, str], examples: Sequence[Example]) -> dict[str, Any]:
    """Score ``predictions`` (question id to text) by the rules of the official SQuAD v1.1 script.

    Texts are compared in lower case, without ASCII punctuation, without the words a, an and the, with single blanks. Exact
    match is equality, F1 the harmonic mean of the shares of common words; the best of the gold answers counts. Two answers
    that have no words left do not share a word: their F1 is 0 although they match exactly (the script of SQuAD 2.0 says 1).

    Returns {"f1", "exact_match"} in percent over all ``examples`` and "per_question": (exact match, F1) in percent by id.
    """
    scores = {
        example.id: _score(predictions[example.id], [text for text, _ in example.answers]) for example in examples
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
