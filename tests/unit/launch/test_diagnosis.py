"""The cause of a broken run is the first failure that is no echo; a hang is the rank that does not wait."""

import pytest
from torch import OutOfMemoryError
from torch.distributed import DistBackendError

from benchlib.launch import diagnosis
from benchlib.launch.diagnosis import RankRecord
from benchlib.launch.processes import memory_kills

CLOSED = "[/b/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1234"


def _failed(rank: int, t: float, kind: str, message: str, code: int = 1, echo: bool = False) -> RankRecord:
    error = {"t": t, "type": kind, "message": message, "traceback": "", "echo": echo}
    return RankRecord(rank, returncode=code, ended_at=t + 0.5, phase="train", step=7, error=error)


def _raised(error: BaseException, file: str) -> BaseException:
    """Return an error that was raised in a file of this name, below a frame of this one."""
    with pytest.raises(type(error)) as caught:
        exec(compile("raise error", file, "exec"), {"error": error})
    return caught.value


C10D = "/v/site-packages/torch/distributed/distributed_c10d.py"
LOADER = "/v/site-packages/torch/utils/data/dataloader.py"
OWN = "/p/train.py"
CALLBACK = "Got the following error when running the callback: "
TIMED_OUT = "[/b/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 15000ms for recv operation"


@pytest.mark.parametrize(
    ("error", "file", "echo"),
    [
        (RuntimeError(CLOSED), C10D, True),
        (RuntimeError(TIMED_OUT), OWN, True),  # raised where the rank waits for its request
        (RuntimeError(f"{CALLBACK}DistBackendError: NCCL error: remote process exited"), OWN, True),
        (DistBackendError("NCCL error: unhandled system error"), OWN, True),
        (RuntimeError("mpi send timed out after 9 s"), "/p/benchlib/runtime/mpi.py", True),
        (ConnectionResetError(104, "Connection reset by peer"), "/v/torch/distributed/rendezvous.py", True),
        (ConnectionResetError(104, "Connection reset by peer"), "/usr/lib/python3.11/ssl.py", False),
        (FileNotFoundError(2, "No such file", "/mnt/nccl-data/train.json"), OWN, False),
        (RuntimeError("DataLoader worker (pid 7) exited unexpectedly: connection reset by peer"), LOADER, False),
        (ValueError("ProcessGroup: Default process group has not been initialized"), C10D, False),
        (RuntimeError("Trying to backward through the graph a second time"), "/v/torch/autograd/graph.py", False),
        (OutOfMemoryError("CUDA out of memory while NCCL allocated"), C10D, False),
    ],
)
def test_type_and_origin_tell_an_echo(error: BaseException, file: str, echo: bool) -> None:
    assert diagnosis.is_secondary(_raised(error, file)) is echo


@pytest.mark.parametrize(
    ("cause", "echo"), [(RuntimeError(CLOSED), True), (OutOfMemoryError("CUDA out of memory"), False)]
)
def test_an_error_that_is_raised_again_is_what_its_cause_is(cause: Exception, echo: bool) -> None:
    error = RuntimeError("all_reduce between the groups: it failed")
    error.__cause__ = _raised(cause, C10D)
    assert diagnosis.is_secondary(_raised(error, "/p/benchlib/workloads/collectives/hierarchy.py")) is echo


OWN_ERROR = _failed(0, 10.0, "FileNotFoundError", "No such file: '/mnt/nccl-data/train.json'")
FIRST_ECHO, LAST_ECHO = (_failed(rank, t, "RuntimeError", CLOSED, echo=True) for rank, t in ((0, 10.0), (1, 10.2)))


@pytest.mark.parametrize(
    ("ranks", "culprit", "words"),
    [
        # Not the peer that the library aborts, nor an echo that came first.
        ([OWN_ERROR, RankRecord(1, returncode=-6, ended_at=10.1, phase="train")], 0, "rank 0 raised FileNotFoundError"),
        ([FIRST_ECHO, _failed(1, 10.4, "ValueError", "boom\nsecond line")], 1, "during phase train, step 7: boom"),
        # A death is noticed later than peers may write about it.
        (
            [_failed(0, 10.05, "Odd", "an unheard-of text"), LAST_ECHO, RankRecord(2, returncode=-9, ended_at=10.1)],
            2,
            "rank 2 was killed by SIGKILL",
        ),
        # Who was ended by the supervisor is no cause; where there are only echoes, somebody had left before.
        (
            [RankRecord(0, returncode=-15, ended_at=1.0, ended_by_us=True), RankRecord(1, returncode=3, ended_at=2.0)],
            1,
            "exit code 3",
        ),
        ([RankRecord(0, returncode=0, ended_at=1.0), LAST_ECHO], 1, "rank 0 had already ended (exit code 0)"),
        ([RankRecord(0, returncode=-15, ended_at=1.0, ended_by_us=True)], None, ""),
    ],
)
def test_the_first_failure_that_is_no_echo_is_the_cause(
    ranks: list[RankRecord], culprit: int | None, words: str
) -> None:
    cause = diagnosis.first_failure(ranks)
    assert (cause and cause.rank) == culprit
    assert cause is None or words in diagnosis.failure_text(cause, ranks)
    assert cause is None or "second line" not in diagnosis.failure_text(cause, ranks)


