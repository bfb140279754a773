"""The cause of a broken run is the first failure that is no echo; a hang is the rank that does not wait."""

import pytest
from torch import OutOfMemoryError
from torch.distributed import DistBackendError, DistNetworkError

from benchlib.core.errors import UserError
from benchlib.launch import diagnosis
from benchlib.launch.diagnosis import RankRecord

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
        (RuntimeError(TIMED_OUT), "/v/site-packages/torch/autograd/graph.py", True),
        (RuntimeError(f"{CALLBACK}RuntimeError: {CLOSED}"), "/v/site-packages/torch/autograd/graph.py", True),
        (RuntimeError(f"{CALLBACK}DistBackendError: NCCL error: remote process exited"), OWN, True),
        (RuntimeError(f"{CALLBACK}ValueError: NCCL has no such socket"), OWN, False),
        (DistBackendError("NCCL error: unhandled system error"), OWN, True),
        (DistNetworkError("The client socket has failed to connect"), C10D, True),
        (RuntimeError("mpi send timed out after 9 s"), "/p/benchlib/workloads/collectives/mpi.py", True),
        (ConnectionResetError(104, "Connection reset by peer"), "/v/torch/distributed/rendezvous.py", True),
        (ConnectionResetError(104, "Connection reset by peer"), "/usr/lib/python3.11/ssl.py", False),
        (TimeoutError("timed out"), "/usr/lib/python3.11/socket.py", False),
        (FileNotFoundError(2, "No such file", "/mnt/nccl-data/train.json"), OWN, False),
        (FileNotFoundError(2, "No such file", "/mnt/nccl-data/train.json"), C10D, False),
        (PermissionError(13, "Permission denied", "/run/socket"), OWN, False),
        (RuntimeError("DataLoader timed out after 5 seconds"), LOADER, False),
        (RuntimeError("DataLoader worker (pid 7) exited unexpectedly: connection reset by peer"), LOADER, False),
        (ValueError("stall_timeout_s must be positive"), OWN, False),
        (ValueError("ProcessGroup: Default process group has not been initialized"), C10D, False),
        (RuntimeError("Sharding propagation failed"), "/v/torch/distributed/tensor/_dispatch.py", False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), OWN, False),
        (RuntimeError("Trying to backward through the graph a second time"), "/v/torch/autograd/graph.py", False),
        (OutOfMemoryError("CUDA out of memory while NCCL allocated"), C10D, False),
        (UserError("stall timeout = 0: expected a number > 0"), OWN, False),
    ],
)
def test_type_and_origin_tell_an_echo(error: BaseException, file: str, echo: bool) -> None:
    assert diagnosis.is_echo(_raised(error, file)) is echo


@pytest.mark.parametrize(
    ("cause", "echo"), [(RuntimeError(CLOSED), True), (OutOfMemoryError("CUDA out of memory"), False)]
)
def test_an_error_that_is_raised_again_is_what_its_cause_is(cause: Exception, echo: bool) -> None:
    error = RuntimeError("all_reduce between the groups: it failed")
    error.__cause__ = _raised(cause, C10D)
    assert diagnosis.is_echo(_raised(error, "/p/benchlib/workloads/collectives/hierarchy.py")) is echo


def test_a_path_with_nccl_in_it_is_the_cause_and_not_the_peer_that_it_aborts() -> None:
    own = _failed(0, 10.0, "FileNotFoundError", "No such file: '/mnt/nccl-data/train.json'")
    aborted = RankRecord(1, returncode=-6, ended_at=10.1, phase="train")
    assert diagnosis.first_failure([own, aborted]) is own


def test_an_echo_that_came_first_is_not_the_cause() -> None:
    ranks = [_failed(0, 10.0, "RuntimeError", CLOSED, echo=True), _failed(1, 10.4, "ValueError", "boom\nsecond line")]
    cause = diagnosis.first_failure(ranks)
    assert cause is ranks[1]
    assert diagnosis.failure_text(cause, ranks) == "rank 1 raised ValueError during phase train, step 7: boom"


