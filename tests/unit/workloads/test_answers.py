import numpy as np
import pytest
import qa_reference
from qa_reference import TOKENIZERS, odd_examples

from benchlib.workloads import answers, features

TOKENIZER = TOKENIZERS["bert"]


def _case(max_length=64, doc_stride=16, seed=0, kind="normal"):
    examples = odd_examples(40, seed=seed)
    built = features.build(examples, TOKENIZER, max_length, doc_stride, False)
    rows = qa_reference.recipe(examples, TOKENIZER, max_length, doc_stride)
    random = np.random.default_rng(seed)
    shape = (2, len(built.input_ids))
    # Rounded logits are full of ties.
    flat = {"normal": random.normal(size=shape), "ties": random.integers(0, 3, shape)}[kind].astype(np.float32)
    return examples, built, rows, flat


def _ragged(built, flat):
    return [flat[built.starts[i] : built.starts[i + 1]] for i in range(len(built))]


@pytest.mark.parametrize("kind", ["normal", "ties"])
@pytest.mark.parametrize(("n_best", "longest"), [(20, 30), (5, 3), (1, 30), (1000, 512)])
def test_answers_equal_the_usual_recipe(kind, n_best, longest):
    examples, built, rows, (start, end) = _case(kind=kind)
    expected = qa_reference.best_answers(examples, rows, _ragged(built, start), _ragged(built, end), n_best, longest)
    assert answers.best_answers(examples, built, start, end, n_best, longest) == expected
    assert n_best > 1 or "empty" in expected.values()


def test_nan_is_never_chosen():
    examples, built, _, (start, end) = _case()
    all_nan = np.full_like(start, np.nan)
    assert set(answers.best_answers(examples, built, all_nan, end).values()) == {"empty"}
