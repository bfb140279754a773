"""MLPerf LoadGen's ``mlperf_log_summary.txt``. Source of the lines: mlcommons/inference, loadgen/results.cc."""

import re
from collections.abc import Mapping
from pathlib import Path

from benchlib.core.errors import UserError
from benchlib.judge.impossible.claim import Claim, Latency, LoadGen

TITLE = "MLPerf Results Summary"
NS = 1e-9
PERCENTILE = re.compile(r"^(\d+(?:\.\d+)?) percentile (?:(first token) |)(latency|time to output token) \(ns\)$")
TARGET = re.compile(r"^(\d+(?:\.\d+)?)th percentile latency \(ns\)$")
ENDS = {"Min": "min_s", "Mean": "mean_s", "Max": "max_s"}
TPOT = "time per output token"
KINDS = {
    "latency": "latency",
    "First Token latency": "first token",
    "Time to Output Token": TPOT,
    "Time per Output Token": TPOT,  # of LoadGen 6; its percentiles kept the older name
}
PROCESSED = re.compile(r"Processed at least (\d+) queries \((\d+)\)")
ONLY = re.compile(r"Only processed (\d+) queries")
NEEDS = re.compile(r"Need to process at least (\d+) queries")
SERVER = re.compile(r"\* Processed (\d+) queries\.")
SHORT = re.compile(r"at least (\d+) more queries")
ERRORS = re.compile(r"^(No|\d+) errors? encountered", re.IGNORECASE | re.MULTILINE)
SHARE = re.compile(r'"effective_target_latency_percentile", "value": (\d+(?:\.\d+)?)')
DISCARD = re.compile(r"Would discard (\d+) highest")


def read(path: Path, text: str) -> list[Claim]:
    """Return the summary as a claim. One that ends before its verdict is a ``UserError``."""
    fields: dict[str, str] = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if value.strip() and not name.lstrip().startswith("*"):
            fields.setdefault(name.strip(), value.strip())
    if "Result is" not in fields or "Scenario" not in fields:
        raise UserError(f"{path}: a LoadGen summary without scenario or verdict ('Result is :'); the file is cut")
    if fields["Result is"] not in ("VALID", "INVALID"):
        raise UserError(f"{path}: Result is {fields['Result is']!r}; expected VALID or INVALID")
    latencies = _latencies(path, fields)
    run = _loadgen(path, fields, text, latencies)
    return [Claim(subject=f"{run.scenario} run", loadgen=run, latencies=list(latencies.values()))]


def _number(path: Path, fields: Mapping[str, str], name: str) -> float | None:
    if name not in fields:
        return None
    try:
        value = float(fields[name])
    except ValueError:
        raise UserError(f"{path}: {name} is {fields[name]!r}; expected a number, the file may be cut") from None
    if value != value or abs(value) == float("inf"):
        raise UserError(f"{path}: {name} is {fields[name]}; expected a finite number")
    return value


def _latencies(path: Path, fields: Mapping[str, str]) -> dict[str, Latency]:
    ends: dict[str, dict[str, float]] = {}
    percentiles: dict[str, dict[float, float]] = {}
    for name in fields:
        match = PERCENTILE.match(name)
        if match:
            kind = "first token" if match[2] else "latency" if match[3] == "latency" else TPOT
            percentiles.setdefault(kind, {})[float(match[1])] = NS * (_number(path, fields, name) or 0.0)
            continue
        end, _, rest = name.removesuffix(" (ns)").partition(" ")
        if end in ENDS and rest in KINDS and name.endswith("(ns)"):
            ends.setdefault(KINDS[rest], {})[ENDS[end]] = NS * (_number(path, fields, name) or 0.0)
    return {
        kind: Latency(
            name=kind, percentiles_s=percentiles.get(kind, {}), of_tokens=kind != "latency", **ends.get(kind, {})
        )
        for kind in dict.fromkeys(KINDS.values())
        if kind in ends or kind in percentiles
    }


def _loadgen(path: Path, fields: Mapping[str, str], text: str, latencies: Mapping[str, Latency]) -> LoadGen:
    scenario = fields["Scenario"].replace(" ", "")
    constraints = {name: fields[name] for name in fields if name.endswith("satisfied")}
    offline, tokens = scenario == "Offline", "first token" in latencies or "TTFT Early Stopping Result" in text
    latency = latencies.get("latency")
    header = next((match for name in fields if (match := TARGET.match(name))), None)
    percentile = float(header[1]) if header else (99.0 if scenario == "Server" else None)
    samples = _number(path, fields, "samples_per_query")
    minimum, target = _number(path, fields, "min_duration (ms)"), _number(path, fields, "target_latency (ns)")
    counts = _early_stopping(text) if not tokens else {}
    errors = ERRORS.search(text)
    rate = "Samples per second" if offline else "Completed samples per second"
    target_s, measured_s = NS * target if target and not tokens else None, None
    if latency and not tokens:
        measured_s = latency.percentiles_s.get(percentile or 99.0)
    elif tokens and scenario == "Server":
        percentile, target_s, measured_s = _token_limits(path, fields, latencies)
    return LoadGen(
        scenario=scenario,
        mode=fields.get("Mode", ""),
        valid=fields["Result is"] == "VALID",
        satisfied=constraints,
        errors=(0 if errors[1].lower() == "no" else int(errors[1])) if errors else None,
        samples_per_s=_number(path, fields, rate),
        scheduled_per_s=_number(path, fields, "Scheduled samples per second"),
        samples=int(samples) if offline and samples and samples == int(samples) else None,
        duration_s=latency.max_s if offline and latency and (latency.max_s or 0) > 0 else None,
        min_duration_s=1e-3 * minimum if minimum is not None else None,
        target_latency_s=target_s,
        target_percentile=percentile if percentile and 1 <= percentile < 99.9999 else None,
        target_percentile_s=measured_s,
        **counts,
    )


def _token_limits(
    path: Path, fields: Mapping[str, str], latencies: Mapping[str, Latency]
) -> tuple[float, float | None, float | None]:
    """Return percentile, limit and measured time of the token latency that comes closest to its limit or is furthest above it.

    The summary prints both limits and not their percentile, which the detail log beside it has; without it the lowest one
    that is printed counts, since a higher one is above the limit, too.
    """
    detail = path.with_name(path.name.replace("summary", "detail"))
    text = detail.read_text(encoding="utf-8", errors="replace") if detail != path and detail.is_file() else ""
    match = SHARE.search(text)
    percentile = round(100 * float(match[1]), 6) if match else 50.0
    pairs = []
    for kind, name in (("first token", "ttft_latency (ns)"), (TPOT, "tpot_latency (ns)")):
        limit = _number(path, fields, name)
        value = latencies[kind].percentiles_s.get(percentile) if kind in latencies else None
        if limit and value is not None:
            pairs.append((value / (NS * limit), NS * limit, value))
    _, limit_s, value_s = max(pairs, default=(0.0, None, None))
    return percentile, limit_s, value_s


def _early_stopping(text: str) -> dict[str, int]:
    """Return the counts of the first early-stopping estimate, which is that of the target percentile."""
    processed, only, needs = PROCESSED.search(text), ONLY.search(text), NEEDS.search(text)
    if processed:
        discard = DISCARD.search(text)
        discarded = {"discarded": int(discard[1])} if discard else {}
        return {"at_least": int(processed[1]), "processed": int(processed[2])} | discarded
    if only and needs:
        return {"processed": int(only[1]), "at_least": int(needs[1])}
    server, short = SERVER.search(text), SHORT.search(text)
    return {"processed": int(server[1]), "short_of": int(short[1])} if server and short else {}
