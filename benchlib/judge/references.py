"""Published figures as data, and the peaks that vendors claim.

The data are ``assets/references.yaml``: sources, devices, what can be published (``quantities``, with the conditions that
change a number), and the figures. ``benchlib.judge.published`` puts a figure beside a run only where they agree.
"""

import datetime
import functools
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field

from benchlib.core.files import PACKAGE

PATH = PACKAGE / "assets" / "references.yaml"
# Published unit -> factor to the unit of the quantity.
UNITS = {
    ("GB/s", "Gbps"): 8.0,
    ("TFLOP/s", "FLOP/s"): 1e12,
    ("seq/s", "samples/s"): 1.0,
    ("min", "s"): 60.0,
    ("h", "s"): 3600.0,
}


class Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Quantity(Strict):
    """What a figure is of: its unit here, and the conditions that change it.

    Those of ``match`` have to be stated on both sides and to agree; those of ``where_stated`` have to agree where both
    sides state them. ``points`` marks scores, which are compared by their difference; everything else by its ratio.
    ``spread`` is the id of the figure that says by how much the seed alone moves it.
    """

    unit: str = ""
    match: tuple[str, ...] = ()
    where_stated: tuple[str, ...] = ()
    points: bool = False
    spread: str = ""


class Source(Strict):
    """A public document or repository."""

    title: str = Field(min_length=1)
    url: str = Field("", pattern="^(https://.+)?$")
    published: datetime.date | None = None


class Device(Strict):
    """A device model, and the names under which torch reports it (a regular expression for the whole name).

    ``link_gbytes_per_s`` is what its links carry one way, as its vendor claims.
    """

    name: str = Field(min_length=1)
    torch: str = ""
    link_gbytes_per_s: float | None = Field(None, gt=0)


class Figure(Strict):
    """A published number. ``value`` is in the published ``unit``, ``low`` and ``high`` are the published range.

    ``conditions`` are what it holds for, by the names that ``quantities`` use, and more for a reader; one that is absent is
    one that the source does not state. ``batch`` is per device, ``devices`` over all nodes.
    """

    id: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9.\-]*$")
    metric: str
    quantity: Quantity
    value: float | None = None
    low: float | None = None
    high: float | None = None
    unit: str = ""
    kind: Literal["measured", "specified", "limit", "claimed"] = "measured"
    conditions: dict[str, Any] = {}
    source: str
    place: str = Field(min_length=1)
    validity: Literal["trusted", "unconfirmed", "invalid"] = "trusted"
    reason: str = ""
    note: str = ""

    @property
    def text(self) -> str:
        """The figure as it was published: ``846 (818 to 915) seq/s``."""
        ends = "" if self.low is None else f"{self.low:,.7g} to {self.high:,.7g}"
        value = ends if self.value is None else f"{self.value:,.7g}" + (f" ({ends})" if ends else "")
        return f"{value} {self.unit or self.quantity.unit}".strip()

    @property
    def factor(self) -> float:
        """What the published unit is in the unit of the quantity."""
        return UNITS.get((self.unit, self.quantity.unit), 1.0)

    def in_kit_unit(self) -> tuple[float, float, float]:
        """Return low, value and high in the unit of the quantity; the value of a mere range is its middle."""
        low, high = (self.value if end is None else end for end in (self.low, self.high))
        assert low is not None and high is not None
        value = (low + high) / 2 if self.value is None else self.value
        return low * self.factor, value * self.factor, high * self.factor


class Registry(Strict):
    """The content of ``references.yaml``, whose consistency tests/unit/judge/test_references.py checks."""

    collected: datetime.date
    sources: dict[str, Source]
    devices: dict[str, Device]
    quantities: dict[str, Quantity]
    figures: tuple[Figure, ...]

    def figure(self, name: str) -> Figure:
        """Return the figure of this id; ``KeyError`` where there is none."""
        return {item.id: item for item in self.figures}[name]

    def devices_of(self, torch_name: str) -> frozenset[str]:
        """Return the ids of the devices that torch calls ``torch_name``; empty for one that the registry does not know."""
        return frozenset(
            name for name, item in self.devices.items() if item.torch and re.fullmatch(item.torch, torch_name)
        )

    def dense_peaks(self, devices: Collection[str]) -> list[Figure]:
        """Return what vendors specify for matrix products of these devices, without sparsity."""
        peaks = [item for item in self.figures if (item.metric, item.kind) == ("matmul_flops", "specified")]
        return [item for item in peaks if item.conditions.get("device") in devices]

    def cite(self, item: Figure) -> str:
        """Return document and place of a figure: ``google-research/bert, README, SQuAD 1.1``."""
        return f"{self.sources[item.source].title}, {item.place}"

    def cite_value(self, metric: str, value: float) -> str:
        """Return the sources that publish exactly this value of a metric; '' where none does."""
        same = [item for item in self.figures if (item.metric, item.value, item.validity) == (metric, value, "trusted")]
        return "; ".join(f"{self.cite(item)} ({item.conditions['model']})" for item in same)

    def dated(self, item: Figure) -> str:
        """Return when a figure was published, else when it was collected."""
        published = self.sources[item.source].published
        return f"published {published}" if published else f"collected {self.collected}"


@functools.cache
def registry() -> Registry:
    """Read the registry; a figure has the fields and conditions of its group beside its own."""
    content = yaml.load(PATH.read_text(encoding="utf-8"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    figures = []
    for group in content.pop("groups"):
        common = {name: value for name, value in group.items() if name != "figures"}
        for item in group["figures"]:
            conditions = {**group.get("conditions", {}), **item.get("conditions", {})}
            stated = {name: value for name, value in conditions.items() if value is not None}
            figure = common | item | {"conditions": stated}
            figures.append(figure | {"quantity": content["quantities"][figure["metric"]]})
    return Registry.model_validate(content | {"figures": figures})


@dataclass(frozen=True)
class VendorPeak:
    """What a vendor claims of one device: FLOP/s without sparsity by precision, and its links one way in GB/s."""

    name: str
    dense_flops: dict[str, float]
    link_gbytes_per_s: float | None = None


@functools.cache
def vendor_peak(device: str) -> VendorPeak | None:
    """Return what the vendor claims of a device, by the name that its driver reports; None for an unknown device."""
    matching, rates = registry().devices_of(device), dict[str, float]()
    for item in registry().dense_peaks(matching):
        precision = item.conditions.get("precision", "bf16")
        # Two tables may differ: what exceeds the higher one exceeds both.
        rates[precision] = max(item.in_kit_unit()[1], rates.get(precision, 0.0))
    if "bf16" in rates:
        rates.setdefault("fp16", rates["bf16"])  # the same units multiply both at the same rate
    devices = [registry().devices[name] for name in matching]
    link = max((item.link_gbytes_per_s or 0.0 for item in devices), default=0.0)
    if not rates and not link:
        return None
    return VendorPeak(min((item.name for item in devices), key=len), rates, link or None)
