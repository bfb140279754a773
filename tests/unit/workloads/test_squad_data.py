import copy
import json
from dataclasses import asdict

import datasets
import pytest

from benchlib.benchmarks.squad import train
from benchlib.benchmarks.squad.config import SquadConfig
from benchlib.core.errors import UserError
from benchlib.workloads import squad_data
from benchlib.workloads.squad_data import Example, check_examples

CONTEXT = "  Ada Löve 😀 wrote the first program in 1843."
ADA = [
    Example("q1", " Who wrote it?", CONTEXT, (("Ada Löve 😀", 2),), "Ada"),
    Example("q2", "When?", CONTEXT, (("1843", 40), ("1843.", 40)), "Ada"),
]
SPANS = [{"text": "1843", "answer_start": 40}, {"text": "1843.", "answer_start": 40}]
FIRST = {"id": "q1", "question": " Who wrote it?", "answers": [{"text": "Ada Löve 😀", "answer_start": 2}]}
SECOND = {"id": "q2", "question": "When?", "is_impossible": False, "answers": SPANS}
ARTICLE = {"title": "Ada", "paragraphs": [{"context": CONTEXT, "qas": [FIRST, SECOND]}]}
GOOD = {"version": "1.1", "data": [ARTICLE]}


def _write(path, content):
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def _edited(edit):
    content = copy.deepcopy(GOOD)
    article = content["data"][0]
    edit(content, article, article["paragraphs"][0], article["paragraphs"][0]["qas"])
    return content


@pytest.mark.parametrize(
    ("edit", "place"),
    [
        (lambda c, a, p, q: c.update(version="v2.0"), "version = 'v2.0'"),
        (lambda c, a, p, q: c.update(data=[]), "no questions"),
        (lambda c, a, p, q: a.pop("title"), "data.0.title"),
        (lambda c, a, p, q: q[1].update(id="q1"), "'q1': duplicate id"),
        (lambda c, a, p, q: q[1].update(answers=[]), "'q2': no answers"),
        (lambda c, a, p, q: q[1]["answers"][0].update(answer_start=39), "'q2': answer '1843' is not at its offset"),
        # The last four characters: a start counted from the end must not be taken for one.
        (lambda c, a, p, q: q[1]["answers"][0].update(answer_start=-5), "answer_start -5"),
    ],
)
def test_a_broken_rule_is_named_with_its_file_and_place(tmp_path, edit, place):
    assert squad_data.read_squad(_write(tmp_path / "good.json", GOOD)) == ADA
    path = _write(tmp_path / "bad.json", _edited(edit))
    with pytest.raises(UserError, match=f"^{path}: .*{place}"):
        squad_data.read_squad(path)


def _load(**values):
    return train.load_data(SquadConfig(**{"train_questions": 0, "eval_questions": 0} | values))


def _examples(prefix, count):
    return [Example(f"{prefix}{i}", f"Who is {i}?", f"{i} is here.", ((str(i), 0),), "t") for i in range(count)]


def _squad(examples):
    """The examples in the official format, a paragraph each."""
    paragraphs = []
    for example in examples:
        answers = [{"text": text, "answer_start": start} for text, start in example.answers]
        question = {"id": example.id, "question": example.question, "answers": answers}
        paragraphs.append({"context": example.context, "qas": [question]})
    return {"version": "1.1", "data": [{"title": "t", "paragraphs": paragraphs}]}


def test_caps_take_a_nested_choice_that_ignores_the_order():
    examples = _examples("q", 50)
    ten, twenty, backwards, other = (
        {example.id for example in squad_data.take(source, count, seed)}
        for source, count, seed in ((examples, 10, 3), (examples, 20, 3), (examples[::-1], 10, 3), (examples, 10, 4))
    )
    assert len(ten) == 10 and ten < twenty and ten == backwards != other
    assert squad_data.take(examples, 0, seed=3) == squad_data.take(examples, 99, seed=3) == examples


def test_files_are_loaded_with_caps_and_a_hash_of_their_content(tmp_path):
    for name, count in (("train", 20), ("eval", 10)):
        _write(tmp_path / name, _squad(_examples(name, count)))
    files = {"train_file": str(tmp_path / "train"), "eval_file": str(tmp_path / "eval")}
    whole, cut, again = _load(**files), _load(**files, train_questions=5), _load(**files, train_questions=5)
    assert (whole.train, whole.eval, cut.eval) == (_examples("train", 20), whole.eval, _examples("eval", 10))
    assert "5 of 20 questions to train on, 10 questions to evaluate on" in cut.description
    assert whole.sha256 != cut.sha256 == again.sha256


def _hub_folder(tmp_path, train, validation):
    """A folder laid out like the repository rajpurkar/squad on the hub."""
    folder = tmp_path / "squad" / "plain_text"
    folder.mkdir(parents=True)
    for name, examples in (("train", train), ("validation", validation)):
        answers = [
            dict(zip(("text", "answer_start"), zip(*example.answers, strict=True), strict=True)) for example in examples
        ]
        rows = [asdict(example) | {"answers": each} for example, each in zip(examples, answers, strict=True)]
        datasets.Dataset.from_list(rows).to_parquet(folder / f"{name}-00000-of-00001.parquet")
    parts = "".join(f"  - split: {name}\n    path: plain_text/{name}-*\n" for name in ("train", "validation"))
    config = "configs:\n- config_name: plain_text\n  default: true\n  data_files:\n"
    (folder.parent / "README.md").write_text(f"---\n{config}{parts}---\n")
    return str(folder.parent)


def test_the_hub_loader_on_a_local_copy_without_a_connection(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    train = _examples("t", 7)
    assert squad_data.load_hub(_hub_folder(tmp_path, train, ADA)) == (train, ADA)
    with pytest.raises(UserError, match=r"connect once .* train_file=F and eval_file=G"):
        squad_data.load_hub("nobody/not-a-set")
    monkeypatch.setattr(squad_data, "load_hub", lambda: (train, ADA))
    split = _load(data="squad", train_questions=3)
    assert (len(split.train), split.eval) == (3, ADA)
    assert split.description.startswith("rajpurkar/squad: 3 of 7 questions")


def test_generated_data_keeps_the_rules_of_the_format():
    split = _load(data="minisquad", train_questions=40, eval_questions=20)
    assert len(check_examples([*split.train, *split.eval], "both")) == 60
