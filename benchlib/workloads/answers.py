"""From logits to answers and their scores: the best span over all windows of a question.

Notation: T tokens of all windows.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchlib import metrics
from benchlib.workloads.features import Features
from benchlib.workloads.squad_data import Example

# What the usual recipe predicts where no span is possible; kept, so that predictions compare equal.
NO_SPAN = "empty"


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


def score(predictions: Mapping[str, str], examples: Sequence[Example], metric: Any = None) -> dict[str, Any]:
    """Score ``predictions`` (question id to text) by the metric ``squad_v1``; a question without a prediction counts as 0.

    ``metric`` is a loaded one, for a caller that times the scores without the import. Returns {"f1", "exact_match"} in percent
    over all ``examples`` and "per_question": (exact match, F1) in percent by id.
    """
    references = []
    for example in examples:
        texts, starts = zip(*example.answers, strict=True)
        references.append({"id": example.id, "answers": {"text": texts, "answer_start": starts}})
    answered = [{"id": name, "prediction_text": text} for name, text in predictions.items()]
    metric = metric or metrics.load("squad_v1")
    return dict(metric.compute(predictions=answered, references=references, per_question=True))
