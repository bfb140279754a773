"""The kit's own files: run folders, results, verdicts and shared reports."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from benchlib.benchmarks import of_run
from benchlib.core.errors import UserError
from benchlib.core.run_folder import file_faults
from benchlib.judge.baselines import config_of
from benchlib.judge.impossible.claim import Claim, Quantity
from benchlib.judge.impossible.own import Numbers, own_claims
from benchlib.results.run import Result, Run, load_samples
from benchlib.results.shared import read_html


def read_run(folder: Path) -> list[Claim]:
    result = Run(folder).result
    if result is None:
        raise UserError(f"{folder}: no run folder with a result.json; a run that broke has none")
    return read_result(folder / "result.json", result)


def read_result(path: Path, result: Result) -> list[Claim]:
    """Return what a result states, with the samples, the config and the machine of the folder that it lies in."""
    folder = path.parent
    if faults := file_faults(folder):
        raise UserError(f"{folder}: changed since the run ended: {'; '.join(faults)}")
    run = Run(folder) if (folder / "config.json").exists() else None
    numbers = Numbers.of(result, load_samples(folder), run.config if run else None)
    claims = own_claims(replace(numbers, machine=run.machine, folder=folder) if run else numbers)
    try:
        return [*claims, Claim(quantities=list(_beside_rows(result)))]
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: the tables are not those of {result.benchmark} ({error})") from None


def _beside_rows(result: Result) -> Iterator[Quantity]:
    """Yield the metrics that a column of a table holds as they are, beside that column, which needs no raw samples."""
    own = of_run(result.benchmark)
    for stated, number in own.spec.beside_rows(result) if own else ():
        yield Quantity(
            name=stated.name, value=stated.value, unit=stated.unit, samples=[stated.value], recorded=[number]
        )


def read_verdict(path: Path, content: object) -> list[Claim]:
    """Return what the run of a verdict states: a verdict holds no raw numbers of its own."""
    if not (path.parent / "result.json").exists():
        raise UserError(f"{path}: a verdict is judged by the result.json beside it, and there is none")
    return read_run(path.parent)


def read_report(path: Path, text: str) -> list[Claim]:
    """Return what the run of a shared report states; long series of raw samples are thinned in it."""
    try:
        run = read_html(text)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    if run.result is None:
        raise UserError(f"{path}: the report of a run that left no result ({run.sentence})")
    return own_claims(Numbers.of(run.result, run.samples, config_of(run.benchmark, run.config)))
