"""The neutral claim JSON: what anybody states about a run, in the fields of ``benchlib.impossible.claim``."""

from pathlib import Path

from benchlib.foreign.json_file import keys, parse, validated
from benchlib.impossible.claim import Claim, ClaimFile


def sniff(path: Path, text: str) -> bool:
    """A JSON object with a ``claim_version``."""
    return "claim_version" in keys(text)


def read(path: Path, text: str) -> list[Claim]:
    """Return the claims; a field that is not known or out of range is a ``UserError``."""
    file: ClaimFile = validated(path, ClaimFile, parse(path, text), "a claim file")
    return file.claims
