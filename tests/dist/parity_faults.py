"""Executors of members that go wrong, for the tests of a run: each is named by its module and function-less ``make``."""

import os
import signal
from pathlib import Path
from typing import Any

from benchlib.core.errors import BackendUnavailable


def make(model: Any, member: Any, where: Any, example: Any, folder: Path) -> Any:
    """Crash as a driver does, or miss a library, by the member's name."""
    if member.name == "sdpa_math":
        os.kill(os.getpid(), signal.SIGSEGV)
    raise BackendUnavailable("its library is not installed: pip install it")
