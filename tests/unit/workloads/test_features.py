import pytest
import qa_reference
from qa_reference import TOKENIZERS, odd_examples

from benchlib.workloads import features
from benchlib.workloads.squad_data import Example


def ids(built, window):
    return built.input_ids[built.starts[window] : built.starts[window + 1]].tolist()


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize(("max_length", "doc_stride"), [(384, 128), (96, 24), (64, 0)])
def test_features_equal_the_usual_recipe(name, max_length, doc_stride):
    examples, tokenizer = odd_examples(), TOKENIZERS[name]
    train = features.build(examples, tokenizer, max_length, doc_stride, True)
    evaluation = features.build(examples, tokenizer, max_length, doc_stride, False)
    rows = qa_reference.recipe(examples, tokenizer, max_length, doc_stride)
    assert len(train) == len(evaluation) == len(rows)
    slips = 0
    for i, row in enumerate(rows):
        assert ids(train, i) == ids(evaluation, i) == row["ids"]
        types = [int(train.token_types and place >= train.context_start[i]) for place in range(train.lengths[i])]
        assert types == row["types"]
        assert train.example_index[i] == row["example"]
        part = slice(evaluation.starts[i], evaluation.starts[i + 1])
        pairs = zip(evaluation.char_start[part].tolist(), evaluation.char_end[part].tolist(), strict=True)
        assert [None if pair == (-1, -1) else pair for pair in pairs] == row["offsets"]
        start, end = int(train.start_positions[i]), int(train.end_positions[i])
        assert end == row["end"]
        if start != row["start"]:
            # The two slips of the recipe that are not followed: past the context's end, and behind the end.
            slips += 1
            assert row["offsets"][row["start"]] is None or row["start"] > row["end"]
            assert train.context_start[i] <= start <= end
    assert slips < len(rows) / 5


def test_an_answer_at_the_end_of_a_window_is_labelled_with_its_token():
    tokenizer = TOKENIZERS["bert"]
    built = features.build([Example("q", "river", "the river", (("river", 4),))], tokenizer, 64, 8, True)
    expected = tokenizer("river", add_special_tokens=False)["input_ids"]
    assert ids(built, 0)[-1 - len(expected) : -1] == expected
    assert ids(built, 0)[built.start_positions[0] : built.end_positions[0] + 1] == expected


def test_a_question_longer_than_the_window_is_cut():
    endless = Example("long", "river " * 500, "the year was 1843 , near the river " * 10, (("1843", 13),))
    short = odd_examples(1)[0]
    built, alone = (features.build(part, TOKENIZERS["bert"], 96, 24, True) for part in ([endless, short], [short]))
    assert built.lengths.max() <= 96
    assert (built.start_positions[built.example_index == 0] > 0).any(), "the answer is still in a window"
    assert ids(built, len(built) - 1) == ids(alone, len(alone) - 1)
