"""What tells a supervisor to stop: its standard input (a pipe whose other end the launching process holds) and signals."""

import contextlib
import os
import select
import signal

from benchlib.processes import signal_name


class Lifeline:
    """``stop_reason`` is empty as long as the run may go on."""

    def __init__(self) -> None:
        """Install the signal handlers of this process; for its main thread."""
        self.stop_reason = ""
        self._sources = [0]
        # A dead child must end the wait in ``listen`` at once: every signal writes a byte to this pipe.
        self._wake, write = os.pipe()
        for descriptor in (self._wake, write):
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _frame: object) -> None:
        self.stop_reason = self.stop_reason or f"stopped: the supervisor received {signal_name(number)}"

    def listen(self, timeout_s: float) -> None:
        """Wait until something happens, at most ``timeout_s``."""
        for source in select.select([self._wake, *self._sources], [], [], timeout_s)[0]:
            data = b""
            with contextlib.suppress(BlockingIOError):
                data = os.read(source, 4096)
            if source == 0 and not data:
                self._sources = []
                self.stop_reason = self.stop_reason or "stopped: the launching process is gone"
            elif source == 0 and b"q" in data:
                self.stop_reason = self.stop_reason or "stopped by the user"
