"""The formats that can be judged, how a file of each is recognised, and what it states. Benchmarks add those of their programs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ValidationError

from benchlib.benchmarks import loadable, of_run
from benchlib.core.errors import UserError, explained
from benchlib.core.files import read_bytes, read_json
from benchlib.core.run_folder import file_faults
from benchlib.core.text import shortened
from benchlib.judge.baselines import Baseline, config_of
from benchlib.judge.foreign import throughput_table
from benchlib.judge.impossible.claim import Claim, ClaimFile
from benchlib.judge.impossible.own import Numbers
from benchlib.results.run import Result, Run
from benchlib.results.shared import is_report, read_html

UNKNOWN = 'not a format that can be judged, see `benchlib judge --help`; a claim file begins with "claim_version": 1'


class Reader(NamedTuple):
    """``read(path, content)`` returns the claims of a file or raises ``UserError``; the content is one of the ``model``, else text.

    JSON is of this format where it has all of ``keys``, text where ``sniff(path, text)`` says so.
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
    """Return what a result states; in its folder, whose files and rows have to agree with it, with samples and config."""
    if faults := file_faults(path.parent):
        raise UserError(f"{path.parent}: changed since the run ended: {'; '.join(faults)}")
    if not _in_its_folder(path):
        return Numbers(result).claims
    run, own = Run(path.parent), of_run(result.benchmark)
    if own and (faults := own.spec.disagreements(run)):
        raise UserError(f"{path.parent}: changed since the run ended: {shortened(faults)}")
    return Numbers.of_run(run).claims


def _in_its_folder(path: Path) -> bool:
    return (path.parent / "config.json").exists()


def _report(path: Path, text: str) -> list[Claim]:
    """Return what the run of a shared report states; long series of raw samples are thinned in it."""
    try:
        run = read_html(text)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    if run.result is None:
        raise UserError(f"{path}: the report of a run that left no result ({run.sentence})")
    return Numbers(run.result, run.samples, config_of(run.benchmark, run.config)).claims


CLAIM = Reader("a claim file, see docs/claims.md", lambda _, file: file.claims, "claim_version", model=ClaimFile)
RESULT = Reader("the kit's result.json", _result, "schema_version benchmark world_size metrics", model=Result)
BASELINE = Reader(
    "the kit's baseline file", lambda _, file: file.claims(), "schema_version runs limits", model=Baseline
)
REPORT = Reader("the kit's shared report.html", _report, sniff=lambda _, text: is_report(text))
TABLE = Reader("a throughput table (CSV, TSV or Markdown)", throughput_table.read, sniff=throughput_table.sniff)


def readers() -> dict[str, Reader]:
    """Return all readers by format, in the order of asking: those with unmistakable marks first."""
    foreign = {"claim": CLAIM, "result": RESULT, "baseline": BASELINE, "report": REPORT}
    for benchmark in loadable():
        foreign |= benchmark.part("foreign", "READERS", {})
    return foreign | {"table": TABLE}


def read_claims(path: Path) -> tuple[str, list[Claim]]:
    """Return the format of a file and what it states. A folder is taken as a run of the kit. Raises ``UserError``."""
    if path.is_dir():
        return "run", _run(path)
    text = _text(path)
    content = read_json(path) if text.lstrip().startswith("{") else text
    name, reader = next((pair for pair in readers().items() if pair[1].fits(path, content)), ("", TABLE))
    if not name:
        raise UserError(f"{path}: {UNKNOWN}")
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
    """Return what no rule saw: columns of a table, and of a result or report alone whether its metrics follow from raw samples."""
    if name == "table":
        return throughput_table.not_read(path, _text(path))
    alone = name == "report" or (name == "result" and not _in_its_folder(path))
    return ["raw samples, from which its metrics follow; judge the run's folder"] if alone else []


def _text(path: Path) -> str:
    data = read_bytes(path)
    if not data.strip():
        raise UserError(f"{path}: the file is empty")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not text (byte {error.start} is not UTF-8)") from None
