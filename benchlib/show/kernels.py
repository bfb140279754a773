"""Kernels of notebooks that run headless: of this very interpreter, ended from outside, and forked from one that is warm.

To start a kernel and import what every notebook needs takes three seconds of one core. A fork server does that once for all
notebooks of a program, and each kernel starts at once.
"""

import atexit
import contextlib
import multiprocessing
import os
import runpy
import signal
import sys
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil

from benchlib.launch.processes import go_on_without_parent, is_stopped

# A kernel and all that it starts must know that nobody looks on: plain text instead of widgets.
HEADLESS = {"BENCHLIB_HEADLESS": "1", "PYDEVD_DISABLE_FILE_VALIDATION": "1"}


def warm_up() -> None:
    """Start the fork server where none runs, on Linux only: elsewhere a kernel is a new interpreter. It ends with the calling thread."""
    if sys.platform == "linux":
        forkserver.set_forkserver_preload(["benchlib.show.preloaded"])
        forkserver.ensure_running()


class _Forked:
    """A kernel of the fork server, with what jupyter_client asks a ``Popen`` for."""

    stdin = stdout = stderr = None

    def __init__(self, command: list[str], environment: dict[str, str], folder: str, log: Path | None) -> None:
        arguments = (command[2:], environment, folder, log)
        self._process: BaseProcess = multiprocessing.get_context("forkserver").Process(
            target=_be_ipykernel, args=arguments
        )
        self._process.start()
        self.pid = self._process.pid
        self.kill, self.terminate = self._process.kill, self._process.terminate

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self) -> int | None:
        self._process.join()
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        assert self.pid
        os.kill(self.pid, number)


def _be_ipykernel(arguments: list[str], environment: dict[str, str], folder: str, log: Path | None) -> None:
    """Be the kernel, in its process."""
    os.setsid()
    go_on_without_parent()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for number, path in ((0, os.devnull), (2, log)):
        if path:
            os.dup2(os.open(path, os.O_RDWR | os.O_APPEND), number)
    sys.argv = arguments
    try:
        runpy.run_module("ipykernel_launcher", run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # multiprocessing leaves them out


class Kernel:
    """The kernel of one notebook, so that it can be ended from outside, whatever it does or does not answer."""

    def __init__(self) -> None:
        self._process: psutil.Process | None = None
        self._ending = False

    def started(self, pid: int) -> None:
        """Note the kernel's process; end it at once where the notebook is to end already."""
        with contextlib.suppress(psutil.Error):
            self._process = psutil.Process(pid)
        if self._ending:
            self.send(signal.SIGKILL)

    def used_s(self) -> float:
        """Return the processor seconds that the kernel itself has used; 0 where there is none."""
        with contextlib.suppress(psutil.Error):
            if self._process is not None:
                times = self._process.cpu_times()
                return float(times.user + times.system)
        return 0.0

    def stopped(self) -> bool:
        """Whether the kernel was stopped (SIGSTOP)."""
        return self._process is not None and is_stopped(self._process.pid)

    def send(self, number: signal.Signals) -> None:
        """Send a signal, to a kernel that starts later as well.

        A fork server that was stopped (SIGSTOP) goes on: it alone can tell that the kernel ended, and it ends with this program.
        """
        self._ending = True
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.Error):
                if is_stopped(child.pid):
                    child.send_signal(signal.SIGCONT)
        if self._process is not None:
            with contextlib.suppress(psutil.Error):
                self._process.send_signal(number)


def kernel_manager(log: Path | None = None, started: Callable[[int], None] | None = None) -> type:
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
            return KernelSpec(
                argv=argv,
                display_name="Python 3",
                language="python",
                interrupt_mode="signal",
                metadata={"supported_encryption": "curve"},
            )

        async def start_kernel(self, **options: Any) -> None:  # type: ignore[override]
            with log.open("ab") if log else contextlib.nullcontext() as handle:
                await super().start_kernel(**options, **({"stderr": handle} if handle else {}))
            if started and self.provisioner is not None:
                started(self.provisioner.pid)  # type: ignore[attr-defined]

        async def _async_launch_kernel(self, kernel_cmd: list[str], **options: Any) -> None:
            if sys.platform != "linux" or self.provisioner is None:
                await super()._async_launch_kernel(kernel_cmd, **options)
                return
            warm_up()
            process = _Forked(kernel_cmd, options["env"], str(options.get("cwd") or Path.cwd()), log)
            self.provisioner.process, self.provisioner.pid = process, process.pid  # type: ignore[attr-defined]
            self.provisioner.pgid = process.pid  # type: ignore[attr-defined]  # soon: it makes a session of its own
            self._reconcile_connection_info(self.provisioner.connection_info)  # type: ignore[attr-defined]

    return ThisInterpreter
