"""What a report says of a run, as plain values: the judgement, the key numbers, who did what, how to run it again. No HTML here."""

import math
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from benchlib.benchmarks import of_run, spec_of
from benchlib.config.schema import BaseConfig, changes, command
from benchlib.core.events import read_events
from benchlib.core.text import GROUPS, KINDS, NOT_EVALUATED, UNJUDGED, badness, duration, look, moment, quantity, text
from benchlib.judge.published import section
from benchlib.judge.regression import foreign_load
from benchlib.results.metrics import Metric
from benchlib.results.record import Record
from benchlib.results.run import Result, Run
from benchlib.results.verdict import GATE, Check, Verdict

READ_FIRST = 3  # sentences of the reading beside the key numbers
STACKS_LIMIT = 20_000  # characters of one stack or traceback; a report stays small with a thousand ranks
STACKS_SHOWN = 8

Rows = list[dict[str, Any]]


class Problems(list[str]):
    """What a report could not show, a sentence each."""

    def part(self, make: Callable[[], Any], otherwise: Any = None, about: str = "") -> Any:
        try:
            return make()
        except Exception as error:  # foreign files and numbers break what is said of them in many ways
            self.append(about + (str(error).strip() or type(error).__name__).splitlines()[0][:400])
            return otherwise


def digest(record: Record, run: Run, problems: Problems) -> dict[str, Any]:
    """Return what the report of a run says, by the names that its template uses.

    What the result of a foreign or partial run cannot show is among the ``problems`` and costs nothing else.
    """
    result, own, rows, part = record.result, of_run(record.benchmark), check_rows(record.verdict), problems.part
    config: BaseConfig | None = part(lambda: run.config)
    skipped = result is not None and result.status == "skipped"  # nothing ran: no results to limit, no ranks to repeat
    spec, facts = spec_of(record.benchmark), result.facts if result else {}
    return {
        "record": record,
        "world_size": config.world_size if config else record.ranks,
        "started": moment(record.started_at),
        "duration": duration(max(0.0, record.ended_at - record.started_at)) if record.ended_at else "",
        "question": own.question if own else "",
        "hardware": "; ".join(record.components),
        "gate": (record.verdict.gate if record.verdict else None) or {},
        "cards": cards(record, rows),
        "checks": _by_kind(rows, {row["word"] for row in rows} - {"PASS", *UNJUDGED}),  # what needs a reader
        "passed": _by_kind(rows, ("PASS",)),
        "unjudged": _by_kind(rows, UNJUDGED),
        "not_evaluated": NOT_EVALUATED,
        "incomplete": any(row["word"] == "INCOMPLETE" for row in rows),
        "metrics": metrics(result, record.samples) if result else [],
        "facts": [(name.replace("_", " "), shown) for name, value in facts.items() if (shown := text(value))],
        "notes": list(dict.fromkeys([*(result.notes if result else []), *messages(run)])),
        "machine": machine_rows(record.machine),
        "skipped": skipped,
        "ranks": (ranks := part(lambda: rank_rows(record.status or {}), [])),
        "stacks": part(lambda: stack_groups(ranks), []),
        "tables": part(lambda: spec.report(run), {}) if result else {},
        "published": part(lambda: section(run)) if config and result else None,
        "config": part(lambda: changes(config, run.origins), []) if config else [],
        "command": part(lambda: command(config, ranks=not skipped), "") if config else "",
        "warnings": part(lambda: warnings(config, record), []) if config and not skipped else [],
        "reading": part(lambda: spec.reading(run)[:READ_FIRST], []) if config and record.complete else [],
    }


def check_rows(verdict: Verdict | None) -> Rows:
    kinds, checks = list(KINDS), verdict.checks if verdict else []
    return list(map(_check_row, sorted(checks, key=lambda item: (kinds.index(item.kind), badness(item.word)))))


def _check_row(check: Check) -> dict[str, Any]:
    shown = quantity(check.value, check.unit) if check.value is not None else ""
    if check.value is not None and check.value.is_integer() and abs(check.value) < 1e7:
        shown = f"{check.value:,.0f} {check.unit}".strip()  # counts have no decimals
    return check.model_dump() | {"word": check.word, "value": shown, "exact": check.value}


def _by_kind(rows: Rows, words: Collection[str]) -> list[tuple[str, Rows]]:
    groups = {
        title: [row for row in rows if row["kind"] == kind and row["word"] in words] for kind, title in KINDS.items()
    }
    return [(title, members) for title, members in groups.items() if members]


def cards(record: Record, rows: Rows) -> list[dict[str, str]]:
    """Return the key numbers, each with the target or limit of the first check that compared the same value with one."""
    cards, words = list[dict[str, str]](), {"regression": "baseline", "reference": "published"}
    judged = [row for row in rows if row["limit"] and row["word"] not in (*UNJUDGED, "INCOMPLETE")]
    for label, metric in record.key_numbers:
        value, _, unit = metric.text.partition(" ")
        count, ends = f", n = {metric.n}" * (metric.n > 1), interval(metric)
        note = f"95%: {ends}{count}" if ends else "one value" if metric.n == 1 else metric.provenance + count
        limits = (
            f"{look(row['word']).mark} {words.get(row['kind'], row['kind'])} {row['limit']}"
            for row in judged
            if (row["exact"] == metric.value and row["kind"] in ("target", "reference", "budget"))
            or row["name"] == metric.name + GATE
        )
        card = {"label": label, "value": value, "unit": unit, "note": note, "name": metric.name}
        cards.append(card | {"limit": next(limits, "")})
    return cards


