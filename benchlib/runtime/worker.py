"""What a rank executes.

    python -m benchlib.runtime.worker RUN_DIR [--benchmark module:function]
    python -m benchlib.runtime.worker --probe

Started by the supervisor, by torchrun, mpirun or SLURM; it reads its place from their environment. ``--benchmark`` runs your
own function in the frame (events, process group, supervision): ``function(config, run_dir, events)``, where
the config is ``config.json`` as a plain namespace, or validated by the module's ``Config`` class if it has one.
``--probe`` prints one JSON line of what torch reports about the backends and the collective libraries.

Exit codes: 0 done, 77 the backend is not available, 74 nothing can be written (a full disk), 1 another error. The
error is in the rank's events.
"""

import argparse
import atexit
import contextlib
import faulthandler
import gc
import importlib
import json
import os
import platform
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchlib.config.cluster import ELSEWHERE
from benchlib.core.errors import BackendUnavailable
from benchlib.core.events import EventWriter
from benchlib.core.files import read_json, storage_error, write_json
from benchlib.launch.diagnosis import EXIT_SKIPPED, EXIT_STORAGE, is_secondary
from benchlib.launch.nodes import Place, attempt, place
from benchlib.launch.processes import MARK, SUPERVISOR_PID, THREAD_VARIABLES, die_with_parent


def _tie_to_parent() -> None:
    """Die with the supervisor, torchrun's agent or mpirun. Other parents (srun, a shell) end their children themselves."""
    if SUPERVISOR_PID in os.environ:
        die_with_parent(int(os.environ[SUPERVISOR_PID]))
    elif "TORCHELASTIC_RUN_ID" in os.environ or "OMPI_COMM_WORLD_RANK" in os.environ or "MPI_LOCALRANKID" in os.environ:
        die_with_parent(os.getppid())


def _redirect(logs: Path, rank: int) -> None:
    """Send the output of a rank under torchrun or mpirun to files of its own, where a supervisor is there to read them."""
    if MARK in os.environ and SUPERVISOR_PID not in os.environ:
        for descriptor, name in ((1, "out"), (2, "err")):
            target = os.open(logs / f"rank{rank}.{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            os.dup2(target, descriptor)
            os.close(target)


def _install_stacks(path: Path) -> None:
    """Write the Python stacks of all threads to ``path`` at every SIGUSR1.

    The file appears after the handler is there: without a handler the signal would end the process.
    """
    faulthandler.enable(all_threads=True)
    temporary = path.with_suffix(".stacks.tmp")
    handle = temporary.open("a")  # stays open as long as the process lives
    faulthandler.register(signal.SIGUSR1, file=handle, all_threads=True)
    signal.siginterrupt(signal.SIGUSR1, False)  # blocking calls of other libraries go on after it
    temporary.rename(path)


def _set_threads(threads: int) -> None:
    """Set the thread count of the numeric libraries; they read it once, when they are loaded.

    torchrun sets 1 for every rank, so a value that is already set is not the user's.
    """
    for name in THREAD_VARIABLES:
        os.environ[name] = str(threads)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true" if threads > 1 else "false")


def _load(reference: str) -> tuple[Callable[..., None], Callable[[dict[str, Any]], Any]]:
    module_name, _, name = reference.partition(":")
    module = importlib.import_module(module_name)
    config = module.Config.model_validate if hasattr(module, "Config") else lambda values: SimpleNamespace(**values)
    return getattr(module, name), config


def _registered(config: Any) -> Callable[..., None]:
    from benchlib.benchmarks import BENCHMARKS

    benchmark = BENCHMARKS[config.benchmark]
    if config.OMP_WAIT_POLICY:
        os.environ["OMP_WAIT_POLICY"] = os.environ.get("OMP_WAIT_POLICY") or config.OMP_WAIT_POLICY
    if modules := benchmark.part("config", "PRELOAD", ()):
        from benchlib.runtime import child

        child.serve(modules)  # they load while this process loads its own
    from benchlib.runtime.measurement import executed

    return executed(benchmark)


def _run(run_dir: Path, benchmark: str, where: Place, events: EventWriter) -> None:
    values, config = read_json(run_dir / "config.json"), None
    gc.disable()  # a fifth of the time that it takes to load torch
    _set_threads(where.threads(int(values.get("threads", 0))))
    if where.rank == 0 and values.get("launcher") in ELSEWHERE:  # the facts of who submitted the run say nothing here
        from benchlib.core import machine
        from benchlib.runtime import devices

        write_json(run_dir / "machine.json", machine.describe(devices.probe()))
    try:
        if benchmark:
            function, read = _load(benchmark)
            config = read(values)
        else:
            from benchlib.config.schema import load_config

            config = load_config(run_dir)
            function = _registered(config)
        gc.freeze()  # what is loaded stays
        gc.enable()
        function(config, run_dir, events)
    except BackendUnavailable as error:
        if where.rank == 0 and config and not benchmark:
            _mark_skipped(run_dir, config, str(error))
        raise


def _report(error: BaseException, events: EventWriter, exit_code: int) -> None:
    """Tell the supervisor of the error; on a full disk only the exit code remains."""
    text = "".join(traceback.format_exception(error))
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)
    with contextlib.suppress(OSError):
        what = {"type": type(error).__name__, "message": str(error), "traceback": text}
        events.emit("error", **what, echo=is_secondary(error), exit_code=exit_code)


