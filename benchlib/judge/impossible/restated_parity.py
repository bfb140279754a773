"""What a parity run states in two places: the differences and latencies of its metrics and of its tables, and its scope.

Only what both places hold is compared; a difference beyond rounding is told with both values.
"""

import math
from collections.abc import Iterator
from typing import Any

from benchlib.benchmarks.parity import tolerances
from benchlib.judge.impossible import numbers as names
from benchlib.judge.impossible.claim import Latency
from benchlib.judge.impossible.numbers import Numbers

ROUNDING = 1e-9
Pair = tuple[str, Any, Any, str]
Row = dict[str, Any]


def restated_parity(numbers: Numbers) -> Iterator[Pair]:
    """Yield (name, stated, other, source) of every value that stands in two places of a parity run."""
    if numbers.result is None or numbers.result.benchmark != "parity":
        return
    metrics = {names.base(metric.name): metric for metric in numbers.metrics}
    for row in _rows(numbers, "latency"):
        yield from _latency(numbers, metrics, row)
    cases: dict[str, list[tuple[bool, float]]] = {}  # whether it is beyond its limit, and the difference
    for row in _rows(numbers, "logits"):
        value, limit = _number(row.get("max_abs")), _number(row.get("limit"))
        if value is not None:
            cases.setdefault(str(row.get("member")), []).append((limit is not None and value > limit, value))
    for row in _rows(numbers, "quantities"):
        value, name = _number(row.get("value")), f"{row.get('member')}_logits_max_difference"
        if row.get("quantity") != tolerances.LOGITS or value is None:
            continue
        stated = metrics[name].value if name in metrics else None
        if stated is not None:
            yield _pair(name, stated, value, "the table of quantities")
        if row.get("member") in cases:
            worst = max(cases[row["member"]])[1]
            yield _pair(
                f"{name} of all cases",
                value,
                worst,
                "the largest of the table of logits, of those beyond their limit where one is",
            )
    yield from _scope(numbers)


def latencies(numbers: Numbers) -> list[Latency]:
    """Return the percentiles of each member, which have to be in order."""
    found = []
    for row in _rows(numbers, "latency"):
        columns = {50.0: row.get("p50_ms"), 95.0: row.get("p95_ms"), 99.0: row.get("p99_ms")}
        known = {key: value / 1e3 for key, item in columns.items() if (value := _number(item)) is not None}
        if len(known) > 1:
            found.append(Latency(name=f"inputs of {row.get('member')}", percentiles_s=known))
    return found


def _latency(numbers: Numbers, metrics: dict[str, Any], row: Row) -> Iterator[Pair]:
    member, mean, batch = row.get("member"), _number(row.get("mean_ms")), _number(row.get("batch"))
    metric = metrics.get(f"{member}_latency_ms")
    if metric is not None and metric.value is not None:
        source = "the table of latencies"
        yield f"inputs of {member}", metric.n, row.get("n"), source
        if (median := _number(row.get("p50_ms"))) is not None:
            yield _pair(metric.name, metric.value, median, source)
        raw = numbers.raw(metric.name)
        if raw and mean is not None:
            yield _pair(f"mean of {metric.name}", mean, sum(raw) / len(raw), "the raw samples")
    rate = metrics.get(f"{member}_queries_per_s")
    for stated in (rate.value if rate is not None else None, _number(row.get("qps"))):
        if stated is not None and mean and batch:
            yield _pair(f"{member}_queries_per_s", stated, batch * 1e3 / mean, "the mean latency")


def _scope(numbers: Numbers) -> Iterator[Pair]:
    """A stand-in says so in the names: what the golden folder says of its model, and the data of the config."""
    model, config = numbers.facts.get("model"), numbers.config
    if not isinstance(model, dict) or not model.get("name") or config is None:
        return
    wanted = {
        "minisquad": getattr(config, "data", "") == "minisquad",
        "files": getattr(config, "data", "") == "files",
        "tiny": model["name"] == "tiny",
        "random": model.get("init") == "random",
    }
    for metric in numbers.metrics:
        plain = names.base(metric.name)
        if plain.endswith(("_logits_max_difference", "_one_minus_cosine", "_latency_ms", "_queries_per_s")):
            told = set(metric.name.removeprefix(plain).split("_")) - {""}
            yield metric.name, _words(told), _words({name for name, holds in wanted.items() if holds}), "model and data"


def _words(found: set[str]) -> str:
    return ", ".join(sorted(found)) or "no stand-in"


def _rows(numbers: Numbers, name: str) -> list[Row]:
    rows = numbers.tables.get(name)
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


def _number(value: Any) -> float | None:
    known = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if known else None


def _pair(name: str, stated: float, other: float, source: str) -> Pair:
    same = math.isclose(stated, other, rel_tol=ROUNDING, abs_tol=0.0)
    return name, f"{stated:.10g}", f"{stated if same else other:.10g}", source
