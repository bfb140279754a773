"""What makers state of their devices: dense matrix rates and links. Claimed figures, to refuse what exceeds them.

The matrix rates are those of the registry of published figures. A device that it does not know has no peak here: its
share of the peak is then not available, and nothing is guessed. NVLink per direction is half of the "total bandwidth"
of NVIDIA's data sheets.
"""

import functools
from dataclasses import dataclass

from benchlib.references import registry

# GB/s one way, by the registry's id of the device; cards without NVSwitch by the bridge that they can have.
LINKS_GBYTES_PER_S = {
    "v100": 150.0,
    "a100": 300.0,
    "h100-sxm": 450.0,
    "h100-pcie": 300.0,
    "h100-nvl": 300.0,
    "gh200-hbm3e": 450.0,
    "h200-sxm": 450.0,
    "b200": 900.0,
    "b300": 900.0,
    "gb200": 900.0,
}


@dataclass(frozen=True)
class VendorPeak:
    """Rates in FLOP/s of one device without sparsity, by precision; the link's in GB/s one way, None where not known."""

    name: str
    dense_flops: dict[str, float]
    link_gbytes_per_s: float | None = None


@functools.cache
def vendor_peak(device: str) -> VendorPeak | None:
    """Return what its maker states of a device, by the name that its driver tells; None where it is not known."""
    known = registry().devices_of(device)
    rates: dict[str, float] = {}
    for item in registry().figures:
        if item.metric != "matmul_flops" or item.kind != "specified" or item.conditions.device not in known:
            continue
        rate = item.in_kit_unit()[1]
        precision = item.conditions.precision or "bf16"
        # Two tables may differ: what exceeds the higher one exceeds both.
        rates[precision] = max(rate, rates.get(precision, 0.0))
    if "bf16" in rates:
        rates.setdefault("fp16", rates["bf16"])  # the same units multiply both at the same rate
    links = [LINKS_GBYTES_PER_S[name] for name in known if name in LINKS_GBYTES_PER_S]
    if not rates and not links:
        return None
    name = min((registry().devices[name].name for name in known), key=len)
    return VendorPeak(name, rates, max(links, default=None))
