"""The table of checks in terminals of different widths, and what a pipe gets."""

import pytest

from benchlib.commands import output, run
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
        run.summarise(tmp_path, Verdict(verdict="FAIL", sentence="1 check failed.", checks=list(checks)))
        return capsys.readouterr().out

    return print_it


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
