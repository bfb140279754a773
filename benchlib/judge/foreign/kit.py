"""JSON of unknown origin: parsed with care, and values taken only where they are of the kind that is expected."""

import difflib
import functools
import json
import math
import typing
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from benchlib.config.schema import BaseConfig, build
from benchlib.core.errors import UserError
from benchlib.core.run_folder import file_faults
from benchlib.judge.baselines import Baseline
from benchlib.judge.impossible.claim import Claim, ClaimFile
from benchlib.judge.impossible.own import Numbers, own_claims
from benchlib.judge.snapshot import ATTRIBUTE, read_html
from benchlib.results.run import Result, Run, load_samples


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


# The neutral claim JSON: what anybody states about a run, in the fields of ``benchlib.judge.impossible.claim``.


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


# The kit's own JSON as foreign files: a result, the folder of a verdict, a baseline. What was measured is judged.


def sniff_result(path: Path, text: str) -> bool:
    """A JSON object with the fields of a result."""
    return {"schema_version", "benchmark", "world_size", "metrics"} <= keys(text)


def sniff_verdict(path: Path, text: str) -> bool:
    """A JSON object with the fields of a verdict."""
    return {"schema_version", "verdict", "sentence", "checks"} <= keys(text)


def sniff_baseline(path: Path, text: str) -> bool:
    """A JSON object with the fields of a baseline."""
    return {"schema_version", "fingerprint", "benchmark", "runs"} <= keys(text)


def sniff_report(path: Path, text: str) -> bool:
    """A shared report with the data of its run."""
    return f" {ATTRIBUTE}=" in text and "<html" in text[:2000]


def read_report(path: Path, text: str) -> list[Claim]:
    """Return what the run of a shared report states; its raw samples are thinned where they are many."""
    try:
        run = read_html(text)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    if run.result is None:
        raise UserError(f"{path}: the report of a run that left no result ({run.sentence})")
    return own_claims(Numbers.of(run.result, run.samples, _built(run.benchmark, run.config)))


def read_result(path: Path, text: str) -> list[Claim]:
    """Return what a result states; the raw samples and the config beside it count where they are there."""
    result: Result = validated(path, Result, parse(path, text), "a result of this version")
    return _of_result(result, path.parent)


def read_run(folder: Path) -> list[Claim]:
    """Return what the result of a run folder states."""
    result = Run(folder).result
    if result is None:
        raise UserError(f"{folder}: no run folder with a result.json; a run that broke has none")
    return _of_result(result, folder)


def read_verdict(path: Path, text: str) -> list[Claim]:
    """Return what the run of a verdict states: a verdict holds no raw numbers of its own."""
    parse(path, text)
    if not (path.parent / "result.json").exists():
        raise UserError(f"{path}: a verdict is judged by the result.json beside it, and there is none")
    return read_run(path.parent)


def _of_result(result: Result, folder: Path) -> list[Claim]:
    if faults := file_faults(folder):
        raise UserError(f"{folder}: not as the run left it: {'; '.join(faults)}")
    return own_claims(Numbers.of(result, load_samples(folder), _config(folder)))


def _config(folder: Path) -> BaseConfig | None:
    if not (folder / "config.json").exists():
        return None
    return Run(folder).config


def _built(benchmark: str, values: Mapping[str, Any]) -> BaseConfig | None:
    """Return the config of these values, None where this version has no such config: less can be judged then."""
    try:
        return build(benchmark, values)
    except UserError:
        return None


def read_baseline(path: Path, text: str) -> list[Claim]:
    """Return what the accepted runs of a baseline state, under the config that its fingerprint holds."""
    values: dict[str, Any] = parse(path, text)
    baseline: Baseline = validated(path, Baseline, values, "a baseline of this version")
    ranks = baseline.fingerprint.get("world_size", "")
    size = int(ranks) if ranks.isdecimal() and int(ranks) > 0 else 1
    config = _of_fingerprint(baseline)
    claims = []
    for run in baseline.runs:
        numbers = Numbers(baseline.benchmark, run.metrics, size, samples=run.samples, config=config)
        for claim in own_claims(numbers):
            subject = f"{run.run}, {claim.subject}" if claim.subject else run.run
            claims.append(claim.model_copy(update={"subject": subject}))
    return claims


def _of_fingerprint(baseline: Baseline) -> BaseConfig | None:
    """Return the config of which a fingerprint holds the work; the rest has its defaults."""
    prefix, work = "config.", dict[str, Any]()
    for name, text in baseline.fingerprint.items():
        if name.startswith(prefix):
            try:
                work[name.removeprefix(prefix)] = json.loads(text)
            except ValueError:
                return None
    backend = baseline.fingerprint.get("backend", "")
    return _built(baseline.benchmark, work | {"backend": backend, "tier": baseline.tier}) if work and backend else None
