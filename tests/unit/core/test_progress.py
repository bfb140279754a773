"""What an onlooker sees, against cases that were worked out by hand."""

import json

import pytest

from benchlib.core.events import Progress, read_events

TRAIN = [{"kind": "plan", "planned_steps": 9, "t": 0}, {"kind": "phase", "name": "train", "t": 0}]
STEPS = [{"kind": "step", "t": float(i), "step": i, "samples": 16, "loss": 2.0 - i / 10} for i in range(1, 6)]
MEMBERS = {"kind": "phase", "name": "members", "text": "comparing", "t": 0}


def counts(*pairs, total):
    return [{"kind": "progress", "t": t, "done": done, "total": total} for t, done in pairs]


def seen(*events):
    progress = Progress()
    for event in events:
        progress.update({"source": "rank0", **event})
    return progress


@pytest.mark.parametrize(
    ("events", "line", "left_s"),
    [
        # By what was done, not by the number of events: 10 a second, 40 to go.
        (counts((0.0, 0), (1.0, 10), (6.0, 60), total=100), "starting  60/100  4 s left", 4.0),
        ([*TRAIN, *STEPS], "training  5/9  loss 1.500  16.0 samples/s  4 s left", 4.0),
        # A second count in a phase starts anew.
        (
            [*counts((0.0, 0), (1.0, 50), (2.0, 100), total=100), *counts((10.0, 0), (11.0, 1), (12.0, 2), total=4)],
            "starting  2/4  2 s left",
            2.0,
        ),
        ([MEMBERS, *counts((0, 1), total=7), {"kind": "phase", "name": "write", "t": 2}], "writing results", None),
    ],
    ids=["leaps", "training", "second count", "next phase"],
)
def test_what_is_shown_follows_the_events(events, line, left_s):
    progress = seen(*events)
    assert (progress.line(), progress.left_s) == (line, left_s)


def test_an_event_without_what_its_kind_needs_is_passed_over(tmp_path):
    """A run does not end because a benchmark leaves out a field of an event: neither supervisor nor notebook sees it."""
    lines = [{"kind": "phase"}, {"kind": "progress", "done": 1}, {"kind": "start"}, {"kind": "log"}]
    text = "".join(json.dumps({"t": 1.0, "source": "rank0", **line}) + "\n" for line in lines)
    (tmp_path / "events-rank0.jsonl").write_text(text)
    assert [event["kind"] for event in read_events(tmp_path)] == ["log"]
