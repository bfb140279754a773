"""The neutral claim JSON: what anybody states about a run, in the fields of ``benchlib.impossible.claim``."""

import difflib
import typing
from collections.abc import Collection
from pathlib import Path

from pydantic import BaseModel, ValidationError

from benchlib.errors import UserError
from benchlib.foreign.json_file import keys, parse
from benchlib.impossible.claim import Claim, ClaimFile

GUIDE = "see docs/claims.md"


def sniff(path: Path, text: str) -> bool:
    """A JSON object with a ``claim_version``."""
    return "claim_version" in keys(text)


def read(path: Path, text: str) -> list[Claim]:
    """Return the claims; a field that is not known or out of range is a ``UserError`` with the nearest known one."""
    try:
        return ClaimFile.model_validate(parse(path, text)).claims
    except ValidationError as error:
        first = error.errors()[0]
        where, message = ".".join(map(str, first["loc"])) or "the file", first["msg"]
        if first["type"] == "extra_forbidden":
            message = f"no such field{nearest(str(first['loc'][-1]))}"
        raise UserError(f"{path}: not a claim file ({where}: {message}); {GUIDE}") from None


def parts() -> dict[str, type[BaseModel]]:
    """Return the model of each part of a claim, by its name in the file."""
    found = {}
    for name, field in Claim.model_fields.items():
        models = [inner for inner in typing.get_args(field.annotation) if _is_part(inner)]
        if models:
            found[name] = models[0]
    return found


def _is_part(inner: object) -> bool:
    return isinstance(inner, type) and issubclass(inner, BaseModel)


def fields() -> dict[str, str]:
    """Return where each name of a claim file belongs: ``samples_per_s`` -> ``speed``; '' for the names at the top."""
    found = dict[str, str]()
    for part, model in parts().items():
        for name in model.model_fields:
            found.setdefault(name, part)
    return found | dict.fromkeys(Claim.model_fields, "claims") | dict.fromkeys(ClaimFile.model_fields, "")


def nearest(name: str) -> str:
    """Return a clause that names the known field that is written most like ``name``, '' where none is near."""
    known = fields()
    found = difflib.get_close_matches(name.lower(), list(known), n=1, cutoff=0.75)
    if not found:
        return ""
    place = known[found[0]]
    return f"; the nearest is {found[0]}" + (f" of {place}" if place else "")


def hint(names: Collection[str]) -> str:
    """Say how JSON of no known format, with these names at its top, becomes a claim file."""
    near = next((text for name in sorted(names) if (text := nearest(name))), "")
    return f'a claim file begins with "claim_version": 1{near}; {GUIDE}'
