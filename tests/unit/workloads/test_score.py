"""F1 and exact match against hand-made cases and against torchmetrics."""

import string
from random import Random

import pytest
from torchmetrics.functional.text import squad as torchmetrics_squad

from benchlib.workloads.answers import score
from benchlib.workloads.squad_data import Example


def _example(name, *answers):
    return Example(name, "Who?", " ".join(answers), tuple((answer, 0) for answer in answers), "t")


@pytest.mark.parametrize(
    ("prediction", "answers", "f1", "exact"),
    [
        ("Denver Broncos", ["Denver Broncos"], 100, 100),
        ("the  denver broncos!", ["Denver Broncos"], 100, 100),
        ("Broncos", ["The Denver Broncos"], 200 / 3, 0),  # precision 1, recall 1/2
        ("the Denver Broncos of 1998", ["Denver Broncos"], 200 / 3, 0),  # 2 of 4 words, 2 of 2
        ("Panthers", ["Denver Broncos"], 0, 0),
        ("Broncos", ["Denver Broncos", "Broncos"], 100, 100),  # the best answer counts
        ("one one two", ["one two two"], 200 / 3, 0),  # words are counted as often as they occur
        ("U.S.A.", ["USA"], 100, 100),
        ("well-known", ["well known"], 0, 0),  # punctuation vanishes, it is no blank
        ("theatre", ["atre"], 0, 0),  # only whole articles are removed
        ("“Zürich”", ["Zürich"], 0, 0),  # only ASCII punctuation is punctuation
        ("ZÜRICH", ["zürich"], 100, 100),
        ("", ["Denver"], 0, 0),
        ("the", ["a"], 0, 100),  # nothing is left of either: equal, but no common word
        ("1,500\u00a0m", ["1500 m"], 100, 100),
    ],
)
def test_hand_made_cases(prediction, answers, f1, exact):
    result = score({"q": prediction}, [_example("q", *answers)])
    assert (result["f1"], result["exact_match"]) == (pytest.approx(f1), exact)


def test_the_mean_is_over_all_questions():
    gold = {"right": "Ada", "half": "the first program", "other": "the", "wrong": "1843"}
    result = score(
        {"wrong": "1844", "right": "Ada", "half": "first", "other": "it"}, [_example(*pair) for pair in gold.items()]
    )
    assert (result["f1"], result["exact_match"]) == (pytest.approx((100 + 200 / 3) / 4), 25)
    right, half = (100, 100), (0, pytest.approx(200 / 3))
    assert result["per_question"] == {"right": right, "half": half, "other": (0, 0), "wrong": (0, 0)}


PIECES = ["the", "a", "an", "An", "The", "Ada", "ada", "Löve", "1843", "1,843", "U.S.", "-", "...", "well-known", "é", "É", "ß", "İ"]  # fmt: skip
PIECES += ["😀", "東京", "“x”", "\u00a0", "\t", "it's"]
EMPTY = {"", "a", "an", "the"}  # for torchmetrics and SQuAD 2.0 an answer of its own where nothing else is left


def _text(random, least):
    return random.choice(["", " "]).join(random.choice(PIECES) for _ in range(random.randint(least, 5)))


def _says_nothing(text):
    return {word.strip(string.punctuation) for word in text.lower().split()} <= EMPTY


def test_scores_equal_those_of_torchmetrics():
    random, examples, predictions = Random(5), list[Example](), dict[str, str]()
    while len(examples) < 400:
        answers = [_text(random, 1) for _ in range(random.randint(1, 3))]
        prediction = random.choice([_text(random, 0), answers[0].swapcase(), "the " + answers[-1]])
        if not _says_nothing(prediction):
            examples.append(_example(f"q{len(examples)}", *answers))
            predictions[examples[-1].id] = prediction
    result = score(predictions, examples)
    assert 20 < result["exact_match"] < result["f1"] < 95, "the cases must tell the rules apart"
    for example in examples:  # question by question, so that no two errors cancel out
        texts = [text for text, _ in example.answers]
        theirs = torchmetrics_squad(
            {"id": "q", "prediction_text": predictions[example.id]},
            {"id": "q", "answers": {"text": texts, "answer_start": [0] * len(texts)}},
        )
        expected = theirs["exact_match"].item(), theirs["f1"].item()
        assert result["per_question"][example.id] == pytest.approx(expected, abs=1e-3), (predictions[example.id], texts)
