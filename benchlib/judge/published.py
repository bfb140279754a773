"""A run beside the published figures that it may be compared with, or the reason why there is none.

A figure is comparable where the conditions that change its number agree. Invalid figures are never used, a device that the
registry does not know has no figures.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchlib.benchmarks import BENCHMARKS
from benchlib.core.definitions import size_text
from benchlib.core.text import quantity, with_unit
from benchlib.judge.references import UNITS, Figure, Registry, registry
from benchlib.results.metrics import Metric, claimed
from benchlib.results.run import Run

NEAR = 2  # a figure that differs in more conditions than this tells nothing of the run
LARGE_BYTES = 2**29  # from here on the bandwidth of a collective hardly depends on the size of the message
FACTORS = {"batch": 2.0, "epochs": 1.5}  # within such a factor rate and score change less than from host to host
LABELS = {
    "sequence_length": "tokens of a sequence",
    "doc_stride": "stride",
    "learning_rate": "learning rate",
    "devices": "number of devices",
    "message_bytes": "message",
}
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


@dataclass(frozen=True)
class Measured:
    """A value that a run measured, and under which conditions: fields of ``references.Conditions`` by name.

    ``quantity`` is one of the registry's ``quantities`` and the value is in its unit. ``device`` is the name that torch
    gives, or the processor's; ``label`` is how a reader knows the metric.
    """

    quantity: str
    label: str
    value: float
    device: str = ""
    conditions: Mapping[str, Any] = field(default_factory=dict)


def device_name(machine: Mapping[str, Any], backend: str, count: int) -> str:
    """Return the name of the devices that ``count`` ranks of a node used, as torch or the system gives it.

    Devices of several kinds give all their names: no published figure is for such a mixture.
    """
    if backend == "cpu":
        return str(machine.get("cpu", {}).get("model") or "")
    names = machine.get("devices", {}).get("backends", {}).get(backend, {}).get("names", [])
    return " and ".join(dict.fromkeys(str(name) for name in names[:count]))


@dataclass(frozen=True)
class Row:
    """A comparable figure, the run's value (in the unit of the quantity), and conditions that differ or are not stated."""

    figure: Figure
    here: float
    remarks: tuple[str, ...] = ()

    @property
    def claim(self) -> Metric:
        """The published value, in the unit of the quantity, as a claimed metric."""
        _, value, _ = self.figure.in_kit_unit()
        kind = self.figure.quantity
        return claimed(self.figure.metric, value, kind.unit, kind.direction, registry().cite(self.figure))

    @property
    def published(self) -> tuple[str, str]:
        """The published value for a reader in the run's unit, and what else was published: a range, another unit."""
        low, value, high = self.figure.in_kit_unit()
        unit, ends = self.figure.quantity.unit, f"{quantity(low)} to {quantity(high)}"
        if UNITS.get((self.figure.unit, unit), 1.0) not in (1.0, 1e12):
            more = self.figure.text
        else:
            more = "" if low == high or self.figure.value is None else ends
        return with_unit(ends, unit) if self.figure.value is None else quantity(value, unit), more

    @property
    def compared(self) -> str:
        """The difference of a score in points, or the ratio here / published; of a mere range both ends."""
        low, value, high = self.figure.in_kit_unit()
        if self.figure.quantity.points:
            return f"{self.here - value:+.2f} points"
        if self.figure.value is None:
            return f"{self.here / high:.3g} to {self.here / low:.3g}"
        return f"{self.here / value:.3g}"


@dataclass(frozen=True)
class Placement:
    """The figures beside a measured value. ``reason`` says why there are no rows; it is empty where there are."""

    measured: Measured
    rows: tuple[Row, ...]
    reason: str = ""


def comparable(measured: Measured, references: Registry | None = None) -> Placement:
    """Return the figures that a value may be placed beside, else why there are none."""
    references = references or registry()
    rows, differences = list[Row](), list[tuple[Figure, dict[str, str]]]()
    for item in references.figures:
        if item.metric != measured.quantity or item.validity == "invalid":
            continue
        differs, remarks = _compare(item, measured, references)
        differences.append((item, differs))
        if not differs:
            rows.append(Row(item, measured.value, remarks))
    return Placement(measured, tuple(rows), "" if rows else _reason(measured, differences, references))


