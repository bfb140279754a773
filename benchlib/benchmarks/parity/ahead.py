"""The fork server that members are forked from: it loads torch and transformers once, while the rank loads its own."""

import sys
from multiprocessing import forkserver
from typing import Any


def begin(config: Any) -> None:
    """Start it before the rank imports its own libraries, where something computes on a CPU."""
    if "cpu" in (config.backend, config.reference):
        warm_up()


def warm_up() -> None:
    """Start it where none runs, on Linux only. To be called by the main thread: the fork server ends with it."""
    if sys.platform == "linux":
        forkserver.set_forkserver_preload(["benchlib.benchmarks.parity.preloaded"])
        forkserver.ensure_running()
