"""What a run of the machine states: peaks of matrix products, copies, all-reduce and disk, none lower than accepted."""

from dataclasses import replace
from typing import Any

from benchlib.core.definitions import algbw_gbps, busbw_gbps
from benchlib.core.text import listing
from benchlib.judge.published import Measured, device_name
from benchlib.spec.charts import Line, bars, lines
from benchlib.spec.checks import rule, zero
from benchlib.spec.spec import Metric, Show, Spec, each, run_table
from benchlib.spec.tables import Col, Ref, Row, Rows, Table, cols

MAY_LOSE = 0.20  # of the accepted peak: what a shared machine's noise may cost
COPIES = {
    "host": "within the host's memory, bytes read and written",
    "device": "within the device's memory, bytes read and written",
    "host_to_device": "from pinned host memory to the device",
    "device_to_host": "from the device to pinned host memory",
}


def _busbw(size: float, times_us: list[float], world: int) -> list[float]:
    return [busbw_gbps("all_reduce", size, 1e-6 * time, world) for time in times_us]


def _algbw(size: float, times_us: list[float]) -> list[float]:
    return [algbw_gbps(size, 1e-6 * time) for time in times_us]


def _exchange(row: Row, run: Rows) -> dict[str, Any]:
    """Return what makes a row a claim; only NCCL lets a switch add, which its name alone does not tell."""
    library = "" if run.run.get("collective") == "nccl" else run.run.get("collective", "")
    return {"collective.operation": "all_reduce", "collective.ranks": run.world, "collective.algorithm": library}


def _products(row: Row, run: Rows) -> dict[str, Any]:
    return {"speed.unit": "FLOP/s", "speed.ranks": run.world, "speed.one_device": "the best sample of a rank"}


products = Table(
    "products",
    "matrix products in {precision}",
    [
        *cols("precision highest_of"),
        *cols("ranks n peak_n", "count"),
        Col("flops", "FLOP/s", "all ranks at once", samples=True, derived=True, role="speed.samples_per_s"),
        Col("alone_flops", "FLOP/s", "one rank alone", samples=True),
        Col("best_flops", "FLOP/s", "best sample", role="speed.one_device_samples_per_s"),
        Col("peak_flops", "FLOP/s", "peak", derived=True),
        Col("highest_flops", "FLOP/s", "highest of all runs"),
    ],
    _products,
)
alone = [Col("together_flops", "FLOP/s", "all ranks at once", samples=True), products.col("alone_flops")]
matmul = Table("matmul", "{precision}, n = {n}, rank {rank}", [Col("precision"), *cols("n rank", "count"), *alone])
together = Col("gbytes_per_s", "GB/s", "all ranks at once", samples=True, derived=True)
copies = Table("copies", "copy {kind}", [Col("kind", words=COPIES), Col("mib", "count", "MiB"), together])

size, times = Col("bytes", "B", "size", role="collective.size_bytes"), Col("times_us", "us", "time", samples=True)
busbw = Col("busbw_gbps", "Gbps", "bus bandwidth", _busbw, "bytes times_us world", True)
algbw = Col("algbw_gbps", "Gbps", "algorithm bandwidth", _algbw, "bytes times_us", True)
rates = [replace(rate, role=f"collective.{rate.name[:5]}_gbytes_per_s") for rate in (busbw, algbw)]
wrong = Col("wrong_elements", "count", "wrong elements", role="collective.wrong_elements")
allreduce = Table("allreduce", "all-reduce of {bytes}", [size, times, *rates, wrong], _exchange)
disk = Table("disk", "disk", [Col("bytes", "B"), Col("gbytes_per_s", "GB/s", samples=True)])
run = run_table()
largest, smallest = allreduce.most("bytes"), allreduce.most("bytes", least=True)
compared = products.where(highest_flops=bool)  # with the machine's earlier runs
higher, fastest = compared.unless(highest_of=""), allreduce.ran().most("busbw_gbps")


def _left_out(run: Rows) -> list[str]:
    """Name the planned products that were left out: a peak over fewer sizes may be too low."""
    parts = []
    for product in products.ran().rows(run):
        name = product["precision"]
        sizes = {*run.config.matmul_sizes} - {row["n"] for row in matmul.where(precision=name).rows(run)}
        if sizes:
            parts.append(f"{name} at n = {listing([str(size) for size in sorted(sizes)])}")
    why = "one would take longer than a measurement may, or finds no memory"
    return [f"Incomplete: there are no matrix products in {listing(parts)}: {why}."] if parts else []


