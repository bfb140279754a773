"""Kernels of notebooks that run headless: of this very interpreter, ended from outside, and started ahead of their notebook.

To start a kernel and import what every notebook needs takes three seconds of one core. A spare interpreter does that while
others compute, reads from its standard input which kernel to be, and is it.
"""

import atexit
import contextlib
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from benchlib.core.imports import importing
from benchlib.launch.processes import go_on_without_parent, is_stopped

# A kernel and all that it starts must know that nobody looks on: plain text instead of widgets.
HEADLESS = {"BENCHLIB_HEADLESS": "1", "PYDEVD_DISABLE_FILE_VALIDATION": "1"}
IMPORTED = ("ipykernel.kernelapp", "benchlib.session", "benchlib.show.figures", "pandas", "scipy.stats")
_WAIT = "from benchlib.show.kernels import be_ipykernel; be_ipykernel()"


class _Spare:
    """At most one interpreter that waits to be a kernel; it ends by itself where this program ends without needing it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start one where none waits."""
        if self._process is None or self._process.poll() is not None:
            command = [sys.executable, "-c", _WAIT]
            environment = {**os.environ, **HEADLESS, "JPY_PARENT_PID": str(os.getpid())}  # read during imports
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, env=environment)

    def take(self, command: list[str], environment: dict[str, str], folder: str, log: Path | None) -> Any:
        """Make the spare interpreter the kernel of ``command``; return its process, None where there is none."""
        process, self._process = self._process, None
        if process is None or process.stdin is None:
            return None
        order = {"arguments": command[2:], "environment": environment, "folder": folder, "log": str(log or "")}
        with contextlib.suppress(OSError), process.stdin as words:  # an error: it has ended
            words.write(json.dumps(order).encode())
        return process if process.poll() is None else None

    def discard(self) -> None:
        """End it."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


SPARE = _Spare()
atexit.register(SPARE.discard)


def be_ipykernel() -> None:
    """Import what notebooks need, wait for the order to be a kernel, and be it; end at once where nobody is left to give it."""
    go_on_without_parent()
    words: list[str] = []

    def listen() -> None:
        words.append(sys.stdin.read())
        if not words[0]:
            os._exit(0)

    listening = threading.Thread(target=listen, daemon=True)
    listening.start()
    with importing():
        for name in IMPORTED:
            importlib.import_module(name)
    listening.join()
    order = json.loads(words[0])
    os.chdir(order["folder"])
    os.environ.update(order["environment"])
    for number, path in ((0, os.devnull), (2, order["log"])):
        if path:
            os.dup2(os.open(path, os.O_RDWR | os.O_APPEND), number)
    sys.argv = order["arguments"]
    runpy.run_module("ipykernel_launcher", run_name="__main__")


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
        """Send a signal, to a kernel that starts later as well."""
        self._ending = True
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
            process = SPARE.take(kernel_cmd, options["env"], str(options.get("cwd") or Path.cwd()), log)
            if process is None or self.provisioner is None:
                await super()._async_launch_kernel(kernel_cmd, **options)
                return
            self.provisioner.process, self.provisioner.pid = process, process.pid  # type: ignore[attr-defined]
            self.provisioner.pgid = os.getpgid(process.pid)  # type: ignore[attr-defined]
            self._reconcile_connection_info(self.provisioner.connection_info)  # type: ignore[attr-defined]

    return ThisInterpreter
