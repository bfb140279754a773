"""Errors that a user can act on: each states the value, the constraint and the remedy."""

import difflib
import os
import tempfile
import traceback
from collections.abc import Iterable


class OneLine:
    """An error whose message says it all: a notebook shows it without a traceback."""

    def _render_traceback_(self) -> list[str]:  # IPython asks for it
        return [f"{type(self).__name__}: {self}"]


class UserError(OneLine, ValueError):
    """Wrong input. The message states the value, the constraint and the remedy; no traceback is needed."""


class DataError(UserError):
    """A data file breaks its format; the message names the article, the question id and the reason."""


class StorageError(UserError, OSError):
    """A file cannot be written: no space, a read-only place, no permission.

    ``errno`` is the system's number and ``strerror`` the bare reason.
    """

    def __init__(self, message: str, number: int | None = None, reason: str = "") -> None:
        super().__init__(message)
        self.errno, self.strerror = number, reason

    def __str__(self) -> str:
        return str(self.args[0])


class BackendUnavailable(OneLine, RuntimeError):
    """The backend cannot run here. The run ends as SKIPPED with this text as the reason."""


class RunBroken(OneLine, RuntimeError):
    """A run ended before its result was complete; the text says what happened, and on which rank."""


class Stopped(OneLine, KeyboardInterrupt):
    """The user stopped the run, by an interrupt or the Stop button; its ranks have ended."""


class VerdictFailed(OneLine, RuntimeError):
    """A run failed its checks, and the notebook was asked to raise then (``fail_on_verdict``)."""


def unexpected(error: BaseException) -> str:
    """Write the traceback of an error that nobody foresaw to a file of its own, and return one sentence that names it."""
    words = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    text = "".join(traceback.format_exception(error))
    try:
        descriptor, path = tempfile.mkstemp(prefix="benchlib-error-", suffix=".log")
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="replace") as file:
            file.write(text)
    except OSError:
        return f"a fault of benchlib itself ({words}); its traceback could not be written"
    return f"a fault of benchlib itself ({words}); please report it with {path}"


def nearest(name: str, names: Iterable[str]) -> str:
    """Return what a misspelt ``name`` may have meant: that with such initials (``lr``), the most similar one, else all."""
    available = sorted(names)
    close = [item for item in available if "_" in item and "".join(word[:1] for word in item.split("_")) == name]
    close = close or difflib.get_close_matches(name, available, n=1, cutoff=0.5)
    return f"did you mean {close[0]}?" if close else "known: " + ", ".join(available)
