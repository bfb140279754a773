"""A run beside the published figures that it may be compared with.

A figure is comparable where the conditions that change its number agree. Invalid figures are never used, a device that the
registry does not know has no figures.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from benchlib.benchmarks import BENCHMARKS
from benchlib.core.definitions import size_text
from benchlib.core.text import capitalized, quantity
from benchlib.judge.references import Figure, registry
from benchlib.results.run import Run

LARGE_BYTES = 2**29  # from here on the bandwidth of a collective hardly depends on the size of the message
FACTORS = {"batch": 2.0, "epochs": 1.5}  # within such a factor rate and score change less than from host to host
FORMATS = {"padding": "padded {}", "training": "{} training"}
KINDS = {
    "measured": "",
    "specified": "specified by the vendor",
    "limit": "a limit, not a result",
    "claimed": "claimed by its source, not measured",
}


@dataclass(frozen=True)
class Measured:
    """A value that a run measured, and under which conditions, by the names that the registry's figures use.

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
class Place:
    """A value beside a comparable figure."""

    measured: Measured
    figure: Figure

    @property
    def here(self) -> str:
        """The measured value in the published unit."""
        return quantity(self.measured.value / self.figure.factor, self.figure.unit or self.figure.quantity.unit)

    @property
    def compared(self) -> str:
        """The difference of a score in points, or the ratio here / published; of a mere range that of its middle."""
        here, (_, value, _) = self.measured.value, self.figure.in_kit_unit()
        return f"{here - value:+.2f} points" if self.figure.quantity.points else f"{here / value:.3g}"

    def sentence(self) -> str:
        kind, source = self.figure.quantity, registry().cite(self.figure)
        end = "" if kind.points else " of it"
        if kind.spread:
            end = f"; a seed alone moves {self.measured.label} by about {registry().figure(kind.spread).value}"
        title = capitalized(self.measured.label)
        return f"{title}: {self.here}, published {self.figure.text} in {source}: {self.compared}{end}."


def comparable(measured: Measured) -> list[Place]:
    figures = (item for item in registry().figures if item.metric == measured.quantity and item.validity != "invalid")
    return [Place(measured, item) for item in figures if _holds(item, measured)]


def _holds(item: Figure, measured: Measured) -> bool:
    """Tell whether the conditions of a figure that have to agree with those of a value do."""
    conditions, kind = {**measured.conditions, "device": measured.device}, item.quantity
    for name in (*kind.match, *kind.where_stated):
        there, here = item.conditions.get(name), conditions.get(name) or None
        if there is not None and here is not None:
            if not _agree(name, there, here):
                return False
        elif name in kind.match and there is not here:
            return False
    return True


def _agree(name: str, there: Any, here: Any) -> bool:
    if name == "device":
        return there in registry().devices_of(here)
    if name in FACTORS:
        return bool(there / FACTORS[name] <= here <= there * FACTORS[name])
    if name == "message_bytes":
        return bool(here >= there if there >= LARGE_BYTES else there / 2 <= here <= there * 2)
    return bool(there == here)


def conditions_text(item: Figure) -> str:
    """Write the conditions of a figure in one line: ``8 x NVIDIA H100 SXM, messages of 512 MiB and more, nodes 1``."""
    stated = dict(item.conditions)
    device, count = stated.pop("device", None), stated.pop("devices", 0)
    name = registry().devices[device].name if device else "devices"
    words = [f"{count} x {name}" if count else name] if device or count else []
    if size := stated.pop("message_bytes", 0):
        words.append(f"messages of {size_text(size)}" + " and more" * (size == LARGE_BYTES))
    for what, value in stated.items():
        form = "{}" if isinstance(value, str) else what.replace("_", " ") + " {:g}"
        words.append(FORMATS.get(what, form).format(value))
    return ", ".join(words)


def placements(run: Run) -> list[tuple[Measured, list[Place]]]:
    """Return every value of a whole run that its benchmark measures as publications do, with the figures beside it."""
    if run.result is None or run.result.status != "complete":
        return []
    return [(item, comparable(item)) for item in BENCHMARKS[run.config.benchmark].spec.placed(run)]


def summary(run: Run) -> str:
    placed = placements(run)
    best = [places[0].sentence() for _, places in placed if places]
    if best or not placed:
        return " ".join(best)
    labels = ", ".join(dict.fromkeys(item.label for item, _ in placed))
    devices = " and ".join(dict.fromkeys(item.device for item, _ in placed if item.device))
    return f"No published figure is comparable with this run: {labels}{f' on {devices}' if devices else ''}."


def section(run: Run) -> dict[str, Any] | None:
    """Return the report's section: ``sentence`` where nothing is comparable, else ``rows``.

    None where the run measured nothing that is published anywhere.
    """
    placed = placements(run)
    rows = [
        {**_described(place.figure), "label": capitalized(item.label), "here": place.here, "compared": place.compared}
        for item, places in placed
        for place in places
    ]
    return {"sentence": "" if rows else summary(run), "rows": rows} if placed else None


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
        name = item.conditions.get("device", "")
        named = f" {figures.devices[name].name if name else ''} {name}".lower()
        if item.metric.startswith(metric) and (not device or f" {device.lower()}" in named):
            yield item, _described(item)
