"""Executing notebooks headless: papermill's Python API with an orderly end."""

import ast
import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchlib.core.errors import UserError
from benchlib.core.imports import importing_jupyter
from benchlib.show.kernels import HEADLESS, Kernel, kernel_manager, warm_up

NOTEBOOK_S = 60.0  # for a notebook after its ranks were ended, while it computes: judgement, pictures
# For a kernel to end its ranks after an interrupt, and for its end to be noticed after it was killed.
END_S = {signal.SIGINT: 12.0, signal.SIGKILL: 6.0}
WATCH_S = 2.0  # for which a kernel is watched at its limit, again and again
WORKING = 0.05  # of a core: a kernel that checks and draws uses more, one that hangs in a driver or was stopped none


def parameters_of(path: Path) -> dict[str, Any]:
    """Return the names and default values of the cell that is tagged ``parameters``.

    They are read without executing anything: the cell may hold annotated literals only.
    """
    with importing_jupyter():
        import nbformat

    notebook = nbformat.read(path, as_version=4)
    cells = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    if len(cells) != 1:
        raise UserError(f"{path}: {len(cells)} cells are tagged `parameters`, expected one")
    values = {}
    for statement in ast.parse(cells[0].source).body:
        if (
            not isinstance(statement, ast.AnnAssign)
            or not isinstance(statement.target, ast.Name)
            or statement.value is None
        ):
            raise UserError(f"{path}: line {statement.lineno} of the parameters cell is not `name: type = literal`")
        values[statement.target.id] = ast.literal_eval(statement.value)
    return values


def execute(path: Path, output: Path, parameters: Mapping[str, Any], timeout_s: float, more_s: float = 0.0) -> None:
    """Execute a notebook with ``parameters`` into ``output``; what ran is saved after every cell.

    ``timeout_s`` is the limit for the whole notebook, its kernel's start included. A kernel that does not end then is killed,
    one that computes gets up to ``more_s`` more. After an interrupt of this program it is interrupted and soon killed. Raises ``papermill.PapermillExecutionError`` with the failing cell's
    error, ``TimeoutError`` at the limit and ``KeyboardInterrupt`` after an interrupt.
    """
    (output.parent / "logs").mkdir(exist_ok=True)
    warm_up()
    old = {name: os.environ.get(name) for name in HEADLESS}
    os.environ.update(HEADLESS)
    folder, kernel, failures = Path.cwd(), Kernel(), list[BaseException]()

    def close_loop() -> None:
        from jupyter_core.utils import ensure_event_loop

        with contextlib.suppress(RuntimeError):
            ensure_event_loop().close()  # nbclient leaves the loop of its thread open

    def work() -> None:
        try:
            _execute(path, output, parameters, kernel)
        except BaseException as error:
            failures.append(error)
        finally:
            close_loop()
            ended.set()

    # In a thread of its own: whatever it waits for, this one sees signals and the time.
    # It is waited for by an event: a join that a signal interrupts takes the thread for ended (CPython 3.11).
    ended = threading.Event()
    try:
        threading.Thread(target=work, name="notebook", daemon=True).start()
        if not ended.wait(timeout_s) and not _ended_at_work(kernel, ended, more_s):
            kernel.send(signal.SIGKILL)
            ended.wait(END_S[signal.SIGKILL])
            raise TimeoutError(f"no end within {timeout_s:.0f} s, the limit for the whole run; its kernel was killed")
    finally:
        for number, wait_s in END_S.items():
            if not ended.is_set():
                kernel.send(number)
                ended.wait(wait_s)
        os.chdir(folder)  # papermill works in the notebook's folder
        for name, value in old.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    if failures:
        raise failures[0]


def _log_to(path: Path) -> None:
    """Send what papermill and nbclient log to a file, which is made by the first line: the verdict says it in a sentence."""
    for name in ("papermill", "traitlets"):
        logger = logging.getLogger(name)
        for handler in [item for item in logger.handlers if isinstance(item, logging.FileHandler)]:
            logger.removeHandler(handler)  # of an earlier run
            handler.close()
        logger.addHandler(logging.FileHandler(path, encoding="utf-8", delay=True))
        logger.propagate = False


def _ended_at_work(kernel: Kernel, ended: threading.Event, more_s: float) -> bool:
    """Wait for a kernel as long as it computes, at most ``more_s``; tell whether it ended."""
    end = time.monotonic() + more_s
    while (left_s := end - time.monotonic()) > 0 and not kernel.stopped():
        before, watch_s = kernel.used_s(), min(WATCH_S, left_s)
        if ended.wait(watch_s):
            return True
        if kernel.used_s() - before < WORKING * watch_s:
            return False
    return False


def _literal(path: Path) -> str:
    """Return a path as papermill takes it: braces would be places for parameters."""
    return str(path).replace("{", "{{").replace("}", "}}")


def _execute(path: Path, output: Path, parameters: Mapping[str, Any], kernel: Kernel) -> None:
    with importing_jupyter():
        import papermill

    _log_to(output.parent / "logs" / "notebook.log")
    papermill.execute_notebook(
        _literal(path),
        _literal(output),
        parameters=dict(parameters),
        kernel_name="python3",
        language="python",
        progress_bar=False,
        log_output=False,
        cwd=str(path.parent),
        kernel_manager_class=kernel_manager(output.parent / "logs" / "kernel.err", kernel.started),
        autosave_cell_every=30,
        start_timeout=120,
    )
