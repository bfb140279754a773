"""What a run of the machine states: peaks of matrix products, copies, all-reduce and disk, none lower than accepted."""

from dataclasses import replace
from functools import partial
from typing import Any

from benchlib.core.definitions import algbw_samples, busbw_samples
from benchlib.core.text import listing
from benchlib.spec.charts import bars
from benchlib.spec.checks import rule, zero
from benchlib.spec.spec import Metric, Published, Show, Spec, each, run_metrics, run_table
from benchlib.spec.tables import Col, Row, Rows, Table, cols
from benchlib.workloads.operations import bus_conditions

COPIES = {
    "host": "within the host's memory, bytes read and written",
    "device": "within the device's memory, bytes read and written",
    "host_to_device": "from pinned host memory to the device",
    "device_to_host": "from the device to pinned host memory",
}


def _of_products(row: Row, run: Rows) -> dict[str, Any]:
    return {"speed.unit": "FLOP/s", "speed.ranks": run.world, "speed.one_device": "the best sample of a rank"}


def _of_exchange(row: Row, run: Rows) -> dict[str, Any]:
    # NCCL alone lets a switch add, and its name does not tell whether it did.
    library = "" if run.run.get("collective") == "nccl" else run.run.get("collective", "")
    return {"collective.operation": "all_reduce", "collective.ranks": run.world, "collective.algorithm": library}


together = Col("flops", "FLOP/s", "all ranks at once", samples=True, derived=True, role="speed.samples_per_s")
alone = Col("alone_flops", "FLOP/s", "one rank alone", samples=True)
products = Table(
    "products",
    "matrix products in {precision}",
    [
        *cols("precision highest_of sizes"),
        *cols("ranks n peak_n", "count"),
        together,
        alone,
        Col("best_flops", "FLOP/s", "best sample", role="speed.one_device_samples_per_s"),
        Col("peak_flops", "FLOP/s", "peak", derived=True),
        Col("highest_flops", "FLOP/s", "highest of all runs"),
    ],
    _of_products,
)
of_rank = replace(together, name="together_flops", derived=False, role="")
matmul = Table(
    "matmul", "{precision}, n = {n}, rank {rank}", [*cols("precision"), *cols("n rank", "count"), of_rank, alone]
)
copied = Col("gbytes_per_s", "GB/s", "memory, all ranks at once", samples=True, derived=True)
any_size = replace(copied, name="any_gbytes_per_s", label="this size, all ranks at once")
of_copies = [Col("mib", "count", "MiB a rank"), Col("cache_bytes", "B", "last-level caches"), copied, any_size]
copies = Table("copies", "copy {kind}", [Col("kind", words=COPIES), *of_copies])

size = Col("bytes", "B", "size", role="collective.size_bytes")
times = Col("times_us", "us", "time", samples=True)
wrong = Col("wrong_elements", "count", role="collective.wrong_elements")
BUS, ALG = "collective.busbw_gbytes_per_s", "collective.algbw_gbytes_per_s"
rate, of_all = partial(Col, unit="Gbps", samples=True), partial(busbw_samples, "all_reduce")
busbw = rate("busbw_gbps", label="bus bandwidth", of=of_all, needs="bytes times_us world", role=BUS)
algbw = rate("algbw_gbps", label="algorithm bandwidth", of=algbw_samples, needs="bytes times_us", role=ALG)
allreduce = Table("allreduce", "all-reduce of {bytes}", [size, times, busbw, algbw, wrong], _of_exchange)
disk = Table("disk", "disk", [Col("bytes", "B"), Col("gbytes_per_s", "GB/s", samples=True)])
run = run_table()

largest, smallest = allreduce.most("bytes"), allreduce.most("bytes", least=True)
peaking = products.ran().where(peak_flops=bool)
compared = products.where(highest_flops=bool)  # with earlier runs of the machine
fastest = allreduce.ran().most("busbw_gbps")


