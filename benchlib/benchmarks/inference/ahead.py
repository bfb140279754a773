"""The fork server that the processes of tests are forked from: it loads their libraries once, while the rank loads its own."""

import multiprocessing
from multiprocessing import forkserver
from typing import Any

CONTEXT = multiprocessing.get_context("forkserver")
TESTS = "benchlib.benchmarks.inference.loadgen"


def begin(config: Any) -> None:
    """Start it before the rank imports its own libraries, where an engine of this machine computes."""
    if config.engine in ("auto", "static", "continuous"):
        preload(computes=True)
        forkserver.ensure_running()


def preload(computes: bool) -> None:
    """Set what it loads when it starts: no thread runs in that process and no model is in it."""
    slow = ["batches"] * computes + ["dispatch"]
    CONTEXT.set_forkserver_preload(["mlperf_loadgen", TESTS, *(f"benchlib.workloads.llm.{name}" for name in slow)])
