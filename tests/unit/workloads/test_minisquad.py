"""Minisquad: deterministic, disjoint between splits, not to be solved by knowing the type of an answer; and the tiny BERT, which
learned from text that shares no name with it."""

import re
from random import Random

import pretrain_text
import pretrain_tiny
import pytest
import torch
from transformers import AutoModelForQuestionAnswering, AutoTokenizer

from benchlib.workloads import minisquad
from benchlib.workloads.answers import score
from benchlib.workloads.encoders import TINY

PINNED = ("When did the business of Fenulm begin?", (("1780", 117),))


@pytest.fixture(scope="module")
def evaluation():
    return minisquad.generate(2000, seed=3, split="eval")


def names(texts):
    """Words that are made of the generator's syllables, as all invented names are."""
    syllable = "|".join(minisquad.SYLLABLES)
    return set(re.findall(rf"\b(?:{syllable}){{2,3}}\b", " ".join(texts).lower()))


def generated(*sets):
    return names(
        text for values in sets for item in minisquad.generate(*values) for text in (item.context, item.question)
    )


def candidates(seed, count):
    """What the type guesser may choose from: all values stated in each of the first `count` paragraphs."""
    drawn = minisquad.paragraphs(seed, "eval")
    return {
        context: [(f.relation, f.value) for f in facts] for _, context, facts in (next(drawn) for _ in range(count))
    }


def test_same_arguments_same_examples_and_a_longer_set_starts_with_the_shorter():
    first = minisquad.generate(50, seed=7, split="train")
    assert first == minisquad.generate(200, seed=7, split="train")[:50]
    assert first != minisquad.generate(50, seed=8, split="train")
    # a fixed example: the set must not change between versions without a new baseline
    assert (first[0].question, first[0].answers) == PINNED


def test_no_name_of_one_split_occurs_in_the_other():
    train, unseen = generated((4000, 1, "train"), (2000, 2, "train")), generated((2000, 1, "eval"))
    assert len(train) > 1000 and len(unseen) > 300
    assert not train & unseen


def test_each_question_names_a_subject_and_a_relation_told_once(evaluation):
    """(subject, relation) has one value in its paragraph, and both are stated of others too: only the pair finds the answer."""
    for _, _, facts in (next(drawn) for drawn in [minisquad.paragraphs(3, "eval")] for _ in range(300)):
        pairs = [(f.subject, f.relation.name) for f in facts]
        assert len(set(pairs)) == len(pairs)
        assert len({f.value for f in facts}) == len(facts)
        assert all(sum(g.relation is f.relation for g in facts) >= 2 for f in facts)


@pytest.mark.parametrize("choose", ["first", "last", "random"])
@pytest.mark.parametrize("knows", ["type", "relation"])
def test_guesser_that_knows_what_is_asked_but_not_of_whom_stays_below_40(evaluation, choose, knows):
    """`type`: any value of the answer's type; `relation`: even only values of the relation that is asked for."""
    by_context, dice, guesses = candidates(3, 600), Random(0), dict[str, str]()
    for example in evaluation:
        gold = example.answers[0][0]
        facts = by_context[example.context]
        asked = next(relation for relation, value in facts if value == gold)
        fitting = [v for r, v in facts if (r is asked if knows == "relation" else r.answer == asked.answer)]
        guesses[example.id] = {"first": fitting[0], "last": fitting[-1], "random": dice.choice(fitting)}[choose]
    assert 15 < score(guesses, evaluation)["f1"] < 40


def test_the_text_of_the_pretraining_has_no_name_of_the_benchmark():
    random = Random(11)
    drawn = [pretrain_text.sample(random, 2 + count % 7) for count in range(4000)]
    words = {word for sample in drawn for word in (*sample.question, *sample.context)}
    assert len(words) > 10_000 and not names(words)
    assert not any(re.fullmatch(r"\d{4}", word) for word in words)


def test_tokenizer_and_weights_of_the_tiny_bert_are_those_of_the_pretraining():
    """On unseen pretraining text (new names, new invented relations) most spans are exactly right; from random weights none is."""
    tokenizer = AutoTokenizer.from_pretrained(TINY, local_files_only=True)
    assert tokenizer.backend_tokenizer.to_str() == pretrain_tiny.build_tokenizer().backend_tokenizer.to_str()
    data = pretrain_tiny.batch(Random(987), pretrain_tiny.Pieces(), 128, 6, 0.0, 512)
    model = AutoModelForQuestionAnswering.from_pretrained(TINY, local_files_only=True).eval()
    with torch.no_grad():
        out = model(**{name: data[name] for name in ("input_ids", "token_type_ids", "attention_mask", "position_ids")})
    right = (out.start_logits.argmax(-1) == data["start"]) & (out.end_logits.argmax(-1) == data["end"])
    assert right.float().mean() > 0.75
