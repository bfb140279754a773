"""What a report, a notebook and the command line say of published figures: where a run stands, and the registry itself."""

from collections.abc import Iterator, Sequence
from typing import Any

from benchlib.metrics import quantity
from benchlib.placing import Placement, Row, comparable, shown
from benchlib.references import QUANTITIES, Figure, registry
from benchlib.registry import BENCHMARKS
from benchlib.results import Run

NEAR_SHOWN = 12
FORMATS = {
    "sequence_length": "{} tokens",
    "doc_stride": "stride {}",
    "epochs": "{:g} epochs",
    "batch": "batch {}",
    "learning_rate": "learning rate {:g}",
    "padding": "padded {}",
    "training": "{} training",
    "nodes": "{} nodes",
}
KINDS = {"measured": "", "specified": "specified by the vendor", "limit": "a limit, not a result"}


def conditions_text(item: Figure) -> str:
    """Write the conditions of a figure in one line: ``8 x NVIDIA H100 SXM, NVLS, bus bandwidth``."""
    stated = item.conditions.model_dump(exclude_none=True)
    device, count = stated.pop("device", None), stated.pop("devices", 0)
    name = registry().devices[device].name if device else "devices"
    words = [f"{count} x {name}" if count else name] if device or count else []
    if stated.get("nodes") == 1:
        del stated["nodes"]
    if "message_bytes" in stated:
        words.append("messages of " + shown("message_bytes", stated.pop("message_bytes")))
    return ", ".join([*words, *(FORMATS.get(key, "{}").format(value) for key, value in stated.items())])


def placements(run: Run) -> list[Placement]:
    """Place every value of a whole run that its benchmark measures as publications do."""
    benchmark = BENCHMARKS[run.config.benchmark]
    if run.result is None or run.result.status != "complete" or not benchmark.published:
        return []
    return [comparable(item) for item in benchmark.load("published")(run)]


def summary(placed: Sequence[Placement]) -> str:
    """Say in a few sentences where a run stands; '' where there was nothing to place."""
    best = [(item, item.rows[0]) for item in placed if item.rows]
    if best:
        return " ".join(_beside(item, row) for item, row in best)
    if not placed:
        return ""
    reasons: dict[str, list[str]] = {}
    for item in placed:
        reasons.setdefault(item.reason.replace("no published figure", "none"), []).append(item.measured.label)
    if len(reasons) == 1:
        return f"No published figure is comparable with this run: {next(iter(reasons))}."
    told = "; ".join(f"for {' and '.join(labels)}, {reason}" for reason, labels in reasons.items())
    return f"No published figure is comparable with this run: {told}."


def _beside(item: Placement, row: Row) -> str:
    kit = QUANTITIES[row.figure.metric]
    value, more = row.published
    told = f"{value} ({more})" if more else value
    text = f"{_first_upper(item.measured.label)}: {quantity(row.here, kit.unit)}, published {told} in {registry().cite(row.figure)}"
    if row.figure.metric == "f1":
        spread = registry().figure("bert-large-f1-spread-dle").value
        return f"{text}: {row.compared}; a seed alone moves F1 by about {spread}."
    if kit.direction == "none":
        return f"{text}: {'the same' if row.here == row.claim.value else 'not the same'}."
    return f"{text}: {row.compared}{'' if kit.points else ' of it'}."


def _first_upper(words: str) -> str:
    return words[:1].upper() + words[1:]


def section(run: Run) -> dict[str, Any] | None:
    """Return the report's section: ``sentence`` where nothing is comparable, else ``rows``; ``near`` with what differs.

    None where the run measured nothing that is published anywhere.
    """
    placed = placements(run)
    if not placed:
        return None
    rows = [_row(item, row) for item in placed for row in item.rows]
    near = [
        {"label": _first_upper(item.measured.label), **_described(miss.figure), "differs": "; ".join(miss.differs)}
        for item in placed
        for miss in item.near
    ]
    return {"sentence": "" if rows else summary(placed), "rows": rows, "near": near[:NEAR_SHOWN]}


def _row(item: Placement, row: Row) -> dict[str, Any]:
    unit = QUANTITIES[row.figure.metric].unit
    return _described(row.figure) | {
        "label": _first_upper(item.measured.label),
        "here": quantity(row.here, unit),
        "published": row.published[0],
        "more": row.published[1],
        "compared": row.compared,
        "remarks": "; ".join(row.remarks),
    }


def _described(item: Figure) -> dict[str, str]:
    known = registry()
    return {
        "published": item.text,
        "conditions": conditions_text(item),
        "source": known.cite(item),
        "url": known.sources[item.source].url,
        "date": known.dated(item),
        "validity": item.validity,
        "notes": "; ".join(part for part in (KINDS[item.kind], item.note, item.reason) if part),
    }


def listed(metric: str = "", device: str = "") -> Iterator[tuple[Figure, dict[str, str]]]:
    """Return the figures of a metric (by the beginning of its name) and of a device (by the beginning of a word of its name)."""
    known = registry()
    order = list(QUANTITIES)
    for item in sorted(known.figures, key=lambda figure: order.index(figure.metric)):
        name = known.devices[item.conditions.device].name if item.conditions.device else ""
        named = f" {name} {item.conditions.device or ''}".lower()
        if item.metric.startswith(metric) and (not device or f" {device.lower()}" in named):
            yield item, _described(item)