def _left_out(run: Rows) -> list[str]:
    """Name the planned products that were left out: a peak over fewer sizes may be too low."""
    parts = []
    for product in products.ran().rows(run):
        if sizes := {*run.config.matmul_sizes} - {
            *product["sizes"]
        }:  # of its own choice those that fit the time are enough
            parts.append(f"{product['precision']} at n = {listing([str(n) for n in sorted(sizes)])}")
    reason = "one would take longer than a measurement may, or finds no memory"
    return [f"Incomplete: there are no matrix products in {listing(parts)}: {reason}."] if parts else []


def _one_device(row: Row, run: Rows) -> dict[str, Any]:
    return {"precision": row["precision"], "devices": 1}


# What a shared machine's noise may cost: 20% of what was accepted.
gated = partial(Metric, better="higher", may_lose=0.20)
key = partial(gated, headline=True)
PEAK, PRODUCTS = "Peak of matrix products, {precision}", "Matrix products, {precision}, "
COPIED = "{kind}, {mib} MiB a rank, last-level caches {cache_bytes}"
AT_ONCE, ALL_RIGHT = "ranks at once: {ranks}", "Is every element of every timed exchange correct?"
SPEC = Spec(
    tables=[products, matmul, copies, allreduce, disk, run],
    metrics=[
        key("matmul_{precision}_peak_flops", products["peak_flops"], PEAK, f"n = {{peak_n}}, {AT_ONCE}, best samples"),
        gated("matmul_{precision}_flops", products["flops"], f"{PRODUCTS}median", f"n = {{n}}, {AT_ONCE}"),
        gated("matmul_{precision}_alone_flops", products["alone_flops"], f"{PRODUCTS}one rank alone", "n = {n}"),
        gated(
            "matmul_{precision}_best_flops", products["best_flops"], f"{PRODUCTS}best sample", "of any rank and size"
        ),
        Metric("matmul_{precision}_highest_flops", compared["highest_flops"], "Highest, {precision}", "{highest_of}"),
        key("copy_{kind}_gbytes_per_s", copies["gbytes_per_s"], "Memory copy, {kind}", COPIED),
        key("allreduce_gbps", largest["busbw_gbps"], "All-reduce (bus), largest message", "{bytes}"),
        gated("allreduce_algbw_gbps", largest["algbw_gbps"], "All-reduce (algorithm), largest message", "{bytes}"),
        Metric("allreduce_latency_us", smallest["times_us"], "All-reduce latency", "{bytes}", "lower", headline=True),
        # Not judged: disks of shared machines vary by more than any limit.
        Metric("disk_write_gbytes_per_s", disk["gbytes_per_s"], "Disk write", "{bytes}, synced", headline=True),
        *run_metrics(run),
    ],
    checks=[
        zero("all-reduce right", ALL_RIGHT, allreduce[wrong.name], rule="right results"),
        rule("possible scaling", "Are all ranks at most as fast as the best rank times their number?", "scaling"),
    ],
    says=[
        each(peaking, "Matrix products in {precision} peak at {peak_flops} in this run (n = {peak_n})."),
        each(fastest, "The all-reduce reaches {busbw_gbps} of bus bandwidth at {bytes}."),
        each(run, "These are the best of this run and no bounds: other sizes, or a quieter machine, may show more."),
    ],
    shows=[
        Show("Matrix products", products.ran(), "precision n flops alone_flops best_flops peak_flops peak_n"),
        Show("Matrix products by rank", matmul, "precision n rank together_flops alone_flops"),
        Show("Memory copies", copies.ran(), "kind mib cache_bytes gbytes_per_s any_gbytes_per_s"),
        Show("All-reduce by size", allreduce.ran(), "bytes times_us busbw_gbps algbw_gbps wrong_elements"),
    ],
    charts=[
        bars(
            "matmul-peaks",
            *(peaking[name] for name in ("peak_flops", "flops", "alone_flops")),
            title="Matrix products reach {peak_flops} in {precision} at n = {peak_n}",
            empty="No matrix product was measured.",
        )
    ],
    warnings=_left_out,
    verified=each(fastest, "every element of the all-reduces, up to {bytes}"),
    published=[
        Published("matmul_flops", products.ran()["alone_flops"], "matrix products in {precision}", _one_device),
        Published("allreduce_gbps", largest.ran()["busbw_gbps"], "all-reduce", bus_conditions),
    ],
)