def _dump(*inner: tuple[str, int, str]) -> str:
    lines = [f'  File "{file}", line {line} in {function}' for file, line, function in inner]
    other = 'Thread 0x0000000000000002 (most recent call first):\n  File "/x/threading.py", line 1 in wait\n\n'
    return other + "Current thread 0x0000000000000001 (most recent call first):\n" + "\n".join(lines) + "\n"


WAITS = _dump(
    ("/v/site-packages/torch/distributed/distributed_c10d.py", 2810, "all_reduce"), ("/p/train.py", 5, "step")
)
BACKWARD = _dump(("/v/site-packages/torch/autograd/graph.py", 841, "_engine_run_backward"), ("/p/train.py", 4, "step"))
BUSY = _dump(("/usr/lib/python3.11/socket.py", 700, "readinto"), ("/p/data.py", 9, "load"))


def test_main_thread_is_the_last_block_and_tells_who_waits() -> None:
    assert diagnosis.main_stack(BUSY)[0] == diagnosis.Frame("/usr/lib/python3.11/socket.py", 700, "readinto")
    assert [RankRecord(0, stacks=text).waits for text in (WAITS, BACKWARD, BUSY, "")] == [True, True, False, False]


@pytest.mark.parametrize(
    ("first", "second", "ends"),
    [
        # The rank that does not wait holds up the others; where all wait it is the one silent for longest.
        (
            RankRecord(0, heard_at=1.0, stacks=WAITS),
            RankRecord(1, heard_at=2.0, stacks=BUSY),
            "0 waited in torch for it",
        ),
        (
            RankRecord(0, heard_at=2.0, stacks=WAITS),
            RankRecord(1, heard_at=1.0, stacks=BACKWARD),
            "it waited for other ranks or for its device; rank 0 waited in torch",
        ),
    ],
)
def test_who_holds_the_others_up(first: RankRecord, second: RankRecord, ends: str) -> None:
    assert diagnosis.hanging([first, second]) is second
    text = diagnosis.hang_text(second, [first, second], 20.4)
    assert text.startswith("rank 1 sent no sign of life for 20 s") and text.endswith(ends)
    if second.stacks == BUSY:
        assert "readinto (/usr/lib/python3.11/socket.py:700), called from load (/p/data.py:9)" in text


# What torchrun's agent writes


TABLE = """
Failures:
[1]:
  time      : 2026-11-21_09:34:16
  host      : vm
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 70)
Root Cause (first observed failure):
[0]:
  time      : 2026-11-21_09:34:16
  host      : vm
  rank      : 1 (local_rank: 1)
  exitcode  : -9 (pid: 71) Signal 9 (SIGKILL) received by PID 71
"""
LINE = "E1122 api.py:1002] failed (exitcode: {}) local_rank: {} (pid: {}) of binary: /usr/bin/python\n"


def test_its_table_and_its_lines() -> None:
    assert diagnosis.agent_failures(TABLE) == [(0, -15, 70, False), (1, -9, 71, True)]
    text = LINE.format(-9, 1, 77) + "other\n" + LINE.format(1, 0, 78)
    assert diagnosis.agent_exits(text) == {77: -9, 78: 1}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x\ntorch...api.RendezvousTimeoutError", "did not all meet within 30 s"),
        ("...RendezvousConnectionError: The connection", "store at h:1 does not answer"),
        ("RendezvousTimeoutError\nlater\nRendezvousClosedError", "was closed"),
        ("SignalException", ""),
    ],
)
def test_why_it_gave_up(text: str, expected: str) -> None:
    reason = diagnosis.agent_reason(text, "h:1", 30)
    assert expected in reason and bool(expected) == bool(reason)


def test_a_killed_rank_is_out_of_memory_if_the_kernel_counted_one(tmp_path):
    (tmp_path / "vmstat").write_text("nr_free_pages 1\noom_kill 3\n")
    assert memory_kills(tmp_path / "vmstat") == 3 and memory_kills(tmp_path / "absent") == 0
    killed, aborted = (RankRecord(0, returncode=code, phase="train", step=7) for code in (-9, -6))
    assert "likely out of memory" in diagnosis.failure_text(killed, [killed], memory_kills=1)
    for record, kills in ((killed, 0), (aborted, 1)):
        assert "memory" not in diagnosis.failure_text(record, [record], kills)
