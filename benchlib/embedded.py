"""The data of a run inside its shared report, and back: a link that a person can click and a program can read.

The report carries its run as ``<a download href="data:application/gzip;base64,...">``: JSON of a
:class:`benchlib.snapshot.Snapshot`, thinned and compressed. A link was chosen because it is the one element that holds data,
needs no script, is allowed by the report's content security policy (which governs loading, not downloads that the reader
asks for), passes through mail attachments and *Save as* unchanged, and serves a person as well: a click saves the file.
``data-sha256`` is the SHA-256 of the compressed bytes, that is of the file which the link saves.

The checksum finds damage and careless changes; it is no signature. What a reader trusts is bounded before it is
unpacked and validated after: the file, the text of the link, the unpacked JSON each have a largest size.
"""

import base64
import binascii
import gzip
import hashlib
import re
import zlib
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

from pydantic import ValidationError

from benchlib.errors import UserError
from benchlib.snapshot import Snapshot

MEDIA_TYPE = "application/gzip"
ATTRIBUTE = "data-benchlib-run"  # its value is the version of the form described above
VERSION = "1"
PREFIX = f"data:{MEDIA_TYPE};base64,"

REPORT_BYTES = 16_000_000
LINK_CHARACTERS = 2_000_000
JSON_BYTES = 16_000_000
WRITTEN_BYTES = 90_000  # of compressed data: with base64 a quarter of what a report may have


@dataclass(frozen=True)
class Link:
    """What a report's template needs: ``href``, ``sha256`` and the name of the file that a click saves."""

    href: str
    sha256: str
    file_name: str
    version: str = VERSION
    size_bytes: int = 0


def link(run: Snapshot) -> Link:
    """Pack a run into a link of at most 90 kB of compressed data; samples are thinned further until it fits."""
    for kept in (200, 100, 50, 20, 0):
        small = run.thinned(kept)
        # A fixed time in the header: the same run gives the same report, byte for byte.
        packed = gzip.compress(small.model_dump_json().encode(), mtime=0)
        if len(packed) <= WRITTEN_BYTES:
            break
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", run.run).strip("-.") or "run"
    return Link(
        href=PREFIX + base64.b64encode(packed).decode(),
        sha256=hashlib.sha256(packed).hexdigest(),
        file_name=f"{name}.json.gz",
        size_bytes=len(packed),
    )


class _Finder(HTMLParser):
    """Collects the links that carry a run, and whether the document was read to its end."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.found: list[dict[str, str]] = []
        self.ended = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        if tag == "a" and ATTRIBUTE in values:
            self.found.append(values)

    def handle_endtag(self, tag: str) -> None:
        self.ended = self.ended or tag == "html"


def read_report(path: Path | str) -> Snapshot:
    """Return the run that a ``report.html`` carries.

    Raises ``UserError`` for a file that is no report, carries no data, is cut, or was altered.
    """
    path = Path(path)
    try:
        if path.stat().st_size > REPORT_BYTES:
            raise UserError(
                f"{path}: {path.stat().st_size:,} bytes are no report of benchlib (at most {REPORT_BYTES:,})"
            )
        source = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not readable as a report ({error})") from None
    try:
        return read_html(source)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def read_html(source: str) -> Snapshot:
    """Return the run that the text of a report carries; ``UserError`` as in :func:`read_report`, without the path."""
    finder = _Finder()
    finder.feed(source)
    finder.close()
    if not finder.ended:
        raise UserError("the file is cut or is no report: its end is missing; ask for the whole file")
    if not finder.found:
        raise UserError(
            "carries no data of a run: it is no report of benchlib, or an old one that `benchlib report` renders again"
        )
    if len(finder.found) > 1:
        raise UserError(
            f"carries the data of {len(finder.found)} runs where a report has one: it was put together by hand"
        )
    found = finder.found[0]
    if found[ATTRIBUTE] != VERSION:
        raise UserError(f"its data have the form {found[ATTRIBUTE]!r}, this version of benchlib reads {VERSION!r}")
    return _unpack(found.get("href", ""), found.get("data-sha256", ""))


def _unpack(href: str, sha256: str) -> Snapshot:
    if not href.startswith(PREFIX) or len(href) > LINK_CHARACTERS:
        raise UserError("its data were altered: the link does not hold what benchlib writes")
    try:
        packed = base64.b64decode(href[len(PREFIX) :], validate=True)
    except (binascii.Error, ValueError):
        raise UserError("its data were altered: not base64") from None
    if hashlib.sha256(packed).hexdigest() != sha256:
        raise UserError("its data were altered or damaged: they do not match their SHA-256; ask for the file again")
    unpacker = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
    try:
        plain = unpacker.decompress(packed, JSON_BYTES)
    except zlib.error as error:
        raise UserError(f"its data cannot be unpacked ({error})") from None
    if not unpacker.eof:
        raise UserError(f"its data are cut or unpack to more than {JSON_BYTES:,} bytes, which no run of benchlib does")
    try:
        return Snapshot.model_validate_json(plain)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise UserError(f"its data are no run of this version ({where}: {first['msg']})") from None
