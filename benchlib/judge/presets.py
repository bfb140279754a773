"""Machines that estimates are made for: ``params/machines/<name>.yaml``, each figure with its source.

Peaks of matrix products and links that ``references.yaml`` holds are taken from there, by the id of the device; a file states
the others. A figure is ``claimed`` (a document says so), ``measured`` (``benchlib machine init`` wrote it) or ``assumed`` (its
source says on what grounds).
"""

import itertools
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from benchlib.core.errors import UserError, explained, nearest
from benchlib.core.files import home, read_yaml
from benchlib.judge.references import Strict, registry

Precision = Literal["fp64", "fp32", "tf32", "bf16", "fp16"]


class Given(Strict):
    """A number and who says so."""

    value: float = Field(gt=0)
    source: str = Field(min_length=8)
    kind: Literal["claimed", "measured", "assumed"] = "claimed"


class Line(Strict):
    """What joins devices: GB/s one way (of a device, or of a node's network adapters together) and the time of one hop."""

    name: str = Field(min_length=1)
    gbytes_per_s: Given | None = None
    latency_us: Given


class Preset(Strict):
    """One machine: nodes of equal devices."""

    description: str = Field(min_length=8)
    device: str = Field("", description="id of `devices` in references.yaml; '': not in there")
    devices: int = Field(1, ge=1, le=1024, description="devices of a node")
    nodes: int = Field(1, ge=1, le=65536)
    peak_tflops: dict[Precision, Given] = Field({}, description="dense matrix products of one device, by precision")
    memory_gb: Given = Field(description="of one device, 1e9 bytes")
    memory_gbytes_per_s: Given = Field(description="of one device, read plus written")
    link: Line | None = Field(None, description="between the devices of a node")
    network: Line | None = Field(None, description="between nodes")

    @model_validator(mode="after")
    def _is_consistent(self) -> "Preset":
        device, registered, link = self.device, _registered(self.device), self.link.gbytes_per_s if self.link else None
        claimed = [name for name, given in self.peak_tflops.items() if given.kind == "claimed"]
        twice = [f"peak_tflops.{name}" for name in claimed if name in registered]
        twice += ["link.gbytes_per_s"] * bool(link and link.kind == "claimed" and _registered_link(device))
        unknown = device and device not in registry().devices
        no_link = self.devices > 1 and not self.link_bytes_per_s
        no_network = self.nodes > 1 and not (self.network and self.network.gbytes_per_s)
        wrong = {
            f"device {device!r} is not in `devices` of references.yaml: leave it out or add it there": unknown,
            f"{' and '.join(twice)} of {device} stands in references.yaml: leave it out here": twice,
            f"no peak of matrix products: references.yaml has none of {device or 'it'}, so state one": not self.peaks,
            f"devices = {self.devices} need `link` with gbytes_per_s, or a device whose link is registered": no_link,
            f"nodes = {self.nodes} need `network` with gbytes_per_s": no_network,
        }
        if why := next((why for why, holds in wrong.items() if holds), ""):
            raise ValueError(why)
        return self

    @property
    def world(self) -> int:
        return self.devices * self.nodes

    @property
    def peaks(self) -> dict[str, Given]:
        return {**_registered(self.device), **{str(name): given for name, given in self.peak_tflops.items()}}

    def peak_flops(self, precision: str) -> tuple[float, str]:
        """Return the dense FLOP/s of one device, and in which precision: the nearest lower rate where it has none of its own.

        A machine without bf16 units is asked for fp16, and the other way round; at last fp32 (or what there is) is taken.
        """
        order = {"bf16": ("bf16", "fp16", "fp32"), "fp16": ("fp16", "bf16", "fp32"), "tf32": ("tf32", "fp32")}
        peaks = self.peaks
        for name in (*order.get(precision, (precision,)), "fp32"):
            if name in peaks:
                return 1e12 * peaks[name].value, name
        slowest = min(peaks, key=lambda name: peaks[name].value)
        return 1e12 * peaks[slowest].value, slowest

    @property
    def link_bytes_per_s(self) -> float | None:
        """Bytes per second one way between devices of a node; None where a node has one device."""
        stated = self.link.gbytes_per_s if self.link else None
        rate = stated.value if stated else _registered_link(self.device)
        return 1e9 * rate if rate and self.link else None

    @property
    def sources(self) -> dict[str, Given]:
        """Every figure by what it is, for a reader."""
        figures = {f"peak {name} (TFLOP/s)": given for name, given in self.peaks.items()}
        figures |= {"memory (GB)": self.memory_gb, "memory bandwidth (GB/s)": self.memory_gbytes_per_s}
        for line in filter(None, (self.link, self.network)):
            listed = (self.link_bytes_per_s or 0) / 1e9 if line is self.link else 0
            rate = line.gbytes_per_s or (Given(value=listed, source="references.yaml, `devices`") if listed else None)
            figures |= {f"{line.name} (GB/s one way)": rate} if rate else {}
            figures |= {f"{line.name} hop (us)": line.latency_us}
        return figures


def _registered(device: str) -> dict[str, Given]:
    """Return the peaks of a device that vendors specify, from the registry, in TFLOP/s by precision."""
    return {
        item.conditions.precision or "bf16": Given(value=item.in_kit_unit()[1] / 1e12, source=registry().cite(item))
        for item in registry().dense_peaks(_families(device))
    }


def _registered_link(device: str) -> float | None:
    """Return what the registry says of the links of a device, GB/s one way; None where it says nothing."""
    devices = registry().devices
    rates = [devices[name].link_gbytes_per_s for name in _families(device) if name in devices]
    return max((rate for rate in rates if rate), default=None)


def _families(device: str) -> set[str]:
    """Return a device's id and those of the chips that it is a kind of: ``a100-sxm-80gb`` is an ``a100``."""
    return set(itertools.accumulate(device.split("-"), "{}-{}".format)) - {""}


def folder() -> Path:
    return home() / "params" / "machines"


def names() -> list[str]:
    return sorted(path.stem for path in folder().glob("*.yaml"))


def preset(name: str) -> Preset:
    """Read a preset by name, or a file of one's own by its path; ``UserError`` names the first thing that is wrong."""
    path = Path(name).expanduser() if name.endswith((".yaml", ".yml")) else folder() / f"{name}.yaml"
    if not path.is_file():
        raise UserError(f"unknown machine {name!r}: {nearest(name, names())}; `benchlib machine init` writes one")
    try:
        return parse(read_yaml(path))
    except ValueError as error:
        raise error if isinstance(error, UserError) else UserError(f"{path}: {error}") from None


def parse(content: Any) -> Preset:
    """Check the content of a file; ``ValueError`` names the first thing that is wrong."""
    try:
        return Preset.model_validate(content)
    except ValidationError as error:
        raise ValueError(explained(error, Preset)) from None
