"""What a report of collectives shows first, its tables and its words."""

from typing import Any

from benchlib.benchmarks import View


def tables(run: Any) -> dict[str, list[dict[str, Any]]]:
    """Return the tables of the report, by heading."""
    from benchlib.benchmarks.collectives import tables

    return tables.report(run)


VIEW = View(
    headlines=(
        "allreduce_busbw_gbps",
        "allreduce_latency_us",
        "all_gather_direct_busbw_gbps",
        "send_recv_busbw_gbps",
        "broadcast_busbw_gbps",
        "reduce_scatter_direct_busbw_gbps",
        "gradient_allreduce_gbps",
        "allreduce_socket_share",
        "barrier_latency_us",
        "total_s",
    ),
    labels={
        "allreduce_latency_us": "All-reduce latency",
        "allreduce_busbw_gbps": "All-reduce (bus)",
        "all_gather_direct_busbw_gbps": "All-gather, direct (bus)",
        "reduce_scatter_direct_busbw_gbps": "Reduce-scatter, direct (bus)",
        **{f"{name}_busbw_gbps": f"{name.capitalize()} (bus)" for name in ("broadcast", "reduce", "gather", "scatter")},
        "all_to_all_busbw_gbps": "All-to-all (bus)",
        "send_recv_busbw_gbps": "Send/recv (bus)",
        "send_recv_latency_us": "Send/recv latency",
        "barrier_latency_us": "Barrier",
        "gradient_allreduce_gbps": "All-reduce of gradients (bus)",
        "allreduce_socket_share": "All-reduce / raw sockets",
        "all_gather_busbw_gbps": "All-gather (bus)",
        "all_gather_latency_us": "All-gather latency",
        "reduce_scatter_busbw_gbps": "Reduce-scatter (bus)",
        "all_gather_direct_socket_share": "All-gather, direct / raw sockets",
        "reduce_scatter_direct_socket_share": "Reduce-scatter, direct / raw sockets",
        "broadcast_socket_share": "Broadcast / raw socket",
        "send_recv_socket_share": "Send/recv / raw socket",
    },
    tables=tables,
    exports=(
        (
            "nccl-tests",
            "collectives as nccl-tests prints them, to lie beside all_reduce_perf",
            "benchlib.benchmarks.collectives.nccl_tests:write",
        ),
    ),
)
