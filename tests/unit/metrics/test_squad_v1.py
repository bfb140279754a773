"""F1 and exact match, loaded by path, against hand-made cases, the official script and torchmetrics."""

import collections
import json
import re
import string
from random import Random

import pytest
from torchmetrics.functional.text import squad as torchmetrics_squad

from benchlib.workloads import answers as kit
from benchlib.workloads.squad_data import Example


@pytest.fixture(scope="module")
def squad(by_path):
    return by_path("squad_v1")


@pytest.fixture(scope="module")
def score(squad):
    """Score {id: text} against {id: gold answers} with the result of each question."""

    def scored(predictions, gold):
        return squad.compute(
            predictions=[_prediction(*item) for item in predictions.items()],
            references=[_reference(name, *texts) for name, texts in gold.items()],
            per_question=True,
        )

    return scored


def _prediction(name, text):
    return {"id": name, "prediction_text": text}


def _reference(name, *texts):
    return {"id": name, "answers": {"text": [*texts], "answer_start": [0] * len(texts)}}


def _example(name, *texts):
    return Example(name, "Who?", " ".join(texts), tuple((text, 0) for text in texts), "t")


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
def test_hand_made_cases(score, prediction, answers, f1, exact):
    result = score({"q": prediction}, {"q": answers})
    assert (result["f1"], result["exact_match"]) == (pytest.approx(f1), exact)


def test_the_mean_is_over_all_questions(score):
    gold = {"right": ["Ada"], "half": ["the first program"], "other": ["the"], "wrong": ["1843"]}
    result = score({"wrong": "1844", "right": "Ada", "half": "first", "other": "it"}, gold)
    assert (result["f1"], result["exact_match"]) == (pytest.approx((100 + 200 / 3) / 4), 25)
    right, half = (100, 100), (0, pytest.approx(200 / 3))
    assert result["per_question"] == {"right": right, "half": half, "other": (0, 0), "wrong": (0, 0)}


GOLD = {"first": ["Ada"], "missing": ["the"], "last": ["1843", "in 1843"]}
RIGHT = {"first": "Ada", "missing": "", "last": "1843"}
ZERO = (0, 0)


@pytest.mark.parametrize("given", ["first", "missing", "last", ""])
def test_a_question_without_a_prediction_counts_as_zero(score, given):
    """The gold answer ``the`` has no words left: an empty prediction matches it, a missing one does not."""
    result = score({name: text for name, text in RIGHT.items() if name == given}, GOLD)
    answered = {"first": (100, 100), "missing": (100, 0), "last": (100, 100)}
    assert result["per_question"] == {name: answered[name] if name == given else ZERO for name in GOLD}
    assert result["exact_match"] == (100 / 3 if given else 0)
    assert score(RIGHT | {"missing": None}, GOLD)["per_question"]["missing"] == ZERO
    examples = [_example(name, *texts) for name, texts in GOLD.items()]
    assert kit.score({given: RIGHT[given]} if given else {}, examples) == result


def test_batches_and_pairs_count_as_one_set(squad):
    squad.add_batch(
        predictions=[_prediction("b", "x"), _prediction("a", "y")],
        references=[_reference("a", "y"), _reference("b", "y")],
    )
    squad.add_batch(predictions=[], references=[_reference("c", "the")])
    squad.add(prediction=_prediction("d", "y"), reference=_reference("d", "Y"))
    assert squad.compute() == {"exact_match": 50, "f1": 50}


def test_what_cannot_be_scored_is_refused_with_the_id_and_leaves_nothing_behind(score, squad):
    with pytest.raises(ValueError, match=r"2 predictions .* such as 'x'.*remove"):
        score({"x": "", "y": "", "first": "Ada"}, GOLD)
    with pytest.raises(ValueError, match="'none' has no gold answer"):
        score({}, {"none": []})
    squad.add(prediction=_prediction("x", "y"), reference=_reference("first", "Y"))
    with pytest.raises(ValueError, match=r"1 predictions .* such as 'x'.*remove"):
        squad.compute()
    assert score(RIGHT, GOLD)["exact_match"] == 100


PIECES = ["the", "a", "an", "An", "The", "Ada", "ada", "Löve", "1843", "1,843", "U.S.", "-", "...", "well-known", "é", "É", "ß", "İ"]  # fmt: skip
PIECES += ["😀", "東京", "“x”", "\u00a0", "\t", "it's"]
EMPTY = {"", "a", "an", "the"}  # for torchmetrics and SQuAD 2.0 an answer of its own where nothing else is left