def _published(run: Rows) -> list[Measured]:
    """Return the matrix products of one device alone, by precision, and the all-reduce of the largest message."""
    device = device_name(run.machine, run.config.backend, run.config.nproc)
    alone = [(row["precision"], products["alone_flops"].number(row, run)) for row in products.ran().rows(run)]
    values = [
        Measured("matmul_flops", f"matrix products in {name}", flops, device, {"precision": name, "devices": 1})
        for name, flops in alone
        if flops is not None
    ]
    for row in largest.ran().rows(run):
        gbps, named = (
            allreduce["busbw_gbps"].number(row, run) or 0.0,
            {"definition": "bus bandwidth", "devices": run.world},
        )
        named |= {"nodes": run.config.nnodes, "message_bytes": row["bytes"]}
        values.append(Measured("allreduce_gbps", "all-reduce", gbps, device, named))
    return values


def _gated(name: str, of: Ref, label: str, basis: str, headline: bool = False) -> Metric:
    return Metric(name, of, "higher", label, basis, MAY_LOSE, headline=headline)


PRODUCTS, AT_ONCE = "Matrix products, {precision}, ", "n = {n}, ranks at once: {ranks}"
RIGHT = "right results"  # the rule that the check shows
BEST = "n = {peak_n}, ranks at once: {ranks}, best samples"
SPEC = Spec(
    tables=[products, matmul, copies, allreduce, disk, run],
    metrics=[
        _gated(
            "matmul_{precision}_peak_flops", products["peak_flops"], "Peak of matrix products, {precision}", BEST, True
        ),
        _gated("matmul_{precision}_flops", products["flops"], PRODUCTS + "median", AT_ONCE),
        _gated("matmul_{precision}_alone_flops", products["alone_flops"], PRODUCTS + "one rank alone", "n = {n}"),
        _gated(
            "matmul_{precision}_best_flops", products["best_flops"], PRODUCTS + "best sample", "of any rank and size"
        ),
        Metric(
            "matmul_{precision}_highest_flops",
            compared["highest_flops"],
            "none",
            "Highest, {precision}",
            "{highest_of}",
        ),
        _gated("copy_{kind}_gbytes_per_s", copies["gbytes_per_s"], "Memory copy, {kind}", "{kind}, {mib} MiB", True),
        _gated("allreduce_gbps", largest["busbw_gbps"], "All-reduce (bus), largest message", "{bytes}", True),
        _gated("allreduce_algbw_gbps", largest["algbw_gbps"], "All-reduce (algorithm), largest message", "{bytes}"),
        Metric("allreduce_latency_us", smallest["times_us"], "lower", "All-reduce latency", "{bytes}", headline=True),
        # Not judged: disks of shared machines vary by more than any limit.
        Metric("disk_write_gbytes_per_s", disk["gbytes_per_s"], "none", "Disk write", "{bytes}, synced", headline=True),
        Metric("startup_s", run["startup_s"], "lower", "Start-up"),
        Metric("total_s", run["total_s"], "lower", "Whole run", headline=True),
    ],
    checks=[
        zero(
            "all-reduce right", "Is every element of every timed exchange correct?", allreduce[wrong.name], rule=RIGHT
        ),
        rule("possible scaling", "Are all ranks at most as fast as the best rank times their number?", "scaling"),
    ],
    says=[
        each(products.ran(), "Matrix products in {precision} peak at {peak_flops} in this run (n = {peak_n})."),
        each(higher, "The highest in {precision} of this machine's runs is {highest_flops} ({highest_of})."),
        each(copies.ran().most("gbytes_per_s"), "The fastest copies reach {gbytes_per_s} ({kind})."),
        each(fastest, "The all-reduce reaches {busbw_gbps} of bus bandwidth at {bytes}."),
        "These are the best of this run and no bounds: other sizes, or a quieter machine, may show more.",
    ],
    shows=[
        Show("Matrix products", products.ran(), "precision n flops alone_flops best_flops peak_flops peak_n"),
        Show("Matrix products by rank", matmul, "precision n rank together_flops alone_flops"),
        Show("Memory copies", copies.ran(), "kind mib gbytes_per_s"),
        Show("All-reduce by size", allreduce.ran(), "bytes times_us busbw_gbps algbw_gbps wrong_elements"),
    ],
    charts=[
        bars(
            "matmul-peaks",
            *(products[name] for name in ("peak_flops", "flops", "alone_flops")),
            title="Matrix products reach {peak_flops} in {precision} at n = {peak_n}",
            empty="No matrix product was measured.",
        ),
        lines(
            "allreduce",
            Line(allreduce["busbw_gbps"], ""),
            Line(allreduce["algbw_gbps"], "", dashed=lambda row: True),
            y="Gbps",
            title="The all-reduce reaches {busbw_gbps} of bus bandwidth at {bytes}",
            empty="One rank exchanges nothing.",
            log=False,
        ),
    ],
    warnings=_left_out,
    published=_published,
)
