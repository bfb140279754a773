"""Which rank broke a run, and how: from what each rank reported, its Python stack and the log of the agent.

When one rank fails, the others fail too, a moment later and with louder texts ("connection closed by peer"). The
cause is the earliest failure that is not an echo of another one; without any failure it is the rank that does *not*
wait for others.
"""

import linecache
import re
import signal
import time
import traceback
from dataclasses import dataclass, field
from typing import Any

from benchlib.launch.processes import signal_name

# Where an error stems from that another rank may have caused: it went away, or did not answer. The packages below
# torch.distributed (tensor, fsdp, checkpoint) raise errors of a rank's own.
_EXCHANGE_FILES = re.compile(r"torch[/\\]distributed[/\\]\w+\.py$|benchlib[/\\]runtime[/\\]mpi\.py$")
# gloo states the place in its source; the Python frame is that of whoever waits. A future with a callback, as in DDP,
# raises a RuntimeError that states the type of the first one.
_EXCHANGE_TEXT = re.compile(
    r"\[\S*[/\\]gloo[/\\]\S+:\d+\]|error when running the callback: (torch\.distributed\.)?Dist\w*Error: "
)
# The table that torchrun's agent prints about its ranks when one of them failed.
_AGENT_ROW = re.compile(r"rank\s*: (\d+) \(local_rank: \d+\)\s+exitcode\s*: (-?\d+) \(pid: (\d+)\)")
_AGENT_ROOT = "Root Cause (first observed failure)"
# The line that it prints in each attempt about the first rank that failed.
_AGENT_LINE = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: \d+ \(pid: (\d+)\)")
# What Open MPI's mpirun says of the first rank that a signal ended; version 4 writes 0 for a process id it lost.
_MPIRUN_KILLED = re.compile(
    r"noticed that process rank (\d+) with PID (\d+) on\s+node\s+\S+\s+exited\s+on\s+signal\s+(\d+)"
)
# Exit codes of the processes of a run beside 0 and 1.
EXIT_STORAGE = 74  # cannot write, not even why: EX_IOERR of sysexits.h
EXIT_SKIPPED = 77  # the backend or library is not available: what automake calls a skipped test
OUT_OF_MEMORY = (
    ": likely out of memory, since the kernel killed a process for that meanwhile; give fewer ranks (nproc), a smaller batch or model, "
    "or the container more memory"
)
_SIGNAL_LEAD_S = 0.2  # a death is noticed this much later than a peer may have written about it


@dataclass
class RankRecord:
    """What is known about one rank. Times are unix seconds; ``returncode`` is negative for a signal.

    ``heard_at``: of its last event; ``waited_at``: when it was last seen to wait for a rank that was still at work, or
    (``went_on``) to do so no more.
    ``stacks`` is None where they were not requested, and empty where the rank did not answer.
    """

    rank: int
    pid: int | None = None
    host: str = ""
    returncode: int | None = None
    ended_at: float | None = None
    ended_by_us: bool = False
    active: bool = False
    heard_at: float = 0.0
    waited_at: float = 0.0
    went_on: bool = False
    phase: str = ""
    step: int | None = None
    error: dict[str, Any] | None = None
    stacks: str | None = field(default=None, repr=False)

    def end(self, code: int, at: float | None = None) -> None:
        self.returncode, self.ended_at = code, at or time.time()

    @property
    def alive(self) -> bool:
        return self.returncode is None

    @property
    def echoes(self) -> bool:
        """Whether its error is the consequence of another rank's failure, see ``is_secondary``."""
        return bool(self.error and self.error.get("echo"))

    @property
    def waits(self) -> bool:
        return is_waiting(main_stack(self.stacks or ""))

    def hear(self, event: dict[str, Any]) -> None:
        self.heard_at = max(self.heard_at, float(event["t"]))
        match event["kind"]:
            case "start":
                self.pid, self.host = int(event["pid"]), str(event.get("host", ""))
            case "phase":
                self.phase, self.step = str(event.get("name", "")), None
                self.active = self.active or self.phase != "import"
            case "error":
                names = ("t", "type", "message", "traceback", "echo", "exit_code")
                self.error = {name: event.get(name, "") for name in names}
            case _:
                self.active = True
        if isinstance(event.get("step"), int):
            self.step = event["step"]

    def where(self) -> str:
        """Return `` during phase train, step 12``, or where it stood before the first phase."""
        if not self.phase:
            return " before its first sign of work"
        return f" during phase {self.phase}" + (f", step {self.step}" if self.step is not None else "")

    def as_json(self) -> dict[str, Any]:
        number = -self.returncode if self.returncode is not None and self.returncode < 0 else None
        error = {key: self.error.get(key, "") for key in ("type", "message", "traceback")} if self.error else None
        return {
            **{name: getattr(self, name) for name in ("rank", "pid", "host", "returncode")},
            "signal": signal_name(number) if number else None,
            "ended_by_supervisor": self.ended_by_us,
            "error": error,
            "last_phase": self.phase or None,
            "last_step": self.step,
            "stacks": self.stacks or None,
        }