def _mean(samples: Sequence[float], unit: str) -> str:
    """Write mean, standard deviation and coefficient of variation of two samples or more, '' for fewer."""
    if len(samples) < 2 or not all(map(math.isfinite, samples)):
        return ""
    mean, sd = statistics.mean(samples), statistics.stdev(samples)
    variation = f" ({sd / abs(mean):.1%})" if mean else ""
    return f"mean {quantity(mean, unit)} ± {quantity(sd, unit)}{variation}"


def interval(metric: Metric) -> str:
    """Write the 95% interval of a metric, '' where it has none; with units only where they differ from the value's."""
    if metric.ci_low is None:
        return ""
    if metric.ci_high is None:
        return f"at least {quantity(metric.ci_low, metric.unit)}"
    ends = (metric.value or 0.0, metric.ci_low, metric.ci_high)
    value, low, high = (quantity(end, metric.unit).partition(" ") for end in ends)
    # The unit stands beside the value already; it is said again only where its prefix is another one (GFLOP/s, TFLOP/s).
    return f"{low[0]} to {high[0]}" if low[2] == high[2] == value[2] else f"{''.join(low)} to {''.join(high)}"


def messages(run: Run) -> list[str]:
    """Return what the ranks said of their work, as that a shard was made again or a training continued: without a result, too."""
    return list(dict.fromkeys(text(event.get("message")) for event in read_events(run.path, {"log"})))


def metrics(result: Result, samples: Mapping[str, Sequence[float]]) -> list[tuple[str, str, Rows]]:
    rows = [
        metric.model_dump(exclude={"samples"})
        | {"value": metric.text, "interval": interval(metric), "mean": _mean(samples.get(metric.name, ()), metric.unit)}
        for metric in result.metrics
    ]
    groups = [(title, meaning, [row for row in rows if row["provenance"] == kind]) for kind, title, meaning in GROUPS]
    return [group for group in groups if group[2]]


def warnings(config: BaseConfig, record: Record) -> list[str]:
    """Return what limits the meaning of the result: what the benchmark says of it, an injected slow-down, and what disturbed it."""
    planted = f"Timed work was made {config.planted_slowdown:.0%} longer on purpose (planted_slowdown), to see whether the gate finds it."
    sentences = [*spec_of(config.benchmark).warned(config, record.result), *[planted] * bool(config.planted_slowdown)]
    return sentences + (foreign_load(record) if record.complete else [])


def machine_rows(machine: dict[str, Any]) -> list[tuple[str, str]]:
    rows = dict[str, str]()
    for name, value in machine.items():
        if name.endswith("_bytes") and isinstance(value, int | float):
            rows[name.removesuffix("_bytes")] = f"{value / 2**30:.1f} GiB"
        elif name == "devices":
            usable = [(kind, item) for kind, item in value.get("backends", {}).items() if item.get("available")]
            rows[name] = "; ".join(
                f"{kind}: {text(item.get('names') or item.get('count') or '')}" for kind, item in usable
            )
        else:
            rows[name] = text(value)
    return [(name.replace("_", " "), shown) for name, shown in rows.items() if shown]


def rank_rows(status: dict[str, Any]) -> Rows:
    """Return how each rank ended, the culprit first, where the run was not complete."""
    rows = []
    for rank in status.get("ranks") or [] if status.get("outcome") != "complete" else []:
        step, traceback = rank.get("last_step"), (rank.get("error") or {}).get("traceback") or ""
        phase = f"{rank.get('last_phase') or 'not started'}{f', step {step:,}' if isinstance(step, int) else ''}"
        words = {"end": _end(rank), "phase": phase, "traceback": str(traceback)[-STACKS_LIMIT:]}
        rows.append({"pid": None, **rank, "culprit": rank.get("rank") == status.get("culprit"), **words})
    return sorted(rows, key=lambda row: not row["culprit"])


def _end(rank: dict[str, Any]) -> str:
    code, name = rank.get("returncode"), rank.get("signal")
    if error := rank.get("error"):
        return f"raised {error.get('type', 'an error')}: {error.get('message', '')}"
    if rank.get("ended_by_supervisor"):
        return f"was ended with the run ({name or 'no signal needed'})"
    if name:
        return f"was killed by {name}"
    return "had not ended" if code is None else "ended normally" if code == 0 else f"ended with exit code {code}"


def stack_groups(ranks: Rows) -> list[tuple[str, str]]:
    """Return the Python stacks with the ranks that had them, each stack once."""
    groups: dict[str, list[str]] = {}
    for rank in ranks:
        if rank.get("stacks"):
            groups.setdefault(str(rank["stacks"])[:STACKS_LIMIT], []).append(str(rank.get("rank")))
    rows = [(f"rank{'s' * (len(members) > 1)} {', '.join(members)}", stack) for stack, members in groups.items()]
    return rows[:STACKS_SHOWN]
