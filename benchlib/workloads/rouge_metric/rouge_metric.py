"""ROUGE-1, 2, L and Lsum as MLPerf computes them for summaries, as a metric that ``evaluate`` loads from here.

``evaluate.load("benchlib/rouge_metric")`` copies this file and imports the copy: it needs nothing but itself.

Texts are stripped, split into sentences and joined by line breaks (only rougeLsum looks at them); rouge_score with its
stemmer; F-measure, mean over all texts, times 100. After mlcommons/inference, language/llama3.1-8b/evaluation.py.
"""

from typing import Any

import datasets
import evaluate
from nltk.tokenize import PunktSentenceTokenizer
from rouge_score import rouge_scorer

KINDS = ("rouge1", "rouge2", "rougeL", "rougeLsum")
_DESCRIPTION = "ROUGE F-measures of summaries with stemmer, in percent, and the characters generated."
_INPUTS = """
Args:
    predictions, references: lists of texts in the same order.
Returns:
    {"rouge1", "rouge2", "rougeL", "rougeLsum": 0 to 100, "gen_len": characters of the predictions as they were split,
    "splitter": what split them into sentences}
"""
_CITATION = """@inproceedings{lin2004rouge, title={ROUGE: A Package for Automatic Evaluation of Summaries},
author={Lin, Chin-Yew}, booktitle={Text Summarization Branches Out}, year={2004}}"""


def splitter() -> tuple[Any, str]:
    """Return a function from a text to its sentences, and its name: punkt_tab where its data is, else punkt untrained."""
    import nltk

    try:
        nltk.data.find("tokenizers/punkt_tab")
    except LookupError:
        return PunktSentenceTokenizer().tokenize, "punkt, untrained (the data of punkt_tab is not on this machine)"
    return nltk.sent_tokenize, "punkt_tab"


class RougeMetric(evaluate.Metric):
    """ROUGE of summaries."""

    def _info(self) -> evaluate.MetricInfo:
        text = datasets.Value("string")
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_INPUTS,
            features=datasets.Features({"predictions": text, "references": text}),
        )

    def _compute(self, predictions: list[str], references: list[str]) -> dict[str, Any]:
        split, name = splitter()
        lines = [["\n".join(split(text.strip())) for text in texts] for texts in (predictions, references)]
        scorer = rouge_scorer.RougeScorer(list(KINDS), use_stemmer=True)
        scores = [scorer.score(target, made) for made, target in zip(*lines, strict=True)]
        result: dict[str, Any] = {
            kind: round(100 * sum(score[kind].fmeasure for score in scores) / len(scores), 4) for kind in KINDS
        }
        return result | {"gen_len": sum(map(len, lines[0])), "splitter": name}
