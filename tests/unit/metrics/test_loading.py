"""Loading metrics by path without a network, what they say of themselves, and the lines of the manual."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import datasets
import pytest

from benchlib import metrics
from benchlib.core.files import PACKAGE, home

NAMES = sorted(path.parent.name for path in (PACKAGE / "metrics").glob("*/__init__.py"))
NO_NETWORK = """
import socket
def refuse(*arguments):
    raise AssertionError(f"a metric asks for the network: {arguments}")
socket.socket.connect = socket.getaddrinfo = refuse
"""
SUMMARIES = 'summaries, highlights = ["Pelham has 62 horses."], ["Pelham has 57 nurses."]\n'


def test_every_folder_is_a_metric():
    assert NAMES == ["mlperf_rouge", "squad_v1"]


@pytest.mark.parametrize("name", NAMES)
def test_a_metric_says_what_it_is(by_path, name):
    metric = by_path(name)
    assert (metric.name, metric.module_type) == (name, "metric")
    assert isinstance(metric.features, datasets.Features) and set(metric.features) == {"predictions", "references"}
    assert len(metric.description) > 200 and metric.codebase_urls and metric.reference_urls
    assert metric.citation.count("@inproceedings{") == metric.citation.count("year={") > 0
    assert {"Args:", "Returns:", "Example:"} <= set(re.findall(r"^\w+:", metric.inputs_description, re.MULTILINE))
    assert f'evaluate.load("benchlib/metrics/{name}")' in metric.compute.__doc__


@pytest.mark.parametrize("name", NAMES)
def test_the_benchmarks_use_the_file_that_a_user_loads(by_path, name):
    used, loaded = metrics.load(name), by_path(name)
    own, copy = (Path(sys.modules[type(metric).__module__].__file__) for metric in (used, loaded))
    assert own == PACKAGE / "metrics" / name / f"{name}.py" != copy
    assert own.read_text() == copy.read_text()


def isolated(code, home_folder):
    """Run code in the checkout with an empty home folder, without a network and without the tests' offline switches."""
    environment = {name: text for name, text in os.environ.items() if not name.startswith(("HF_", "XDG_"))}
    environment |= {"HOME": str(home_folder), "PYTHONPATH": str(PACKAGE.parent)}
    command = [sys.executable, "-W", "error", "-c", NO_NETWORK + code]
    done = subprocess.run(command, cwd=home(), env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def lines_of(page):
    """Return the two lines of a page of the manual that load a metric and score with it."""
    (lines,) = re.findall(r"^    (import evaluate)\n    (.*)$", (home() / "docs" / page).read_text(), re.MULTILINE)
    return "\n".join(lines)


def test_the_lines_of_the_manual_score_without_a_network(tmp_path):
    predictions, references = tmp_path / "predictions.json", tmp_path / "dev-v1.1.json"
    predictions.write_text(json.dumps({"half": "Broncos!", "right": "Zürich"}))
    gold = {"half": ["Denver Broncos", "the Denver Broncos"], "right": ["zürich"], "missing": ["the"], "other": ["x"]}
    answers = {name: [{"text": text, "answer_start": 0} for text in texts] for name, texts in gold.items()}
    questions = [{"id": name, "question": "?", "answers": rows} for name, rows in answers.items()]
    paragraphs = [{"context": "", "qas": questions[:2]}, {"context": "", "qas": questions[2:]}]
    references.write_text(json.dumps({"version": "1.1", "data": [{"title": "t", "paragraphs": paragraphs}]}))
    squad = lines_of("training.md").replace('"predictions.json"', repr(str(predictions)))
    squad = squad.replace('"dev-v1.1.json"', repr(str(references)))
    code = f"{squad}\n{SUMMARIES}{lines_of('inference.md')}"
    first, second = isolated(code, tmp_path / "home").splitlines()
    assert first == str({"exact_match": 25.0, "f1": (200 / 3 + 100) / 4})
    assert "'rouge1': 50.0," in second


def test_what_benchmarks_load_leaves_no_file_and_asks_for_no_network(tmp_path):
    code = """
from benchlib import metrics
row = {"id": "q", "answers": {"text": ["a b"], "answer_start": [0]}}
print(metrics.load("squad_v1").compute(predictions=[{"id": "q", "prediction_text": "b"}], references=[row])["f1"])
print(metrics.load("mlperf_rouge").compute(predictions=["a"], references=["a"])["rouge1"])
"""
    folder = tmp_path / "home"
    folder.mkdir(mode=0o555)
    assert isolated(code, folder).split() == ["100.0", "100.0"]
    assert list(folder.iterdir()) == []
