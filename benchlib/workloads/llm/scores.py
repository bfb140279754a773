"""ROUGE of generated summaries as MLPerf computes it, beside two controls that need no model: references of other articles, and the lead.

The control of shuffled references says what the wording that all summaries share is worth, the lead what copying is.
"""

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from benchlib.workloads.llm.articles import Summaries

KINDS = ("rouge1", "rouge2", "rougeL", "rougeLsum")


def splitter() -> tuple[Any, str]:
    """Return a function from a text to its sentences, and its name: punkt_tab where its data is, else punkt untrained."""
    import nltk

    try:
        nltk.data.find("tokenizers/punkt_tab")
    except LookupError:
        untrained = nltk.tokenize.PunktSentenceTokenizer().tokenize
        return untrained, "punkt, untrained (the data of punkt_tab is not on this machine)"
    return nltk.sent_tokenize, "punkt_tab"


def rouge(predictions: Sequence[str], references: Sequence[str]) -> dict[str, Any]:
    """Return the mean F-measures over all texts in percent, the characters of the predictions as they were split, and by what.

    Texts are stripped, split into sentences and joined by line breaks (only rougeLsum looks at them); rouge_score with its
    stemmer. After mlcommons/inference, language/llama3.1-8b/evaluation.py.
    """
    from rouge_score import rouge_scorer

    split, name = splitter()
    lines = [["\n".join(split(text.strip())) for text in texts] for texts in (predictions, references)]
    scorer = rouge_scorer.RougeScorer(list(KINDS), use_stemmer=True)
    scores = [scorer.score(target, text) for text, target in zip(*lines, strict=True)]
    means = {kind: 100 * sum(score[kind].fmeasure for score in scores) / len(scores) for kind in KINDS}
    return means | {"gen_len": sum(map(len, lines[0])), "splitter": name}


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