def _compare(item: Figure, measured: Measured, references: Registry) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return what keeps a figure from being comparable, by condition, and what a reader should know of it beside that."""
    differs, remarks = {}, []
    for name in type(item.conditions).model_fields:
        there, here = getattr(item.conditions, name), measured.conditions.get(name)
        must, may = name in item.quantity.match, name in item.quantity.where_stated
        label = LABELS.get(name, name)
        if not must and here is not None and there != here and (may or there is not None):
            remarks.append(f"{label}: {shown(name, there)} there, {shown(name, here)} here")
        if name == "device":
            here = measured.device
        if there is None or here in (None, ""):
            agree = may or there is here is None
        else:
            agree = there in references.devices_of(here) if name == "device" else _agree(name, there, here)
        if (must or may) and not agree:
            there = references.devices[there].name if name == "device" and there else there
            differs[name] = f"{label}: {shown(name, there)} there, {shown(name, here)} here"
    return differs, tuple(remarks)


def _agree(name: str, there: Any, here: Any) -> bool:
    if name in FACTORS:
        return bool(there / FACTORS[name] <= here <= there * FACTORS[name])
    if name == "message_bytes":
        return bool(here >= there if there >= LARGE_BYTES else there / 2 <= here <= there * 2)
    return bool(there == here)


def shown(name: str, value: Any) -> str:
    """Write the value of a condition for a reader."""
    if value in (None, ""):
        return "not stated"
    if name == "message_bytes":
        return size_text(value) + (" and more" if value == LARGE_BYTES else "")
    return f"{value:g}" if isinstance(value, float) else str(value)


def _reason(measured: Measured, differences: Sequence[tuple[Figure, Mapping[str, str]]], references: Registry) -> str:
    what = measured.quantity.removesuffix("_gbps").replace("_", " ")
    if not differences:
        return f"the registry holds no usable figure of {what}"
    match = differences[0][0].quantity.match
    if "device" in match and not references.devices_of(measured.device):
        return f"no published figure is for this device ({measured.device or 'unknown'})"
    same = [differs for _, differs in differences if "device" not in differs]
    if not same:
        return f"no published figure of {what} is for this device ({measured.device})"
    nearest = min(same, key=len)
    if len(nearest) <= NEAR:
        return "the nearest published figure differs in " + "; ".join(nearest.values())
    never = [name for name in match if all(name in differs for differs in same)] or list(nearest)
    conditions = (f"{LABELS.get(name, name)} ({shown(name, measured.conditions.get(name))})" for name in never)
    return "no published figure holds for its " + " or ".join(conditions)


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
    if run.result is None or run.result.status != "complete":
        return []
    return [comparable(item) for item in benchmark.spec.placed(run)]


def summary(run: Run) -> str:
    """Say in a few sentences where a run stands; '' where there was nothing to place."""
    return _summary(placements(run))


def _summary(placed: Sequence[Placement]) -> str:
    best = [(item.measured.label, item.rows[0]) for item in placed if item.rows]
    if best:
        return " ".join(_sentence(label, row) for label, row in best)
    reasons: dict[str, list[str]] = {}
    for item in placed:
        reasons.setdefault(item.reason.replace("no published figure", "none"), []).append(item.measured.label)
    if not reasons:
        return ""
    why = "; ".join(f"for {' and '.join(labels)}, {reason}" for reason, labels in reasons.items())
    return f"No published figure is comparable with this run: {why if len(reasons) > 1 else next(iter(reasons))}."


def _sentence(label: str, row: Row) -> str:
    kind = row.figure.quantity
    value, more = row.published
    published = f"{value} ({more}) in" if more else f"{value} in"
    text = (
        f"{_first_upper(label)}: {quantity(row.here, kind.unit)}, published {published} {registry().cite(row.figure)}"
    )
    if kind.spread:
        return f"{text}: {row.compared}; a seed alone moves {label} by about {registry().figure(kind.spread).value}."
    if kind.direction == "none":
        return f"{text}: {'the same' if row.here == row.claim.value else 'not the same'}."
    return f"{text}: {row.compared}{'' if kind.points else ' of it'}."


def _first_upper(words: str) -> str:
    return words[:1].upper() + words[1:]


def section(run: Run) -> dict[str, Any] | None:
    """Return the report's section: ``sentence`` where nothing is comparable, else ``rows``.

    None where the run measured nothing that is published anywhere.
    """
    placed = placements(run)
    if not placed:
        return None
    rows = [
        {
            **_described(row.figure),
            "label": _first_upper(item.measured.label),
            "here": quantity(row.here, row.figure.quantity.unit),
            "published": row.published[0],
            "more": row.published[1],
            "compared": row.compared,
            "remarks": "; ".join(row.remarks),
        }
        for item in placed
        for row in item.rows
    ]
    return {"sentence": "" if rows else _summary(placed), "rows": rows}


def _described(item: Figure) -> dict[str, str]:
    figures = registry()
    return {
        "published": item.text,
        "conditions": conditions_text(item),
        "source": figures.cite(item),
        "url": figures.sources[item.source].url,
        "date": figures.dated(item),
        "validity": item.validity,
        "notes": "; ".join(part for part in (KINDS[item.kind], item.note, item.reason) if part),
    }


def listed(metric: str = "", device: str = "") -> Iterator[tuple[Figure, dict[str, str]]]:
    """Yield the figures of a metric (by the start of its name) and of a device (by the start of a word of its name)."""
    figures = registry()
    order = list(figures.quantities)
    for item in sorted(figures.figures, key=lambda figure: order.index(figure.metric)):
        name = figures.devices[item.conditions.device].name if item.conditions.device else ""
        named = f" {name} {item.conditions.device or ''}".lower()
        if item.metric.startswith(metric) and (not device or f" {device.lower()}" in named):
            yield item, _described(item)
