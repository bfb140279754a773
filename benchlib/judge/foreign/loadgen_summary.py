"""MLPerf LoadGen's ``mlperf_log_summary.txt``. Source of the lines: mlcommons/inference, loadgen/results.cc."""

import re
from pathlib import Path
from typing import Any

from benchlib.core.errors import UserError
from benchlib.judge.impossible.claim import Claim, Latency, LoadGen

TITLE = "MLPerf Results Summary"
NS = 1e-9
PERCENTILE = re.compile(r"^(\d+(?:\.\d+)?) percentile (First Token latency|latency|Time to Output Token) \(ns\)$", re.I)
END = re.compile(r"^(Min|Mean|Max) (.*) \(ns\)$")
ERRORS = re.compile(r"^(No|\d+) errors? encountered", re.IGNORECASE | re.MULTILINE)
TPOT = "time per output token"
KINDS = {
    "latency": "latency",
    "first token latency": "first token",
    "time to output token": TPOT,
    "time per output token": TPOT,  # of LoadGen 6; its percentiles kept the older name
}


def read(path: Path, text: str) -> list[Claim]:
    """Return the summary as a claim. One that ends before its verdict is a ``UserError``, a broken number a ``ValueError``."""
    lines = dict[str, Any]()
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if value.strip() and not name.lstrip().startswith("*"):  # those are advice
            lines.setdefault(name.strip(), value.strip())
    if "Result is" not in lines or "Scenario" not in lines:
        raise UserError(f"{path}: a LoadGen summary without scenario or verdict ('Result is :'); the file is cut")
    if lines["Result is"] not in ("VALID", "INVALID"):
        raise UserError(f"{path}: Result is {lines['Result is']!r}; expected VALID or INVALID")
    stated: dict[str, dict[str, Any]] = {kind: {} for kind in KINDS.values()}
    for name, value in lines.items():
        if match := PERCENTILE.match(name):
            stated[KINDS[match[2].lower()]].setdefault("percentiles_s", {})[float(match[1])] = NS * float(value)
        elif (match := END.match(name)) and match[2].lower() in KINDS:
            stated[KINDS[match[2].lower()]][f"{match[1].lower()}_s"] = NS * float(value)
    scenario, errors = lines["Scenario"].replace(" ", ""), ERRORS.search(text)
    run = LoadGen(
        valid=lines["Result is"] == "VALID",
        satisfied={name: word for name, word in lines.items() if name.endswith("satisfied")},
        errors=(0 if errors[1].lower() == "no" else int(errors[1])) if errors else None,
        samples_per_s=lines.get("Samples per second" if scenario == "Offline" else "Completed samples per second"),
        target_per_s=lines.get("target_qps") if scenario == "Server" else None,
        scheduled_per_s=lines.get("Scheduled samples per second"),
    )
    latencies = [Latency(name=kind, of_tokens=kind != "latency", **times) for kind, times in stated.items() if times]
    return [Claim(subject=f"{scenario} run", loadgen=run, latencies=latencies)]
