"""ROUGE, loaded by path, against rouge_score, torchmetrics and a case by hand."""

import nltk
import pytest
from rouge_score import rouge_scorer

from benchlib import metrics

PREDICTIONS = ["Calder burned the stadium in Stanmere.", "Pelham has 62 horses.", ""]
TARGETS = ["Calder burned the gardens in Stanmere.", " Pelham has 57 nurses. Jutland has 62 horses.\n", "Nothing."]


@pytest.fixture(scope="module")
def rouge(by_path):
    return by_path("mlperf_rouge")


def test_a_case_by_hand(rouge):
    """Of 4 words each 2 are common and in order, of 3 pairs one; both sentences on the right, the other way round."""
    result = rouge.compute(predictions=["Pelham has 62 horses."], references=["Pelham has 57 nurses."])
    assert [result[kind] for kind in ("rouge1", "rouge2", "rougeL", "rougeLsum")] == pytest.approx(
        [50, 100 / 3, 50, 50]
    )
    turned = rouge.compute(predictions=["One two. Three four."], references=["Three four. One two."])
    assert [turned[kind] for kind in ("rouge1", "rougeL", "rougeLsum")] == pytest.approx([100, 50, 100])
    assert turned["gen_len"] == len("One two.\nThree four.")


def test_rouge_is_that_of_rouge_score_to_the_last_bit(rouge):
    split = nltk.tokenize.PunktSentenceTokenizer().tokenize
    if "untrained" not in (result := rouge.compute(predictions=PREDICTIONS, references=TARGETS))["splitter"]:
        split = nltk.sent_tokenize
    kinds = ["rouge1", "rouge2", "rougeL", "rougeLsum"]
    scorer = rouge_scorer.RougeScorer(kinds, use_stemmer=True)
    lines = [["\n".join(split(text.strip())) for text in texts] for texts in (PREDICTIONS, TARGETS)]
    scores = [scorer.score(target, text) for text, target in zip(*lines, strict=True)]
    assert {kind: result[kind] for kind in kinds} == {
        kind: 100 * sum(score[kind].fmeasure for score in scores) / len(scores) for kind in kinds
    }
    assert result["gen_len"] == sum(map(len, PREDICTIONS)) and "punkt" in result["splitter"]
    assert metrics.load("mlperf_rouge").compute(predictions=PREDICTIONS, references=TARGETS) == result


def test_rouge_is_that_of_a_second_library(rouge):
    from torchmetrics.functional.text.rouge import rouge_score

    ours = rouge.compute(predictions=PREDICTIONS[:2], references=TARGETS[:2])
    theirs = rouge_score(PREDICTIONS[:2], TARGETS[:2], use_stemmer=True, rouge_keys=("rouge1", "rouge2", "rougeL"))
    for kind in ("rouge1", "rouge2", "rougeL"):
        assert ours[kind] == pytest.approx(100 * float(theirs[f"{kind}_fmeasure"]), abs=1e-3)
