"""Exact match and F1 by the rules of the official SQuAD v1.1 script.

Texts are compared in lower case, without ASCII punctuation, without the words a, an and the, with single blanks. Exact
match is equality, F1 the harmonic mean of the shares of common words; the best of the gold answers counts, and the
score is the mean over all questions, times 100. A question without a prediction counts 0. Two answers that have no
words left do not share a word: their F1 is 0 although they match exactly (later scripts, for SQuAD 2.0, say 1).
"""

import collections
import re
import string
from collections.abc import Mapping, Sequence

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def normalize(text: str) -> str:
    """Return ``text`` as it is compared."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(prediction: str, answer: str) -> float:
    """Return 1.0 when both texts compare equal, else 0.0."""
    return float(normalize(prediction) == normalize(answer))


def f1(prediction: str, answer: str) -> float:
    """Return the F1 of the words of both texts, 0 to 1."""
    predicted, gold = normalize(prediction).split(), normalize(answer).split()
    common = sum((collections.Counter(predicted) & collections.Counter(gold)).values())
    return 2 * common / (len(predicted) + len(gold)) if common else 0.0


def best(prediction: str | None, answers: Sequence[str]) -> tuple[float, float]:
    """Return (exact match, F1) of a prediction against the best of its gold answers, 0 to 1; of none 0."""
    if prediction is None:
        return 0.0, 0.0
    return max(exact_match(prediction, gold) for gold in answers), max(f1(prediction, gold) for gold in answers)


def means(predictions: Mapping[str, str], answers: Mapping[str, Sequence[str]]) -> tuple[float, float]:
    """Return (exact match, F1) over all questions in percent; ``answers`` are the gold answers by question."""
    scores = [best(predictions.get(question), gold) for question, gold in answers.items()]
    exact, overlap = (100 * sum(score[part] for score in scores) / len(scores) for part in (0, 1))
    return exact, overlap
