"""``--repeat N``: what is run again, how often, and in which order. The runs themselves are stand-ins here."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from benchlib.commands import run


@pytest.fixture
def runs(monkeypatch, tmp_path):
    """Let every benchmark end with the verdicts that ``script`` gives it, and keep the order of the runs."""
    log, script = [], {}

    def run_one(planned, out, earlier=(), verbose=False):
        word = script[planned].pop(0)
        log.append((planned, len(earlier)))
        verdict = SimpleNamespace(
            verdict="FAIL" if word == "WORSE" else word,
            regressed=word == "WORSE",
            exit_code=lambda strict: {"FAIL": 1, "WORSE": 1, "AMBIGUOUS": 3 * strict}.get(word, 0),
        )
        return run.Outcome(Path(f"{planned}-{len(log)}"), verdict, word == "STOPPED")

    monkeypatch.setattr(run, "run_one", run_one)
    monkeypatch.setattr("benchlib.show.index.render", lambda store: None)
    monkeypatch.setattr(run, "summarise_tier", lambda outcomes, store: None)
    monkeypatch.setattr(run, "load", lambda run_dir: SimpleNamespace(limits=[], kept=lambda limits: run_dir.name))
    return SimpleNamespace(
        log=log, script=script, all=lambda repeat, strict=False: run.run_all(list(script), tmp_path, strict, repeat)
    )


@pytest.mark.parametrize(
    ("script", "options", "code", "log"),
    [  # verdicts by benchmark; the exit code; what ran, with how many earlier repetitions
        (
            {"a": ["AMBIGUOUS"] * 3, "b": ["PASS"], "c": ["AMBIGUOUS", "PASS"]},
            {"repeat": 3, "strict": True},
            3,
            [("a", 0), ("b", 0), ("c", 0), ("a", 1), ("c", 1), ("a", 2)],
        ),
        ({"a": ["AMBIGUOUS", "AMBIGUOUS", "FAIL", "PASS"]}, {"repeat": 20}, 1, [("a", 0), ("a", 1), ("a", 2)]),
        (
            {"a": ["WORSE", "AMBIGUOUS", "PASS"], "b": ["WORSE"] * 3, "c": ["FAIL"]},
            {"repeat": 5},
            1,
            [("a", 0), ("b", 0), ("c", 0), ("a", 1), ("b", 1), ("a", 2)],
        ),
        ({"a": ["AMBIGUOUS", "PASS"]}, {"repeat": 1}, 0, [("a", 0)]),
        ({"a": ["STOPPED"], "b": ["PASS"]}, {"repeat": 3}, 130, [("a", 0)]),
    ],
    ids=[
        "only the undecided, interleaved",
        "until a decision",
        "what got worse once more",
        "not without --repeat",
        "not after an interrupt",
    ],
)
def test_what_runs_again(runs, script, options, code, log):
    runs.script |= script
    assert runs.all(**options) == code
    assert runs.log == log
