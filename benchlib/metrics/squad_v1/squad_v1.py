"""F1 and exact match by the rules of the official SQuAD v1.1 script, as a metric of the evaluate library."""

import collections
import json
import re
import string
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import evaluate

DESCRIPTION = """
Texts are compared in lower case, without ASCII punctuation, without the words a, an and the, with single blanks. Exact match
is equality, F1 the harmonic mean of the shares of common words; the best of the gold answers counts. Two answers without any
word left have an F1 of 0 although they match exactly (the script of SQuAD v2.0 says 1). A question without a prediction
counts as 0 in both.
"""
CITATION = """
@inproceedings{rajpurkar2016squad, title={{SQuAD}: 100,000+ Questions for Machine Comprehension of Text}, booktitle={EMNLP}, year={2016},
  author={Rajpurkar, Pranav and Zhang, Jian and Lopyrev, Konstantin and Liang, Percy}}
"""
INPUTS = """
Args:
    predictions: [{"id", "prediction_text"}] in any order. A text of None counts as missing.
    references: [{"id", "answers": {"text": [...], "answer_start": [...]}}], the rows of the data set.
    per_question: also return (exact match, F1) of each question.
Returns:
    "exact_match" and "f1": means over all references in percent; "per_question": {id: (exact match, F1)} in percent.
Example:
    >>> squad = evaluate.load("benchlib/metrics/squad_v1")
    >>> references = [{"id": "q", "answers": {"text": ["the Denver Broncos"], "answer_start": [177]}}]
    >>> squad.compute(predictions=[{"id": "q", "prediction_text": "Broncos!"}], references=references)
    {'exact_match': 0.0, 'f1': 66.66666666666667}
    >>> squad.compute_files(predictions="predictions.json", references="dev-v1.1.json")
"""
NO_PREDICTION = {"id": "", "prediction_text": ""}  # a row for a missing one: evaluate needs columns of one length
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


class SquadV1(evaluate.Metric):
    """``evaluate.Metric`` with the columns of evaluate's own ``squad``, which cannot score a missing prediction."""

    def _info(self) -> evaluate.MetricInfo:
        answers = datasets.Sequence({"text": datasets.Value("string"), "answer_start": datasets.Value("int32")})
        prediction = {"id": datasets.Value("string"), "prediction_text": datasets.Value("string")}
        reference = {"id": datasets.Value("string"), "answers": answers}
        return evaluate.MetricInfo(
            description=DESCRIPTION,
            citation=CITATION,
            inputs_description=INPUTS,
            features=datasets.Features({"predictions": prediction, "references": reference}),
            codebase_urls=["https://github.com/rajpurkar/SQuAD-explorer/blob/master/evaluate-v1.1.py"],
            reference_urls=["https://rajpurkar.github.io/SQuAD-explorer/", "https://arxiv.org/abs/1606.05250"],
        )

    def add_batch(self, *, predictions: Any = None, references: Any = None, **others: Any) -> None:
        """Add predictions and the references of the same questions; a reference may lack its prediction."""
        if isinstance(predictions, Mapping) or not references:
            raise ValueError(
                "give rows as lists: predictions [{id, prediction_text}] and one reference or more; compute_files takes {id: text}"
            )
        rows = {row["id"]: row for row in predictions if row["prediction_text"] is not None}  # the last of an id counts
        _refuse_unknown(rows, references)
        padded = [*rows.values()] + [NO_PREDICTION] * (len(references) - len(rows))
        super().add_batch(predictions=padded, references=references, **others)

    def compute_files(self, *, predictions: Path | str, references: Path | str, **options: Any) -> Any:
        """Score a file {id: text}, as the official script reads it, against a data set in the SQuAD v1.1 JSON format."""
        texts, articles = (json.loads(Path(path).read_text(encoding="utf-8-sig")) for path in (predictions, references))
        paragraphs = [paragraph for article in articles["data"] for paragraph in article["paragraphs"]]
        return self.compute(
            predictions=[{"id": name, "prediction_text": text} for name, text in texts.items()],
            references=[_reference(question) for paragraph in paragraphs for question in paragraph["qas"]],
            **options,
        )

    def _compute(self, predictions: Any, references: Any, per_question: bool = False) -> dict[str, Any]:
        texts = {row["id"]: row["prediction_text"] for row in predictions if row != NO_PREDICTION}
        _refuse_unknown(texts, references)
        names = [row["id"] for row in references]
        scores = [_score(row["id"], texts.get(row["id"]), row["answers"]["text"]) for row in references]
        exact, f1 = (sum(part) / len(scores) for part in zip(*scores, strict=True))
        details = {"per_question": dict(zip(names, scores, strict=True))} if per_question else {}
        return {"exact_match": exact, "f1": f1} | details


def _reference(question: Mapping[str, Any]) -> dict[str, Any]:
    """Return a question of a SQuAD file as a row of the data set."""
    columns = {name: [answer[name] for answer in question["answers"]] for name in ("text", "answer_start")}
    return {"id": question["id"], "answers": columns}


def _refuse_unknown(predictions: Iterable[str], references: Iterable[Mapping[str, Any]]) -> None:
    if unknown := set(predictions) - {row["id"] for row in references}:
        raise ValueError(
            f"{len(unknown)} predictions are for questions that the references lack, such as {min(unknown)!r}: "
            "remove these predictions, or give the references of the same data set"
        )


def _score(name: str, prediction: str | None, answers: Sequence[str]) -> tuple[float, float]:
    """Return (exact match, F1) in percent of a prediction against the best of its gold answers."""
    if not answers:
        raise ValueError(f"question {name!r} has no gold answer; each question of SQuAD v1.1 has one or more")
    if prediction is None:
        return 0.0, 0.0
    words, gold = _words(prediction), [_words(answer) for answer in answers]
    return 100.0 * (words in gold), max(_f1(words, other) for other in gold)


def _words(text: str) -> list[str]:
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def _f1(predicted: Sequence[str], gold: Sequence[str]) -> float:
    common = (collections.Counter(predicted) & collections.Counter(gold)).total()
    return 200 * common / (len(predicted) + len(gold)) if common else 0.0
