"""ROUGE as MLPerf Inference computes it for summaries, as a metric of the evaluate library."""

from typing import Any

import datasets
import evaluate
import nltk
from rouge_score import rouge_scorer

DESCRIPTION = """
Texts are stripped, split into sentences (with punkt_tab if its data is on this machine, else with an untrained punkt) and joined
by line breaks, which only rougeLsum looks at. Scores are the F-measures of rouge_score with its stemmer, after
mlcommons/inference, language/llama3.1-8b/evaluation.py.
"""
CITATION = """
@inproceedings{lin2004rouge, title={{ROUGE}: A Package for Automatic Evaluation of Summaries}, booktitle={Text Summarization Branches Out},
  year={2004}, author={Lin, Chin-Yew}}
@inproceedings{reddi2020mlperf, title={{MLPerf} Inference Benchmark}, booktitle={ISCA}, year={2020}, author={Reddi, Vijay Janapa and others}}
"""
INPUTS = """
Args:
    predictions: summaries, a list of strings.
    references: the reference summaries, in the same order.
Returns:
    "rouge1", "rouge2", "rougeL" and "rougeLsum": means over all texts in percent; "gen_len": characters of all predictions
    after the split; "splitter": what split them into sentences.
Example:
    >>> rouge = evaluate.load("benchlib/metrics/mlperf_rouge")
    >>> rouge.compute(predictions=["Pelham has 62 horses."], references=["Pelham has 57 nurses."])["rouge1"]
    50.0
"""
KINDS = ("rouge1", "rouge2", "rougeL", "rougeLsum")


class MlperfRouge(evaluate.Metric):
    """``evaluate.Metric`` for two columns of texts."""

    def _info(self) -> evaluate.MetricInfo:
        text = datasets.Value("string")
        return evaluate.MetricInfo(
            description=DESCRIPTION,
            citation=CITATION,
            inputs_description=INPUTS,
            features=datasets.Features({"predictions": text, "references": text}),
            codebase_urls=["https://github.com/mlcommons/inference/blob/master/language/llama3.1-8b/evaluation.py"],
            reference_urls=["https://aclanthology.org/W04-1013/", "https://arxiv.org/abs/1911.02549"],
        )

    def _compute(self, predictions: Any, references: Any) -> dict[str, Any]:
        if not predictions:
            raise ValueError("there is no summary to score: give one prediction and one reference or more")
        split, splitter = nltk.sent_tokenize, "punkt_tab"
        try:
            nltk.data.find("tokenizers/punkt_tab")
        except LookupError:
            split = nltk.tokenize.PunktSentenceTokenizer().tokenize
            splitter = "punkt, untrained (the data of punkt_tab is not on this machine)"
        lines = [["\n".join(split(text.strip())) for text in texts] for texts in (predictions, references)]
        scorer = rouge_scorer.RougeScorer(list(KINDS), use_stemmer=True)
        scores = [scorer.score(target, text) for text, target in zip(*lines, strict=True)]
        means = {kind: 100 * sum(score[kind].fmeasure for score in scores) / len(scores) for kind in KINDS}
        return means | {"gen_len": sum(map(len, lines[0])), "splitter": splitter}
