"""A child that answers, reports, is silent, raises, crashes, hangs, loses its parent: what its parent learns, and what is left of it."""

import ctypes
import functools
import os
import signal
import subprocess
import sys
import time
from multiprocessing import forkserver

import psutil
import pytest
from waiting import until

from benchlib.core.errors import BackendUnavailable
from benchlib.runtime import child

PATIENCE_S = 300.0  # for what comes to pass at once where nobody else has the cores
run = functools.partial(child.run, timeout_s=PATIENCE_S, tell=lambda progress: None)


@pytest.fixture(scope="module", autouse=True)
def own_server():
    forkserver._forkserver._stop()  # other tests may have started one, with their modules
    yield
    forkserver._forkserver._stop()


def answer(first, second, tell):
    for done in range(3):
        tell({"done": done})
    print("said aloud")
    return {
        "sum": first + second,
        "blas": os.environ["OPENBLAS_NUM_THREADS"],
        "ids": (os.getpid(), os.getppid(), os.getsid(0)),
    }


def fail(kind, tell):
    print("the driver said no", file=sys.stderr, flush=True)
    if kind == "segfault":
        ctypes.string_at(0)
    raise {
        "raise": ValueError("two\n lines"),
        "unavailable": BackendUnavailable("no openvino:\n pip install it"),
        "quit": SystemExit(4),
    }[kind]


def wait_for_the_device(pids, tell):
    """Start a helper in a session of its own, as compilers do: neither the parent's death nor its group reaches it. Then hang."""
    helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    pids.write_text(f"{os.getpid()} {helper.pid} ")
    time.sleep(600)


def gone(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def hangs(pids):
    return pids.exists() and pids.read_text().endswith(" ")


def hanging(pids):
    """Wait for the ids of a hanging child and of its helper."""
    until(lambda: hangs(pids), PATIENCE_S)
    return [int(word) for word in pids.read_text().split()]


def test_an_answer_comes_back_with_progress_and_output(tmp_path):
    reports = []
    ended = run(answer, 2, 3, tell=reports.append, log=tmp_path / "a")
    assert (ended.status, ended.reason) == ("done", "") and ended.seconds > 0
    value = ended.value
    assert (value["sum"], value["blas"]) == (5, "1")
    assert [progress for progress in reports if progress] == [{"done": 0}, {"done": 1}, {"done": 2}]
    assert (tmp_path / "a.out").read_text() == "said aloud\n" and (tmp_path / "a.err").read_text() == ""
    pid, parent, session = value["ids"]
    assert session == pid != os.getsid(0) and gone(pid)
    assert os.environ.get("OPENBLAS_NUM_THREADS") != "1", "the parent's own stay"
    if sys.platform == "linux":
        assert parent != os.getpid(), "a fork of the server"


@pytest.mark.parametrize(
    ("kind", "status", "reason"),
    [
        ("raise", "crashed", "ValueError: two lines"),
        ("quit", "crashed", "SystemExit: 4"),
        ("segfault", "crashed", "ended by SIGSEGV: Fatal Python error: Segmentation fault"),
        ("unavailable", "unavailable", "no openvino: pip install it"),
    ],
)
def test_what_goes_wrong_is_told_in_its_own_words(tmp_path, kind, status, reason):
    ended = run(fail, kind, log=tmp_path / "log")
    assert (ended.status, ended.value) == (status, None) and ended.reason.startswith(reason)
    if kind == "segfault":
        assert "string_at" in ended.reason


def test_a_hang_is_silent_then_ends_in_time_with_its_place_and_leaves_no_process(tmp_path, monkeypatch):
    """The time is over as soon as the child hangs and has given signs of life, however long that takes."""
    pids, reports, real = tmp_path / "pids", [], time.monotonic
    monkeypatch.setattr(child, "SILENT_S", 0.05)
    monkeypatch.setattr(child, "STACKS_S", PATIENCE_S)
    late = [0.0]
    monkeypatch.setattr(child.time, "monotonic", lambda: real() + late[0])

    def tell(progress):
        reports.append(progress)
        if hangs(pids):
            late[0] = 700.0

    ended = run(wait_for_the_device, pids, timeout_s=600, tell=tell, log=tmp_path / "log")
    assert ended.status == "timeout" and ended.reason.startswith("not done after 600 s: ")
    assert "wait_for_the_device" in ended.reason and set(reports) == {None}
    assert all(gone(pid) for pid in hanging(pids))


def test_an_interrupt_leaves_no_process(tmp_path, monkeypatch):
    pids = tmp_path / "pids"
    monkeypatch.setattr(child, "SILENT_S", 0.05)
    with pytest.raises(KeyboardInterrupt):
        run(wait_for_the_device, pids, tell=lambda _: hangs(pids) and signal.raise_signal(signal.SIGINT))
    assert all(gone(pid) for pid in hanging(pids))


def test_a_child_and_its_server_die_with_their_parent(tmp_path):
    pids = tmp_path / "pids"
    code = f"import test_child, pathlib; test_child.run(test_child.wait_for_the_device, pathlib.Path({str(pids)!r}))"
    parent = subprocess.Popen([sys.executable, "-c", code])
    pid, helper = hanging(pids)
    started = [pid, *(process.pid for process in psutil.Process(parent.pid).children(recursive=True))]
    parent.kill()
    parent.wait()
    try:
        until(lambda: all(gone(each) for each in started if each != helper), PATIENCE_S)
    finally:
        psutil.Process(helper).kill()  # in a run the supervisor, who adopts it, does this
