"""Physical ceilings: speeds that nothing built comes near, by quantity and kind of device.

A ceiling is about ten times the best product, so that it holds for years and never accuses an honest figure; a floor of time is what
light or a launch takes. Peaks that were measured or are claimed of a device hold more, where they are known.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchlib.judge.impossible.findings import Finding, figure, finding, rule

FLOP = "FLOP/s"  # of dense matrix products


@dataclass(frozen=True)
class Ceiling:
    """The ``most`` or, of a time, the ``least`` that is possible of one device, or of a node of processors. ``why`` is its source."""

    why: str
    most: float | None = None
    least: float | None = None
    shared: bool = False  # it is not of each device: more of them make no more of it

    def of(self, devices: int) -> "Ceiling":
        return self if self.shared or self.most is None else replace(self, most=self.most * devices)


_MEMORY = "HBM3E of B200 and MI355X claims 8 TB/s, 12 channels of MRDIMM-8800 1.7 TB/s on two sockets"
_SAMPLES = "one A100 trains 4.3 million samples/s of DLRM (NVIDIA DeepLearningExamples: 4.2e9 samples in 16.3 minutes)"
_TOKENS = "2.5 PFLOP/s do 1e9 tokens/s of a model of 1.25 million parameters"
_LAUNCH = "a model is a chain of operations, of which the launch of one takes about a microsecond"

# By kind of device, unit and precision ("": any).
CEILINGS: Mapping[str, Mapping[tuple[str, str], Ceiling]] = {
    "accelerator": {
        (FLOP, "fp32"): Ceiling("MI300X claims 163 TFLOP/s", 1.6e15),
        (FLOP, "tf32"): Ceiling("GB200 claims 1.25 PFLOP/s", 1.3e16),
        (FLOP, "bf16"): Ceiling("GB200 and MI355X claim 2.5 PFLOP/s", 2.5e16),
        (FLOP, "fp16"): Ceiling("GB200 and MI355X claim 2.5 PFLOP/s", 2.5e16),
        (FLOP, ""): Ceiling("GB300 claims 15 PFLOP/s in fp4", 1.5e17),
    },
    "processors": {
        (FLOP, "fp32"): Ceiling("2 x 192 cores x 64 FLOP x 3.7 GHz (AVX-512 of EPYC 9965) are 91 TFLOP/s", 9e14),
        (FLOP, ""): Ceiling("2 x 128 cores x 2,048 FLOP x 3.2 GHz (AMX of Xeon 6980P) are 1.7 PFLOP/s", 1.7e16),
    },
    # Of a server that other machines run: one address may be a whole rack. Here the rack's own peak counts.
    "server": {(FLOP, ""): Ceiling("72 x GB300 claim 1.1 EFLOP/s in fp4", 1.1e18)},
}
# Of each device, node of processors or server.
EACH: Mapping[str, Ceiling] = {
    "GB/s": Ceiling(_MEMORY, 8e4),
    "MB/s": Ceiling(_MEMORY, 8e7),
    "Gbps": Ceiling("NVLink 5 carries 900 GB/s of a device one way", 7.2e4, shared=True),
    "samples/s": Ceiling(_SAMPLES, 5e7),
    "queries/s": Ceiling(_SAMPLES, 5e7),
    "tokens/s": Ceiling(_TOKENS, 1e10),
}
# Times by the words of their names and their unit: of an exchange between devices, of a pass through a model.
SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
EXCHANGE = Ceiling("light takes 10 ns for 3 m, a store from one core to another longer", least=1e-8)
PASS = Ceiling(_LAUNCH, least=1e-6)
PRECISIONS = ("fp32", "tf32", "bf16", "fp16")


def ceiling(name: str, unit: str, kind: str, devices: int, precision: str = "") -> Ceiling | None:
    """Return the ceiling of a metric of ``devices`` of a ``kind``, by its name and unit; None if there is none."""
    if unit in SECONDS:
        if not re.search(r"(^|_)(latency|ttft|step_s)(_|$)", name):
            return None
        bound = EXCHANGE if unit == "us" else PASS
        return replace(bound, least=(bound.least or 0.0) / SECONDS[unit])
    rates = CEILINGS[kind]
    named = next((word for word in PRECISIONS if word in name.split("_")), precision)
    found = rates.get((unit, named)) or rates.get((unit, "")) or EACH.get(unit)
    return found.of(devices) if found else None


def least_parameters(names: Sequence[str]) -> float:
    """Return the fewest parameters that a token of these models passes, by their names, as in Llama-3.1-8B; 0 where none says it.

    Of experts those of one, or the active ones: Mixtral-8x7B, Qwen3-30B-A3B.
    """
    found = list[float]()
    for name in names:
        sizes = re.findall(r"(?:^|[^A-Za-z0-9.])(?:\d+x)?(A?)(\d+(?:\.\d+)?)[bB](?![A-Za-z0-9])", name)
        active = [float(size) for mark, size in sizes if mark] or [float(size) for _, size in sizes]
        found.append(min(active, default=0.0))
    return 1e9 * min(found, default=0.0)


@rule("quantities", "physical ceiling", "stated ceiling_source")
def below_ceiling(it: Any) -> Finding:
    """Speeds above, and times below, what anything built comes near."""
    value = figure(it.stated, it.unit)
    if it.most is not None and it.stated > it.most:
        return finding(False, f"{it.name} = {value} is above {figure(it.most, it.unit)}", wrong=it.ceiling_source)
    if it.least is not None and it.stated < it.least:
        return finding(False, f"{it.name} = {value} is below {figure(it.least, it.unit)}", wrong=it.ceiling_source)
    return finding(True, "within its physical ceiling")
