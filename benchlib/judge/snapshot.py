"""A run as one value: what comparing, exporting and sharing need of it, wherever it is stored.

A snapshot is made from a run folder, or read from a report. A damaged part costs only itself: it is named in ``problems``
and left empty.

A report carries its run as ``<a download href="data:application/gzip;base64,...">``: JSON of a :class:`Snapshot`, thinned and
compressed. A link was chosen because it is the one element that holds data, needs no script, is allowed by the report's
content security policy (which governs loading, not downloads that the reader asks for), passes through mail attachments and
*Save as* unchanged, and serves a person as well: a click saves the file. ``data-sha256`` is the SHA-256 of the compressed
bytes, that is of the file which the link saves. It detects damage and careless changes; it is no signature. What a reader
trusts is bounded before it is unpacked and validated after: the file, the text of the link and the unpacked JSON each have
a largest size.
"""

import base64
import binascii
import gzip
import hashlib
import json
import math
import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from benchlib.core.errors import UserError
from benchlib.core.files import read_bytes
from benchlib.core.terminal import harmless
from benchlib.judge.baselines import run_fingerprint
from benchlib.judge.checks import Verdict
from benchlib.judge.impossible.own import Numbers, own_claims
from benchlib.judge.impossible.rules import judge_claims
from benchlib.judge.regression import KEPT_SAMPLES, RegressionLimit, limits_of, others_share, thinned
from benchlib.results.run import Result, Run, is_run, tolerant
from benchlib.results.store import identity, span, state

T = TypeVar("T")
KEPT_BYTES = 8_000  # of one table or one fact, as JSON
MEDIA_TYPE = "application/gzip"
ATTRIBUTE = "data-benchlib-run"  # its value is the version of the form that this module describes
VERSION = "1"
# What is between tags cannot hold a tag of its own: all of it is escaped. An HTML parser takes minutes for hostile text.
ANCHOR, VALUE = re.compile(r"<a\s[^<>]*>", re.IGNORECASE), re.compile(r'\s([\w-]+)="([^"]*)"')
PREFIX = f"data:{MEDIA_TYPE};base64,"

REPORT_BYTES = 16_000_000
LINK_CHARACTERS = 2_000_000
JSON_BYTES = 16_000_000
WRITTEN_BYTES = 90_000  # of compressed data: with base64 a quarter of what a report may have


class Snapshot(BaseModel):
    """A run, complete or not. ``word`` is PASS, FAIL, AMBIGUOUS, SKIPPED, BROKEN, STOPPED, RUNNING, UNFINISHED or DAMAGED.

    ``samples`` are raw samples by metric, ``limits`` how much worse the benchmark lets its metrics get, ``fingerprint``
    the factors that make it comparable, ``others`` the share of the processors that others took, ``left_out`` what
    :meth:`thinned` dropped.
    """

    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="strings")

    schema_version: Literal[1] = 1
    run: str
    benchmark: str
    tier: str
    backend: str
    word: str
    sentence: str
    started_at: float | None = None
    ended_at: float | None = None
    config: dict[str, Any] = Field(default_factory=dict)
    machine: dict[str, Any] = Field(default_factory=dict)
    result: Result | None = None
    verdict: Verdict | None = None
    limits: list[RegressionLimit] = Field(default_factory=list)
    fingerprint: dict[str, str] = Field(default_factory=dict)
    samples: dict[str, list[float]] = Field(default_factory=dict)
    others: float = Field(0.0, ge=0, lt=1)
    problems: list[str] = Field(default_factory=list)
    left_out: list[str] = Field(default_factory=list)
    # Where it and its report lie on this machine, '' where they do not: no part of the run.
    folder: str = Field("", exclude=True, repr=False)
    report: str = Field("", exclude=True, repr=False)

    @property
    def complete(self) -> bool:
        """Whether the run has a whole result that can be compared."""
        return self.result is not None and self.result.status == "complete" and bool(self.fingerprint)

    def thinned(self, kept: int = KEPT_SAMPLES) -> "Snapshot":
        """Return the run with at most ``kept`` samples of each metric (quantiles, see ``record.thinned``) and without long tables.

        Samples that are not all finite numbers are left out: JSON has no word for them.
        """
        result, left_out = self.result, list(self.left_out)
        if result is not None:
            parts = {}
            for name in ("tables", "facts"):
                whole: dict[str, Any] = getattr(result, name)
                parts[name] = {key: value for key, value in whole.items() if len(_json(value)) <= KEPT_BYTES}
                left_out += [f"{name}.{key}" for key in whole.keys() - parts[name].keys()]
            result = result.model_copy(update=parts)
        samples = {}
        for name, values in self.samples.items():
            if not all(isinstance(value, (int, float)) and math.isfinite(value) for value in values):
                left_out.append(f"samples.{name}")
            elif kept:
                samples[name] = thinned(values, kept)
        return self.model_copy(update={"result": result, "samples": samples, "left_out": sorted(set(left_out))})


def _json(value: Any) -> str:
    return json.dumps(value, default=str)


