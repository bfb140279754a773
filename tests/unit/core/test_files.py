"""Files are whole or absent; events survive damage."""

import json

import pytest

from benchlib.core.errors import UserError
from benchlib.core.events import EventFollower, EventWriter, read_events
from benchlib.core.files import atomic_path, read_json, write_json


def test_a_failed_write_leaves_the_old_file_and_no_temporary(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, {"old": 1})
    with pytest.raises(ValueError, match="JSON compliant"):
        write_json(path, {"new": float("nan")})
    with pytest.raises(OSError, match="disk is full"):
        write_half(path)
    assert json.loads(path.read_text()) == {"old": 1}
    assert [item.name for item in tmp_path.iterdir()] == ["a.json"]


def write_half(path):
    with atomic_path(path) as temporary:
        temporary.write_text("half")
        raise OSError("disk is full")


@pytest.mark.parametrize(
    ("data", "words"), [(b'{"a": ', "may be cut"), (b"\xff\xfe", "not UTF-8"), (None, "no such file")]
)
def test_unreadable_json_is_named(tmp_path, data, words):
    path = tmp_path / "x.json"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(UserError, match=f"x.json.*{words}"):
        read_json(path)


def test_events_of_all_writers_come_in_the_order_of_time(tmp_path):
    writers = [EventWriter(tmp_path, f"rank{rank}") for rank in (0, 1)]
    follower = EventFollower(tmp_path)
    for number in range(6):
        writers[number % 2].emit("step", step=number, loss=float("nan"))
    assert [event["step"] for event in read_events(tmp_path, ["step"])] == list(range(6))
    assert len(follower.poll()) == 6
    with writers[0].path.open("ab") as handle:
        handle.write(b'{"t": 1, "kind"')  # a line that is still being written
    assert follower.poll() == []
    assert len(read_events(tmp_path)) == 6
    for writer in writers:
        writer.close()
