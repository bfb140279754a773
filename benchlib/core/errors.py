"""Errors that a user can act on: each states the value, the constraint and the remedy."""

import difflib
import tempfile
import traceback
import typing
from collections.abc import Iterable
from typing import Any

from benchlib.core.text import shortened

if typing.TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError

MAX_FAULTS = 4  # of a file or of a command line that are named at once


class OneLine:
    """An error whose message says it all: a notebook shows it without a traceback."""

    def _render_traceback_(self) -> list[str]:  # IPython asks for it
        return [f"{type(self).__name__}: {self}"]


class UserError(OneLine, ValueError):
    """Wrong input. The message states the value, the constraint and the remedy; no traceback is needed."""


class StorageError(UserError, OSError):
    """A file cannot be written. ``errno`` is the system's number and ``strerror`` the bare reason."""

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
    with tempfile.NamedTemporaryFile(
        "w", prefix="benchlib-error-", suffix=".log", delete=False, errors="replace"
    ) as file:
        traceback.print_exception(error, file=file)
    return f"a fault of benchlib itself ({words}); please report it with {file.name}"


def nearest(name: str, names: Iterable[str]) -> str:
    """Return what a misspelt ``name`` may have meant: that with such initials (``lr``), the most similar one, else all."""
    available = sorted(names)
    close = [item for item in available if "_" in item and "".join(word[:1] for word in item.split("_")) == name]
    close = close or difflib.get_close_matches(name, available, n=1, cutoff=0.5)
    return f"did you mean {close[0]}?" if close else "known: " + ", ".join(available)


def explained(error: "ValidationError", model: "type[BaseModel] | None" = None) -> str:
    """Return what pydantic found wrong: each field with the value given and the constraint.

    For a name that is not known, the nearest one of its section in ``model``.
    """
    return shortened([_fault(dict(item), model) for item in error.errors(include_url=False)], MAX_FAULTS, "; ")


def _fault(item: dict[str, Any], model: "type[BaseModel] | None") -> str:
    where = ".".join(map(str, item["loc"]))
    if item["type"] == "extra_forbidden":
        near = f": {nearest(str(item['loc'][-1]), _fields(model, item['loc'][:-1]))}" if model else ""
        return f"{where}: no such field{near}"
    message = str(item["msg"]).removeprefix("Value error, ")
    # A validator names the value itself, or leaves it out because it is a secret.
    plain = item["type"] != "value_error" and isinstance(item["input"], (str, int, float, type(None)))
    value = repr(item["input"])
    shown = f" = {value if len(value) <= 200 else f'{value[:200]}...'}" if plain else ""
    return f"{where}{shown}: {message}" if where else message


def _fields(model: "type[BaseModel]", place: tuple[int | str, ...]) -> Iterable[str]:
    for step in place:  # an index of a list stays in its section
        field = model.model_fields.get(str(step))
        model = (_section(field.annotation) if field else None) or model
    return model.model_fields


def _section(annotation: Any) -> "type[BaseModel] | None":
    if isinstance(annotation, type) and hasattr(annotation, "model_fields"):
        return annotation
    return next(filter(None, map(_section, typing.get_args(annotation))), None)
