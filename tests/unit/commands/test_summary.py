"""The table of checks in terminals of different widths, and what a pipe gets."""

import io

import pytest

from benchlib.commands import run
from benchlib.core import terminal
from benchlib.judge.checks import Check, Verdict

LONG = (
    "broadcast library int64 in place, 1 MiB: busbw 8.9 GB/s; at most 135.87 GB/s can be moved (measured: memory copy)"
)
CHECK = Check(
    name="possible bandwidth", kind="sanity", question="", status="PASS", reason=LONG, limit="<= 142.663 GB/s"
)


def printed(width, monkeypatch, tmp_path):
    made = terminal.console()
    made.width, made.file = width, io.StringIO()
    monkeypatch.setattr(run, "console", made)
    run.summarise(tmp_path, Verdict(verdict="PASS", sentence="1 check passed.", checks=[CHECK]), None)
    return made.file.getvalue()


@pytest.mark.parametrize(("width", "column"), [(60, False), (80, False), (100, True), (140, True)])
def test_every_line_fits_and_nothing_is_lost(width, column, monkeypatch, tmp_path):
    text = printed(width, monkeypatch, tmp_path)
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    assert ("limit" in lines[0].split()) is column
    words = " ".join(text.split())
    assert "142.663" in words
    for word in LONG.split():
        assert word in words


def test_a_pipe_is_as_wide_as_columns_says(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    assert terminal.console(least_width=120).width == 120
    monkeypatch.setenv("COLUMNS", "80")
    assert terminal.console(least_width=120).width == 80
