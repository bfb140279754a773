"""Ctrl+C, SIGTERM and SIGHUP while something goes on that has to be ended cleanly."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import Any

EXIT_INTERRUPTED = 130
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """Notes the signals that end a program, and raises ``KeyboardInterrupt`` for the first one inside ``allowed()``.

    A signal that the program was told to ignore (``nohup``) stays ignored. Outside the main thread it notes nothing.
    """

    def __init__(self) -> None:
        self.seen = False
        self._allowed = False
        self._old: dict[int, Any] = {}

    def __enter__(self) -> "Interrupts":
        if threading.current_thread() is threading.main_thread():
            for number in ENDING:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._old[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _note(self, number: int, _frame: Any) -> None:
        first, self.seen = not self.seen, True
        if first and self._allowed:
            raise KeyboardInterrupt(f"ended by {signal.Signals(number).name}")

    @contextlib.contextmanager
    def allowed(self) -> Iterator[None]:
        """Let the first signal raise ``KeyboardInterrupt`` in the block; one that came before raises at its beginning."""
        self._allowed = True
        try:
            if self.seen:
                raise KeyboardInterrupt
            yield
        finally:
            self._allowed = False