def test_a_death_goes_before_what_peers_say_right_after_it() -> None:
    dead = RankRecord(2, returncode=-9, ended_at=10.1, phase="evaluate")
    ranks = [
        _failed(0, 10.05, "RuntimeError", "an unheard-of text"),
        _failed(1, 10.2, "RuntimeError", CLOSED, echo=True),
        dead,
    ]
    assert diagnosis.first_failure(ranks) is dead
    assert diagnosis.failure_text(dead, ranks) == "rank 2 was killed by SIGKILL during phase evaluate"


def test_who_was_ended_by_the_supervisor_is_no_cause() -> None:
    ended = RankRecord(0, returncode=-15, ended_at=1.0, ended_by_us=True)
    left = RankRecord(1, returncode=3, ended_at=2.0)
    assert diagnosis.first_failure([ended, left]) is left
    assert diagnosis.first_failure([ended]) is None


def test_only_echoes_name_who_left_before() -> None:
    ranks = [RankRecord(0, returncode=0, ended_at=1.0), _failed(1, 2.0, "RuntimeError", CLOSED, echo=True)]
    cause = diagnosis.first_failure(ranks)
    assert cause is ranks[1]
    assert "rank 0 had already ended (exit code 0)" in diagnosis.failure_text(cause, ranks)


def _dump(*inner: tuple[str, int, str]) -> str:
    lines = [f'  File "{file}", line {line} in {function}' for file, line, function in inner]
    other = 'Thread 0x0000000000000002 (most recent call first):\n  File "/x/threading.py", line 1 in wait\n\n'
    return other + "Current thread 0x0000000000000001 (most recent call first):\n" + "\n".join(lines) + "\n"


WAITS = _dump(
    ("/v/site-packages/torch/distributed/distributed_c10d.py", 2810, "all_reduce"), ("/p/train.py", 5, "step")
)
BACKWARD = _dump(("/v/site-packages/torch/autograd/graph.py", 841, "_engine_run_backward"), ("/p/train.py", 4, "step"))
BUSY = _dump(("/usr/lib/python3.11/socket.py", 700, "readinto"), ("/p/data.py", 9, "load"))


def test_main_thread_is_the_last_block() -> None:
    assert diagnosis.main_stack(BUSY)[0] == diagnosis.Frame("/usr/lib/python3.11/socket.py", 700, "readinto")
    assert diagnosis.main_stack("") == []
    assert [diagnosis.is_waiting(diagnosis.main_stack(text)) for text in (WAITS, BACKWARD, BUSY, "")] == [
        True,
        True,
        False,
        False,
    ]


def test_waiting_is_seen_in_the_line_that_waits(tmp_path: object) -> None:
    path = f"{tmp_path}/mine.py"
    with open(path, "w") as handle:
        handle.write("work = group.allreduce(x)\nwork.wait()\nwhile True: pass\n")
    waits, works = ([diagnosis.Frame(path, line, "f")] for line in (2, 3))
    assert diagnosis.is_waiting(waits)
    assert not diagnosis.is_waiting(works)


def test_the_rank_that_does_not_wait_holds_up_the_others() -> None:
    ranks = [RankRecord(0, heard_at=1.0, stacks=WAITS), RankRecord(1, heard_at=2.0, stacks=BUSY, phase="data")]
    culprit = diagnosis.hanging(ranks)
    assert culprit is ranks[1]
    text = diagnosis.hang_text(culprit, ranks, 20.4, "stall limit")
    assert text.startswith("rank 1 sent no sign of life for 20 s (stall limit) during phase data; its Python stack")
    assert "readinto (/usr/lib/python3.11/socket.py:700), called from load (/p/data.py:9)" in text
    assert text.endswith("rank 0 waited in torch for it")


def test_where_all_wait_the_one_silent_longest_is_named_as_waiting() -> None:
    ranks = [RankRecord(0, heard_at=2.0, stacks=WAITS), RankRecord(1, heard_at=1.0, stacks=BACKWARD)]
    culprit = diagnosis.hanging(ranks)
    assert culprit is ranks[1]
    text = diagnosis.hang_text(culprit, ranks, 9, "stall limit")
    assert "it waited for other ranks or for its device; rank 0 waited in torch" in text
    assert not text.endswith("for it")


def test_table_of_torchrun() -> None:
    text = """
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
    assert diagnosis.agent_failures(text) == [(0, -15, 70, False), (1, -9, 71, True)]