def _text(random, least):
    return random.choice(["", " "]).join(random.choice(PIECES) for _ in range(random.randint(least, 5)))


def _says_nothing(text):
    return {word.strip(string.punctuation) for word in text.lower().split()} <= EMPTY


@pytest.fixture(scope="module")
def cases():
    """Return 400 predictions and gold answers by id."""
    random, gold, predictions = Random(5), dict[str, list[str]](), dict[str, str]()
    while len(gold) < 400:
        answers = [_text(random, 1) for _ in range(random.randint(1, 3))]
        prediction = random.choice([_text(random, 0), answers[0].swapcase(), "the " + answers[-1]])
        if not _says_nothing(prediction):
            name = f"q{len(gold)}"
            gold[name], predictions[name] = answers, prediction
    return predictions, gold


def test_scores_equal_those_of_torchmetrics(score, cases):
    predictions, gold = cases
    result = score(*cases)
    assert 20 < result["exact_match"] < result["f1"] < 95, "the cases must tell the rules apart"
    for name, texts in gold.items():  # question by question, so that no two errors cancel out
        theirs = torchmetrics_squad(_prediction("q", predictions[name]), _reference("q", *texts))
        expected = theirs["exact_match"].item(), theirs["f1"].item()
        assert result["per_question"][name] == pytest.approx(expected, abs=1e-3), (predictions[name], texts)


def test_the_way_through_arrow_changes_no_bit(score, cases):
    predictions, gold = cases
    result = score(*cases)
    # From the function that scored before evaluate did.
    assert (result["f1"].hex(), result["exact_match"].hex()) == ("0x1.05ef8af8af8afp+6", "0x1.f000000000000p+5")
    assert kit.score(predictions, [_example(name, *texts) for name, texts in gold.items()]) == result


def _official_words(text):
    """``normalize_answer`` of the official script: lower case, then punctuation, articles and white space."""
    text = "".join(character for character in text.lower() if character not in set(string.punctuation))
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


def _official_f1(prediction, truth):
    """``f1_score`` of the official script."""
    words, gold = _official_words(prediction), _official_words(truth)
    same = sum((collections.Counter(words) & collections.Counter(gold)).values())
    if same == 0:
        return 0
    precision, recall = same / len(words), same / len(gold)
    return (2 * precision * recall) / (precision + recall)


def _official(data, predictions):
    """``evaluate`` of the official script, evaluate-v1.1.py: an unanswered question receives 0."""
    f1 = exact_match = total = 0
    for article in data:
        for paragraph in article["paragraphs"]:
            for question in paragraph["qas"]:
                total += 1
                if question["id"] not in predictions:
                    continue
                truths = [answer["text"] for answer in question["answers"]]
                prediction = predictions[question["id"]]
                exact_match += max(_official_words(prediction) == _official_words(truth) for truth in truths)
                f1 += max(_official_f1(prediction, truth) for truth in truths)
    return {"exact_match": 100.0 * exact_match / total, "f1": 100.0 * f1 / total}


def test_files_are_scored_as_by_the_official_script(squad, cases, tmp_path):
    predictions, gold = cases
    predictions = {name: text for number, (name, text) in enumerate(predictions.items()) if number % 7}
    rows = {name: [{"text": text, "answer_start": 0, "answer_id": 1} for text in texts] for name, texts in gold.items()}
    questions = [{"id": name, "question": "Who?", "answers": answers} for name, answers in rows.items()]
    data = [
        {"title": "t", "paragraphs": [{"context": "", "qas": questions[:100]}]},
        {
            "title": "u",
            "paragraphs": [{"context": "", "qas": questions[100:101]}, {"context": "", "qas": questions[101:]}],
        },
    ]
    paths = {"predictions": tmp_path / "predictions.json", "references": tmp_path / "dev.json"}
    paths["predictions"].write_text(json.dumps(predictions))
    paths["references"].write_text(json.dumps({"version": "1.1", "data": data}))
    expected = _official(data, predictions)
    assert 20 < expected["exact_match"] < expected["f1"] < 80
    assert squad.compute_files(**paths) == pytest.approx(expected, rel=1e-12)


def test_more_questions_than_one_batch_of_arrow_keep_their_order(score):
    numbers = [*range(2500)]
    Random(1).shuffle(numbers)
    gold = {f"q{number}": [str(number)] for number in numbers}
    result = score({name: texts[0] for name, texts in sorted(gold.items()) if name[-1] != "7"}, gold)
    assert [*result["per_question"].items()] == [(name, ZERO if name[-1] == "7" else (100, 100)) for name in gold]
    assert (result["exact_match"], result["f1"]) == (90, 90)
