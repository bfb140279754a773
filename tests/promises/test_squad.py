"""BERT on SQuAD: training, scores, texts."""

import json
import random
import re
import shutil

import datasets
import evaluate
import nbformat
import numpy as np
import pytest
from promised import promise, skip_rest
from recorded import edited, judged
from torchmetrics.functional.text import squad as torchmetrics_squad

from benchlib import session
from benchlib.core.files import home
from benchlib.results.run import Run

WHOLE = {"data": "squad", "model": "bert-base-uncased", "train_questions": 0, "eval_questions": 0}
REAL = {"quality": "", "speed_scope": ""}


def _words(text):
    return " ".join(text.split())


def _check(verdict, name):
    return next(check for check in verdict.checks if check.name == name)


def _rows(count, first):
    """Return questions of the columns of SQuAD v1.1, each with a paragraph in which its answer stands."""
    rows = []
    for number in range(first, first + count):
        names = random.Random(number).sample(
            ["Ada", "Grace", "Alan", "Edsger", "Barbara", "Donald", "Frances", "John"], 3
        )
        context = f"In room {number} {names[0]} met {names[1]} before {names[2]} came."
        answer = {"text": [names[0]], "answer_start": [context.index(names[0])]}
        rows.append(
            {
                "id": f"q{number}",
                "title": "Rooms",
                "context": context,
                "question": f"Who was first in room {number}?",
                "answers": answer,
            }
        )
    return rows


PARTS = {"train": _rows(48, 0), "validation": _rows(8, 48)}


def _file(path, rows):
    """Write rows as a file in the official SQuAD v1.1 format."""
    paragraphs = []
    for row in rows:
        pairs = zip(row["answers"]["text"], row["answers"]["answer_start"], strict=True)
        answers = [{"text": text, "answer_start": start} for text, start in pairs]
        paragraphs.append(
            {"context": row["context"], "qas": [{"id": row["id"], "question": row["question"], "answers": answers}]}
        )
    path.write_text(json.dumps({"version": "1.1", "data": [{"title": "Rooms", "paragraphs": paragraphs}]}))
    return str(path)


def _cache(folder, patch):
    """Fill a cache of datasets as a download of rajpurkar/squad does, and let all processes read it; there is no network."""
    source = folder / "hub" / "squad"
    source.mkdir(parents=True)
    for name, rows in PARTS.items():
        datasets.Dataset.from_list(rows).to_parquet(source / f"{name}-00000-of-00001.parquet")
    cache = folder / "cache"
    datasets.load_dataset(str(source), cache_dir=str(cache), name=None)
    (made,) = (path for path in cache.iterdir() if path.is_dir())
    made.rename(cache / "rajpurkar___squad")
    patch.setenv("HF_DATASETS_CACHE", str(cache))


SETTINGS = {
    "threads": 1,
    "epochs": 2,
    "train_questions": 0,
    "eval_questions": 0,
    "hidden_dropout": 0,
    "attention_dropout": 0,
    "budget_s": 200,
}


def _trained(**more):
    return session.execute(session.open_run("squad", "", "smoke", "cpu", {**SETTINGS, **more}))


@pytest.fixture(scope="module")
def of_files(tmp_path_factory):
    """A training on files by one process."""
    folder = tmp_path_factory.mktemp("files")
    files = {
        "train_file": _file(folder / "train.json", PARTS["train"]),
        "eval_file": _file(folder / "dev.json", PARTS["validation"]),
    }
    return _trained(nproc=1, batch_size=16, **files), files


@pytest.fixture(scope="module")
def of_cache(tmp_path_factory):
    """A training on the same questions from the cache of datasets by two ranks."""
    with pytest.MonkeyPatch.context() as patch:
        _cache(tmp_path_factory.mktemp("hub"), patch)
        return _trained(nproc=2, batch_size=8, data="squad")


