"""Nodes of one run that were started with different parameters, data or versions."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchlib.config.schema import resolve
from benchlib.runtime.group import difference, statement

HOSTS = ("a", "a", "b")


def _stated(torch: str = "2.9.1", benchmark: str = "squad", **values: Any) -> dict[str, str]:
    return statement(resolve(benchmark, overrides=values).config, torch)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"precision": "bf16"}, "precision is fp32 on a and bf16 on b"),
        ({"checkpoint_every": 5}, "checkpoint_every is 0 on a and 5 on b"),
        ({"planted_slowdown": 0.2}, "planted_slowdown is 0.0 on a and 0.2 on b"),
        ({"collective": "ucc"}, "collective is '' on a and ucc on b"),
        ({"torch": "2.8.0+cpu"}, "version of torch is 2.9.1 on a and 2.8.0 on b"),
        ({"torch": "2.9.1+cu126"}, ""),
        ({"budget_s": 7, "wall_limit_s": 9, "stall_timeout_s": 5, "target_f1": 50}, ""),
    ],
)
def test_a_difference_names_field_hosts_and_values(other: dict[str, Any], said: str) -> None:
    told = difference([_stated(), _stated(), _stated(**other)], HOSTS)
    assert said in told
    assert bool(told) == bool(said)


def test_another_benchmark_is_the_first_thing_told() -> None:
    told = difference([_stated(), _stated(benchmark="collectives")], ("a", "b"))
    assert "do the same work: benchmark is squad on a and collectives on b; " in told
    assert "more)" in told, "a sentence and no list of fields"


def test_files_are_compared_by_content(tmp_path: Path) -> None:
    """Each node has a copy of the data and of the model at a path of its own."""
    stated = []
    for name, answer in (("one", 1), ("two", 1), ("three", 2)):
        (tmp_path / name / "model").mkdir(parents=True)
        for file in ("train.json", "eval.json", "model/config.json"):
            (tmp_path / name / file).write_text(json.dumps({"answer": answer if file == "train.json" else 0}))
        paths = {
            field: str(tmp_path / name / f"{field.partition('_')[0]}.json") for field in ("train_file", "eval_file")
        }
        stated.append(_stated(**paths, model=str(tmp_path / name / "model")))
    assert difference(stated[:2], ("a", "b")) == ""
    told = difference(stated, ("a", "b", "c"))
    assert told.startswith("the nodes of this run do not do the same work: train_file is a file with SHA-256 ")
    assert "eval_file" not in told
    assert "model" not in told
    (tmp_path / "two/model/vocab.txt").write_text("a word")
    changed = _stated(train_file=str(tmp_path / "two/train.json"), eval_file=str(tmp_path / "two/eval.json"), model=str(tmp_path / "two/model"))  # fmt: skip
    assert "model is a folder with SHA-256" in difference([stated[0], changed], ("a", "b"))
