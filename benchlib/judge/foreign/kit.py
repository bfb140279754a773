"""Claim files, and the kit's own files: results, run folders, verdicts, baselines and shared reports.

The JSON is of unknown origin: values are taken only where they are of the expected kind.
"""

import json
import math
import typing
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
from benchlib.results.shared import read_html

GUIDE = "see docs/claims.md"
Model = typing.TypeVar("Model", bound=BaseModel)


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
    try:
        return float(value) if type(value) in (int, float) and math.isfinite(value) else None
    except OverflowError:
        return None


def rows(value: Any) -> list[dict[str, Any]]:
    """Return the objects of a list; anything else is left out."""
    return [row for row in value if isinstance(row, dict)] if isinstance(value, list) else []


def _validated(path: Path, content: Any, model: type[Model], what: str) -> Model:
    try:
        return model.model_validate(content)
    except ValidationError as error:
        raise UserError(f"{path}: not {what} ({explained(error, model)})") from None


def read_claim_file(path: Path, content: Any) -> list[Claim]:
    return _validated(path, content, ClaimFile, f"a claim file, {GUIDE}").claims


def read_run(folder: Path) -> list[Claim]:
    result = Run(folder).result
    if result is None:
        raise UserError(f"{folder}: no run folder with a result.json; a run that broke has none")
    return _of_result(result, folder)


def read_result(path: Path, content: Any) -> list[Claim]:
    return _of_result(_validated(path, content, Result, "a result of this version"), path.parent)


def read_verdict(path: Path, content: Any) -> list[Claim]:
    """Return what the run of a verdict states: a verdict holds no raw numbers of its own."""
    if not (path.parent / "result.json").exists():
        raise UserError(f"{path}: a verdict is judged by the result.json beside it, and there is none")
    return read_run(path.parent)


def _of_result(result: Result, folder: Path) -> list[Claim]:
    if faults := file_faults(folder):
        raise UserError(f"{folder}: changed since the run ended: {'; '.join(faults)}")
    run = Run(folder) if (folder / "config.json").exists() else None
    numbers = Numbers.of(result, load_samples(folder), run.config if run else None)
    return own_claims(replace(numbers, machine=run.machine, folder=folder) if run else numbers)


def read_report(path: Path, text: str) -> list[Claim]:
    """Return what the run of a shared report states; long series of raw samples are thinned in it."""
    try:
        run = read_html(text)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    if run.result is None:
        raise UserError(f"{path}: the report of a run that left no result ({run.sentence})")
    return own_claims(Numbers.of(run.result, run.samples, config_of(run.benchmark, run.config)))


def read_baseline(path: Path, content: Any) -> list[Claim]:
    return _validated(path, content, Baseline, "a baseline of this version").claims()