@promise(
    "P027",
    "fine-tune BERT over two or more ranks and see that they compute what one process does",
    "benchlib run squad --set nproc=2",
)
def test_p027_two_ranks(of_files, of_cache):
    one, two = of_files[0].samples["loss"], of_cache.samples["loss"]
    assert len(one) == len(two) == 6
    np.testing.assert_allclose(two, one, rtol=1e-4)  # rounding differs between processors
    facts = of_cache.result.facts
    assert facts["bucket_bytes"] and facts["wrong_elements"] == 0
    assert facts["checksums"] and all(len(each) == 2 and len(set(each)) == 1 for each in facts["checksums"])


@promise("P028", "see losses converge and a training that learns nothing fail", "benchlib run squad")
def test_p028_learning(tmp_path):
    learnt = judged(edited("squad", tmp_path / "learnt"))
    assert [_check(learnt, name).status for name in ("loss decreases", "learning rate")] == ["PASS", "PASS"]
    still = judged(
        edited("squad", tmp_path / "still", facts={"learning_rate_min": 0.0}, samples={"run[0].loss": [5.9] * 10})
    )
    assert [_check(still, name).status for name in ("loss decreases", "learning rate")] == ["FAIL", "FAIL"]
    assert (still.verdict, still.exit_code()) == ("FAIL", 1)


@pytest.fixture(scope="module")
def metric(tmp_path_factory):
    cache = str(tmp_path_factory.mktemp("evaluate"))
    return evaluate.load(str(home() / "benchlib" / "metrics" / "squad_v1"), cache_dir=cache, keep_in_memory=True)


def _scores(metric, prediction, *answers):
    references = [{"id": "q", "answers": {"text": list(answers), "answer_start": [0] * len(answers)}}]
    return metric.compute(predictions=[{"id": "q", "prediction_text": prediction}], references=references)


@promise(
    "P029", "read F1 and exact match as the official script computes them", 'evaluate.load("benchlib/metrics/squad_v1")'
)
def test_p029_scores(metric, of_files):
    for prediction, answers, f1, exact in (
        ("the  denver broncos!", ["Denver Broncos"], 100, 100),
        ("Broncos", ["The Denver Broncos"], 200 / 3, 0),  # precision 1, recall 1/2
        ("Broncos", ["Denver Broncos", "Broncos"], 100, 100),  # the best answer counts
        ("one one two", ["one two two"], 200 / 3, 0),  # words count as often as they occur
        ("", ["Denver"], 0, 0),
    ):
        assert _scores(metric, prediction, *answers) == {"f1": pytest.approx(f1), "exact_match": exact}
        if prediction:
            theirs = torchmetrics_squad(
                {"id": "q", "prediction_text": prediction},
                {"id": "q", "answers": {"text": answers, "answer_start": [0] * len(answers)}},
            )
            assert (theirs["f1"].item(), theirs["exact_match"].item()) == pytest.approx((f1, exact), abs=1e-3)
    run, files = of_files
    stored = metric.compute_files(predictions=run.path / "predictions.json", references=files["eval_file"])
    for name in ("f1", "exact_match"):
        assert run.result.value(f"{name}_files_tiny") == pytest.approx(stored[name])


@promise(
    "P030",
    "score a set of predictions that lacks a question: it counts as 0",
    "compute_files(predictions=FILE, references=FILE)",
)
def test_p030_missing_question(metric, tmp_path):
    predictions = tmp_path / "predictions.json"
    answers = {row["id"]: row["answers"]["text"][0] for row in PARTS["validation"]}
    gold = _file(tmp_path / "dev.json", PARTS["validation"])
    predictions.write_text(json.dumps(answers))
    assert metric.compute_files(predictions=predictions, references=gold) == {"f1": 100, "exact_match": 100}
    del answers["q48"], answers["q49"]
    predictions.write_text(json.dumps(answers))
    assert metric.compute_files(predictions=predictions, references=gold) == {"f1": 75, "exact_match": 75}


