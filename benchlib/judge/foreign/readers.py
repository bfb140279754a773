"""The formats that can be judged, how a file of each is recognised, and what it states. A format is a module and a row."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from benchlib.core.errors import UserError, explained
from benchlib.core.files import read_bytes
from benchlib.judge.foreign import kit, loadgen_summary, nccl, throughput_table
from benchlib.judge.impossible.claim import Claim

MAX_BYTES = 64 * 2**20


class UnknownFormat(UserError):
    """A file of no format that can be judged; ``expected`` names those, once for all such files."""


@dataclass(frozen=True)
class Reader:
    """``read(path, text)`` returns the claims of a file or raises ``UserError``.

    A file is of this format where it is a JSON object with all of ``keys``, or where ``sniff(path, text)`` says so.
    """

    name: str
    what: str
    read: Callable[[Path, str], list[Claim]]
    keys: str = ""
    sniff: Callable[[Path, str], bool] | None = None

    def fits(self, path: Path, text: str) -> bool:
        """Return whether a file is of this format."""
        return self.sniff(path, text) if self.sniff else set(self.keys.split()) <= kit.keys(text)


# In the order of asking: the formats with unmistakable marks first.
READERS: dict[str, Reader] = {
    reader.name: reader
    for reader in (
        Reader("claim", "the neutral claim JSON", kit.read_claim_file, "claim_version"),
        Reader("result", "the kit's result.json", kit.read_result, "schema_version benchmark world_size metrics"),
        Reader("verdict", "the kit's verdict.json", kit.read_verdict, "schema_version verdict sentence checks"),
        Reader("baseline", "the kit's baseline file", kit.read_baseline, "schema_version runs limits"),
        Reader("report", "the kit's shared report.html", kit.read_report, sniff=lambda _, text: kit.is_report(text)),
        Reader("nccl-tests JSON", "JSON of nccl-tests or rccl-tests", nccl.read_json, "nccl_version"),
        Reader("nccl-tests", "output of nccl-tests or rccl-tests", nccl.read_text, sniff=lambda _, text: nccl.is_text(text)),
        Reader("LoadGen", "MLPerf's mlperf_log_summary.txt", loadgen_summary.read, sniff=lambda _, text: loadgen_summary.TITLE in text),
        Reader("table", "a throughput table (CSV, TSV or Markdown)", throughput_table.read, sniff=throughput_table.sniff),
    )
}  # fmt: skip


def read_claims(path: Path) -> tuple[str, list[Claim]]:
    """Return the format of a file and what it states. A folder is taken as a run of the kit. Raises ``UserError``."""
    if path.is_dir():
        return "run", kit.read_run(path)
    text = _text(path)
    if kit.looks_like_json(text):
        kit.parse(path, text)  # says so where it is cut
    reader = next((reader for reader in READERS.values() if reader.fits(path, text)), None)
    if reader is None:
        hint = f"; {kit.hint(kit.keys(text))}" if kit.looks_like_json(text) else ""
        raise UnknownFormat(f"{path}: not a format that can be judged{hint}")
    try:
        claims = reader.read(path, text)
    except UserError:
        raise
    except (ValueError, OverflowError) as error:  # of the models, or of a number with thousands of digits
        said = explained(error) if isinstance(error, ValidationError) else f"a number: {error}"
        raise UserError(f"{path}: {reader.what} with an invalid value ({said})") from None
    if not claims:
        raise UserError(f"{path}: {reader.what} without a single result; the file may be cut")
    return reader.name, claims


def not_read(path: Path, name: str) -> list[str]:
    """Return what no rule saw of a file that was read under this format; only a table has columns of any kind."""
    return list(throughput_table.not_read(path, _text(path))) if name == "table" else []


def expected() -> str:
    """Name the formats, for messages."""
    names = [reader.what for reader in READERS.values()]
    return f"{', '.join(names[:-1])} or {names[-1]}"


def _text(path: Path) -> str:
    data = read_bytes(path, MAX_BYTES)
    if not data.strip():
        raise UnknownFormat(f"{path}: the file is empty")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UnknownFormat(f"{path}: not text (byte {error.start} is not UTF-8)") from None
    if "\0" in text:
        raise UnknownFormat(f"{path}: not text (it holds zero bytes)")
    return text
