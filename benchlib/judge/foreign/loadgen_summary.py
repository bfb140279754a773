"""MLPerf LoadGen's ``mlperf_log_summary.txt``. Source of the lines: mlcommons/inference, loadgen/results.cc."""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchlib.core.errors import UserError
from benchlib.judge.impossible.claim import Claim, Latency, LoadGen

TITLE = "MLPerf Results Summary"
NS = 1e-9
PERCENTILE = re.compile(r"^(\d+(?:\.\d+)?) percentile (?:(first token) |)(latency|time to output token) \(ns\)$")
END = re.compile(r"^(Min|Mean|Max) (.*) \(ns\)$")
TARGET = re.compile(r"^(\d+(?:\.\d+)?)th percentile latency \(ns\)$")
TPOT = "time per output token"
KINDS = {
    "latency": "latency",
    "First Token latency": "first token",
    "Time to Output Token": TPOT,
    "Time per Output Token": TPOT,  # of LoadGen 6; its percentiles kept the older name
}
# Of early stopping: the first estimate, which is that of the target percentile.
COUNTS = {
    "processed": r"Processed at least \d+ queries \((\d+)\)|Only processed (\d+) queries|\* Processed (\d+) queries\.",
    "at_least": r"(?:Processed|Need to process) at least (\d+) queries",
    "discarded": r"Would discard (\d+) highest",
    "short_of": r"at least (\d+) more queries",
}
ERRORS = re.compile(r"^(No|\d+) errors? encountered", re.IGNORECASE | re.MULTILINE)
SHARE = re.compile(r'"effective_target_latency_percentile", "value": (\d+(?:\.\d+)?)')


class _Fields(dict[str, str]):
    def __init__(self, path: Path, text: str) -> None:
        super().__init__()
        self.path = path
        for line in text.splitlines():
            name, _, value = line.partition(":")
            if value.strip() and not name.lstrip().startswith("*"):
                self.setdefault(name.strip(), value.strip())

    def number(self, name: str, unit: float = 1.0) -> float | None:
        """Return a finite number in units of ``unit``, None where it is not there."""
        if name not in self:
            return None
        try:
            value = float(self[name])
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise UserError(f"{self.path}: {name} is {self[name]!r}; expected a finite number, the file may be cut")
        return unit * value


def read(path: Path, text: str) -> list[Claim]:
    """Return the summary as a claim. One that ends before its verdict is a ``UserError``."""
    fields = _Fields(path, text)
    if "Result is" not in fields or "Scenario" not in fields:
        raise UserError(f"{path}: a LoadGen summary without scenario or verdict ('Result is :'); the file is cut")
    if fields["Result is"] not in ("VALID", "INVALID"):
        raise UserError(f"{path}: Result is {fields['Result is']!r}; expected VALID or INVALID")
    latencies = _latencies(fields)
    run = _loadgen(fields, text, latencies)
    return [Claim(subject=f"{run.scenario} run", loadgen=run, latencies=list(latencies.values()))]


def _latencies(fields: _Fields) -> dict[str, Latency]:
    stated: dict[str, dict[str, Any]] = {}
    for name in fields:
        if match := PERCENTILE.match(name):
            kind = "first token" if match[2] else "latency" if match[3] == "latency" else TPOT
            percentiles = stated.setdefault(kind, {}).setdefault("percentiles_s", {})
            percentiles[float(match[1])] = fields.number(name, NS)
        elif (match := END.match(name)) and match[2] in KINDS:
            stated.setdefault(KINDS[match[2]], {})[f"{match[1].lower()}_s"] = fields.number(name, NS)
    kinds = (kind for kind in dict.fromkeys(KINDS.values()) if kind in stated)
    return {kind: Latency(name=kind, of_tokens=kind != "latency", **stated[kind]) for kind in kinds}


def _loadgen(fields: _Fields, text: str, latencies: Mapping[str, Latency]) -> LoadGen:
    scenario, latency = fields["Scenario"].replace(" ", ""), latencies.get("latency")
    offline, tokens = scenario == "Offline", "first token" in latencies or "TTFT Early Stopping Result" in text
    header = next((match for name in fields if (match := TARGET.match(name))), None)
    percentile = float(header[1]) if header else (99.0 if scenario == "Server" else None)
    target_s = fields.number("target_latency (ns)", NS) or None
    measured_s = latency.percentiles_s.get(percentile or 99.0) if latency else None
    if tokens:
        target_s = measured_s = None
        if scenario == "Server":
            percentile, target_s, measured_s = _token_limits(fields, latencies)
    samples, errors = fields.number("samples_per_query"), ERRORS.search(text)
    matches = {name: re.search(form, text) for name, form in COUNTS.items()}
    counts = {name: int(match[match.lastindex or 0]) for name, match in matches.items() if match}
    return LoadGen(
        scenario=scenario,
        mode=fields.get("Mode", ""),
        valid=fields["Result is"] == "VALID",
        satisfied={name: word for name, word in fields.items() if name.endswith("satisfied")},
        errors=(0 if errors[1].lower() == "no" else int(errors[1])) if errors else None,
        samples_per_s=fields.number("Samples per second" if offline else "Completed samples per second"),
        target_per_s=fields.number("target_qps") if scenario == "Server" else None,
        scheduled_per_s=fields.number("Scheduled samples per second"),
        samples=int(samples) if offline and samples and samples == int(samples) else None,
        duration_s=latency.max_s if offline and latency and (latency.max_s or 0) > 0 else None,
        min_duration_s=fields.number("min_duration (ms)", 1e-3),
        target_latency_s=target_s,
        target_percentile=percentile if percentile and 1 <= percentile < 99.9999 else None,
        target_percentile_s=measured_s,
        **({} if tokens else counts),
    )


def _token_limits(fields: _Fields, latencies: Mapping[str, Latency]) -> tuple[float, float | None, float | None]:
    """Return percentile, limit and measured time of the token latency that comes closest to its limit or is furthest above it.

    The summary prints both limits and not their percentile, which the detail log beside it has; without it the lowest one
    that is printed counts, since a higher one is above the limit, too.
    """
    path = fields.path
    detail = path.with_name(path.name.replace("summary", "detail"))
    text = detail.read_text(encoding="utf-8", errors="replace") if detail != path and detail.is_file() else ""
    match = SHARE.search(text)
    percentile = round(100 * float(match[1]), 6) if match else 50.0
    pairs = []
    for kind, name in (("first token", "ttft_latency (ns)"), (TPOT, "tpot_latency (ns)")):
        limit = fields.number(name, NS)
        value = latencies[kind].percentiles_s.get(percentile) if kind in latencies else None
        if limit and value is not None:
            pairs.append((value / limit, limit, value))
    _, limit_s, value_s = max(pairs, default=(0.0, None, None))
    return percentile, limit_s, value_s
