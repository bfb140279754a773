"""Nodes of one run that were started with different parameters, data or versions."""

from pathlib import Path
from typing import Any

import pytest

from benchlib.config.schema import resolve
from benchlib.runtime.group import difference, statement


def _stated(torch: str = "2.9.1", benchmark: str = "squad", **values: Any) -> dict[str, str]:
    return statement(resolve(benchmark, overrides=values).config, torch)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"precision": "bf16"}, "precision is fp32 on a and bf16 on b"),
        ({"collective": "ucc"}, "collective is '' on a and ucc on b"),
        ({"torch": "2.8.0+cpu"}, "version of torch is 2.9.1 on a and 2.8.0 on b"),
        ({"benchmark": "collectives"}, "do the same work: benchmark is squad on a and collectives on b; "),
        ({"torch": "2.9.1+cu126"}, ""),
        ({"budget_s": 7, "wall_limit_s": 9, "stall_timeout_s": 5, "target_f1": 50}, ""),
    ],
)
def test_a_difference_names_field_hosts_and_values(other, words) -> None:
    reason = difference([_stated(), _stated(), _stated(**other)], ("a", "a", "b"))
    assert words in reason
    assert bool(reason) == bool(words)
    assert (" more; start" in reason) == ("benchmark" in other), "a sentence and no list of fields"


def test_files_are_compared_by_their_size(tmp_path) -> None:
    """Each node has a copy of the data and of the model at a path of its own."""
    stated = []
    for name, size in (("one", 3), ("two", 3), ("three", 4)):
        (tmp_path / name / "model").mkdir(parents=True)
        paths = {field: str(tmp_path / name / f"{field}.json") for field in ("train_file", "eval_file")}
        for field, path in paths.items():
            Path(path).write_text("x" * (size if field == "train_file" else 2))
        (tmp_path / name / "model" / "config.json").write_text("{}")
        stated.append(_stated(**paths, model=str(tmp_path / name / "model")))
    assert difference(stated[:2], ("a", "b")) == ""
    reason = difference(stated, ("a", "b", "c"))
    assert "train_file is 3 bytes on a and 4 bytes on c" in reason
    assert "eval_file" not in reason and "model" not in reason
