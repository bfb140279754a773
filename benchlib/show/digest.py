"""What a report says of a run, as plain values: the judgement, the key numbers, who did what, how to run it again.

No HTML here and no reading twice: every part of the run folder may be absent or damaged, and what is damaged is named in
``problems`` instead of costing the rest of the report.
"""

import contextlib
from collections.abc import Collection
from dataclasses import dataclass, field, fields, replace
from typing import Any

from benchlib.benchmarks import BENCHMARKS, of_run, view
from benchlib.config.schema import BaseConfig, changes, command
from benchlib.core.errors import UserError
from benchlib.core.events import read_events
from benchlib.core.machine import hardware
from benchlib.core.text import (
    GROUPS,
    KINDS,
    MARKS,
    NOT_EVALUATED,
    UNJUDGED,
    check_word,
    duration,
    moment,
    quantity,
    text,
)
from benchlib.judge.disturbed import disturbances
from benchlib.judge.published import section
from benchlib.launch.diagnosis import rank_endings, stack_groups
from benchlib.results.metrics import Metric
from benchlib.results.run import Result, Run, tolerant
from benchlib.results.store import GATE, identity, skip_reason, span, state

LEAST_FIELDS = 20  # of a row that is cut: a check has as many
READ_FIRST = 3  # sentences of the reading beside the key numbers

Groups = list[tuple[str, list[dict[str, Any]]]]  # checks by kind


@dataclass
class Digest:
    """The parts of a report; see the functions of the same names."""

    name: str
    benchmark: str
    tier: str
    backend: str
    word: str
    sentence: str
    world_size: int | None = None
    started: str = ""
    duration: str = ""
    question: str = ""
    hardware: str = ""
    reading: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    gate: dict[str, Any] = field(default_factory=dict)
    cards: list[dict[str, str]] = field(default_factory=list)
    checks: Groups = field(default_factory=list)
    passed: Groups = field(default_factory=list)
    unjudged: Groups = field(default_factory=list)
    ranks: list[dict[str, Any]] = field(default_factory=list)
    stacks: list[tuple[str, str]] = field(default_factory=list)
    metrics: list[tuple[str, str, list[dict[str, str]]]] = field(default_factory=list)
    published: dict[str, Any] | None = None
    tables: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    facts: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    machine: list[tuple[str, str]] = field(default_factory=list)
    config: list[tuple[str, str, str, str]] = field(default_factory=list)
    command: str = ""
    skipped: bool = False

    not_evaluated = NOT_EVALUATED

    @property
    def incomplete(self) -> bool:
        """Whether a gate lacks the numbers that it needs."""
        return any(row["word"] == "INCOMPLETE" for _, rows in self.checks for row in rows)

    @property
    def mark(self) -> str:
        """A sign beside the word, for readers who do not see the colour."""
        return MARKS.get(self.word, "?")


def digest(run: Run) -> Digest:
    """Read a run folder, whole or damaged, into what a report says."""
    problems: list[str] = []

    read = tolerant(run, problems)
    config, result = read(lambda: run.config), read(lambda: run.result)
    verdict, status = read(lambda: run.verdict), read(lambda: run.status)
    verdict, status = (part if isinstance(part, dict) else None for part in (verdict, status))
    word, sentence, damage = state(run)
    out = Digest(run.path.name, *identity(run, config, result), word, sentence, problems=problems)
    out.world_size = config.world_size if config else (result.world_size if result else None)
    started, ended = span(result, status)
    out.started = moment(started) if started else ""
    out.duration = duration(ended - started) if started and ended else ""
    if result:
        out.cards, out.metrics = cards(result), metrics(result)
        out.tables, out.facts = (
            read(lambda: _tables(run, result)) or {},
            [(name.replace("_", " "), shown) for name, value in result.facts.items() if (shown := text(value))],
        )
        out.published = read(lambda: section(run)) if config else None
    out.notes = list(dict.fromkeys([*(result.notes if result else []), *messages(run)]))
    everything = read(lambda: checks(verdict or {})) or []
    out.passed, out.unjudged = _with(everything, ("PASS",)), _with(everything, UNJUDGED)
    others = {str(row["word"]) for _, rows in everything for row in rows} - {"PASS", *UNJUDGED}
    out.checks = _with(everything, others)  # what needs a reader: failed, undecided, incomplete, damaged
    _add_limits(out.cards, [row for _, rows in everything for row in rows])
    out.ranks, out.stacks = read(lambda: (rank_endings(status), stack_groups(status))) or ([], [])
    out.gate = gate if isinstance(gate := (verdict or {}).get("gate"), dict) else {}
    out.machine = read(lambda: machine_rows(run.machine)) or []
    out.hardware = read(lambda: hardware(run.machine, out.backend)) or ""
    out.question = own.question if (own := of_run(out.benchmark)) else ""
    if config and result and result.status == "complete":
        out.reading = _reading(run)
    if config:
        # Of a run that was skipped there are no results whose meaning is limited, and no ranks to repeat.
        ran = skip_reason(result) is None
        out.warnings = read(lambda: warnings(config, result)) or [] if ran else []
        out.warnings += _disturbances(run) if result and result.status == "complete" else []
        out.skipped = not ran
        out.config, out.command = changes(config, read(lambda: run.origins) or {}), command(config, ranks=ran)
    if damage:  # the sentence beside the word names these; of files that only pictures use, too
        files = tuple(problem.partition(" ")[0].rstrip(":") for problem in damage)
        problems[:] = [problem for problem in problems if not problem.startswith(files)]
    return out