@promise(
    "P031",
    "reach F1 > 88 with bert-base-uncased on the whole of SQuAD v1.1 within 2 h",
    "benchlib run squad --tier weekend --backend cuda",
    needs="a GPU and the Hugging Face hub",
)
def test_p031_f1(program, tmp_path):
    plan = _words(program("run", "squad", "--tier", "weekend", "--dry-run"))
    assert "fine-tunes bert-base-uncased" in plan and "on all questions of squad for 2 epochs" in plan
    assert "budget_s 7200.0" in plan and "target_f1 88.0" in plan
    for f1, status in ((88.1, "PASS"), (87.9, "FAIL")):
        verdict = judged(
            edited("squad", tmp_path / str(f1), config=WHOLE | {"target_f1": 88.0}, facts=REAL | {"f1": f1})
        )
        assert _check(verdict, "F1 target").status == status
    skip_rest("the training itself takes a GPU, the hub and up to 2 h")


@promise(
    "P032",
    "see what is generated, reduced, planted or a subset in the names of metrics, never as the target",
    "benchlib run squad",
)
def test_p032_names(program, recorded, of_files, tmp_path):
    smoke = {metric.name for metric in Run(recorded("squad")).result.metrics}
    assert {"f1_minisquad_tiny", "exact_match_minisquad_tiny", "train_samples_per_s_minisquad_tiny"} <= smoke
    assert "f1_files_tiny" in {metric.name for metric in of_files[0].result.metrics}
    assert not {"f1", "exact_match", "loss_final", "train_samples_per_s"} & smoke
    for benchmark, ending in (("inference", "_tiny_mininews_reduced"), ("seq2seq", "_subset")):
        assert any(metric.name.endswith(ending) for metric in Run(recorded(benchmark)).result.metrics)
    asked = {"target_f1": 88.0, "target_loss": 0.5, "target_samples_per_s": 1.0, "target_minutes": 45}
    verdict = judged(edited("squad", tmp_path / "asked", config=asked, facts={"f1": 99.0}))
    for name in ("F1 target", "final loss", "training throughput", "training time"):
        assert _check(verdict, name).status == "SKIPPED" and "minisquad" in _check(verdict, name).reason
    planted = edited("squad", tmp_path / "planted", config={"planted_slowdown": 1.0})
    assert "planted_slowdown=1.0" in str(session.provenance(Run(planted)).to_dict())
    assert "planted" in program("baseline", "accept", planted, "--reason", "x", code=2)


@promise(
    "P033",
    "train BERT-large by its name, beside its published F1 and exact match",
    "benchlib run squad --set model=bert-large-uncased",
    needs="a GPU and the Hugging Face hub",
)
def test_p033_bert_large(program):
    plan = _words(program("run", "squad", "--tier", "weekend", "--set", "model=bert-large-uncased", "--dry-run"))
    assert "fine-tunes bert-large-uncased (pretrained weights" in plan
    for name, value in (("f1", "90.87 (90.5 to 91)"), ("exact_match", "84.39")):
        published = _words(program("references", "--metric", name))
        assert f"{value} BERT-large uncased, SQuAD v1.1, whole training" in published
    skip_rest("the training itself takes a GPU and the hub")


def _table(title):
    """Return the rows of the first table below a heading of the guide, by their first cell."""
    below = (home() / "docs" / "training.md").read_text().split(f"## {title}\n")[1].split("\n## ")[0]
    rows = [
        [cell.strip(" *") for cell in line.strip("|").split("|")] for line in below.splitlines() if line.startswith("|")
    ]
    return {row[0]: row[1:] for row in rows}, below


def _method():
    notebook = nbformat.read(home() / "notebooks" / "10_squad.ipynb", as_version=4)
    return next(cell.source for cell in notebook.cells if cell.source.startswith("## Method"))


