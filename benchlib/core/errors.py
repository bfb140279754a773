"""Errors that a user can act on: each states the value, the constraint and the remedy."""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
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


class BackendUnavailable(RuntimeError):
    """The backend cannot run here. The run ends as SKIPPED with this text as the reason."""


class RunBroken(RuntimeError):
    """A run ended before its result was complete; the text says what happened, and on which rank."""


def nearest(name: str, names: Iterable[str]) -> str:
    """Return what a misspelt ``name`` may have meant: the most similar of ``names``, else all of them."""
    known = sorted(names)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {close[0]}?" if close else "known: " + ", ".join(known)
