"""A run beside the published figures that it may be compared with, or the reason why there is none.

A figure is comparable where the conditions that change its number agree; those that are invalid are never used, a device
that the registry does not know has no figures, and a near miss is named with what differs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchlib.metrics import Metric, claimed, quantity
from benchlib.references import QUANTITIES, UNITS, Figure, Registry, registry

NEAR = 2  # a figure that differs in more conditions than this tells nothing of the run
LARGE_BYTES = 2**29  # from here on the bandwidth of a collective hardly depends on the size of the message
FACTORS = {"batch": 2.0, "epochs": 1.5}  # within such a factor rate and score change less than from host to host
BYTES = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
LABELS = {
    "sequence_length": "tokens of a sequence",
    "doc_stride": "stride",
    "learning_rate": "learning rate",
    "devices": "number of devices",
    "message_bytes": "message",
}


@dataclass(frozen=True)
class Measured:
    """A value that a run measured, and under which conditions: fields of ``references.Conditions`` by name.

    ``quantity`` is a name of ``references.QUANTITIES`` and the value is in its unit. ``device`` is the name that torch
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
    """A comparable figure, the run's value (in the unit of the quantity), and what to keep in mind."""

    figure: Figure
    here: float
    remarks: tuple[str, ...] = ()

    @property
    def claim(self) -> Metric:
        """The published value, in the unit of the quantity, as a claimed metric."""
        kit = QUANTITIES[self.figure.metric]
        _, value, _ = self.figure.in_kit_unit()
        return claimed(self.figure.metric, value, kit.unit, kit.direction, registry().cite(self.figure))

    @property
    def published(self) -> tuple[str, str]:
        """The published value for a reader in the run's unit, and what else was published: a range, another unit."""
        low, value, high = self.figure.in_kit_unit()
        unit = QUANTITIES[self.figure.metric].unit
        ends = f"{quantity(low)} to {quantity(high)}"
        shown = f"{ends} {unit}".strip() if self.figure.value is None else quantity(value, unit)
        more = "" if low == high or self.figure.value is None else ends
        return shown, more if UNITS.get((self.figure.unit, unit), 1.0) in (1.0, 1e12) else self.figure.text

    @property
    def compared(self) -> str:
        """The difference of a score in points, or the ratio here / published; of a mere range both ends."""
        low, value, high = self.figure.in_kit_unit()
        if QUANTITIES[self.figure.metric].points:
            return f"{self.here - value:+.2f} points"
        if self.figure.value is None:
            return f"{self.here / high:.3g} to {self.here / low:.3g}"
        return f"{self.here / value:.3g}"


@dataclass(frozen=True)
class Near:
    """A figure that is not comparable, and what differs."""

    figure: Figure
    differs: tuple[str, ...]


@dataclass(frozen=True)
class Placement:
    """Where a measured value stands. ``reason`` says why there are no rows; it is empty where there are."""

    measured: Measured
    rows: tuple[Row, ...]
    near: tuple[Near, ...]
    reason: str = ""


def comparable(measured: Measured, known: Registry | None = None) -> Placement:
    """Return the figures that a value may be placed beside, and those that miss it nearly."""
    known = known or registry()
    usable = [item for item in known.figures if item.metric == measured.quantity and item.validity != "invalid"]
    differences = [(item, _differences(item, measured, known)) for item in usable]
    rows = tuple(Row(item, measured.value, _remarks(item, measured)) for item, differs in differences if not differs)
    near = sorted(
        (Near(item, tuple(differs.values())) for item, differs in differences if _is_near(item, differs)),
        key=lambda miss: len(miss.differs),
    )
    return Placement(measured, rows, tuple(near), "" if rows else _reason(measured, differences, known))


def _differences(item: Figure, measured: Measured, known: Registry) -> dict[str, str]:
    """Return what keeps a figure from being comparable, by condition."""
    kit, found = QUANTITIES[item.metric], {}
    for name in (*kit.match, *kit.where_stated):
        there = getattr(item.conditions, name)
        here = measured.device if name == "device" else measured.conditions.get(name)
        if there is None or here in (None, ""):
            if name in kit.where_stated or there is here is None:
                continue
            agree = False
        else:
            agree = there in known.devices_of(here) if name == "device" else _agree(name, there, here)
        if not agree:
            there = known.devices[there].name if name == "device" and there else there
            found[name] = f"{LABELS.get(name, name)}: {shown(name, there)} there, {shown(name, here)} here"
    return found


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
        unit, scale = next((pair for pair in BYTES if value >= pair[1]), BYTES[-1])
        return f"{value / scale:,.4g} {unit}" + (" and more" if value == LARGE_BYTES else "")
    return f"{value:g}" if isinstance(value, float) else str(value)


def _remarks(item: Figure, measured: Measured) -> tuple[str, ...]:
    """Return what a reader should know of a comparable figure: conditions that differ, or that its source leaves open."""
    kit, found = QUANTITIES[item.metric], []
    for name in type(item.conditions).model_fields:
        there, here = getattr(item.conditions, name), measured.conditions.get(name)
        if here is None or name in kit.match or there == here:
            continue
        if there is not None or name in kit.where_stated:
            found.append(f"{LABELS.get(name, name)}: {shown(name, there)} there, {shown(name, here)} here")
    return tuple(found)


def _is_near(item: Figure, differs: Mapping[str, str]) -> bool:
    # Another device's figure is no near miss, since nothing of it carries over; nor is a limit, which nobody measured.
    return 0 < len(differs) <= NEAR and "device" not in differs and item.kind != "limit"


def _reason(measured: Measured, differences: Sequence[tuple[Figure, Mapping[str, str]]], known: Registry) -> str:
    kit = QUANTITIES[measured.quantity]
    what = measured.quantity.removesuffix("_gbps").replace("_", " ")
    if not differences:
        return f"the registry holds no usable figure of {what}"
    if "device" in kit.match and not known.devices_of(measured.device):
        return f"no published figure is for this device ({measured.device or 'unknown'})"
    same = [differs for _, differs in differences if "device" not in differs]
    if not same:
        return f"no published figure of {what} is for this device ({measured.device})"
    nearest = min(same, key=len)
    if len(nearest) <= NEAR:
        return "the nearest published figure differs in " + "; ".join(nearest.values())
    never = [name for name in kit.match if all(name in differs for differs in same)] or list(nearest)
    told = (f"{LABELS.get(name, name)} ({shown(name, measured.conditions.get(name))})" for name in never)
    return "no published figure holds for its " + " or ".join(told)