def agent_failures(text: str) -> list[tuple[int, int, int, bool]]:
    """Return (rank, exit code, process id, whether it is called the root cause) of each rank that an agent reports.

    The agent is torchrun's, or Open MPI's mpirun, which names ranks that a signal ended; process id 0 is an unknown
    one.
    """
    killed = [(int(rank), -int(number), int(pid), True) for rank, pid, number in _MPIRUN_KILLED.findall(text)]
    return killed + [
        (int(rank), int(code), int(pid), index > 0)
        for index, part in enumerate(text.split(_AGENT_ROOT))
        for rank, code, pid in _AGENT_ROW.findall(part)
    ]


def agent_exits(text: str) -> dict[int, int]:
    """Return the exit codes by process id of the ranks that torchrun saw fail first, attempt by attempt."""
    return {int(pid): int(code) for code, pid in _AGENT_LINE.findall(text)}


def agent_reason(text: str, endpoint: str, limit_s: float) -> str:
    """Return why torchrun's agent gave up without a failed rank, from what it wrote; '' where that is not known."""
    store = f"the rendezvous store at {endpoint}"
    reasons = {
        "RendezvousTimeoutError": f"the nodes did not all meet within {limit_s:.0f} s (start-up limit)",
        "RendezvousConnectionError": f"{store} does not answer: the node that holds it is gone or cut off, or another "
        "program has its port (see logs/agent.err); start the run again on all nodes, or choose another rdzv_endpoint",
        "RendezvousClosedError": f"{store} was closed: the run had ended on another node",
    }
    return max(((text.rfind(name), reason) for name, reason in reasons.items() if name in text), default=(0, ""))[1]


def no_restart_helps(error: dict[str, Any] | None) -> bool:
    """Whether a rank failed for a reason that is there the next time too: wrong input, no such device, a full disk."""
    return (error or {}).get("type") in ("UserError", "StorageError", "BackendUnavailable")


def is_secondary(error: BaseException) -> bool:
    """Whether an error is what a rank sees of another one's failure: an error of ``torch.distributed``, or of a
    connection of it.

    Type and origin decide, not the words: a path may hold "nccl", and a data loader may time out.
    """
    if any(kind.__module__ == "torch.distributed" and kind.__name__ == "DistError" for kind in type(error).__mro__):
        return True
    if type(error) is not RuntimeError and not isinstance(error, (ConnectionError, TimeoutError)):
        return False
    if error.__cause__ is not None:  # raised again with more words
        return is_secondary(error.__cause__)
    frames = list(traceback.walk_tb(error.__traceback__))
    origin = frames[-1][0].f_code.co_filename if frames else ""
    return bool(_EXCHANGE_FILES.search(origin) or (type(error) is RuntimeError and _EXCHANGE_TEXT.search(str(error))))


def first_failure(ranks: list[RankRecord]) -> RankRecord | None:
    """Return the rank that failed first and of itself, else the first echo; None when none failed."""
    failed = [record for record in ranks if record.error or (record.returncode and not record.ended_by_us)]
    own = [record for record in failed if not record.echoes]
    return min(own or failed, key=_failed_at, default=None)


def _failed_at(record: RankRecord) -> float:
    if record.error:
        return float(record.error.get("t", 0.0))
    # A library of collectives aborts the process that lost its peer: SIGABRT may well follow the cause.
    killed = (record.returncode or 0) < 0 and record.returncode != -signal.SIGABRT
    return float(record.ended_at or 0.0) - (_SIGNAL_LEAD_S if killed else 0.0)


