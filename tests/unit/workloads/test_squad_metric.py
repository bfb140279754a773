from random import Random

import evaluate
import pytest
from torchmetrics.functional.text import squad as torchmetrics_squad

from benchlib.core.errors import UserError
from benchlib.workloads import answers as scoring
from benchlib.workloads.squad_text import Example


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
    result = scoring.score({"q": prediction}, [_example("q", *answers)])
    assert result["f1"] == pytest.approx(f1)
    assert result["exact_match"] == exact


def test_the_mean_is_over_all_questions_and_a_missing_one_counts_nothing():
    examples = [
        _example("right", "Ada"),
        _example("half", "the first program"),
        _example("missing", "the"),
        _example("wrong", "1843"),
    ]
    result = scoring.score({"wrong": "1844", "right": "Ada", "half": "first"}, examples)
    assert result["f1"] == pytest.approx((100 + 200 / 3) / 4)
    assert result["exact_match"] == 25
    assert [row["id"] for row in result["per_question"]] == ["right", "half", "missing", "wrong"]
    assert [row["f1"] for row in result["per_question"]] == pytest.approx([100, 200 / 3, 0, 0])


def test_predictions_for_other_data_are_refused():
    with pytest.raises(UserError, match=r"1 predictions .* 'x'"):
        scoring.score({"q": "Ada", "x": "Ada"}, [_example("q", "Ada")])


PIECES = [
    "the",
    "a",
    "an",
    "An",
    "The",
    "Ada",
    "ada",
    "Löve",
    "1843",
    "1,843",
    "U.S.",
    "-",
    "...",
    "well-known",
    "é",
    "É",
    "ß",
    "İ",
    "😀",
    "東京",
    "“x”",
    "\u00a0",
    "\t",
    "it's",
]


def _text(random, least):
    return random.choice(["", " "]).join(random.choice(PIECES) for _ in range(random.randint(least, 5)))


def test_scores_equal_those_of_torchmetrics():
    random, metric = Random(5), evaluate.load(str(scoring.METRIC), keep_in_memory=True)
    normalize = __import__(type(metric).__module__, fromlist=["normalize"]).normalize
    examples, predictions = [], {}
    while len(examples) < 400:
        answers = [_text(random, 1) for _ in range(random.randint(1, 3))]
        prediction = random.choice([_text(random, 0), answers[0].swapcase(), "the " + answers[-1]])
        if not normalize(prediction):
            # The one rule that differs: torchmetrics follows SQuAD 2.0, where two empty texts agree with F1 = 1.
            continue
        examples.append(_example(f"q{len(examples)}", *answers))
        predictions[examples[-1].id] = prediction
    ours = scoring.score(predictions, examples)
    theirs = torchmetrics_squad(
        [{"id": name, "prediction_text": text} for name, text in predictions.items()],
        [
            {"id": e.id, "answers": {"text": [t for t, _ in e.answers], "answer_start": [s for _, s in e.answers]}}
            for e in examples
        ],
    )
    assert 20 < ours["exact_match"] < ours["f1"] < 95, "the cases must tell the rules apart"
    assert ours["f1"] == pytest.approx(theirs["f1"].item(), abs=1e-3)
    assert ours["exact_match"] == pytest.approx(theirs["exact_match"].item(), abs=1e-3)
    # Question by question, so that no two errors cancel out.
    for example, row in zip(examples[:100], ours["per_question"], strict=False):
        single = torchmetrics_squad(
            {"id": example.id, "prediction_text": predictions[example.id]},
            {
                "id": example.id,
                "answers": {"text": [t for t, _ in example.answers], "answer_start": [0] * len(example.answers)},
            },
        )
        assert (row["f1"], row["exact_match"]) == pytest.approx(
            (single["f1"].item(), single["exact_match"].item()), abs=1e-3
        )


@pytest.mark.parametrize(
    ("predictions", "references", "words"),
    [
        ([("q", "a"), ("q", "b")], ["q", "r"], "one prediction a question"),
        ([("q", "a"), ("r", "b")], ["q", "q"], "each question once"),
    ],
)
def test_ids_that_are_not_unique_are_refused(predictions, references, words):
    metric = evaluate.load(str(scoring.METRIC), keep_in_memory=True)
    with pytest.raises(ValueError, match=words):
        metric.compute(
            predictions=[{"id": name, "prediction_text": text} for name, text in predictions],
            references=[{"id": name, "answers": {"text": ["a"], "answer_start": [0]}} for name in references],
        )
