"""JSON of unknown origin: parsed with care, and values taken only where they are of the kind that is expected."""

import functools
import json
import math
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from benchlib.errors import UserError


def looks_like_json(text: str) -> bool:
    """Tell whether a text starts as a JSON object."""
    return text.lstrip()[:1] == "{"


@functools.lru_cache(maxsize=1)  # each reader asks it of the same text
def keys(text: str) -> frozenset[str]:
    """Return the names at the top of a JSON object, none for any other text."""
    try:
        value = json.loads(text) if looks_like_json(text) else None
    except (ValueError, RecursionError):
        return frozenset()
    return frozenset(value) if isinstance(value, dict) else frozenset()


def parse(path: Path, text: str) -> dict[str, Any]:
    """Return the object of a JSON file; ``UserError`` where it is cut or no object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        where = (
            f"{error.msg.removesuffix(' at')} at line {error.lineno}"
            if isinstance(error, json.JSONDecodeError)
            else "nested too deep or a number too long"
        )
        raise UserError(f"{path}: not valid JSON ({where}); the file may be cut") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def number(value: Any) -> float | None:
    """Return a finite number, or None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def rows(value: Any) -> list[dict[str, Any]]:
    """Return the objects of a list; anything else is left out."""
    return [row for row in value if isinstance(row, dict)] if isinstance(value, list) else []


def validated(path: Path, model: type[BaseModel], values: Any, what: str) -> Any:
    """Return a validated record; ``UserError`` names the first field that is wrong."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise UserError(f"{path}: not {what} ({where}: {first['msg']})") from None
