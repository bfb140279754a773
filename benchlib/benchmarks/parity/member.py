"""One member, in a process of its own: what it computes from the golden inputs becomes its recording.

    python -m benchlib.benchmarks.parity.member RUN_DIR NAME [MODULE:FUNCTION]

NAME is a member of the table, ``reference``, ``truth`` (both of the golden folder), or ``attention``: the kernels of
the device side by side, whose rows go into ``RUN_DIR/attention.json``. Another executor than the table's is for
tests and for ways to compute of one's own. Progress is a line of JSON on standard output:
``{"done": 1, "total": 6, "what": "repeats"}``.

Exit codes: 0 recorded, 77 this way to compute is not there (the reason is the last line on standard error), 74 a file
could not be written (the same), 1 another error.
"""

import contextlib
import dataclasses
import faulthandler
import importlib
import json
import os
import platform
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

from benchlib.benchmarks.parity import golden
from benchlib.benchmarks.parity.config import MEMBERS, Member, ParityConfig
from benchlib.core.errors import BackendUnavailable, StorageError
from benchlib.core.files import is_storage_error, not_written, write_json
from benchlib.launch.diagnosis import EXIT_SKIPPED, EXIT_STORAGE

ALLOWED = "BENCHLIB_PARITY_SECONDS"  # after which this process is ended
ATTENTION = "attention"
TEMPORARY = ".member-"  # begins the name of the folder that a member's executor works in: hidden, so nobody's result
SHARE = 0.6  # of these seconds for the kernels, the rest for loading and one that is slow
_VERSIONS = ("benchlib", "python", "torch", "transformers", "numpy", "safetensors")


@dataclasses.dataclass(frozen=True)
class Task:
    """What a name stands for: which member on which backend, and where its recording goes."""

    member: Member
    backend: str
    folder: Path
    timed: bool = True
    planted: bool = False


def task(config: ParityConfig, run_dir: Path, name: str) -> Task:
    """Return what ``name`` stands for in a run."""
    place = golden.place(run_dir, config.golden)
    if name == golden.REFERENCE:
        return Task(MEMBERS["eager"], config.reference, place / golden.REFERENCE)
    if name == golden.TRUTH:
        # Not by way of eager: some models compute their softmax in fp32 there, whatever the weights are.
        truth = dataclasses.replace(MEMBERS["fp64"], name=golden.TRUTH, what="the model in double precision")
        return Task(truth, "cpu", place / golden.TRUTH, timed=False)
    return Task(MEMBERS[name], config.backend, run_dir / "members" / name, planted=True)


def factory(reference: str) -> Any:
    """Import and return what builds an executor: ``module:function``."""
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)


def tell(done: int, total: int, what: str) -> None:
    """Say how far the member is."""
    print(json.dumps({"done": done, "total": total, "what": what}), flush=True)


def record(config: ParityConfig, run_dir: Path, name: str, executor: str = "") -> None:
    """Compute what ``name`` stands for and leave its recording, whole or not at all."""
    began = time.monotonic()
    todo = task(config, run_dir, name)
    member = dataclasses.replace(todo.member, executor=executor or todo.member.executor)
    place = golden.place(run_dir, config.golden)
    tell(0, 1, "loading")
    make = factory(member.executor)  # first: a missing package is reported before the model is loaded

    import torch

    from benchlib.benchmarks.parity import layers, recording, switches, weights
    from benchlib.benchmarks.parity.executors import device_name
    from benchlib.benchmarks.parity.exercise import Exercise
    from benchlib.benchmarks.parity.inputs import Inputs
    from benchlib.runtime import devices

    devices.require(todo.backend)
    where = devices.device(todo.backend)
    if member.threads:
        torch.set_num_threads(member.threads)
    inputs = Inputs(place)
    model, model_sha256 = weights.loaded(config, place, member.attention)
    folder = Path(tempfile.mkdtemp(prefix=f"{TEMPORARY}{name}-", dir=run_dir))
    try:
        with (
            switches.held(member, where) as switched,
            layers.planted(model, config.planted_layer if todo.planted else -1),
        ):
            made = make(model, member, where, inputs.tensors("layer"), folder)
            results = Exercise(config, member, model, made, inputs, where, tell).run(latency=todo.timed)
            description = {**made.description, "switches": switched}
            made.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    meta: dict[str, Any] = {
        "member": name,
        "backend": todo.backend,
        "device": device_name(where),
        "precision": member.precision,
        "mode": member.mode,
        "seconds": time.monotonic() - began,
        "model_sha256": model_sha256,
        "inputs_sha256": inputs.sha256,
        "environment": _environment(where),
        "executor": description,
        **results.facts,
    }
    recording.write(todo.folder, meta, results.outputs, results.gradients, results.layers)


def _environment(where: Any) -> dict[str, Any]:
    """Return what two recordings are told apart by: versions, processor, threads."""
    import torch

    from benchlib.benchmarks.parity.executors import device_name
    from benchlib.core.machine import cpu_model, versions

    return {
        **{name: value for name, value in versions().items() if name in _VERSIONS},
        "platform": platform.platform(terse=True),
        "processor": cpu_model(),
        "device": device_name(where),
        "threads": torch.get_num_threads(),
        "thread_waiting": os.environ.get("OMP_WAIT_POLICY", ""),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }


def attention(config: ParityConfig, run_dir: Path) -> None:
    """Compare the attention kernels of the run's device and write their rows."""
    tell(0, 1, "attention kernels")

    from benchlib.benchmarks.parity.attention import kernels
    from benchlib.runtime import devices

    devices.require(config.backend)
    where = devices.device(config.backend)
    allowed_s = float(os.environ.get(ALLOWED, config.member_timeout_s))
    rows = kernels(where, ["fp32", "bf16"], sorted(set(config.lengths)), SHARE * allowed_s)
    write_json(run_dir / "attention.json", {"rows": rows})
    tell(1, 1, "done")


def run(run_dir: Path, name: str, executor: str = "") -> int:
    """Be the process of ``name``: record, and return the exit code."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # where a member hangs is asked for before it is ended

    from benchlib.config.schema import load_config

    try:
        config = load_config(run_dir)
        assert isinstance(config, ParityConfig)
        if name == ATTENTION:
            attention(config, run_dir)
        else:
            record(config, run_dir, name, executor)
    except BackendUnavailable as error:
        print(" ".join(str(error).split()), file=sys.stderr, flush=True)
        return EXIT_SKIPPED
    except Exception as error:
        if isinstance(error, OSError) and (isinstance(error, StorageError) or is_storage_error(error)):
            return _not_stored(not_written(error.filename or f"a file of member {name}", error))
        traceback.print_exc()
        return 1
    return 0


def _not_stored(error: StorageError) -> int:
    with contextlib.suppress(OSError):  # the log may lie on the same disk: the exit code is what is left to tell
        print(" ".join(str(error).split()), file=sys.stderr, flush=True)
    return EXIT_STORAGE


def leave(code: int) -> NoReturn:
    """End without the second that torch needs to take itself apart: everything is written."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # they may lie on a full disk
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    leave(run(Path(sys.argv[1]), *sys.argv[2:]))
