"""F1 and exact match by the rules of the official SQuAD v1.1 script, as a metric that ``evaluate`` loads from here.

``evaluate.load("benchlib/squad_metric")`` copies this file and imports the copy: it needs nothing but itself.

Texts are compared in lower case, without ASCII punctuation, without the words a, an and the, with single blanks. Exact
match is equality, F1 the harmonic mean of the shares of common words; the best of the gold answers counts, and the
score is the mean over all questions, times 100. A question without a prediction counts 0. Two answers that have no
words left do not share a word: their F1 is 0 although they match exactly (later scripts, for SQuAD 2.0, say 1).
"""

import collections
import re
import string
from typing import Any

import datasets
import evaluate

_DESCRIPTION = "F1 and exact match of SQuAD v1.1, in percent; a question without a prediction counts 0."
_INPUTS = """
Args:
    predictions: list of {"id": str, "prediction_text": str or None}; None is a question without a prediction.
    references: list of {"id": str, "answers": {"text": [str], "answer_start": [int]}}.
    per_question: also return the scores of each reference, in their order.
Returns:
    {"exact_match": 0 to 100, "f1": 0 to 100} and, when asked for, "ids", "exact_match_per_question" and
    "f1_per_question" (lists, 0 to 100).
"""
_CITATION = """@inproceedings{rajpurkar2016squad, title={SQuAD: 100,000+ Questions for Machine Comprehension of Text},
author={Rajpurkar, Pranav and Zhang, Jian and Lopyrev, Konstantin and Liang, Percy}, booktitle={EMNLP}, year={2016}}"""

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


class SquadMetric(evaluate.Metric):
    """F1 and exact match of SQuAD v1.1."""

    def _info(self) -> evaluate.MetricInfo:
        text = datasets.Value("string")
        answers = {"text": datasets.Sequence(text), "answer_start": datasets.Sequence(datasets.Value("int32"))}
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_INPUTS,
            features=datasets.Features(
                {"predictions": {"id": text, "prediction_text": text}, "references": {"id": text, "answers": answers}}
            ),
        )

    def _compute(self, predictions: list[dict], references: list[dict], per_question: bool = False) -> dict[str, Any]:
        texts = {prediction["id"]: prediction["prediction_text"] for prediction in predictions}
        if len(texts) != len(predictions):
            raise ValueError(
                f"{len(predictions)} predictions have {len(texts)} different ids: give one prediction a question"
            )
        ids = [reference["id"] for reference in references]
        if not ids or len(set(ids)) != len(ids):
            raise ValueError(
                f"{len(ids)} references have {len(set(ids))} different ids: give each question once, at least one"
            )
        scores = []
        for reference in references:
            text, answers = texts.get(reference["id"]), reference["answers"]["text"]
            if not answers:
                raise ValueError(f"question {reference['id']!r} has no gold answer: SQuAD v1.1 has at least one")
            both = (
                (0.0, 0.0)
                if text is None
                else tuple(max(rule(text, answer) for answer in answers) for rule in (exact_match, f1))
            )
            scores.append(both)
        exact, overlap = ([100 * score[i] for score in scores] for i in (0, 1))
        result: dict[str, Any] = {"exact_match": sum(exact) / len(ids), "f1": sum(overlap) / len(ids)}
        if per_question:
            result |= {"ids": ids, "exact_match_per_question": exact, "f1_per_question": overlap}
        return result
