"""Times that no calendar has, and durations in words."""

import pytest
from stores import command, no_pictures, place  # noqa: F401

from benchlib.core.text import day, duration, moment
from benchlib.results.run import Run
from benchlib.show import index, report


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize("started", [-1e20, -1.0, 1e20, 4e11, 10**200])
def test_times_that_no_calendar_has(tmp_path, started):
    out = tmp_path / "out"
    run = place(out, started_at=started)
    other = place(out, "squad-cpu-101501-bbbbbb")
    assert moment(started) and day(started) and duration(started)
    assert "result.json: not of this version (started_at" in report.html(Run(run))
    assert index.render(out).read_text().count("squad-cpu-1015") or other
    code, said = command("list", "--runs", out=out)
    assert (code, said.count("PASS"), said.count("DAMAGED")) == (0, 1, 1)


def test_spans_are_written_in_their_unit():
    assert [duration(value) for value in (-30, 0.25, 59.4, 59.7, 3599.9, 7260)] == [
        "-30 s", "0.25 s", "59.4 s", "1 min 0 s", "1 h 0 min", "2 h 1 min",
    ]  # fmt: skip
    assert moment(float("nan")) == moment(1e18) == "an unknown time"
