"""What a report says of a run, as plain values: the judgement, the key numbers, who did what, how to run it again. No HTML here."""

from collections.abc import Callable, Collection
from typing import Any

from benchlib.benchmarks import BENCHMARKS, of_run, spec_of
from benchlib.config.schema import BaseConfig, changes, command
from benchlib.core.events import read_events
from benchlib.core.machine import hardware
from benchlib.core.text import (
    GROUPS,
    KINDS,
    NOT_EVALUATED,
    UNJUDGED,
    badness,
    duration,
    look,
    moment,
    quantity,
    text,
)
from benchlib.judge.published import section
from benchlib.judge.regression import disturbances
from benchlib.launch.diagnosis import rank_endings, stack_groups
from benchlib.results.metrics import Metric
from benchlib.results.record import Record
from benchlib.results.run import Result, Run
from benchlib.results.verdict import GATE, Check, Verdict

LEAST_FIELDS = 20  # of a row that is cut: a check has as many
READ_FIRST = 3  # sentences of the reading beside the key numbers

Groups = list[tuple[str, list[dict[str, Any]]]]  # checks by kind


def digest(record: Record, run: Run) -> dict[str, Any]:
    """Return what the report of a run says, by the names that its template uses.

    What the result of a foreign or partial run cannot show is named in ``problems`` and costs nothing else.
    """
    problems: list[str] = []

    def read(part: Callable[[], Any], otherwise: Any, silent: bool = False) -> Any:
        try:
            return part()
        except Exception as error:  # foreign numbers break what a benchmark says of them in many ways
            if not silent:
                problems.append(str(error).strip().replace(f"{run.path}/", "") or type(error).__name__)
            return otherwise

    result, own = record.result, of_run(record.benchmark)
    config: BaseConfig | None = read(lambda: run.config, None)
    everything, complete = checks(record.verdict), config is not None and record.complete
    ran = not (
        result and result.status == "skipped"
    )  # of a skipped run there are no results whose meaning is limited, and no ranks to repeat
    key_numbers = cards(result) if result else []
    _add_limits(key_numbers, [row for _, rows in everything for row in rows])
    content = {
        "name": record.run,
        "benchmark": record.benchmark,
        "tier": record.tier,
        "backend": record.backend,
        "word": record.word,
        "sentence": record.sentence,
        "world_size": config.world_size if config else record.ranks,
        "started": moment(record.started_at),
        "duration": duration(record.ended_at - record.started_at) if record.ended_at else "",
        "question": own.question if own else "",
        "hardware": hardware(record.machine, record.backend),
        "reading": [],
        "warnings": [],
        "gate": (record.verdict.gate if record.verdict else None) or {},
        "cards": key_numbers,
        # What needs a reader: failed, undecided, incomplete.
        "checks": _with(everything, {row["word"] for _, rows in everything for row in rows} - {"PASS", *UNJUDGED}),
        "passed": _with(everything, ("PASS",)),
        "unjudged": _with(everything, UNJUDGED),
        "not_evaluated": NOT_EVALUATED,
        "incomplete": any(row["word"] == "INCOMPLETE" for _, rows in everything for row in rows),
        "ranks": read(lambda: rank_endings(record.status), []),
        "stacks": read(lambda: stack_groups(record.status), []),
        "metrics": metrics(result) if result else [],
        "published": read(lambda: section(run), None) if config and result else None,
        "tables": read(lambda: spec_of(result.benchmark).report(run), {}) if result else {},
        "facts": [
            (name.replace("_", " "), shown)
            for name, value in (result.facts if result else {}).items()
            if (shown := text(value))
        ],
        "notes": list(dict.fromkeys([*(result.notes if result else []), *messages(run)])),
        "machine": machine_rows(record.machine),
        "config": changes(config, read(lambda: run.origins, {})) if config else [],
        "command": command(config, ranks=ran) if config else "",
        "skipped": not ran,
    }
    if complete and config:
        content["reading"] = read(lambda: BENCHMARKS[record.benchmark].spec.reading(run)[:READ_FIRST], [], silent=True)
    if config and ran:
        content["warnings"] = read(lambda: warnings(config, result), [])
        content["warnings"] += read(lambda: disturbances(record), [], silent=True) if complete else []
    damaged = tuple(problem.partition(" ")[0].rstrip(":") for problem in record.problems)  # the sentence names these
    content["problems"] = [problem for problem in problems if not (damaged and problem.startswith(damaged))]
    return content


def shortened(content: dict[str, Any], characters: int, entries: int) -> dict[str, Any]:
    """Return a digest of a run that says too much for a page: long texts, lists and tables are cut, and a problem says so."""

    def short(value: Any) -> Any:
        if isinstance(value, str):
            return value if len(value) <= characters else f"{value[:characters]}…"
        if isinstance(value, (list, tuple)):
            return type(value)(short(item) for item in value[:entries])
        if isinstance(value, dict):
            return {short(name): short(item) for name, item in list(value.items())[: max(entries, LEAST_FIELDS)]}
        return value

    cut = {name: short(value) for name, value in content.items()}
    problem = "Long texts and tables are cut to keep this report small, and the notebook may be left out: they are in the run folder"
    return cut | {"problems": [*cut["problems"], problem]}


