"""What a report of the machine shows first, and its words."""

from benchlib.benchmarks import View
from benchlib.benchmarks.machine.config import MachineConfig
from benchlib.core.text import listing
from benchlib.results.run import Result


def _warnings(config: MachineConfig, result: Result | None) -> list[str]:
    """Name the planned products that were left out: a peak over fewer sizes may be too low."""
    measured: dict[str, set[int]] = {}
    for row in result.tables.get("matmul", []) if result else []:
        measured.setdefault(row["precision"], set()).add(row["n"])
    lacking = {name: sorted({*config.matmul_sizes} - sizes) for name, sizes in measured.items()}
    parts = [f"{name} at n = {listing([str(size) for size in sizes])}" for name, sizes in lacking.items() if sizes]
    why = f"one would take longer than the {config.seconds:g} s of a measurement, or finds no memory"
    return [f"Incomplete: there are no matrix products in {listing(parts)}: {why}."] if parts else []


VIEW = View(
    headlines=(
        "matmul_fp32_peak_flops",
        "matmul_bf16_peak_flops",
        "copy_host_gbytes_per_s",
        "copy_device_gbytes_per_s",
        "allreduce_gbps",
        "allreduce_latency_us",
        "disk_write_gbytes_per_s",
        "total_s",
    ),
    labels={
        "allreduce_gbps": "All-reduce (bus), largest message",
        "matmul_fp32_peak_flops": "Peak of matrix products, fp32",
        "matmul_bf16_peak_flops": "Peak of matrix products, bf16",
        "matmul_fp32_flops": "Matrix products, fp32, median",
        "matmul_bf16_flops": "Matrix products, bf16, median",
        "copy_host_gbytes_per_s": "Memory copy",
        "copy_device_gbytes_per_s": "Device memory copy",
        "allreduce_latency_us": "All-reduce latency",
        "disk_write_gbytes_per_s": "Disk write",
    },
    headings={"matmul": "Matrix products", "allreduce": "All-reduce by size"},
    warnings=_warnings,
)