def snapshot(run: Run) -> Snapshot:
    """Read a run folder, whole, partial or damaged, into one value. Raises nothing for what is damaged."""
    problems: list[str] = []

    read = tolerant(run, problems)
    config, result = read(lambda: run.config), read(lambda: run.result)
    verdict, status = read(lambda: _verdict(run)), read(lambda: run.status)
    word, sentence, damage = state(run)
    problems += damage
    if word in ("PASS", "AMBIGUOUS") and (why := read(lambda: _contradiction(run))):
        sentence += f" By today's rules its numbers contradict each other ({why}): `benchlib report` judges it again."
    benchmark, tier, backend = identity(run, config, result)
    started, ended = span(result, status)
    complete = config is not None and result is not None and result.status == "complete"
    report = run.path / "report.html"
    machine = read(lambda: _object(run.machine, "machine.json")) or {}
    made = Snapshot(
        run=run.path.resolve().name.encode(errors="replace").decode(),  # a name need not be UTF-8
        benchmark=benchmark,
        tier=tier,
        backend=backend,
        word=word,
        sentence=sentence,
        started_at=started,
        ended_at=ended,
        config=config.model_dump(mode="json") if config else {},
        machine=machine,
        result=result,
        verdict=verdict,
        limits=(read(lambda: limits_of(run)) or []) if complete else [],
        fingerprint=(read(lambda: run_fingerprint(run)) or {}) if complete and machine else {},
        samples=read(lambda: run.samples) or {},
        others=(read(lambda: others_share(run)) or 0.0) if complete else 0.0,
        problems=list(dict.fromkeys(problems)),
        folder=str(run.path),
        report=str(report) if report.exists() else "",
    )
    return _printable(made)


def _printable(run: Snapshot) -> Snapshot:
    """Return a run whose texts hold no control characters: pages, tables and other tools show them."""
    values = run.model_dump()
    cleaned = _without_controls(values)
    return run if cleaned == values else Snapshot.model_validate(cleaned).model_copy(update={"report": run.report})


def _without_controls(value: Any) -> Any:
    if isinstance(value, str):
        return harmless(value)
    if isinstance(value, dict):
        return {_without_controls(name): _without_controls(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)) and not all(isinstance(item, (int, float)) for item in value):
        return [_without_controls(item) for item in value]
    return value


def _verdict(run: Run) -> Verdict | None:
    if run.verdict is None:
        return None
    try:
        return Verdict.model_validate(run.verdict)
    except ValueError as error:
        raise UserError(f"verdict.json: not a verdict of this version ({str(error).splitlines()[0]})") from None


def _contradiction(run: Run) -> str:
    """Return what the rules of impossible numbers say against a run that passed: it was judged by older ones."""
    if run.result is None or run.result.status != "complete":
        return ""
    failures = [reason for judged in judge_claims(own_claims(Numbers.of_run(run))) for reason in judged.failures]
    return "; ".join(failures[:2])


def _object(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UserError(f"{name}: not a JSON object")
    return value


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


def read_report(path: Path | str) -> Snapshot:
    """Return the run that a ``report.html`` carries.

    Raises ``UserError`` for a file that is not a report, carries no data, is cut, or was altered.
    """
    path = Path(path)
    try:
        source = read_bytes(path, REPORT_BYTES).decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not readable as a report ({error})") from None
    try:
        return read_html(source)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def read_html(source: str) -> Snapshot:
    """Return the run that the text of a report carries; ``UserError`` as in :func:`read_report`, without the path."""
    if not source.rstrip().lower().endswith("</html>"):
        raise UserError("the file is cut or not a report: its end is missing; ask for the whole file")
    links = [dict(VALUE.findall(tag)) for tag in ANCHOR.findall(source) if f"{ATTRIBUTE}=" in tag]
    if not links:
        raise UserError(
            "carries no data of a run: it is not a report of benchlib, or an old one that `benchlib report` renders again"
        )
    if len(links) > 1:
        raise UserError(f"carries the data of {len(links)} runs where a report has one: it was put together by hand")
    link = links[0]
    if link.get(ATTRIBUTE) != VERSION:
        raise UserError(f"its data have version {link.get(ATTRIBUTE)!r}, this version of benchlib reads {VERSION!r}")
    return _unpack(link.get("href", ""), link.get("data-sha256", ""))


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
        return _printable(Snapshot.model_validate_json(plain))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise UserError(f"its data are not a run of this version ({where}: {first['msg']})") from None


def run_folders(path: Path) -> list[Path]:
    """Return the run folders that ``path`` stands for: itself, or those one or two levels below it, by name."""
    return [path] if is_run(path) else sorted(_below(path, 2))


def _below(folder: Path, levels: int) -> Iterator[Path]:
    for child in folder.iterdir():
        if child.is_dir() and not child.name.startswith("."):
            if is_run(child):
                yield child
            elif levels > 1:
                yield from _below(child, levels - 1)


def load(path: Path | str) -> list[Snapshot]:
    """Read what ``path`` names: a run folder, a folder of runs (a day, or all), or a ``report.html``.

    Damaged runs are among them and say so; ``UserError`` for a path that is not there or holds no run, and for a report
    that is damaged.
    """
    path = Path(path)
    if path.is_file():
        return [read_report(path).model_copy(update={"report": str(path)})]
    if not path.is_dir():
        raise UserError(f"{path}: no such run, folder or report; `benchlib list --runs` shows the stored runs")
    folders = run_folders(path)
    if not folders:
        raise UserError(f"{path} holds no runs: give a run folder, a folder of runs or a report.html")
    return [snapshot(Run(folder)) for folder in folders]


def load_all(paths: Iterable[Path | str]) -> list[Snapshot]:
    """Read several arguments into one list, in their order."""
    return [run for path in paths for run in load(path)]
