"""Who works in a run folder: one launch at a time, from before its first file until its supervisor has ended.

A lock of the operating system on ``RUN_DIR/.lock``. It is free again when the process that holds it dies, however it
dies, and it knows neither process ids nor clocks, both of which may lie.
"""

import os
import time
from pathlib import Path

from benchlib.errors import UserError
from benchlib.files import not_written

NAME = ".lock"
TRY_S = 0.5  # who only looks at the lock holds it for a moment


def take(run_dir: Path | str) -> int:
    """Claim a run folder and return the descriptor that holds it until it is closed, in all who inherited it.

    Raises ``UserError`` where another process works in the folder, ``StorageError`` where nothing can be written.
    """
    import fcntl

    path = Path(run_dir) / NAME
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise not_written(path, error) from error
    end = time.monotonic() + TRY_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError:
            if time.monotonic() > end:
                os.close(descriptor)
                raise UserError(
                    f"{run_dir} is in use: another process works on this run; wait for its end or take a new folder"
                ) from None
            time.sleep(0.02)
        except OSError:  # a file system without locks: then the files of an earlier launch are the only sign of it
            return descriptor


def taken(run_dir: Path | str) -> bool | None:
    """Whether a process works in a run folder; None where that cannot be told (never claimed, or no locks there)."""
    import fcntl

    try:
        descriptor = os.open(Path(run_dir) / NAME, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    except OSError:
        return None
    finally:
        os.close(descriptor)