def _mark_skipped(run_dir: Path, config: Any, reason: str) -> None:
    from benchlib.results.run import Result, save_result

    now = time.time()
    save_result(run_dir, Result.of(config, status="skipped", reason=reason, started_at=now, ended_at=now))


def work(run_dir: Path, benchmark: str = "") -> int:
    _tie_to_parent()
    # As the drivers' tools and the sensors number devices, also under srun and in pods; the fastest first is CUDA's own order.
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    where = place()
    logs = run_dir / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    _redirect(logs, where.rank)
    _install_stacks(logs / f"rank{where.rank}.stacks")
    events = EventWriter(run_dir, f"rank{where.rank}")
    events.emit(
        "start",
        pid=os.getpid(),
        host=platform.node(),
        rank=where.rank,
        local_rank=where.local_rank,
        attempt=attempt(),
    )
    events.emit("phase", name="import")
    try:
        _run(run_dir, benchmark, where, events)
    except BackendUnavailable as error:
        _report(error, events, EXIT_SKIPPED)
        return EXIT_SKIPPED
    except (
        BaseException
    ) as error:  # not only Exception: torch's CheckpointException and SystemExit are not subclasses of it
        if isinstance(error, SystemExit) and not error.code:
            return 0
        full = storage_error(error, f"a file of the run {run_dir}")
        if full and full is not error:
            full.__cause__ = error
        code = EXIT_STORAGE if full else 1
        _report(full or error, events, code)
        return code
    events.emit("phase", name="done")
    return 0


def _probe() -> int:
    gc.disable()
    from benchlib.runtime import devices, libraries

    print(json.dumps({**devices.probe(), "libraries": libraries.probe()}))
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchlib.runtime.worker", description="What a rank executes.")
    parser.add_argument("run_dir", type=Path, nargs="?")
    parser.add_argument(
        "--benchmark", default="", metavar="MODULE:FUNCTION", help="run this function instead of the config's benchmark"
    )
    parser.add_argument("--probe", action="store_true", help="print what torch reports about the backends")
    options = parser.parse_args()
    if options.probe:
        return _probe()
    if options.run_dir is None:
        parser.error("RUN_DIR is missing")
    try:
        return work(options.run_dir.resolve(), options.benchmark)
    except OSError as error:  # before there was a place to report to
        if not (full := storage_error(error, options.run_dir)):
            raise
        with contextlib.suppress(OSError):
            print(full, file=sys.stderr, flush=True)
        return EXIT_STORAGE


if __name__ == "__main__":
    code = main()
    # Leave without the interpreter's teardown: a reducer that drops the last reference to a gloo group deadlocks there
    # now and then. What others registered for the exit (data loaders' children) still runs.
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # they may lie on a full disk
            stream.flush()
    os._exit(code)
