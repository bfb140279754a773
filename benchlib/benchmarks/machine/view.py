"""What a report of the machine shows first, and its words."""

from benchlib.benchmarks import View

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
)
