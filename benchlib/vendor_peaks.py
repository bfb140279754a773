"""What makers state of their devices: dense matrix rates and links. Claimed figures, to refuse what exceeds them.

A device that is not in the tables has no peak here: its share of the peak is not available, and nothing is guessed.
Sources: the makers' data sheets, dense figures (those with structured sparsity are twice as high); NVLink per
direction, half of the "total bandwidth" of the data sheet.
"""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class VendorPeak:
    """``pattern`` matches the driver's device name in lower case; rates in FLOP/s of one device, by precision."""

    pattern: str
    name: str
    dense_flops: dict[str, float]
    link_gbytes_per_s: float | None = None


# The first match counts: variants stand before the name they contain.
VENDOR_PEAKS = (
    VendorPeak(r"gb200(?!\d)", "GB200", {"bf16": 2500e12, "fp16": 2500e12}, 900),
    VendorPeak(r"\bb200(?!\d)", "B200", {"bf16": 2250e12, "fp16": 2250e12}, 900),
    VendorPeak(r"\bgh200", "GH200", {"bf16": 989e12, "fp16": 989e12, "tf32": 494.5e12}, 450),
    VendorPeak(r"\bh200(?!\d)", "H200", {"bf16": 989e12, "fp16": 989e12, "tf32": 494.5e12}, 450),
    VendorPeak(r"h100.*pcie", "H100 PCIe", {"bf16": 756e12, "fp16": 756e12}, 300),
    VendorPeak(r"h100.*nvl", "H100 NVL", {"bf16": 835e12, "fp16": 835e12}, 300),
    VendorPeak(r"\bh100(?!\d)", "H100 SXM", {"bf16": 989e12, "fp16": 989e12, "tf32": 494.5e12}, 450),
    VendorPeak(r"\ba100(?!\d)", "A100", {"bf16": 312e12, "fp16": 312e12, "tf32": 156e12}, 300),
    VendorPeak(r"\bv100(?!\d)", "V100", {"fp16": 125e12}, 150),
    VendorPeak(r"mi355x", "MI355X", {"bf16": 2500e12, "fp16": 2500e12}),
    VendorPeak(r"mi3(00|25)x", "MI300X/MI325X", {"bf16": 1307e12, "fp16": 1307e12}),
    VendorPeak(r"mi250x", "MI250X (one of its two dies)", {"bf16": 191.5e12, "fp16": 191.5e12}),
)


def vendor_peak(device: str) -> VendorPeak | None:
    """Return what the maker states of a device, or None where the device is not known."""
    return next((peak for peak in VENDOR_PEAKS if re.search(peak.pattern, device.lower())), None)
