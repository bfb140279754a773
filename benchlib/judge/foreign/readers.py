"""Which formats can be judged, how a file of each is told apart, and what it states. A format is a module and a row."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from benchlib.core.errors import UserError
from benchlib.judge.foreign import kit, loadgen_summary, nccl_json, nccl_text, throughput_table
from benchlib.judge.foreign.kit import keys, looks_like_json, parse
from benchlib.judge.impossible.claim import Claim

MOST_BYTES = 64 * 2**20


class UnknownFormat(UserError):
    """A file of no format that can be judged; ``expected`` names those, once for all such files."""


@dataclass(frozen=True)
class Reader:
    """``sniff(path, text)`` tells whether a file is of this format, ``read`` gives its claims or raises ``UserError``."""

    name: str
    what: str
    sniff: Callable[[Path, str], bool]
    read: Callable[[Path, str], list[Claim]]


# In the order of asking: the formats with unmistakable marks first.
READERS: dict[str, Reader] = {
    reader.name: reader
    for reader in (
        Reader("claim", "the neutral claim JSON", kit.sniff, kit.read),
        Reader("result", "the kit's result.json", kit.sniff_result, kit.read_result),
        Reader("verdict", "the kit's verdict.json", kit.sniff_verdict, kit.read_verdict),
        Reader("baseline", "the kit's baseline file", kit.sniff_baseline, kit.read_baseline),
        Reader("report", "the kit's shared report.html", kit.sniff_report, kit.read_report),
        Reader("nccl-tests JSON", "JSON of nccl-tests or rccl-tests", nccl_json.sniff, nccl_json.read),
        Reader("nccl-tests", "output of nccl-tests or rccl-tests", nccl_text.sniff, nccl_text.read),
        Reader("LoadGen", "MLPerf's mlperf_log_summary.txt", loadgen_summary.sniff, loadgen_summary.read),
        Reader("table", "a throughput table (CSV, TSV or Markdown)", throughput_table.sniff, throughput_table.read),
    )
}


def read_claims(path: Path) -> tuple[str, list[Claim]]:
    """Return the format of a file and what it states. A folder is taken as a run of the kit. Raises ``UserError``."""
    if path.is_dir():
        return "run", kit.read_run(path)
    text = _text(path)
    if looks_like_json(text):
        parse(path, text)  # says so where it is cut
    for reader in READERS.values():
        if reader.sniff(path, text):
            try:
                claims = reader.read(path, text)
            except (ValidationError, OverflowError) as error:
                first = error.errors()[0] if isinstance(error, ValidationError) else {"loc": (), "msg": str(error)}
                where = ".".join(map(str, first["loc"])) or "a number"
                raise UserError(
                    f"{path}: {reader.what} with a value that cannot be ({where}: {first['msg']})"
                ) from None
            if not claims:
                raise UserError(f"{path}: {reader.what} without a single result; the file may be cut")
            return reader.name, claims
    if looks_like_json(text):
        raise UnknownFormat(f"{path}: not a format that can be judged; {kit.hint(keys(text))}")
    raise UnknownFormat(f"{path}: not a format that can be judged")


def expected() -> str:
    """Name the formats, for messages."""
    names = [reader.what for reader in READERS.values()]
    return f"{', '.join(names[:-1])} or {names[-1]}"


def _text(path: Path) -> str:
    try:
        size = path.stat().st_size
        if size > MOST_BYTES:
            raise UserError(
                f"{path}: {size / 2**20:,.0f} MiB are more than a result has; the limit is {MOST_BYTES // 2**20} MiB"
            )
        data = path.read_bytes()
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    if not data.strip():
        raise UnknownFormat(f"{path}: the file is empty")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UnknownFormat(f"{path}: not text (byte {error.start} is not UTF-8)") from None
    if "\0" in text:
        raise UnknownFormat(f"{path}: not text (it holds zero bytes)")
    return text
