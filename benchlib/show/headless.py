"""Executing notebooks headless: papermill's Python API with a kernel of this very interpreter and an orderly end."""

import ast
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchlib.core.errors import UserError


def parameters_of(path: Path) -> dict[str, Any]:
    """Return the names and default values of the cell that is tagged ``parameters``.

    They are read without executing anything: the cell may hold annotated literals only.
    """
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


@contextlib.contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    # papermill dies at once on SIGTERM and leaves kernel and notebook behind; as an interrupt it ends both in order.
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(signum: int, frame: object) -> None:
        raise KeyboardInterrupt(f"ended by {signal.Signals(signum).name}")

    old = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def kernel_manager(log: Path | None = None) -> type:
    """Return the class of jupyter_client that starts kernels of the running interpreter.

    What a kernel itself writes to stderr goes to the file ``log``: on an interrupt it prints pages about its sockets.
    """
    from jupyter_client.kernelspec import KernelSpec
    from jupyter_client.manager import AsyncKernelManager

    class ThisInterpreter(AsyncKernelManager):  # type: ignore[misc]
        """A kernel of the running interpreter, whatever kernelspecs the user has installed."""

        # ipykernel 7 warns of plain text on every start unless it is asked to encrypt where it can.
        transport_encryption = "auto"

        @property
        def kernel_spec(self) -> KernelSpec:
            argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
            return KernelSpec(
                argv=argv,
                display_name="Python 3",
                language="python",
                interrupt_mode="signal",
                metadata={"supported_encryption": "curve"},
            )

        async def start_kernel(self, **options: Any) -> None:  # type: ignore[override]
            if log is None:
                await super().start_kernel(**options)
                return
            with log.open("ab") as handle:
                await super().start_kernel(**options, stderr=handle)

    return ThisInterpreter


def execute(path: Path, output: Path, parameters: Mapping[str, Any], timeout_s: float) -> None:
    """Execute a notebook with ``parameters`` into ``output``; what ran is saved after every cell.

    Raises ``papermill.PapermillExecutionError`` with the failing cell's error, ``KeyboardInterrupt`` after an
    interrupt or SIGTERM, and ``CellTimeoutError`` of nbclient for a cell that runs longer than ``timeout_s``.
    """
    import papermill

    # The kernel and all that it starts must know that nobody looks on: plain text instead of widgets.
    environment = {"BENCHLIB_HEADLESS": "1", "PYDEVD_DISABLE_FILE_VALIDATION": "1"}
    (output.parent / "logs").mkdir(exist_ok=True)
    old = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    try:
        with _terminated_like_interrupted():
            papermill.execute_notebook(
                str(path),
                str(output),
                parameters=dict(parameters),
                kernel_name="python3",
                language="python",
                progress_bar=False,
                log_output=False,
                cwd=str(path.parent),
                execution_timeout=int(timeout_s),
                interrupt_on_timeout=True,
                kernel_manager_class=kernel_manager(output.parent / "logs" / "kernel.err"),
                autosave_cell_every=30,
                start_timeout=120,
            )
    finally:
        for name, value in old.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
