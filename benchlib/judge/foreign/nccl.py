"""What text and JSON of nccl-tests have in common: names of operations, links of devices, a row as a claim."""

from collections.abc import Sequence
from dataclasses import dataclass

from benchlib.judge.impossible.claim import Claim, Collective
from benchlib.judge.references import vendor_peak

# The programs of nccl-tests (without _perf) and the operation they time; others have no factor that is agreed on.
PROGRAMS = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "gather": "gather",
    "scatter": "scatter",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "sendrecv": "send_recv",
}
# NCCL's own numbers of its algorithms (NCCL_ALGO_* in nccl's src/include/nccl_common.h), as older logs print them.
ALGORITHMS = ("Tree", "Ring", "CollNetDirect", "CollNetChain", "NVLS", "NVLSTree", "PAT")
WITHOUT_SWITCH = "ring or tree"
UNITS = ((30, "GiB"), (20, "MiB"), (10, "KiB"))


@dataclass(frozen=True)
class Setting:
    """What holds for all rows of a file. ``operation`` is '' where the file does not name its program."""

    operation: str = ""
    ranks: int | None = None
    devices: tuple[str, ...] = ()
    algorithm: str = ""


def operation_of(program: str) -> str:
    """Return the operation of a program's name or path: ``./build/all_reduce_perf`` -> ``all_reduce``."""
    name = program.replace("\\", "/").rsplit("/", 1)[-1].removesuffix(".exe").removesuffix("_perf")
    return PROGRAMS.get(name, name)


def algorithm_of(told: str) -> str:
    """Return the algorithm by the name or number that a log of NCCL tells: ``4`` -> ``NVLS``."""
    return ALGORITHMS[int(told)] if told.isdecimal() and int(told) < len(ALGORITHMS) else told


def forced_algorithm(value: str) -> str:
    """Return what NCCL_ALGO leaves; ``^NVLS,NVLSTree`` forbids, ``Ring,Tree`` allows, '' where several kinds are left."""
    value = value.strip().strip('"')
    if value.startswith("^"):
        forbidden = value[1:].upper().split(",")
        return WITHOUT_SWITCH if {"NVLS", "NVLSTREE"} <= set(forbidden) else ""
    return value


def row_claim(
    setting: Setting,
    placement: str,
    size_bytes: int,
    seconds: float | None,
    algbw: float | None,
    busbw: float | None,
    wrong: float | None,
) -> Claim:
    """Return one row and placement ("out of place", "in place") as a claim; bandwidths in GB/s."""
    bound = link_bound(setting.devices)
    collective = Collective(
        operation=setting.operation,
        size_bytes=size_bytes,
        seconds=seconds,
        ranks=setting.ranks,
        algbw_gbytes_per_s=algbw,
        busbw_gbytes_per_s=busbw,
        bound_gbytes_per_s=bound[0] if bound else None,
        bound_source=bound[1] if bound else "",
        algorithm=setting.algorithm,
        wrong_elements=wrong,
    )
    return Claim(subject=f"{setting.operation or 'row'} {size_text(size_bytes)}, {placement}", collective=collective)


def average_claim(average: float | None, rows: Sequence[float], wrong: float | None) -> Claim:
    """Return the footer of a file as a claim; ``rows`` are all bus bandwidths, none where rows may be missing."""
    collective = Collective(average_busbw_gbytes_per_s=average, all_busbw_gbytes_per_s=list(rows), wrong_elements=wrong)
    return Claim(subject="footer", collective=collective)


def link_bound(devices: Sequence[str]) -> tuple[float, str] | None:
    """Return what the links of the fastest of the devices carry one way in GB/s, and by whom; None where one is unknown."""
    known = [vendor_peak(device) for device in devices]
    links = [(peak.link_gbytes_per_s, peak.name) for peak in known if peak and peak.link_gbytes_per_s]
    if not links or len(links) < len(known):
        return None
    rate, name = max(links)
    return rate, f"claimed for a rank's links, NVLink of the {name}"


def size_text(size_bytes: int) -> str:
    """Write a size as nccl-tests users speak of it: 8 MiB, 24 B."""
    for power, unit in UNITS:
        if size_bytes >= 1 << power:
            return f"{size_bytes / (1 << power):g} {unit}"
    return f"{size_bytes} B"
