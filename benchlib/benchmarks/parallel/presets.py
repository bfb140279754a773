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

Precision = Literal["fp64", "fp32", "tf32", "bf16", "fp16", "fp8"]


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
    """One machine: nodes of equal devices. What the registry has of its ``device`` counts, whatever the file states."""

    description: str = Field(min_length=8)
    device: str = Field("", description="id of `devices` in references.yaml; '': not in there")
    devices: int = Field(1, ge=1, le=1024, description="devices of a node")
    nodes: int = Field(1, ge=1, le=65536)
    peak_tflops: dict[Precision, Given] = Field({}, description="dense matrix products of one device, by precision")
    memory_gb: Given = Field(description="of one device, 1e9 bytes")
    memory_gbytes_per_s: Given = Field(description="of one device, read plus written")
    link: Line | None = Field(None, description="between the devices of a node")
    network: Line | None = Field(None, description="between nodes")

    @model_validator(mode="before")
    @classmethod
    def _registered(cls, content: Any) -> Any:
        if not isinstance(content, dict) or not (device := content.get("device")):
            return content
        if device not in registry().devices:
            raise ValueError(f"device {device!r} is not in `devices` of references.yaml: leave it out or add it there")
        # Its id, and those of the chips that it is a kind of: ``a100-sxm-80gb`` is an ``a100``.
        families = set(itertools.accumulate(device.split("-"), "{}-{}".format))
        devices = [item for name, item in registry().devices.items() if name in families]
        rate = max((item.link_gbytes_per_s or 0.0 for item in devices), default=0.0)
        peaks = {
            item.conditions.get("precision", "bf16"): {
                "value": item.in_kit_unit()[1] / 1e12,
                "source": registry().cite(item),
            }
            for item in registry().dense_peaks(families)
        }
        content = content | {"peak_tflops": {**(content.get("peak_tflops") or {}), **peaks}}
        if rate and isinstance(content.get("link"), dict):
            content["link"] = content["link"] | {
                "gbytes_per_s": {"value": rate, "source": "references.yaml, `devices`"}
            }
        return content

    @model_validator(mode="after")
    def _is_whole(self) -> "Preset":
        if not self.peak_tflops:
            raise ValueError(
                f"no peak of matrix products: references.yaml has none of {self.device or 'it'}, so state one"
            )
        for name, count, line in (("link", self.devices, self.link), ("network", self.nodes, self.network)):
            if count > 1 and not (line and line.gbytes_per_s):
                raise ValueError(f"{count} devices or nodes need `{name}` with gbytes_per_s")
        return self

    @property
    def world(self) -> int:
        return self.devices * self.nodes

    def peak_flops(self, precision: str) -> tuple[float, str]:
        """Return the dense FLOP/s of one device, and in which precision: the nearest lower rate where it has none of its own.

        A machine without bf16 units is asked for fp16, and the other way round; at last fp32 (or what there is) is taken.
        """
        order = {"bf16": ("bf16", "fp16", "fp32"), "fp16": ("fp16", "bf16", "fp32"), "tf32": ("tf32", "fp32")}
        peaks = self.peak_tflops
        for name in (*order.get(precision, (precision,)), "fp32"):
            if name in peaks:
                return 1e12 * peaks[name].value, name  # type: ignore[index]
        slowest = min(peaks, key=lambda name: peaks[name].value)
        return 1e12 * peaks[slowest].value, slowest

    @property
    def sources(self) -> dict[str, Given]:
        """Every figure by what it is, for a reader."""
        figures = {f"peak {name} (TFLOP/s)": peak for name, peak in self.peak_tflops.items()}
        figures |= {"memory (GB)": self.memory_gb, "memory bandwidth (GB/s)": self.memory_gbytes_per_s}
        for line in filter(None, (self.link, self.network)):
            figures |= {f"{line.name} (GB/s one way)": line.gbytes_per_s} if line.gbytes_per_s else {}
            figures |= {f"{line.name} hop (us)": line.latency_us}
        return figures


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
        return Preset.model_validate(read_yaml(path))
    except ValidationError as error:
        raise UserError(f"{path}: {explained(error, Preset)}") from None