def failure_text(record: RankRecord, ranks: list[RankRecord], memory_kills: int = 0) -> str:
    """Return what ended a rank. ``memory_kills`` are the processes that the kernel killed for lack of memory during the run."""
    who, code, where = f"rank {record.rank}", record.returncode or 0, record.where()
    if error := record.error:
        message = str(error.get("message", "")).strip()
        if error.get("type") in ("UserError", "StorageError"):
            return message  # what the user gave is wrong, or the disk is full: the message says it all
        first = f": {message.splitlines()[0]}" if message else ""
        return f"{who} raised {error.get('type')}{where}{first}" + (_gone(ranks) if record.echoes else "")
    if code == EXIT_STORAGE:
        return f"{who} could not write its files{where}: the disk is full or read-only"
    if code < 0:
        text = f"{who} was killed by {signal_name(-code)}{where}"
        return text + OUT_OF_MEMORY if code == -signal.SIGKILL and memory_kills else text
    return f"{who} left with exit code {code} and no error{where}; see logs/rank{record.rank}.err"


def hanging(living: list[RankRecord]) -> RankRecord:
    """Return the rank that holds the others up: one that does not wait, else the one silent for longest."""
    busy = [record for record in living if record.stacks is not None and not record.waits]
    return min(busy or living, key=lambda record: record.heard_at)


def hang_text(record: RankRecord, ranks: list[RankRecord], silent_s: float) -> str:
    """Return where a silent rank was, and which ranks waited for it."""
    silence = f"no sign of life for {silent_s:.0f} s (stall limit)"
    text = f"rank {record.rank} sent {silence}{record.where()}{_inside(record)}"
    if record.waits:
        text += "; it waited for other ranks or for its device"
    waiting = [other.rank for other in ranks if other is not record and other.alive and other.waits]
    if waiting:
        text += f"; {_rank_list(waiting)} waited in torch" + ("" if record.waits else " for it")
    return text + _gone(ranks)


def late_text(record: RankRecord, limit_s: float) -> str:
    late = f"rank {record.rank} was not at work {limit_s:.0f} s after the launch (start-up limit)"
    return f"{late}; it stood{record.where()}{_inside(record)}"


def _inside(record: RankRecord) -> str:
    if record.stacks == "":
        return "; it did not answer the request for its Python stack (stopped, or stuck in the system)"
    frames = main_stack(record.stacks or "")
    own = own_frame(frames)
    called = f", called from {own}" if frames and own != frames[0] else ""
    return f"; its Python stack was inside {frames[0]}{called}" if frames else ""


def _gone(ranks: list[RankRecord]) -> str:
    gone = [record.rank for record in ranks if record.returncode == 0]
    return f"; {_rank_list(gone)} had already ended (exit code 0)" if gone else ""


def _rank_list(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


_FRAME = re.compile(r'^\s+File "(.*)", line (\d+|\?\?\?) in (.*)$')
_WAITING_FILES = re.compile(
    r"torch[/\\](distributed[/\\]|autograd[/\\]graph\.py|futures[/\\]|cuda[/\\]__init__\.py|xpu[/\\]__init__\.py)"
    r"|benchlib[/\\]runtime[/\\](group|mpi)\.py"
)
# The innermost Python line of a rank that waits for its device or for its peers in C++ code.
_WAITING_LINE = re.compile(
    r"\.(wait|item|synchronize|cpu|tolist|result)\(|barrier\(|all_reduce\(|all_gather|broadcast\("
)


@dataclass(frozen=True)
class Frame:
    """One line of a Python stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.function} ({self.file}:{self.line})"


def main_stack(text: str) -> list[Frame]:
    """Return the main thread's frames, innermost first, of a ``faulthandler`` dump of all threads.

    The main thread was created first and is printed last.
    """
    _, _, last = text.rpartition("(most recent call first)")
    matches = (_FRAME.match(line) for line in last.splitlines() if last != text)
    return [Frame(match[1], int(match[2]) if match[2].isdigit() else 0, match[3]) for match in matches if match]


def is_waiting(frames: list[Frame]) -> bool:
    """Whether a stack ends in torch's collectives, its backward pass (where gradients are awaited) or a device wait."""
    if not frames:
        return False
    line = linecache.getline(frames[0].file, frames[0].line)
    return bool(_WAITING_FILES.search(frames[0].file) or _WAITING_LINE.search(line))


def own_frame(frames: list[Frame]) -> Frame | None:
    """Return the innermost frame that is not Python's or a package's own: the line that a reader can act on."""
    foreign = ("site-packages", "/lib/python", "<frozen")
    own = (frame for frame in frames if not any(place in frame.file for place in foreign))
    return next(own, frames[0] if frames else None)
