"""``--repeat N``: what is run again, how often, and in which order. The runs themselves are stand-ins here."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from benchlib.commands import run


@pytest.fixture
def runs(monkeypatch, tmp_path):
    """Let every benchmark end with the verdicts that ``script`` gives it, and keep the order of the runs."""
    log, script = [], {}

    def run_one(planned, out, earlier=()):
        word = script[planned].pop(0)
        log.append((planned, len(earlier)))
        verdict = SimpleNamespace(
            verdict=word, exit_code=lambda strict: {"FAIL": 1, "AMBIGUOUS": 3 * strict}.get(word, 0)
        )
        return run.Outcome(Path(f"{planned}-{len(log)}"), verdict, word == "STOPPED")

    monkeypatch.setattr(run, "run_one", run_one)
    monkeypatch.setattr(run, "write_index", lambda store, quiet: 0)
    monkeypatch.setattr(run, "summarise_tier", lambda outcomes, store: None)
    monkeypatch.setattr(run, "load", lambda run_dir: SimpleNamespace(limits=[], kept=lambda limits: run_dir.name))
    return SimpleNamespace(
        log=log, script=script, all=lambda repeat, strict=False: run.run_all(list(script), tmp_path, strict, repeat)
    )


def test_only_the_undecided_run_again_and_take_turns(runs):
    runs.script |= {"a": ["AMBIGUOUS"] * 3, "b": ["PASS"], "c": ["AMBIGUOUS", "PASS"]}
    assert runs.all(repeat=3, strict=True) == 3
    assert runs.log == [("a", 0), ("b", 0), ("c", 0), ("a", 1), ("c", 1), ("a", 2)]


def test_a_decision_ends_the_repetition(runs):
    runs.script |= {"a": ["AMBIGUOUS", "AMBIGUOUS", "FAIL", "PASS"]}
    assert runs.all(repeat=20) == 1
    assert runs.log == [("a", 0), ("a", 1), ("a", 2)]


def test_without_repeat_nothing_runs_twice(runs):
    runs.script |= {"a": ["AMBIGUOUS", "PASS"]}
    assert runs.all(repeat=1) == 0
    assert runs.log == [("a", 0)]


def test_an_interrupt_ends_everything(runs):
    runs.script |= {"a": ["STOPPED"], "b": ["PASS"]}
    assert runs.all(repeat=3) == 130
    assert runs.log == [("a", 0)]
