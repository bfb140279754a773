"""Executing notebooks headless: papermill's Python API with an orderly end, and kernels that can be ended from outside."""

import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchlib.core.text import shortened

# Its grammars take more than a second to compile, and jsonschema, which papermill loads, needs them for nothing that notebooks have.
sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]
# A kernel and all that it starts must know that nobody looks on: plain text instead of widgets.
HEADLESS = {"BENCHLIB_HEADLESS": "1", "PYDEVD_DISABLE_FILE_VALIDATION": "1"}
NOTEBOOK_S = 60.0  # for a notebook after its ranks were ended: judgement, pictures
# Of the extra `notebooks`: what executing a notebook and making a page of it import.
NEEDS = ["ipykernel", "IPython", "jupyter_client", "latex2mathml", "matplotlib", "nbclient"]
NEEDS += ["nbconvert", "nbformat", "nh3", "papermill", "seaborn", "traitlets"]
INSTALL = "pip install 'benchlib[notebooks]'"
# For a kernel to end its ranks after an interrupt, and for its end to be noticed after it was killed.
END_S = {signal.SIGINT: 12.0, signal.SIGKILL: 6.0}


def lacking() -> str:
    """Return what is not installed of the extra ``notebooks``, with the remedy; '' if nothing."""
    missing = [name for name in NEEDS if find_spec(name) is None]
    return f"{shortened(missing)} not installed: {INSTALL}" if missing else ""


def parameters_of(path: Path) -> list[str]:
    """Return the names in the cell that is tagged ``parameters``, as papermill reads them."""
    import papermill

    return list(papermill.inspect_notebook(str(path)))


def execute(path: Path, output: Path, parameters: Mapping[str, Any], timeout_s: float, log: Path | None = None) -> None:
    """Execute a notebook with ``parameters`` into ``output``; what ran is saved after every cell.

    ``log`` gets what the kernel itself writes to stderr, by default ``logs/kernel.err`` beside ``output``.
    ``timeout_s`` is the limit for the whole notebook, its kernel's start included: a kernel that does not end then is killed.
    After an interrupt of this program it is interrupted and soon killed. Raises ``papermill.PapermillExecutionError`` with the
    failing cell's error, ``TimeoutError`` at the limit and ``KeyboardInterrupt`` after an interrupt.
    """
    log = log or output.parent / "logs" / "kernel.err"
    log.parent.mkdir(exist_ok=True)
    kernels, failures = list[int](), list[BaseException]()

    def work() -> None:
        from jupyter_core.utils import ensure_event_loop

        try:
            _execute(path, output, parameters, kernel_manager(log, kernels.append))
        except BaseException as error:
            failures.append(error)
        finally:
            with contextlib.suppress(RuntimeError):
                ensure_event_loop().close()  # nbclient leaves the loop of its thread open
            ended.set()

    def end(number: signal.Signals) -> None:
        for pid in kernels:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        ended.wait(END_S[number])

    # In a thread of its own: whatever it waits for, this one sees signals and the time.
    # It is waited for by an event: a join that a signal interrupts takes the thread for ended (CPython 3.11).
    ended = threading.Event()
    with contextlib.chdir(Path.cwd()):  # papermill works in the notebook's folder
        try:
            threading.Thread(target=work, name="notebook", daemon=True).start()
            if not ended.wait(timeout_s):
                end(signal.SIGKILL)
                limit = f"no end within {timeout_s:.0f} s, the limit for the whole run"
                raise TimeoutError(f"{limit}; its kernel was killed")
        finally:
            for number in END_S:
                if not ended.is_set():
                    end(number)
    if failures:
        raise failures[0]


def _execute(path: Path, output: Path, parameters: Mapping[str, Any], manager: type) -> None:
    import papermill

    for name in ("papermill", "traitlets"):  # the verdict says it in a sentence
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    papermill.execute_notebook(
        str(path),
        str(output),
        parameters=dict(parameters),
        kernel_name="python3",
        language="python",
        progress_bar=False,
        cwd=str(path.parent),
        kernel_manager_class=manager,
        autosave_cell_every=30,
        start_timeout=120,
        coalesce_streams=True,
        shutdown_kernel="immediate",  # nothing is left to do in it: an orderly end takes half a second
    )


def kernel_manager(log: Path, started: Callable[[int], None] = lambda pid: None) -> type:
    """Return the class of jupyter_client that starts kernels of the running interpreter.

    What a kernel itself writes to stderr goes to the file ``log``: on an interrupt it prints pages about its sockets.
    ``started`` is called with the process id of each.
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
            return KernelSpec(argv=argv, language="python", metadata={"supported_encryption": "curve"})

        async def start_kernel(self, **options: Any) -> None:  # type: ignore[override]
            with log.open("ab") as handle:
                await super().start_kernel(**options, env=os.environ | HEADLESS, stderr=handle)
            started(self.provisioner.pid)  # type: ignore[union-attr]

    return ThisInterpreter
