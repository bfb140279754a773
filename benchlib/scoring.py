"""F1 and exact match of predictions, and which questions went wrong."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchlib.errors import UserError
from benchlib.example import Example

METRIC = Path(__file__).resolve().parent / "squad_metric"


def score(predictions: Mapping[str, str], examples: Sequence[Example]) -> dict[str, Any]:
    """Score ``predictions`` (question id to text) by the rules of SQuAD v1.1.

    Returns {"f1", "exact_match"} in percent over all ``examples`` and "per_question": for each, in their order, {"id",
    "f1", "exact_match"} in percent. An example without a prediction counts 0. Predictions for other questions are a
    ``UserError``: they belong to other data.
    """
    known = {example.id for example in examples}
    foreign = [name for name in predictions if name not in known]
    if foreign:
        raise UserError(
            f"{len(foreign)} predictions are for questions that are not in the data, such as {foreign[0]!r}: give the data they were made for"
        )
    import evaluate  # seconds of import that a training does not need

    metric = evaluate.load(str(METRIC), keep_in_memory=True)
    result = metric.compute(
        predictions=[{"id": example.id, "prediction_text": predictions.get(example.id)} for example in examples],
        references=[
            {
                "id": example.id,
                "answers": {
                    "text": [text for text, _ in example.answers],
                    "answer_start": [start for _, start in example.answers],
                },
            }
            for example in examples
        ],
        per_question=True,
    )
    rows = zip(result["ids"], result["f1_per_question"], result["exact_match_per_question"], strict=True)
    return {
        "f1": result["f1"],
        "exact_match": result["exact_match"],
        "per_question": [{"id": name, "f1": f1, "exact_match": exact} for name, f1, exact in rows],
    }
