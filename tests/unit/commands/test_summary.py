"""The table of checks in terminals of different widths, and what a pipe gets."""

import io

import pytest
from make_run import make_run
from rich.console import Console

from benchlib.commands import output, run
from benchlib.core import terminal
from benchlib.judge.checks import Check, Verdict

LONG = (
    "broadcast library int64 in place, 1 MiB: busbw 8.9 GB/s; at most 135.87 GB/s can be moved (measured: memory copy)"
)
CHECK = Check(
    name="possible bandwidth", kind="sanity", question="", status="FAIL", reason=LONG, limit="<= 142.663 GB/s"
)


@pytest.fixture
def printed(monkeypatch, tmp_path, capsys):
    """Summarise a run of these checks on a console of this width; return what was printed."""

    def print_it(width, checks=(CHECK,)):
        monkeypatch.setattr(output.console, "width", width)
        run.summarise(tmp_path, Verdict(verdict="FAIL", sentence="1 check failed.", checks=list(checks)), None)
        return capsys.readouterr().out

    return print_it


@pytest.mark.parametrize("width", [60, 140])
def test_every_line_fits_and_nothing_is_lost(width, printed):
    text = printed(width)
    assert max(map(len, text.splitlines())) <= width
    words = " ".join(text.split())
    assert "142.663" in words
    for word in LONG.split():
        assert word in words


def check(name, status, gates=True):
    return CHECK.model_copy(update={"name": name, "status": status, "gates": gates, "reason": "a reason"})


def test_what_needs_a_reader_comes_first_and_what_passed_takes_a_line(printed):
    checks = [check(f"fine {number}", "PASS") for number in range(30)]
    checks += [check("noisy", "AMBIGUOUS"), check("unlike", "FAIL", gates=False), check("slow", "FAIL")]
    lines = printed(140, checks).splitlines()
    assert [line.split()[:2] for line in lines[1:4]] == [
        ["slow", "fail"],
        ["unlike", "differs"],
        ["noisy", "undecided"],
    ]
    assert lines[4] == "passed  30 checks"
    assert not [line for line in lines if "fine" in line]


def test_a_tier_ends_with_the_verdicts_and_the_index(tmp_path, capsys):
    fast = make_run(tmp_path / "a")
    verdicts = [Verdict(verdict="PASS", sentence="3 checks passed.", checks=[])]
    verdicts += [Verdict(verdict="FAIL", sentence="1 check failed: loss decreases.", checks=[])]
    run.summarise_tier([run.Outcome(fast, verdict, False) for verdict in verdicts], tmp_path)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[1:3]] == [["squad", "PASS"], ["squad", "FAIL"]]
    assert "1 check failed: loss decreases." in lines[2]
    assert lines[-1] == f"index: {tmp_path / 'index.html'}"


def test_a_pipe_is_as_wide_as_columns_says(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    assert terminal.console(least_width=120).width == 120
    monkeypatch.setenv("COLUMNS", "80")
    assert terminal.console(least_width=120).width == 80


@pytest.mark.parametrize("terminal_", [True, False])
def test_what_takes_its_time_shows_in_a_terminal_only(terminal_, monkeypatch):
    made = Console(file=io.StringIO(), force_terminal=terminal_, width=80)
    monkeypatch.setattr(run, "console", made)
    with run.at_work("drawing the report"):
        pass
    assert ("drawing the report" in made.file.getvalue()) == terminal_
