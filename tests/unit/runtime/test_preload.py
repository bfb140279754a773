"""What a benchmark's children load ahead: a name that is wrong would only cost time, so nothing else would tell."""

import importlib.util

import pytest

from benchlib.benchmarks import BENCHMARKS


@pytest.mark.parametrize("name", ["parity", "inference"])
def test_the_modules_that_children_load_ahead_exist(name):
    modules = BENCHMARKS[name].part("config", "PRELOAD")
    assert modules and all(map(importlib.util.find_spec, modules))
