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


PRODUCTS = {
    "matmul_{}_peak_flops": "Peak of matrix products, {}",
    "matmul_{}_flops": "Matrix products, {}, median",
    "matmul_{}_alone_flops": "Matrix products, {}, one rank alone",
    "matmul_{}_best_flops": "Matrix products, {}, best sample",
}

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
        "allreduce_algbw_gbps": "All-reduce (algorithm), largest message",
        **{
            name.format(precision): words.format(precision)
            for precision in ("fp32", "tf32", "bf16", "fp16")
            for name, words in PRODUCTS.items()
        },
        "copy_host_gbytes_per_s": "Memory copy",
        "copy_device_gbytes_per_s": "Device memory copy",
        "copy_host_to_device_gbytes_per_s": "Copy to the device",
        "copy_device_to_host_gbytes_per_s": "Copy from the device",
        "allreduce_latency_us": "All-reduce latency",
        "disk_write_gbytes_per_s": "Disk write",
    },
    headings={"matmul": "Matrix products", "allreduce": "All-reduce by size"},
    warnings=_warnings,
)