def shortened(content: Digest, characters: int, entries: int) -> Digest:
    """Return a digest of a run that says too much for a page: long texts, lists and tables are cut, and a problem says so."""

    def short(value: Any) -> Any:
        if isinstance(value, str):
            return value if len(value) <= characters else f"{value[:characters]}…"
        if isinstance(value, (list, tuple)):
            return type(value)(short(item) for item in value[:entries])
        if isinstance(value, dict):
            return {short(name): short(item) for name, item in list(value.items())[: max(entries, LEAST_FIELDS)]}
        return value

    cut = replace(content, **{item.name: short(getattr(content, item.name)) for item in fields(content)})
    problem = "Long texts and tables are cut to keep this report small, and the notebook may be left out: they are in the run folder"
    cut.problems = [*cut.problems, problem]
    return cut


def _with(groups: Groups, words: Collection[str]) -> Groups:
    return [(kind, kept) for kind, rows in groups if (kept := [row for row in rows if row["word"] in words])]


def _reading(run: Run) -> list[str]:
    """Return the first sentences of the reading; a result without the parts that it speaks of has none."""
    try:
        return BENCHMARKS[run.config.benchmark].reading(run)[:READ_FIRST]
    except Exception:  # the numbers of a foreign or partial run; the notebook shows what is wrong with them
        return []


def _disturbances(run: Run) -> list[str]:
    """Return where speeds shifted; what of the run is damaged or foreign is named elsewhere."""
    with contextlib.suppress(UserError, OSError, ValueError, KeyError, TypeError, AttributeError, AssertionError):
        return disturbances(run)
    return []


def _add_limits(cards: list[dict[str, str]], rows: list[dict[str, Any]]) -> None:
    """Add target or limit to the key numbers: those of the checks that compared the same value with one."""
    for card in cards:
        for row in rows:
            own = row.get("metric_value") == card["exact"] and row["kind"] in ("target", "reference", "budget")
            judged = row["word"] not in (*UNJUDGED, "INCOMPLETE")
            # A target that could not be judged, as of a training that was cut, is still what the value aims at.
            if row.get("limit") and (own or (judged and row["name"] == card["name"] + GATE)):
                word = {"regression": "baseline", "reference": "published"}.get(row["kind"], row["kind"])
                card["limit"] = f"{row['mark']} {word} {row['limit']}" + ("" if judged else ", not evaluated")
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


def _tables(run: Run, result: Result) -> dict[str, list[dict[str, Any]]]:
    own = view(result.benchmark)
    if own.tables:
        return own.tables(run)
    # The template lays these two out by itself, wherever a benchmark has them.
    kept = ("misses", "ranks")
    return {name if name in kept else own.heading(name): rows for name, rows in result.tables.items()}


def cards(result: Result) -> list[dict[str, str]]:
    """Return the key numbers: label, value, unit, note."""
    present = [metric for metric in result.metrics if metric.value is not None]
    own = view(result.benchmark)
    wanted = own.headlines
    chosen = [
        (prefix, metric)
        for prefix in wanted
        for metric in present
        if metric.name == prefix or metric.name.startswith(prefix + "_")
    ]
    if not wanted:
        chosen = [(metric.name, metric) for metric in present[:6]]
    rows = []
    for prefix, metric in dict(chosen).items():
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
                "label": own.label(prefix),
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


def checks(verdict: dict[str, Any]) -> Groups:
    """Return the checks by kind, what failed first within each."""
    order = ["FAIL", "AMBIGUOUS", "INCOMPLETE", "DIFFERS", "PASS", "NOT_COMPARABLE", "NO_BASELINE", "SKIPPED"]
    rows = [row for row in verdict.get("checks") or [] if isinstance(row, dict)]
    groups = []
    for kind in dict.fromkeys([*KINDS, *(str(row.get("kind", "")) for row in rows)]):
        members = [_check_row(row) for row in rows if str(row.get("kind", "")) == kind]
        members.sort(key=lambda row: order.index(row["word"]) if row["word"] in order else 0)
        if members:
            groups.append((KINDS.get(kind, kind), members))
    return groups


def _check_row(row: dict[str, Any]) -> dict[str, Any]:
    value, status = row.get("value"), str(row.get("status", ""))
    word = check_word(status, row.get("gates") is not False)
    shown = quantity(float(value), str(row.get("unit") or "")) if isinstance(value, (int, float)) else ""
    if isinstance(value, (int, float)) and float(value).is_integer() and abs(value) < 1e7:
        shown = f"{value:,.0f} {row.get('unit') or ''}".strip()  # counts have no decimals
    return row | {"word": word, "mark": MARKS.get(word, "?"), "value": shown, "metric_value": str(value)}


def warnings(config: BaseConfig, result: Result | None) -> list[str]:
    """Return what limits the meaning of the result: what the benchmark says of it, and a planted slow-down."""
    sentences = view(config.benchmark).warnings(config, result)
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
