"""What holds for all tests: no hub, no display, runs that stay out of the checkout's outputs, and what runs beside what.

``make test`` runs two tests at a time (``-n 2``). A file stays on one worker. The first worker takes the files of
tests/dist, which start several processes each and wait for them most of the time, the other one the rest, long files first;
whoever is done helps the other.
"""

import atexit
import functools
import gc
import os
import shutil
import signal
import sys
import tempfile
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

    @functools.cache
    def kind(name: str) -> str:
        return next(
            (folder for folder in ("tests/dist", "tests/notebooks", "tests/unit") if name.startswith(folder)),
            "notebooks",
        )

    class Streams(LoadFileScheduling):
        def _assign_work_unit(self, node: Any) -> None:
            # Notebooks take a minute each, files of tests/unit seconds: these come last and even out the end.
            kinds = ["tests/dist", "notebooks", "tests/notebooks", "tests/unit"]
            if node is not next(iter(self.assigned_work)):
                kinds = ["notebooks", "tests/notebooks", "tests/unit", "tests/dist"]
            self.workqueue.move_to_end(min(self.workqueue, key=lambda name: kinds.index(kind(name))), last=False)
            super()._assign_work_unit(node)

    config.option.loadscopereorder = False  # xdist puts the most tests first, which are not those that take longest
    return Streams(config, log)
