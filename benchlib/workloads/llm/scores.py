"""Scores of generated summaries beside two controls that need no model: references of other articles, and the lead.

The control of shuffled references says what the wording that all summaries share is worth, the lead what copying is.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

from benchlib.workloads.llm.articles import Summaries

METRIC = Path(__file__).resolve().parents[1] / "rouge_metric"
KINDS = ("rouge1", "rouge2", "rougeL", "rougeLsum")


def rouge(predictions: Sequence[str], references: Sequence[str]) -> dict[str, Any]:
    """Return ROUGE in percent with splitter and generated characters, see ``rouge_metric``."""
    import evaluate

    scored = evaluate.load(str(METRIC)).compute(predictions=list(predictions), references=list(references))
    return dict(scored)


def score(summaries: Summaries, answers: Mapping[int, Sequence[int]]) -> list[dict[str, Any]]:
    """Return rows of ROUGE for the answers (tokens by sample) and for the two controls, in that order."""
    rows = sorted(answers)
    made = [summaries.decode(answers[row]) for row in rows]
    references = [summaries.references[row] for row in rows]
    leads = [summaries.texts[row][: len(reference)] for row, reference in zip(rows, references, strict=True)]
    # A shuffle may leave some in place; in a shuffled circle the next one is always another.
    order = Random(0).sample(range(len(references)), len(references))
    other = {place: order[(number + 1) % len(order)] for number, place in enumerate(order)}
    turned = [references[other[place]] for place in range(len(references))]
    return [
        {"of": name, **rouge(texts, targets), "texts": len(rows)}
        for name, texts, targets in (
            ("answers", made, references),
            ("control: answers against references of other articles", made, turned),
            ("control: the article's first characters", leads, references),
        )
    ]
