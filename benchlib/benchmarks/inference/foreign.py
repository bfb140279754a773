"""MLPerf LoadGen's ``mlperf_log_summary.txt``. Source of the lines: mlcommons/inference, loadgen/results.cc."""

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchlib.core.errors import UserError
from benchlib.core.files import read_bytes
from benchlib.judge.foreign.readers import Reader
from benchlib.judge.impossible.claim import Claim, Latency, Limit, Requests, Speed, Verdict

TITLE = "MLPerf Results Summary"
NS = 1e-9
# LoadGen 6 says "per" and not "to"; its percentiles kept the older name.
TIME = re.compile(
    r"^(Min|Mean|Max|[\d.]+ percentile) (latency|First Token latency|Time (?:to|per) Output Token) \(ns\)$", re.I
)
ERRORS = re.compile(r"^(No|\d+) errors? encountered", re.IGNORECASE | re.MULTILINE)
SATISFIED = " satisfied"
SERVER_LIMITS = {"target_latency": "latency", "ttft_latency": "first token", "tpot_latency": "time per output token"}
PERCENTILE = re.compile(r'"effective_target_latency_percentile", "value": ([\d.]+)')


def read(path: Path, text: str) -> list[Claim]:
    """Return the summary as a claim. One that ends before its verdict is a ``UserError``, a broken number a ``ValueError``."""
    stated = dict[str, list[str]]()
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if value.strip() and not name.lstrip().startswith("*"):  # those are advice
            stated.setdefault(name.strip(), []).append(value.strip())
    lines = {name: values[0] for name, values in stated.items()}
    if lines.get("Result is") not in ("VALID", "INVALID") or "Scenario" not in lines:
        raise UserError(f"{path}: a LoadGen summary without scenario or verdict ('Result is : VALID'); the file is cut")
    times: dict[str, dict[str, Any]] = {"latency": {}, "first token": {}, "time per output token": {}}
    for name, value in lines.items():
        if match := TIME.match(name):
            what, kind = match[1].lower(), match[2].lower()
            group = times[kind.removesuffix(" latency") if kind.endswith("latency") else "time per output token"]
            if what.endswith("percentile"):
                group.setdefault("percentiles_s", {})[float(what.split()[0])] = NS * float(value)
            else:
                group[f"{what}_s"] = NS * float(value)
    errors = ERRORS.search(text)
    latencies = [Latency(name=kind, of_tokens=kind != "latency", **group) for kind, group in times.items() if group]
    scheduled = lines.get("Scheduled samples per second")
    logged = Requests(
        logged_errors=(0 if errors[1].lower() == "no" else int(errors[1])) if errors else None,
        due_per_s=float(scheduled) if scheduled else None,
        completed_per_s=[float(rate) for rate in stated.get("Completed samples per second", [])],
        tokens_per_s=[float(rate) for rate in stated.get("Completed tokens per second", [])],
    )
    unmet = [name for name, value in lines.items() if name.endswith(SATISFIED) and value.upper() == "NO"]
    verdict = Verdict(valid=lines["Result is"] == "VALID", unmet=[name.removesuffix(SATISFIED) for name in unmet])
    subject = f"{lines['Scenario'].replace(' ', '')} run, {lines['Result is']}"
    speed, limits = _rate(lines, times["latency"]), list(_limits(path, lines, times))
    return [Claim(subject=subject, speed=speed, requests=logged, latencies=latencies, verdict=verdict, limits=limits)]


def _rate(lines: Mapping[str, str], latency: Mapping[str, float]) -> Speed | None:
    """Return the rate of Offline: the samples of its one query over the time of the last; or of SingleStream: one over the mean latency.

    LoadGen may fill the query up to a multiple of the loaded samples; the count that is nearer to the rate counts.
    """
    single = lines["Scenario"].replace(" ", "") == "SingleStream"
    rate = float(lines.get("QPS w/o loadgen overhead" if single else "Samples per second", 0))
    count, loaded = (int(lines.get(name, 0)) for name in ("samples_per_query", "performance_sample_count"))
    duration, source = latency.get("mean_s" if single else "max_s", 0.0), "at a time" if single else "of the query"
    if not (single or lines["Scenario"] == "Offline") or min(rate, duration, count) <= 0:
        return None
    filled = math.ceil(count / loaded) * loaded if loaded and not single else count
    samples = min(count, filled, key=lambda each: abs(each - rate * duration))
    ends = [latency.get("min_s") or duration, duration] if single else []  # older versions take the minimum
    return Speed(samples_per_s=rate, samples_counted=samples, samples_source=source, wall_s=duration, wall_s_span=ends)


def _limits(path: Path, lines: Mapping[str, str], times: Mapping[str, Mapping[str, Any]]) -> Iterator[Limit]:
    """Yield the limits that the summary calls satisfied, with the number that it prints for each."""
    yes = {name.removesuffix(SATISFIED) for name, value in lines.items() if value.upper() == "YES"}
    minimum, duration = 1e-3 * float(lines.get("min_duration (ms)", 0)), times["latency"].get("max_s")
    if lines["Scenario"] == "Offline" and "Min duration" in yes and minimum and duration:
        yield Limit(name="duration", value_s=duration, limit_s=minimum, at_least=True)
    if lines["Scenario"] != "Server" or "Performance constraints" not in yes:
        return
    log = path.with_name("mlperf_log_detail.txt")
    match = PERCENTILE.search(read_bytes(log).decode(errors="replace")) if log.is_file() else None
    percentile = round(100 * float(match[1]), 6) if match else 99.0  # that of MLPerf, and LoadGen's default
    for name, kind in SERVER_LIMITS.items():
        most, value = NS * float(lines.get(f"{name} (ns)", 0)), times[kind].get("percentiles_s", {}).get(percentile)
        if most and value is not None and (kind != "latency" or not times["first token"]):  # those replace it
            yield Limit(name=f"p{percentile:g} of {kind}", value_s=value, limit_s=most)


READERS = {"LoadGen": Reader("MLPerf's mlperf_log_summary.txt", read, sniff=lambda _, text: TITLE in text)}
