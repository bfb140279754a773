"""The table of checks in a terminal."""

from benchlib.commands import output, run
from benchlib.judge.checks import Check, Verdict


def check(name, status, gates=True):
    return Check(name=name, kind="sanity", question="", status=status, reason="a reason", gates=gates)


def test_what_needs_a_reader_comes_first_and_what_passed_takes_a_line(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(output.console, "width", 140)
    checks = [check(f"fine {number}", "PASS") for number in range(30)]
    checks += [check("noisy", "AMBIGUOUS"), check("unlike", "FAIL", gates=False), check("slow", "FAIL")]
    run.summarise(tmp_path, Verdict(verdict="FAIL", sentence="1 check failed.", checks=checks))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[1:4]] == [
        ["slow", "fail"],
        ["unlike", "differs"],
        ["noisy", "undecided"],
    ]
    assert lines[4] == "passed  30 checks"
    assert not [line for line in lines if "fine" in line]
