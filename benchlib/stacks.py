"""Python stacks of ranks: asked for by a signal, read back from the text that ``faulthandler`` writes."""

import contextlib
import linecache
import os
import re
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

COLLECT_S = 1.0  # that the ranks get to write their stacks
_FRAME = re.compile(r'^\s+File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<function>.*)$')
_WAITING_FILES = re.compile(
    r"torch[/\\](distributed[/\\]|autograd[/\\]graph\.py|futures[/\\]|cuda[/\\]__init__\.py|xpu[/\\]__init__\.py)"
    r"|benchlib[/\\](process_group|mpi_work)\.py"
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
    blocks: list[list[Frame]] = []
    for line in text.splitlines():
        if "(most recent call first)" in line:
            blocks.append([])
        elif blocks and (match := _FRAME.match(line)):
            number = int(match["line"]) if match["line"].isdigit() else 0
            blocks[-1].append(Frame(match["file"], number, match["function"]))
    return blocks[-1] if blocks else []


def is_waiting(frames: list[Frame]) -> bool:
    """Whether a stack ends in torch's collectives, its backward pass (where gradients are awaited) or a device wait."""
    if not frames:
        return False
    inner = frames[0]
    return bool(_WAITING_FILES.search(inner.file)) or bool(
        _WAITING_LINE.search(linecache.getline(inner.file, inner.line))
    )


def own_frame(frames: list[Frame]) -> Frame | None:
    """Return the innermost frame that is not Python's or a package's own: the line that a reader can act on."""
    return next(
        (
            frame
            for frame in frames
            if "site-packages" not in frame.file and "/lib/python" not in frame.file and "<frozen" not in frame.file
        ),
        frames[0] if frames else None,
    )


def collect(asked: Sequence[tuple[int, Path]]) -> list[str]:
    """Ask processes (id, file of their stacks) for their Python stacks and return the new text of each.

    The text is empty for a process that does not answer: it has no handler yet, or is stopped. The worker makes the
    file after it has installed the handler; without one the signal would end the process, so it is not sent then.
    """
    sizes = [path.stat().st_size if path.exists() else None for _, path in asked]
    for (pid, _), size in zip(asked, sizes, strict=True):
        if size is not None:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGUSR1)
    awaited = [(path, size) for (_, path), size in zip(asked, sizes, strict=True) if size is not None]
    end, now = time.monotonic() + COLLECT_S, [-1]
    while awaited and time.monotonic() < end:
        time.sleep(0.05)
        before, now = now, [path.stat().st_size for path, _ in awaited]
        if now == before and all(size > old for size, (_, old) in zip(now, awaited, strict=True)):
            break  # all have answered, and nothing is being added
    return [
        "" if size is None else path.read_bytes()[size:].decode(errors="replace")
        for (_, path), size in zip(asked, sizes, strict=True)
    ]
