"""The embedded tiny BERT: small, complete, really pretrained, and on text that shares nothing with the benchmark."""

import re
from pathlib import Path
from random import Random
from typing import Any

import pretrain_text
import pretrain_tiny
import pytest
import torch
from transformers import AutoModelForQuestionAnswering, AutoTokenizer

from benchlib.workloads import minisquad

ROOT = Path(__file__).resolve().parents[3]
TINY = ROOT / "benchlib" / "assets" / "tiny"
# the only words that sentences and questions of the benchmark share with the pretraining text
FUNCTION_WORDS = {
    "a", "as", "by", "does", "has", "in", "is", "it", "its", "of", "that", "the", "to", "was", "what", "when", "where",
    "which", "who", "whom",
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(TINY, local_files_only=True)


@pytest.fixture(scope="module")
def benchmark_texts() -> list[tuple[str, str]]:
    examples = minisquad.generate(400, 1, "train") + minisquad.generate(400, 1, "eval")
    return [(e.question, e.context) for e in examples]


@pytest.fixture(scope="module")
def pretraining_words() -> set[str]:
    random = Random(11)
    drawn = [pretrain_text.sample(random, 2 + i % 7) for i in range(4000)]
    return {word for sample in drawn for word in (*sample.question, *sample.context)}


def test_shipped_tokenizer_is_the_one_the_script_builds(tokenizer: Any) -> None:
    assert tokenizer.get_vocab() == {piece: i for i, piece in enumerate(pretrain_tiny.vocabulary())}
    assert tokenizer.backend_tokenizer.to_str() == pretrain_tiny.build_tokenizer().backend_tokenizer.to_str()


def test_no_entity_of_the_benchmark_occurs_in_the_pretraining_text(
    pretraining_words: set[str], benchmark_texts: list[tuple[str, str]]
) -> None:
    syllables = "|".join(minisquad.SYLLABLES)
    made_of_syllables = re.compile(rf"(?:{syllables}){{2,}}")
    benchmark = {word for pair in benchmark_texts for word in re.findall(r"\w+", " ".join(pair).lower())}
    entities = {word for word in benchmark if made_of_syllables.fullmatch(word) or re.fullmatch(r"\d{4}", word)}
    assert len(entities) > 500
    assert len(pretraining_words) > 10_000
    assert not entities & pretraining_words
    assert not any(made_of_syllables.search(word) for word in pretraining_words)
    assert not any(re.fullmatch(r"\d{4}", word) for word in pretraining_words)


def test_no_relation_of_the_benchmark_occurs_in_the_pretraining_text(pretraining_words: set[str]) -> None:
    """Not only relations as a whole: no word of the benchmark's sentences and questions does, function words apart."""
    phrasings = [p for kind in minisquad.KINDS.values() for r in kind for p in (*r.sentences, *r.questions)]
    words = {w for p in (*phrasings, *minisquad.OPENINGS) for w in re.findall(r"[a-z]+", p.lower())} - {"s", "x"}
    assert {"born", "river", "mayor", "founded"} <= words
    assert words & pretraining_words <= FUNCTION_WORDS


def test_weights_are_those_of_the_pretraining() -> None:
    """On unseen pretraining text (new names, new invented relations) most spans are exactly right; from random weights none is."""
    data = pretrain_tiny.batch(Random(987), pretrain_tiny.Pieces(), 128, 6, 0.0, 512)
    model = AutoModelForQuestionAnswering.from_pretrained(TINY, local_files_only=True).eval()
    with torch.no_grad():
        out = model(**{k: data[k] for k in ("input_ids", "token_type_ids", "attention_mask", "position_ids")})
    right = (out.start_logits.argmax(-1) == data["start"]) & (out.end_logits.argmax(-1) == data["end"])
    assert right.float().mean() > 0.75
