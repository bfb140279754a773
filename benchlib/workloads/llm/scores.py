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


def score(summaries: Summaries, answers: Mapping[int, Sequence[int]]) -> dict[str, Any]:
    """Return ROUGE of the answers (tokens by sample) with the splitter, and ROUGE-1 of the two controls."""
    rows = sorted(answers)
    texts = [summaries.decode(answers[row]) for row in rows]
    references = [summaries.references[row] for row in rows]
    leads = [summaries.texts[row][: len(reference)] for row, reference in zip(rows, references, strict=True)]
    # A shuffle may leave some in place; in a shuffled circle the next one is always another.
    order = Random(0).sample(range(len(references)), len(references))
    other = {place: order[(number + 1) % len(order)] for number, place in enumerate(order)}
    shuffled = rouge(texts, [references[other[place]] for place in range(len(references))])
    controls = {"rouge1_shuffled": shuffled["rouge1"], "rouge1_lead": rouge(leads, references)["rouge1"]}
    return rouge(texts, references) | controls
