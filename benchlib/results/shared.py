"""Runs by what a user names: a run folder, a folder of runs, or a report, which carries its run in a link.

A report carries its run as ``<a download href="data:application/gzip;base64,...">``: JSON of a :class:`Record`, thinned and
compressed. A link needs no script, passes through mail and *Save as* unchanged, and a click saves the file. The checksum that
gzip keeps detects damage and careless changes; it is no signature.
"""

import base64
import gzip
import re
import zlib
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import from_json

from benchlib.core.errors import UserError, explained
from benchlib.core.files import read_text
from benchlib.results.record import Record, load
from benchlib.results.run import is_run, printable

KEPT_BYTES = 8_000  # of one table or one fact
MEDIA_TYPE = "application/gzip"
ATTRIBUTE = "data-benchlib-run"  # its value is the version of the form that this module describes
VERSION = "3"
# What is between tags cannot hold a tag of its own: all of it is escaped. An HTML parser takes minutes for hostile text.
ANCHOR, VALUE = re.compile(r"<a\s[^<>]*>", re.IGNORECASE), re.compile(r'\s([\w-]+)="([^"]*)"')
PREFIX = f"data:{MEDIA_TYPE};base64,"

REPORT_BYTES = 16_000_000
WRITTEN_BYTES = 90_000  # of compressed data: with base64 a quarter of what a report may have


def link(run: Record) -> dict[str, Any]:
    """Pack a run into what the template of a link needs; samples are thinned until the compressed data fit in 90 kB."""
    for count in (200, 50, 0):
        # A fixed time in the header: the same run gives the same report, byte for byte.
        packed = gzip.compress(run.thin(count, KEPT_BYTES).model_dump_json().encode(), mtime=0)
        if len(packed) <= WRITTEN_BYTES:
            break
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", run.run).strip("-.") or "run"
    href = PREFIX + base64.b64encode(packed).decode()
    return {"href": href, "file_name": f"{name}.json.gz", "size": len(packed), "version": VERSION}


def read_report(path: Path | str) -> Record:
    """Return the run that a ``report.html`` carries; ``UserError`` for one without data, cut or altered."""
    path = Path(path)
    try:
        return read_html(read_text(path, REPORT_BYTES)).model_copy(update={"report": str(path)})
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None


def is_report(text: str) -> bool:
    return f" {ATTRIBUTE}=" in text and "<html" in text[:2000]


def read_html(source: str) -> Record:
    links = [dict(VALUE.findall(tag)) for tag in ANCHOR.findall(source) if f"{ATTRIBUTE}=" in tag]
    if len(links) != 1:
        raise UserError(
            f"carries the data of {len(links)} runs, a whole report of benchlib has one: let `benchlib report` make it"
        )
    (link,) = links
    if link.get(ATTRIBUTE) != VERSION:
        raise UserError(f"its data have version {link.get(ATTRIBUTE)!r}, this version of benchlib reads {VERSION!r}")
    try:
        content = gzip.decompress(base64.b64decode(link.get("href", "").removeprefix(PREFIX), validate=True))
    except (ValueError, OSError, EOFError, zlib.error):
        raise UserError("its data were altered or damaged: ask for the file again") from None
    try:
        return Record.model_validate(printable(from_json(content, allow_inf_nan=False)))
    except ValueError as error:
        why = explained(error) if isinstance(error, ValidationError) else error
        raise UserError(f"its data are not a run of this version ({why})") from None


def run_folders(path: Path, levels: int = 2) -> list[Path]:
    """Return the run folders that ``path`` stands for: itself, or those one or two ``levels`` below it, by name."""
    if is_run(path):
        return [path]
    children = path.iterdir() if levels and path.is_dir() else ()
    folders = [child for child in children if child.is_dir() and not child.name.startswith(".")]
    return sorted(run for folder in folders for run in run_folders(folder, levels - 1))


def load_runs(path: Path | str) -> list[Record]:
    """Read a run folder, a folder of runs (a day, or all), or a ``report.html``; damaged runs say so.

    ``UserError`` for a path that is not there or holds no run, and for a report that is damaged.
    """
    path = Path(path)
    if path.is_file():
        return [read_report(path)]
    if not path.is_dir():
        raise UserError(f"{path}: no such run, folder or report; `benchlib list --runs` shows the stored runs")
    folders = run_folders(path)
    if not folders:
        raise UserError(f"{path} holds no runs: give a run folder, a folder of runs or a report.html")
    return [load(folder) for folder in folders]
