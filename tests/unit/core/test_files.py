"""Files are whole or absent; events survive damage; what is read is a regular file of plain values."""

import errno
import json
import time
from pathlib import Path

import pytest

from benchlib.core.errors import StorageError, UserError
from benchlib.core.events import EventFollower, EventWriter, read_events
from benchlib.core.files import atomic_path, read_json, read_text, read_yaml, write_json


def write_and_fail(path, error):
    with atomic_path(path) as temporary:
        temporary.write_text("half")
        raise error


def test_a_failed_write_leaves_the_old_file_and_no_temporary(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, {"old": 1})
    with pytest.raises(ValueError, match="JSON compliant"):
        write_json(path, {"new": float("nan")})
    with pytest.raises(StorageError, match=r"a\.json cannot be written: no space left"):
        write_and_fail(path, OSError(errno.ENOSPC, "full"))
    with pytest.raises(PermissionError) as caught:  # not of this disk
        write_and_fail(path, PermissionError(errno.EACCES, "somebody else's file", "/elsewhere"))
    assert not isinstance(caught.value, StorageError)
    assert json.loads(path.read_text()) == {"old": 1}
    assert [item.name for item in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize("read", [read_yaml, read_json])
@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "no such file"),
        ("/dev/zero", "found a pipe or a device"),
        ("folder", "is a directory"),
        (b"\xfd\xfe", "not valid|not text"),
        (b"\xff\xfe{", "not valid|not text"),  # the mark of UTF-16 and half a character
        (b'{"a": ', "not valid"),
    ],
)
def test_what_is_no_file_of_values_is_refused_in_one_line(tmp_path, read, content, reason):
    path = tmp_path / "own"
    if content == "/dev/zero":
        path = Path(content)
    elif content == "folder":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=reason) as caught:
        read(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_a_mark_of_the_byte_order_is_no_part_of_a_file(tmp_path, encoding):
    """Notepad writes one before UTF-8, a shell of Windows that redirects output one before UTF-16."""
    path = tmp_path / "own"
    path.write_text('{"a": "\u00d7"}', encoding=encoding)
    assert read_json(path) == read_yaml(path) == {"a": "\u00d7"}
    assert read_text(path) == '{"a": "\u00d7"}'


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a: 1\nb: 2\na: 3\n", "line 1: a stands twice"),
        ("c: 1\na: {b: 1, b: 2}\n", "line 2: b stands twice"),
        ("a: 2026-13-45\n", "not valid YAML"),
        ("!!python/object/apply:os.system ['true']\n", "not valid YAML"),
    ],
)
def test_yaml_of_plain_values(tmp_path, text, reason):
    path = tmp_path / "own.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=reason):
        read_yaml(path)
    path.write_text("all: {budget_s: 3e2, amp: true}\nlist: [1, 2.5, x]\n")
    assert read_yaml(path) == {"all": {"budget_s": "3e2", "amp": True}, "list": [1, 2.5, "x"]}
    path.write_text("")
    assert read_yaml(path) is None


@pytest.mark.parametrize("text", ["NaN", "-Infinity", r'"\ud83d"'])
def test_json_is_read_strictly(tmp_path, text):
    path = tmp_path / "own.json"
    path.write_text(f'{{"a": {text}}}')
    with pytest.raises(UserError, match="not valid JSON"):
        read_json(path)


def test_events_of_all_writers_come_in_the_order_of_time(tmp_path):
    writers = [EventWriter(tmp_path, f"rank{rank}") for rank in (0, 1)]
    follower = EventFollower(tmp_path)
    for number in range(6):
        writers[number % 2].emit("step", step=number, loss=float("nan"), losses=[float("-inf"), 1.0])
    assert [event["step"] for event in read_events(tmp_path, ["step"])] == list(range(6))
    assert read_events(tmp_path)[0]["losses"] == ["-Infinity", 1.0]
    assert len(follower.poll()) == 6
    with writers[0].path.open("ab") as handle:
        handle.write(b'{"t": 1, "kind"')  # a line that is still being written
        handle.flush()
        assert follower.poll() == []
        handle.write(b': "step", "source": "rank0", "step": 6}\n')
    assert [event["step"] for event in follower.poll()] == [6]
    assert len(read_events(tmp_path)) == 7


def test_events_of_one_writer_keep_their_order_when_the_clock_is_set_back(tmp_path, monkeypatch):
    now = iter([1000.0, 1001.0, 400.0, 401.0, 500.0])
    writer, other = EventWriter(tmp_path, "rank0"), EventWriter(tmp_path, "rank1")
    monkeypatch.setattr(time, "time", lambda: next(now))
    for step in range(4):
        writer.emit("step", step=step)
    other.emit("step", step=9)
    assert [event["step"] for event in read_events(tmp_path) if event["source"] == "rank0"] == [0, 1, 2, 3]
