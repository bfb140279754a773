"""Results of nccl-tests as rows of a table, to stand beside what a run measured. Everything here is ``claimed``.

Rows: operation, placement ("out of place", "in place"), bytes (S: the larger side), ranks (None where the file does not
tell), time_us, algbw_gbps, busbw_gbps, wrong_elements (None where not checked), provenance, source (the file's name).
"""

from pathlib import Path
from typing import Any, Protocol

from benchlib.core.errors import UserError
from benchlib.judge.foreign.readers import READERS, UnknownFormat, read_claims
from benchlib.judge.impossible.claim import Collective

FORMATS = ("nccl-tests", "nccl-tests JSON")
EXPECTED = "the text or JSON output of nccl-tests"
BITS = 8


class NamesResults(Protocol):
    """A config with the field ``nccl_tests``: a file, '' for none."""

    @property
    def nccl_tests(self) -> str:
        """The file."""


def series(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file of nccl-tests or rccl-tests; ``UserError`` for any other file and one that is cut."""
    try:
        name, claims = read_claims(path)
    except UnknownFormat as error:
        raise UserError(f"nccl_tests = {error}; expected {EXPECTED}") from None
    except UserError as error:
        raise UserError(f"nccl_tests = {error}") from None
    if name not in FORMATS:
        what = READERS[name].what if name in READERS else "a run of the kit"
        raise UserError(f"nccl_tests = {path}: this is {what}; expected {EXPECTED}")
    rows = []
    for claim in claims:
        one = claim.collective
        if one is None or one.size_bytes is None or one.busbw_gbytes_per_s is None:
            continue  # a footer, or a placement that was not run
        if not one.operation:
            raise UserError(
                f"nccl_tests = {path}: the file does not name its program (all_reduce_perf or the like): keep the lines "
                "before the table, or the command that made it"
            )
        rows.append(_row(one, claim.subject.rpartition(", ")[2], path.name))
    if not rows:
        raise UserError(f"nccl_tests = {path}: no row with a bandwidth; the test failed or the file is cut")
    return rows


def _row(one: Collective, placement: str, source: str) -> dict[str, Any]:
    rates = (one.algbw_gbytes_per_s, one.busbw_gbytes_per_s)
    algbw, busbw = (BITS * rate if rate is not None else None for rate in rates)
    return {
        "operation": one.operation,
        "placement": placement,
        "bytes": one.size_bytes,
        "ranks": one.ranks,
        "time_us": 1e6 * one.seconds if one.seconds is not None else None,
        "algbw_gbps": algbw,
        "busbw_gbps": busbw,
        "wrong_elements": one.wrong_elements,
        "provenance": "claimed",
        "source": source,
    }


def refuse(config: NamesResults) -> None:
    """Raise ``UserError`` where the file of nccl-tests that a config names cannot be shown, before any work starts."""
    if config.nccl_tests:
        series(Path(config.nccl_tests))
