"""MLPerf LoadGen's ``mlperf_log_summary.txt`` and ``mlperf_log_detail.txt``. Source: mlcommons/inference, loadgen/results.cc."""

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchlib.core.errors import UserError
from benchlib.core.files import read_bytes
from benchlib.judge.foreign.readers import Reader
from benchlib.judge.impossible.claim import Claim, Latency, Limit, Mean, Quantity, Requests, Speed, Verdict
from benchlib.judge.impossible.findings import span

TITLE, SETTINGS = "MLPerf Results Summary", "Test Parameters Used"
NS = 1e-9
# LoadGen 6 says "per" and not "to"; its percentiles kept the older name.
TIME = re.compile(
    r"^(Min|Mean|Max|[\d.]+ percentile) (latency|First Token latency|Time (?:to|per) Output Token) \(ns\)$", re.I
)
HEADLINE = re.compile(r"^(\d+)th (first token )?percentile latency \(ns\)$")
ESTIMATE = re.compile(r"^\* Early stopping (\d+)th percentile estimate$")
PROCESSED = re.compile(r"^ \* Processed at least \d+ queries \((\d+)\)", re.MULTILINE)
RATE = re.compile(r"per second$|^[QT]PS w")
OTHERS = re.compile(r"^(SUT name|Scenario|Mode|Result is)$| satisfied$")
ERRORS = re.compile(r"^(No|\d+) errors? encountered", re.IGNORECASE | re.MULTILINE)
SATISFIED = " satisfied"
SERVER_LIMITS = {"target_latency": "latency", "ttft_latency": "first token", "tpot_latency": "time per output token"}
PERCENTILE = "effective_target_latency_percentile"

# The detail log has an event a line: its keys and what the summary calls them.
EVENT = re.compile(r'^:::MLLOG (\{"key": "(?:result|effective|early)_.*\})\s*$', re.MULTILINE)
COUNT = "result_query_count"
KEYS = {
    "effective_scenario": "Scenario",
    "result_validity": "Result is",
    "result_perf_constraints_met": "Performance constraints satisfied",
    "result_min_duration_met": "Min duration satisfied",
    "result_min_queries_met": "Min queries satisfied",
    "early_stopping_met": "Early stopping satisfied",
    "result_samples_per_second": "Samples per second",
    "result_tokens_per_second": "Tokens per second",
    "result_scheduled_samples_per_sec": "Scheduled samples per second",
    "result_completed_samples_per_sec": "Completed samples per second",
    "result_qps_with_loadgen_overhead": "QPS w/ loadgen overhead",
    "result_qps_without_loadgen_overhead": "QPS w/o loadgen overhead",
    "effective_min_duration_ms": "min_duration (ms)",
    **{f"effective_{name}_ns": f"{name} (ns)" for name in SERVER_LIMITS},
    **{name: name for name in (COUNT, PERCENTILE)},
    **{f"effective_{name}": name for name in ("samples_per_query", "min_query_count", "performance_sample_count")},
}
TIME_KEY = re.compile(r"^result_(first_token_)?(min|mean|max|[\d.]+_percentile)_latency_ns$")


def _stated(text: str) -> dict[str, list[str]]:
    """Return what stands behind each name: of the summary, or of the detail log by the names of the summary."""
    stated = dict[str, list[str]]()
    for event in map(json.loads, EVENT.findall(text)):
        key, value = event["key"], event.get("value")
        name = KEYS.get(key, "")
        if time := TIME_KEY.match(key):
            name = f"{time[2].capitalize()} {'first token ' if time[1] else ''}latency (ns)".replace("_", " ")
        word = {"True": "Yes", "False": "NO"}.get(str(value), str(value))
        stated.setdefault(name or key, []).append(word)
    if stated:
        return stated
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if value.strip():
            stated.setdefault(name.strip(), []).append(value.strip())
    return stated


def not_read(path: Path, text: str) -> list[str]:
    """Return the names of the results that no rule sees; settings are no results."""
    if TITLE not in text:
        return [name for name in _stated(text) if name.startswith("result_") and name != COUNT]
    names = _stated(text.partition(SETTINGS)[0])
    numbers = [name for name, values in names.items() if re.match(r"[-\d]", values[0])]
    return [
        name.strip("* ")
        for name in numbers
        if not any(known.search(name) for known in (TIME, HEADLINE, ESTIMATE, RATE, OTHERS))
    ]


def read(path: Path, text: str) -> list[Claim]:
    """Return the log as a claim. One that ends before its verdict is a ``UserError``, a broken number a ``ValueError``."""
    stated = _stated(text)
    if stated.get("Result is", [""])[0] not in ("VALID", "INVALID") or "Scenario" not in stated:
        raise UserError(f"{path}: a LoadGen log without scenario or verdict ('Result is : VALID'); the file is cut")
    impossible = list[Quantity]()
    for name in [name for name in stated if RATE.search(name) or TIME.match(name)]:
        numbers = [float(value) for value in stated[name]]
        if wrong := [one for one in numbers if not math.isfinite(one) or (one < 0 and RATE.search(name))]:
            impossible += [Quantity(name=name, value=one if math.isfinite(one) else None) for one in wrong]
            del stated[name]
    lines = {name: values[0] for name, values in stated.items()}
    if processed := PROCESSED.search(text):
        lines[COUNT] = processed[1]
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
        asked_per_s=float(lines["target_qps"]) if lines["Scenario"] == "Server" and "target_qps" in lines else None,
        completed_per_s=[float(rate) for rate in stated.get("Completed samples per second", [])],
        tokens_per_s=[float(rate) for rate in stated.get("Completed tokens per second", [])],
    )
    unmet = [name for name, value in lines.items() if name.endswith(SATISFIED) and value.upper() == "NO"]
    verdict = Verdict(valid=lines["Result is"] == "VALID", unmet=[name.removesuffix(SATISFIED) for name in unmet])
    return [
        Claim(
            subject=f"{lines['Scenario'].replace(' ', '')} run, {lines['Result is']}",
            speed=_rate(lines, times["latency"]),
            requests=logged,
            latencies=latencies,
            verdict=verdict,
            limits=[*_parts(lines, times), *_limits(path, lines, times)],
            averages=list(_headlines(lines, times)),
            quantities=impossible,
        )
    ]


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
    least = latency.get("min_s", 0.0)  # older versions take that
    ends = [least if least > 0 else duration, duration] if single else []
    return Speed(samples_per_s=rate, samples_counted=samples, samples_source=source, wall_s=duration, wall_s_span=ends)


