"""The kit's own JSON as foreign files: a result, the folder of a verdict, a baseline. What was measured is judged."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchlib.baselines import Baseline
from benchlib.config import BaseConfig, build
from benchlib.embedded import ATTRIBUTE, read_html
from benchlib.errors import UserError
from benchlib.foreign.json_file import keys, parse, validated
from benchlib.impossible.claim import Claim
from benchlib.impossible.numbers import Numbers
from benchlib.impossible.own import own_claims
from benchlib.results import Result, Run, load_samples


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
        for claim in own_claims(Numbers(run.metrics, world_size=size, samples=run.samples, config=config)):
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
