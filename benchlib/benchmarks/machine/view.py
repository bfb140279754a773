"""What a report of the machine shows first, and its words."""

from benchlib.benchmarks import View

VIEW = View(
    headlines=(
        "matmul_fp32_flops",
        "matmul_bf16_flops",
        "copy_host_gbytes_per_s",
        "copy_device_gbytes_per_s",
        "allreduce_gbps",
        "allreduce_latency_us",
        "disk_write_gbytes_per_s",
        "total_s",
    ),
    labels={
        "allreduce_gbps": "All-reduce (bus)",
        "matmul_fp32_flops": "Matrix products, fp32",
        "matmul_bf16_flops": "Matrix products, bf16",
        "copy_host_gbytes_per_s": "Memory copy",
        "copy_device_gbytes_per_s": "Device memory copy",
        "allreduce_latency_us": "All-reduce latency",
        "disk_write_gbytes_per_s": "Disk write",
    },
    headings={"matmul": "Matrix products", "allreduce": "All-reduce by size"},
)
