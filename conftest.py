"""What holds for all tests: no hub, no display, runs that stay out of the checkout's outputs, and what runs beside what.

``make test`` runs three tests at a time (``-n 3``), since those of tests/dist wait for their processes most of the time. A file
stays on one worker. One worker begins with tests/dist, one with the notebooks, one with tests/notebooks; whoever is done helps
the others. Long files come first: the short ones even out the end.
"""

import atexit
import gc
import os
import shutil
import signal
import sys
import tempfile
from pathlib import PurePath
from typing import Any

import pytest

# Set before anything is imported, and inherited by every process that a test starts.
os.environ.update(
    {
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "BENCHLIB_HEADLESS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "MPLBACKEND": "agg",
        "OMP_WAIT_POLICY": "PASSIVE",  # threads that spin take the core of the test beside this one
        "TORCHINDUCTOR_VEC_ISA_OK": "1",  # no trial compilations of what the CPU says it has: 10 s of CPU time
    }
)
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # hundreds of processes import the kit: it is compiled once
sys.dont_write_bytecode = False
os.environ.pop("COLUMNS", None)  # tables in tests are as wide as in a pipe
if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # `make test &` in a script: programs under test would not hear Ctrl+C
    signal.signal(signal.SIGINT, signal.default_int_handler)
# What workers begin with, and the files that take longer than half a minute, the longest first.
KINDS = ("tests/dist", "notebooks", "tests/notebooks", "tests/simulated", "tests/unit")
LONG = ["test_faults", "test_restart", "test_training", "test_parity", "test_collectives", "test_parallel"]
LONG += ["test_child", "test_agents", "test_two_hosts", "test_missing_numbers", "test_executors"]
LONG += ["test_instruments", "test_foreign_servers", "test_charts", "test_inference", "test_run"]
LONG += ["30_parallel", "40_parity", "31_unlike_nodes", "20_collectives"]
gc.disable()  # until all modules are imported, see pytest_runtestloop
_outputs = tempfile.mkdtemp(prefix="benchlib-test-outputs-")
atexit.register(shutil.rmtree, _outputs, ignore_errors=True)
os.environ["BENCHLIB_OUTPUTS"] = _outputs


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Collect cycles from here on, never among what was imported: torch and transformers alone are a million objects."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Say which file a worker takes next. (``--dist loadgroup`` loses its groups under pytest 9.2.)"""
    from xdist.scheduler import LoadFileScheduling

    def kind(name: str) -> int:
        return next((index for index, folder in enumerate(KINDS) if name.startswith(folder)), len(KINDS))

    def rank(name: str, first: int) -> tuple[bool, int, int]:
        place = LONG.index(stem) if (stem := PurePath(name).stem) in LONG else len(LONG)
        return kind(name) != first, kind(name), place

    class Streams(LoadFileScheduling):
        def _assign_work_unit(self, node: Any) -> None:
            first = list(self.assigned_work).index(node) % len(KINDS)
            self.workqueue.move_to_end(min(self.workqueue, key=lambda name: rank(name, first)), last=False)
            super()._assign_work_unit(node)

    config.option.loadscopereorder = False  # xdist puts the most tests first, which are not those that take longest
    return Streams(config, log)