def _met(lines: Mapping[str, str], name: str) -> bool:
    """Return whether the log calls a constraint satisfied; a run that it calls VALID satisfies those that it does not name."""
    return lines.get(name + SATISFIED, "Yes" if lines["Result is"] == "VALID" else "").upper() == "YES"


def _duration(lines: Mapping[str, str], latency: Mapping[str, float]) -> tuple[float, str]:
    """Return the time for which queries were sent (Offline: worked on), at least, and how it is known; 0 if it is not."""
    if lines["Scenario"] == "Offline":
        return latency.get("max_s", 0.0), "duration"
    name = "Scheduled samples per second" if lines["Scenario"] == "Server" else "QPS w/ loadgen overhead"
    count, rate = int(lines.get(COUNT, 0)), float(lines.get(name, 0))
    if count and rate:
        return (count - 1) / span(rate)[0], f"duration by {count:,} queries and their rate"
    return 0.0, ""


def _limits(path: Path, lines: Mapping[str, str], times: Mapping[str, Mapping[str, Any]]) -> Iterator[Limit]:
    """Yield the limits that the log calls satisfied, with the number that it prints for each."""
    minimum, (duration, how) = 1e-3 * float(lines.get("min_duration (ms)", 0)), _duration(lines, times["latency"])
    if minimum and duration and _met(lines, "Min duration"):
        yield Limit(name=how, value_s=duration, limit_s=minimum, at_least=True)
    if lines["Scenario"] != "Server" or not _met(lines, "Performance constraints"):
        return
    log = path.with_name("mlperf_log_detail.txt")
    beside = _stated(read_bytes(log).decode(errors="replace")) if log.is_file() else {}
    share = lines.get(PERCENTILE) or beside.get(PERCENTILE, ["0.99"])[0]  # that of MLPerf, and LoadGen's default
    percentile = round(100 * float(share), 6)
    for name, kind in SERVER_LIMITS.items():
        most, value = NS * float(lines.get(f"{name} (ns)", 0)), times[kind].get("percentiles_s", {}).get(percentile)
        if most and value is not None and (kind != "latency" or not times["first token"]):  # those replace it
            yield Limit(name=f"p{percentile:g} of {kind}", value_s=value, limit_s=most)


def _parts(lines: Mapping[str, str], times: Mapping[str, Mapping[str, Any]]) -> Iterator[Limit]:
    """Yield the times that are part of another: first tokens of answers, answers of runs, waiting of overhead."""
    first, whole = (Latency(**times[kind]).stated for kind in ("first token", "latency"))
    for name in first.keys() & whole.keys():
        wrong = "a first token comes no later than the last"
        yield Limit(name=f"{name} of first token", value_s=first[name], limit_s=whole[name], wrong=wrong)
    for name, value in lines.items():
        if (match := ESTIMATE.match(name)) and (listed := whole.get(f"p{match[1]}")):
            words = {
                "name": f"early stopping estimate of p{match[1]}",
                "wrong": "it is above the percentile of the sample",
            }
            yield Limit(**words, value_s=NS * float(value), limit_s=listed, at_least=True)
    longest, mean = whole.get("maximum", 0.0), whole.get("mean", 0.0)
    scheduled, completed, overhead = (
        float(lines.get(name, 0))
        for name in ("Scheduled samples per second", "Completed samples per second", "QPS w/ loadgen overhead")
    )
    minimum = 1e-3 * float(lines.get("min_duration (ms)", 0)) if _met(lines, "Min duration") else 0.0
    if scheduled and completed and longest and minimum:
        # The same queries over the time until the last was due, and over that until it was answered.
        tail = minimum * (span(scheduled)[0] / span(completed)[1] - 1)
        wrong = "the last query was answered later than the longest latency allows"
        yield Limit(name="time from the last query to its answer", value_s=tail, limit_s=longest, wrong=wrong)
    if overhead and mean and minimum:
        # Without the last query, whose latency is not in the time of the rate.
        least = mean - longest / (overhead * minimum)
        wrong = "the time without LoadGen's overhead is a part of it"
        time = 1 / span(overhead)[0]
        yield Limit(name="time of a query", value_s=time, limit_s=least, at_least=True, wrong=wrong)


def _headlines(lines: Mapping[str, str], times: Mapping[str, Mapping[str, Any]]) -> Iterator[Mean]:
    """Yield the percentiles that head a summary beside the same ones of its list."""
    for name, value in lines.items():
        if match := HEADLINE.match(name):
            listed = times["first token" if match[2] else "latency"].get("percentiles_s", {}).get(float(match[1]))
            if listed is not None:
                yield Mean(name=name.removesuffix(" (ns)"), stated=NS * float(value), values=[listed], unit="s")


READERS = {
    "LoadGen": Reader(
        "MLPerf's mlperf_log_summary.txt or mlperf_log_detail.txt",
        read,
        sniff=lambda _, text: TITLE in text or (":::MLLOG" in text and COUNT in text),
        unread=not_read,
    )
}
