"""Claim files, and the kit's own files: results, run folders, verdicts, baselines and shared reports.

The JSON is of unknown origin: values are taken only where they are of the expected kind.
"""

import difflib
import functools
import json
import math
import typing
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from benchlib.core.errors import UserError, explained
from benchlib.core.run_folder import file_faults
from benchlib.judge.baselines import Baseline, config_of
from benchlib.judge.impossible.claim import Claim, ClaimFile
from benchlib.judge.impossible.own import Numbers, own_claims
from benchlib.results.run import Result, Run, load_samples
from benchlib.results.shared import ATTRIBUTE, read_html

GUIDE = "see docs/claims.md"
Model = typing.TypeVar("Model", bound=BaseModel)


def looks_like_json(text: str) -> bool:
    """Return whether a text starts as a JSON object."""
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
        where = "nested too deep or a number too long"
        if isinstance(error, json.JSONDecodeError):
            where = f"{error.msg.removesuffix(' at')} at line {error.lineno}"
        raise UserError(f"{path}: not valid JSON ({where}); the file may be cut") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: expected a JSON object, not {type(value).__name__}")
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


def _validated(path: Path, text: str, model: type[Model], what: str) -> Model:
    """Return a record; ``UserError`` names the first wrong field, and for one that is not known the nearest known one."""
    try:
        return model.model_validate(parse(path, text))
    except ValidationError as error:
        first = error.errors()[0]
        near = nearest(str(first["loc"][-1])) if model is ClaimFile and first["type"] == "extra_forbidden" else ""
        guide = f"; {GUIDE}" if model is ClaimFile else ""
        raise UserError(f"{path}: not {what} ({explained(error)}{near}){guide}") from None


# --- claim files ---------------------------------------------------------------------------------------------------------


def read_claim_file(path: Path, text: str) -> list[Claim]:
    """Return the claims of a claim file."""
    return _validated(path, text, ClaimFile, "a claim file").claims


def parts() -> dict[str, type[BaseModel]]:
    """Return the model of each part of a claim, by its name in the file."""
    models = {
        name: [
            inner
            for inner in typing.get_args(field.annotation)
            if isinstance(inner, type) and issubclass(inner, BaseModel)
        ]
        for name, field in Claim.model_fields.items()
    }
    return {name: inner[0] for name, inner in models.items() if inner}


def nearest(name: str) -> str:
    """Return a clause with the field of a claim file whose name is most like ``name``, '' where none is."""
    places = dict.fromkeys(ClaimFile.model_fields, "") | dict.fromkeys(Claim.model_fields, "claims")
    for part, model in parts().items():
        places = dict.fromkeys(model.model_fields, part) | places
    matches = difflib.get_close_matches(name.lower(), list(places), n=1, cutoff=0.75)
    place = f" of {places[matches[0]]}" if matches and places[matches[0]] else ""
    return f"; the nearest is {matches[0]}{place}" if matches else ""


def hint(names: Collection[str]) -> str:
    """Say how JSON of no known format, with these names at its top, becomes a claim file."""
    near = next((text for name in sorted(names) if (text := nearest(name))), "")
    return f'a claim file begins with "claim_version": 1{near}; {GUIDE}'


# --- the kit's own files -------------------------------------------------------------------------------------------------


def read_run(folder: Path) -> list[Claim]:
    """Return what the result of a run folder states."""
    result = Run(folder).result
    if result is None:
        raise UserError(f"{folder}: no run folder with a result.json; a run that broke has none")
    return _of_result(result, folder)


def read_result(path: Path, text: str) -> list[Claim]:
    """Return what a result states; raw samples and config beside it are used where they exist."""
    return _of_result(_validated(path, text, Result, "a result of this version"), path.parent)


def read_verdict(path: Path, text: str) -> list[Claim]:
    """Return what the run of a verdict states: a verdict holds no raw numbers of its own."""
    parse(path, text)
    if not (path.parent / "result.json").exists():
        raise UserError(f"{path}: a verdict is judged by the result.json beside it, and there is none")
    return read_run(path.parent)


def _of_result(result: Result, folder: Path) -> list[Claim]:
    if faults := file_faults(folder):
        raise UserError(f"{folder}: changed since the run ended: {'; '.join(faults)}")
    run = Run(folder) if (folder / "config.json").exists() else None
    numbers = Numbers.of(result, load_samples(folder), run.config if run else None)
    return own_claims(replace(numbers, machine=run.machine, folder=folder) if run else numbers)


def is_report(text: str) -> bool:
    """Return whether a text is a shared report with the data of its run."""
    return f" {ATTRIBUTE}=" in text and "<html" in text[:2000]


def read_report(path: Path, text: str) -> list[Claim]:
    """Return what the run of a shared report states; long series of raw samples are thinned in it."""
    try:
        run = read_html(text)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    if run.result is None:
        raise UserError(f"{path}: the report of a run that left no result ({run.sentence})")
    return own_claims(Numbers.of(run.result, run.samples, config_of(run.benchmark, run.config)))


def read_baseline(path: Path, text: str) -> list[Claim]:
    """Return what the accepted runs of a baseline state, under the config that its fingerprint holds."""
    return _validated(path, text, Baseline, "a baseline of this version").claims()
