"""F1 and exact match by the rules of the official SQuAD v1.1 script, as a metric that ``evaluate`` loads from here.

``evaluate.load("benchlib/squad_metric")`` copies this file and imports the copy; the rules are ``benchlib.core.squad_score``.
"""

from typing import Any

import datasets
import evaluate

from benchlib.core.squad_score import best, normalize

__all__ = ["SquadMetric", "normalize"]

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
            scores.append(best(text, answers))
        exact, overlap = ([100 * score[i] for score in scores] for i in (0, 1))
        result: dict[str, Any] = {"exact_match": sum(exact) / len(ids), "f1": sum(overlap) / len(ids)}
        if per_question:
            result |= {"ids": ids, "exact_match_per_question": exact, "f1_per_question": overlap}
        return result
