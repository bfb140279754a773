"""Files are whole or absent; events survive damage."""

import json
import os
import threading
from pathlib import Path

import pytest

from benchlib.core import files, run_folder
from benchlib.core.errors import StorageError, UserError
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


@pytest.fixture
def no_replacing(monkeypatch):
    """As root a mistake would replace a device of this machine."""
    monkeypatch.setattr("os.replace", lambda source, target: pytest.fail(f"{target} was replaced"))


@pytest.mark.parametrize("kind", ["fifo", "link", "dangling", "device"])
def test_output_goes_into_what_is_no_regular_file_and_never_replaces_it(tmp_path, kind, no_replacing):
    path, other, received = tmp_path / "out", tmp_path / "other", []
    if kind == "fifo":
        os.mkfifo(path)
        reader = threading.Thread(target=lambda: received.append(path.read_text()))
        reader.start()
    elif kind == "device":
        path = Path("/dev/null")
    else:
        path.symlink_to(other)
        if kind == "link":
            other.write_text("an earlier and longer text")
    before = os.lstat(path)
    with files.output_path(path) as temporary:
        temporary.write_text("rows")
    if kind == "fifo":
        reader.join()
        assert received == ["rows"]
    elif kind != "device":
        assert other.read_text() == "rows"
    assert (os.lstat(path).st_ino, os.lstat(path).st_mode) == (before.st_ino, before.st_mode)
    assert not list(tmp_path.glob("*.tmp")) and not list(tmp_path.glob(".*.tmp"))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_output_into_a_full_device_is_an_error(no_replacing):
    with pytest.raises(StorageError, match="/dev/full cannot be written"), files.output_path("/dev/full") as temporary:
        temporary.write_text("rows")


def test_output_that_fails_leaves_the_earlier_file(tmp_path):
    path = tmp_path / "out"
    path.write_text("earlier")
    with pytest.raises(OSError, match="cut"), files.output_path(path) as temporary:
        _write_and_fail(temporary)
    assert path.read_text() == "earlier" and list(tmp_path.iterdir()) == [path]


def _write_and_fail(path):
    path.write_text("half")
    raise OSError("cut")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"a: 1\nb: 2\na: 3\n", "line 1: a stands twice"),
        (b"a: {b: 1, b: 2}\n", "b stands twice"),
        (b"a: &x [1, 2]\nb: *x\n", "a second time by an alias"),
        (b"a: &x {b: *x}\n", "alias"),
        (b"a: " + b"[" * 25 + b"]" * 25, "nested deeper than 20"),
        (b"a: " + b"[" * 20_000, "nested deeper than 20"),
        (b"a: " + b"{b: " * 3_000 + b"}" * 3_000, "nested deeper than 20"),
        (b"".join(b" " * level + b"a:\n" for level in range(900)), "nested too deeply|nested deeper"),
        ("a: 1\n".encode("utf-16"), "not UTF-8"),
        (b"a: \x00", "not valid YAML"),
        (b"a: 2026-13-45\n", "not valid YAML"),
        (b"!!python/object/apply:os.system ['true']\n", "not valid YAML"),
        (b"? {a: 1}\n: 2\n", "not valid YAML"),
        (b"#" * (2**20 + 1), "the limit is 1 MiB"),
        (b"a: b: c", "not valid YAML"),
    ],
)
def test_yaml_that_is_no_plain_file_of_values_is_refused_in_one_line(tmp_path, text, reason):
    path = tmp_path / "own.yaml"
    path.write_bytes(text)
    with pytest.raises(UserError, match=reason) as caught:
        files.read_yaml(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_yaml_is_read_as_the_library_reads_it(tmp_path):
    path = tmp_path / "own.yaml"
    path.write_text("all: {budget_s: 3e2, amp: true}\nlist: [1, 2.5, x]\n")
    assert files.read_yaml(path) == {"all": {"budget_s": "3e2", "amp": True}, "list": [1, 2.5, "x"]}
    path.write_text("")
    assert files.read_yaml(path) is None


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="this system has no /dev/zero")
def test_a_device_a_pipe_and_a_huge_file_are_never_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "huge").touch()
    os.truncate(tmp_path / "huge", 2**40)
    for path, reason in (
        ("/dev/zero", "found a device"),
        (tmp_path / "pipe", "found a pipe"),
        (tmp_path / "huge", "MiB"),
    ):
        for read in (files.read_yaml, read_json):
            with pytest.raises(UserError, match=reason):
                read(path)


def test_new_files_have_the_permissions_that_the_umask_leaves_and_nobody_changes_it(tmp_path, monkeypatch):
    """For a moment without umask other threads would make files that everybody may write."""
    before = os.umask(0o027)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(os, "umask", lambda mask: pytest.fail(f"the umask was set to {mask:o}"))
            write_json(tmp_path / "a.json", {})
    finally:
        os.umask(before)
    assert (tmp_path / "a.json").stat().st_mode & 0o777 == 0o640


def test_two_who_judge_a_run_at_once_leave_the_checksum_of_the_last_verdict(tmp_path, monkeypatch):
    """The first one has read the list and the verdict when the second one writes both anew."""
    path, entry, others = tmp_path / "verdict.json", run_folder._entry, []
    write_json(path, {"verdict": "PASS"})
    run_folder.record_files(tmp_path)

    def judge_again():
        write_json(path, {"verdict": "FAIL", "sentence": "judged by other rules"})
        run_folder.record_verdict(tmp_path)

    def entry_that_takes_long(file):
        found = entry(file)
        if not others:
            others.append(threading.Thread(target=judge_again))
            others[0].start()
            others[0].join(0.3)  # with a lock the other one waits
        return found

    monkeypatch.setattr(run_folder, "_entry", entry_that_takes_long)
    run_folder.record_verdict(tmp_path)
    others[0].join()
    assert run_folder.file_faults(tmp_path) == []
