"""MLPerf LoadGen's ``mlperf_log_summary.txt``. Source of the lines: mlcommons/inference, loadgen/results.cc."""

import re
from pathlib import Path
from typing import Any

from benchlib.core.errors import UserError
from benchlib.judge.foreign.readers import Reader
from benchlib.judge.impossible.claim import Claim, Latency, Requests

TITLE = "MLPerf Results Summary"
NS = 1e-9
# LoadGen 6 says "per" and not "to"; its percentiles kept the older name.
TIME = re.compile(
    r"^(Min|Mean|Max|[\d.]+ percentile) (latency|First Token latency|Time (?:to|per) Output Token) \(ns\)$", re.I
)
ERRORS = re.compile(r"^(No|\d+) errors? encountered", re.IGNORECASE | re.MULTILINE)


def read(path: Path, text: str) -> list[Claim]:
    """Return the summary as a claim. One that ends before its verdict is a ``UserError``, a broken number a ``ValueError``."""
    lines = dict[str, str]()
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if value.strip() and not name.lstrip().startswith("*"):  # those are advice
            lines.setdefault(name.strip(), value.strip())
    if lines.get("Result is") not in ("VALID", "INVALID") or "Scenario" not in lines:
        raise UserError(f"{path}: a LoadGen summary without scenario or verdict ('Result is : VALID'); the file is cut")
    times: dict[str, dict[str, Any]] = {"latency": {}, "first token": {}, "time per output token": {}}
    for name, value in lines.items():
        if match := TIME.match(name):
            what, kind = match[1].lower(), match[2].lower()
            stated = times[kind.removesuffix(" latency") if kind.endswith("latency") else "time per output token"]
            if what.endswith("percentile"):
                stated.setdefault("percentiles_s", {})[float(what.split()[0])] = NS * float(value)
            else:
                stated[f"{what}_s"] = NS * float(value)
    errors = ERRORS.search(text)
    latencies = [Latency(name=kind, of_tokens=kind != "latency", **stated) for kind, stated in times.items() if stated]
    logged = Requests(logged_errors=(0 if errors[1].lower() == "no" else int(errors[1])) if errors else None)
    subject = f"{lines['Scenario'].replace(' ', '')} run, {lines['Result is']}"
    return [Claim(subject=subject, requests=logged, latencies=latencies)]


READERS = {"LoadGen": Reader("MLPerf's mlperf_log_summary.txt", read, sniff=lambda _, text: TITLE in text)}