@promise(
    "P034", "read why this benchmark was chosen: size, metric, time, collectives, traceability", "docs/training.md"
)
def test_p034_criteria():
    rows, _ = _table("Why BERT on SQuAD")
    criteria = ("size", "metric", "time", "collectives", "traceability")
    assert set(criteria) <= set(rows) and all(all(rows[name]) for name in criteria)
    assert all(f"({name})" in _method() for name in criteria)
    assert "(../docs/training.md#why-bert-on-squad)" in _method()
    questions, parameters = 87_599 + 10_570, 108_893_186  # 108.9 M parameters of 4 bytes are 436 MB
    assert f"{questions:,} questions" in rows["size"][-1] and f"{4 * parameters / 1e6:.0f} MB" in rows["size"][-1]


@promise("P035", "read the five benchmarks it was chosen among, with sizes and times", "docs/training.md")
def test_p035_alternatives():
    rows, below = _table("Why BERT on SQuAD")
    chosen = [name for name in rows if re.search(" on (SQuAD|MNLI|ImageNet|CIFAR-10|WMT14)", name)]
    sources = set(re.findall(r"\[\d\]", below.strip().split("\n\n")[-1]))
    assert len(chosen) == 5 and any("ResNet-50" in name for name in chosen)
    for name in chosen:
        data, _, time, _ = rows[name]
        assert re.search(r"\d", data) and re.search(r"\d+ (s|min|h)\b", time), name
        assert set(re.findall(r"\[\d\]", f"{data} {time}")) <= sources, "each claim has a source"
    assert "none was measured here" in below


@promise(
    "P036",
    "read the expected F1, exact match and V100 times of BERT-base and -large as others' figures",
    "benchlib references --metric train_s",
)
def test_p036_expected(program):
    for name, base, large in (("f1", "88.41", "90.87"), ("exact_match", "81.25", "84.39")):
        listed = _words(program("references", "--metric", name))
        assert f"{base} BERT-base uncased" in listed and re.search(rf"{large}( \(.*?\))? BERT-large uncased", listed)
    times = _words(program("references", "--metric", "train_s"))
    for minutes, model in (("24 min", "BERT-base uncased"), ("68 min", "BERT-large uncased")):
        assert re.search(rf"{minutes} 1 x NVIDIA V100 16 GB.{{0,400}}?{model}", times)
    assert "huggingface/transformers" in times and "claimed by their sources; none was measured here" in times


@promise("P037", "read licence, source, size and caching of SQuAD", "docs/training.md")
def test_p037_data_set():
    rows, _ = _table("The data set")
    assert "CC BY-SA 4.0" in rows["licence"][0]
    assert "Rajpurkar" in rows["source"][0] and "rajpurkar/squad" in rows["source"][0]
    assert all(words in rows["size"][0] for words in ("87,599", "10,570", "16 MB"))
    assert "HF_HOME" in rows["cache"][0]
    assert "licence, source, size and cache" in _method()


@promise(
    "P038",
    "download SQuAD once and train from the cache, or from files of one's own",
    "benchlib run squad --set train_file=F --set eval_file=G",
)
def test_p038_cache_and_files(program, of_files, of_cache, tmp_path):
    facts = [of_files[0].result.facts, of_cache.result.facts]
    assert [each["train_questions"] for each in facts] == [48, 48] and [each["eval_questions"] for each in facts] == [
        8,
        8,
    ]
    assert facts[1]["data"].startswith("rajpurkar/squad")
    broken = shutil.copy(of_files[1]["train_file"], tmp_path / "broken.json")
    text = json.dumps(json.loads((tmp_path / "broken.json").read_text())).replace(
        '"answer_start": ', '"answer_start": 9'
    )
    (tmp_path / "broken.json").write_text(text)
    with pytest.raises(Exception, match=r"broken.json: article 'Rooms', question 'q0': answer .* is not at its offset"):
        _trained(nproc=1, train_file=str(broken), eval_file=of_files[1]["eval_file"])