def _with(groups: Groups, words: Collection[str]) -> Groups:
    return [(kind, kept) for kind, rows in groups if (kept := [row for row in rows if row["word"] in words])]


def _add_limits(cards: list[dict[str, str]], rows: list[dict[str, Any]]) -> None:
    """Add target or limit to the key numbers: those of the checks that compared the same value with one."""
    for card in cards:
        for row in rows:
            own = row.get("metric_value") == card["exact"] and row["kind"] in ("target", "reference", "budget")
            judged = row["word"] not in (*UNJUDGED, "INCOMPLETE")
            # A target that could not be judged, as of a training that was cut, is still what the value aims at.
            if row.get("limit") and (own or (judged and row["name"] == card["name"] + GATE)):
                word = {"regression": "baseline", "reference": "published"}.get(row["kind"], row["kind"])
                card["limit"] = f"{look(row['word']).mark} {word} {row['limit']}" + (
                    "" if judged else ", not evaluated"
                )
                break


def interval(metric: Metric) -> str:
    """Write the 95% interval of a metric, '' where it has none; with units only where they differ from the value's."""
    if metric.ci_low is not None and metric.ci_high is None:
        return f"at least {quantity(metric.ci_low, metric.unit)}"
    if metric.ci_low is None or metric.ci_high is None:
        return ""
    value, low, high = (
        quantity(end, metric.unit).partition(" ") for end in (metric.value or 0.0, metric.ci_low, metric.ci_high)
    )
    # The unit stands beside the value already; it is said again only where its prefix is another one (GFLOP/s, TFLOP/s).
    return f"{low[0]} to {high[0]}" if low[2] == high[2] == value[2] else f"{''.join(low)} to {''.join(high)}"


def cards(result: Result) -> list[dict[str, str]]:
    """Return the key numbers: label, value, unit, note."""
    present = {metric.name: metric for metric in result.metrics if metric.value is not None}
    rows = []
    for name, label in spec_of(result.benchmark).first(present).items():
        metric = present[name]
        value, _, unit = metric.text.partition(" ")
        note = (
            f"95%: {interval(metric)}, n = {metric.n}"
            if interval(metric)
            else (
                "one value"
                if metric.n == 1
                else f"{metric.provenance}, n = {metric.n}"
                if metric.n
                else metric.provenance
            )
        )
        rows.append(
            {
                "label": label,
                "value": value,
                "unit": unit,
                "note": note,
                "name": metric.name,
                "exact": str(metric.value),
            }
        )
    return rows


def messages(run: Run) -> list[str]:
    """Return what the ranks said of their work, as that a shard was made again or a training continued: without a result, too."""
    return list(dict.fromkeys(text(event.get("message")) for event in read_events(run.path, {"log"})))


def metrics(result: Result) -> list[tuple[str, str, list[dict[str, str]]]]:
    """Return the metrics by provenance: title, meaning, rows."""
    out = []
    for provenance, title, meaning in GROUPS:
        rows = [
            {
                "name": metric.name,
                "value": metric.text,
                "interval": interval(metric),
                "n": str(metric.n) if metric.n else "",
                "reason": metric.reason,
            }
            for metric in result.metrics
            if metric.provenance == provenance
        ]
        if rows:
            out.append((title, meaning, rows))
    return out


def checks(verdict: Verdict | None) -> Groups:
    """Return the checks by kind, what failed first within each."""
    groups = []
    for kind, title in KINDS.items():
        members = [check for check in (verdict.checks if verdict else []) if check.kind == kind]
        if members:
            groups.append(
                (title, [_check_row(check) for check in sorted(members, key=lambda check: badness(check.word))])
            )
    return groups


def _check_row(check: Check) -> dict[str, Any]:
    shown = quantity(check.value, check.unit) if check.value is not None else ""
    if check.value is not None and check.value.is_integer() and abs(check.value) < 1e7:
        shown = f"{check.value:,.0f} {check.unit}".strip()  # counts have no decimals
    return check.model_dump() | {"word": check.word, "value": shown, "metric_value": str(check.value)}


def warnings(config: BaseConfig, result: Result | None) -> list[str]:
    """Return what limits the meaning of the result: what the benchmark says of it, and a planted slow-down."""
    sentences = list(spec_of(config.benchmark).warned(config, result))
    if config.planted_slowdown:
        sentences.append(
            f"Timed work was made {config.planted_slowdown:.0%} longer on purpose (planted_slowdown), to see whether the gate finds it."
        )
    return sentences


def machine_rows(machine: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the machine as rows; sizes in GiB, nested parts joined."""
    rows = []
    for name, value in machine.items():
        label, shown = name.replace("_", " "), text(value)
        if name.endswith("_bytes") and isinstance(value, (int, float)):
            label, shown = label.removesuffix(" bytes"), f"{value / 2**30:.1f} GiB"
        if name == "devices" and isinstance(value, dict):
            devices = [
                f"{kind}: {text(item.get('names') or item.get('count') or '')}"
                for kind, item in (value.get("backends") or {}).items()
                if item.get("available")
            ]
            shown = "; ".join(devices)
        if shown:
            rows.append((label, shown))
    return rows
