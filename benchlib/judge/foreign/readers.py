"""The formats that can be judged, how a file of each is recognised, and what it states. A format is a module and a row."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ValidationError

from benchlib.benchmarks import of_run
from benchlib.core.errors import UserError, explained
from benchlib.core.files import read_bytes, read_json
from benchlib.core.run_folder import file_faults
from benchlib.judge.baselines import Baseline, config_of
from benchlib.judge.foreign import loadgen_summary, nccl, throughput_table
from benchlib.judge.foreign.loadgen_summary import TITLE
from benchlib.judge.impossible.claim import Claim, ClaimFile, Quantity
from benchlib.judge.impossible.own import Numbers
from benchlib.results.run import Result, Run, load_samples
from benchlib.results.shared import is_report, read_html

UNKNOWN = 'not a format that can be judged, see `benchlib judge --help`; a claim file begins with "claim_version": 1'


class Reader(NamedTuple):
    """``read(path, content)`` returns the claims of a file or raises ``UserError``; the content is JSON's object, else text.

    JSON is of this format where it has all of ``keys``, text where ``sniff(path, text)`` says so. With a ``model`` the content is
    one of it.
    """

    what: str
    read: Callable[[Path, Any], list[Claim]]
    keys: str = ""
    sniff: Callable[[Path, str], bool] | None = None
    model: type[BaseModel] | None = None

    def fits(self, path: Path, content: Any) -> bool:
        if isinstance(content, dict):
            return bool(self.keys) and set(self.keys.split()) <= content.keys()
        return self.sniff is not None and self.sniff(path, content)


def _run(folder: Path) -> list[Claim]:
    result = Run(folder).result
    if result is None:
        raise UserError(f"{folder}: no run folder with a result.json; a run that broke has none")
    return _result(folder / "result.json", result)


def _result(path: Path, result: Result) -> list[Claim]:
    """Return what a result states, with the samples, the config and the machine of the folder that it lies in."""
    folder = path.parent
    if faults := file_faults(folder):
        raise UserError(f"{folder}: changed since the run ended: {'; '.join(faults)}")
    whole = (folder / "config.json").exists()
    numbers = Numbers.of_run(Run(folder)) if whole else Numbers(result, load_samples(folder))
    own, beside = of_run(result.benchmark), list[Quantity]()
    try:
        # What a column of a table holds as it is stands beside that column, which needs no raw samples.
        for metric, number in own.spec.beside_rows(result) if own else ():
            both = {"samples": [metric.value], "recorded": [number]}
            beside.append(Quantity(name=metric.name, value=metric.value, unit=metric.unit, **both))
        return [*numbers.claims, Claim(quantities=beside)]
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: the tables are not those of {result.benchmark} ({error})") from None


def _report(path: Path, text: str) -> list[Claim]:
    """Return what the run of a shared report states; long series of raw samples are thinned in it."""
    try:
        run = read_html(text)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    if run.result is None:
        raise UserError(f"{path}: the report of a run that left no result ({run.sentence})")
    return Numbers(run.result, run.samples, config_of(run.benchmark, run.config)).claims


# In the order of asking: the formats with unmistakable marks first.
READERS = {
    "claim": Reader(
        "a claim file, see docs/claims.md", lambda _, file: list(file.claims), "claim_version", model=ClaimFile
    ),
    "result": Reader("the kit's result.json", _result, "schema_version benchmark world_size metrics", model=Result),
    "baseline": Reader(
        "the kit's baseline file", lambda _, file: file.claims(), "schema_version runs limits", model=Baseline
    ),
    "report": Reader("the kit's shared report.html", _report, sniff=lambda _, text: is_report(text)),
    "nccl-tests JSON": Reader("JSON of nccl-tests or rccl-tests", nccl.read_json, "nccl_version", model=nccl.File),
    "nccl-tests": Reader("output of nccl-tests or rccl-tests", nccl.read_text, sniff=nccl.sniff),
    "LoadGen": Reader("MLPerf's mlperf_log_summary.txt", loadgen_summary.read, sniff=lambda _, text: TITLE in text),
    "table": Reader("a throughput table (CSV, TSV or Markdown)", throughput_table.read, sniff=throughput_table.sniff),
}


def read_claims(path: Path) -> tuple[str, list[Claim]]:
    """Return the format of a file and what it states. A folder is taken as a run of the kit. Raises ``UserError``."""
    if path.is_dir():
        return "run", _run(path)
    text = _text(path)
    content = read_json(path) if text.lstrip().startswith("{") else text
    name = next((name for name, reader in READERS.items() if reader.fits(path, content)), None)
    if name is None:
        raise UserError(f"{path}: {UNKNOWN}")
    reader = READERS[name]
    try:
        claims = reader.read(path, reader.model.model_validate(content) if reader.model else content)
    except UserError:
        raise
    except (ValueError, OverflowError) as error:  # of the models, or of a number with thousands of digits
        reason = explained(error, reader.model) if isinstance(error, ValidationError) else f"a number: {error}"
        raise UserError(f"{path}: {reader.what} with an invalid value ({reason})") from None
    if not claims:
        raise UserError(f"{path}: {reader.what} without a single result; the file may be cut")
    return name, claims


def not_read(path: Path, name: str) -> list[str]:
    """Return what no rule saw of a file that was read under this format: columns of a table, samples of a lone result."""
    if name == "result" and not (path.parent / "samples.parquet").exists():
        return ["raw samples, there is no samples.parquet beside it"]
    return list(throughput_table.not_read(path, _text(path))) if name == "table" else []


def _text(path: Path) -> str:
    data = read_bytes(path)
    if not data.strip():
        raise UserError(f"{path}: the file is empty")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not text (byte {error.start} is not UTF-8)") from None
