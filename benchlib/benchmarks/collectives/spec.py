"""What a run of the collectives states: every series with its verification, the limits beside it, shares, fits, crossings."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchlib.benchmarks.collectives.config import COMPARABLE_US, NO_BUS, CollectivesConfig
from benchlib.core.definitions import BUS_FACTORS, algbw_samples, busbw_samples, size_text
from benchlib.core.text import listing
from benchlib.judge.checks import Check as Judged
from benchlib.runtime.transport import SOCKET
from benchlib.spec.charts import Chart, Line, bars, grid, lines, stacked
from benchlib.spec.checks import Check, above_zero, below, reached, rule, zero
from benchlib.spec.spec import Bound, Metric, Published, Show, Spec, each, run_metrics, run_table
from benchlib.spec.tables import Col, Row, Rows, Table, cols
from benchlib.workloads.operations import OPS, TOGETHER, VARIANTS, Op, bus_conditions

MIN_TIME_SHARE = 0.5  # of what a series was to get; with less, its percentiles are those of a handful of rounds
# A share of a limit that was measured interleaved with the operation exceeds 1 by noise, but not by more than this. Above it the
# limit was not one: the library drives the network faster than one stream of a socket.
NO_LIMIT = 1.05
WITH_SWITCH = ("nccl", "rccl", "sharp")  # libraries in whose algorithms a switch may add
LABELS = {op.name: op.label for op in OPS.values()}
WAYS = {name: way.label for name, way in VARIANTS.items()}
BOUNDS = {"socket_one_way": "TCP socket one way", "socket_all_ranks": "TCP socket all ranks", "link": "claimed link"}
FASTER = {
    "above": "faster from",
    "below": "faster up to",
    "always": "faster at every size",
    "never": "slower at every size",
    "mixed": "neither consistently faster nor slower: the curves cross several times",
    "unknown": "timed at one size",
}


def _shares(busbw: list[float], size: float, limit_us: list[float]) -> list[float]:
    return [rate / limit for rate, limit in zip(busbw, algbw_samples(size, limit_us), strict=True)]


def _no_limit(shares: Any) -> str:  # nan where the rounds of both are not as many
    return "(faster than it)" if isinstance(shares, list) and median(shares) > NO_LIMIT else ""


def _exchange(row: Row, run: Rows) -> dict[str, Any]:
    """Return what makes a row a claim: the ranks, the algorithm, and what the links are claimed to carry."""
    operation, variant = row.get("operation", "all_reduce"), row.get("variant", "library")
    if operation not in BUS_FACTORS:
        return {}
    library = str(run.run.get("collective", ""))
    claim = {"operation": operation, "ranks": run.world, "algorithm": "" if library in WITH_SWITCH else library}
    if time_us := series["times_us"].finite(row, run):
        claim["seconds"] = 1e-6 * time_us
    if variant in VARIANTS and VARIANTS[variant].own:
        claim["algorithm"] = variant
    if limit := _claimed_gbps(operation, run):
        source = next(str(link.get("source")) for link in links.ran().rows(run))
        claim |= {"bound_gbytes_per_s": limit / 8, "bound_source": f"claimed: {source}"}
    return {f"collective.{name}": value for name, value in claim.items()}


def _beside(here: float, claimed: float, time_us: float) -> float | None:
    return here / claimed if time_us >= COMPARABLE_US else None


def _claimed_gbps(operation: str, run: Rows) -> float | None:
    """Return the most that the bus bandwidth of an operation can be by the claimed link.

    Within a node the claim is of the links of one device, which carry what the bus bandwidth counts. Between nodes it is of
    all adapters of a node, which the traffic of an operation between nodes passes: busbw over its factor, times the factor
    of as many ranks as nodes; in an all-to-all each rank sends that. A message to rank 1 stays within the first node.
    """
    gbps = next((links["gbps"].finite(link, run) for link in links.ran().rows(run)), None)
    nodes, nproc = (run.config.nnodes, run.config.nproc) if run.config else (1, run.world)
    if gbps is None or nodes == 1:
        return gbps
    if operation == "send_recv" and nproc > 1:
        return None
    factor, senders = BUS_FACTORS[operation], nproc if operation == "all_to_all" else 1
    return gbps * factor(run.world) / factor(nodes) / senders


BUS = "operation bytes times_us world"  # what a bus bandwidth follows from
operation, variant, bound = Col("operation", words=LABELS), Col("variant", words=WAYS), Col("bound", words=BOUNDS)
size, times = Col("bytes", "B", "size"), Col("times_us", "us", "time", samples=True)
rate = Col("gbps", "Gbps", "bandwidth", algbw_samples, "bytes times_us", True)
busbw = Col("busbw_gbps", "Gbps", "bus bandwidth", busbw_samples, BUS, True, role="collective.busbw_gbytes_per_s")
wrong = Col("wrong_elements", "count", role="collective.wrong_elements")
compared = [wrong, Col("checked_elements", "count", "elements compared"), Col("first", label="first wrong element")]

place = Col("in_place", words={"True": "in place", "False": ""})
flaw = Col("flaw", of=lambda wrong: "with wrong results" if wrong else "", needs="wrong_elements")
claimed = [replace(size, role="collective.size_bytes"), replace(times, role="latencies.samples_s"), busbw]
case = [operation, variant, *cols("dtype reduction"), place]
SERIES = "{operation} {variant} {reduction} {dtype} {in_place}, {bytes}"
series = Table("series", SERIES, [*case, Col("curve"), flaw, *claimed, *compared], _exchange, "{first}")
bounds = Table("bounds", "{bound}, {bytes}", [bound, size, times, rate, *compared], note="{first}")
links = Table("links", "claimed link", [bound, size, Col("gbps", "Gbps", "claimed"), Col("source")])
ways = Table("ways", "{way}", [Col("way", label="way of the data"), Col("rdma", label="claimed adapters")], later=True)

limit = Col("bound_gbps", "Gbps", "of the limit", algbw_samples, "bytes bound_times_us", True)
share = Col("share", "ratio", "share, both interleaved", _shares, "busbw_gbps bytes bound_times_us", True)
no_limit = Col("no_limit", of=_no_limit, needs="share")
in_turns = [times, Col("bound_times_us", "us", samples=True), busbw, limit, share, no_limit, Col("target", "ratio")]
SHARE = "{operation} {variant}, {bytes} {no_limit}"
shares = Table("shares", SHARE, [operation, variant, size, bound, *in_turns, *compared], _exchange, "{first}")

line = [
    Col("alpha_us", "us", "α", derived=True),
    Col("bandwidth_gbps", "Gbps", "B (bus)"),
    Col("half_bytes", "B", "n1/2"),
]
fit = [*line, Col("residual", "ratio", "residual (rms)"), Col("points", "count", "sizes")]
fits = Table("fits", "{operation} {variant}", [operation, variant, *fit])
others = replace(variant, words=WAYS | {"library": "library"})
ratios = Table("ratios", "{variant}, {bytes}", [others, size, Col("ratio", "ratio", "time / the library's")])
crossover = Table("crossover", "{variant}", [variant, Col("faster", words=FASTER), size, Col("points", "count")])

apart = [Col("max_difference", "error", "largest difference"), Col("tolerance", "error"), *cols("status reason")]
gradients = Table("gradients", "{collective}", [Col("collective", label="library"), *apart])
ends = [*cols("source target", "number"), size, times, rate]
pairs = Table("pairs", "rank {source} to {target}", [*ends, *compared], note="{first}")
hidden = [*cols("alone_us compute_us together_us", "us", samples=True), Col("hidden_share", "ratio")]
overlap = Table("overlap", "{operation}, {bytes}", [operation, size, *hidden, *compared], note="{first}")
of_buckets = replace(busbw, of=lambda *values: busbw_samples("all_reduce", *values), needs="bytes times_us world")
sizes = [Col("buckets", "count"), *cols("least_bytes most_bytes", "B"), size, times, of_buckets]
buckets = Table("buckets", "buckets of gradients", [*sizes, *compared], _exchange, "{first}")

verified = Col("measured", "count", "verified", quality=0.0)
counts = [Col("planned", "count"), verified, Col("time_share", "ratio"), *cols("cut_from_bytes cut_to_bytes", "B")]
plan = Table("plan", "{part}", [Col("part"), *counts])
unsupported = Table("unsupported", "{operation} {reduction} {dtype}", [*case, Col("reason")])
stated = [*cols("ranks wrong_elements", "count"), *cols("placement source"), Col("time_us", "us")]
foreign = [operation, size, *stated, *cols("algbw_gbps busbw_gbps here_gbps", "Gbps")]
beside = Col("ratio", "number", "here / claimed", _beside, "here_gbps busbw_gbps time_us")
text = "{operation} {placement}, {bytes}"
nccl = Table("nccl_tests", text, [*foreign, beside])
run = run_table(*compared[:2])
EVERY = (series, bounds, shares, pairs, overlap, buckets)  # tables of what was compared

curves = series.where(curve=True)
largest, smallest = curves.most("bytes", "operation variant"), curves.most("bytes", "operation variant", least=True)
library, asked = curves.where(variant="library"), shares.most("bytes", "operation variant")
whole = asked.where(operation="all_reduce", variant="library")
start_up = fits.where(operation="all_reduce", variant="library")
of_all_reduce = library.where(operation="all_reduce")
crossed, uncrossed = crossover.where(faster=("above", "below")), crossover.unless(faster=("above", "below"))


def _alone(row: Row, run: Rows) -> str:
    return NO_BUS if run.world == 1 else ""


def _no_headline(row: Row, run: Rows) -> str:
    """Return why a bandwidth is none: one rank, or a curve that the time did not hold up to where the others are."""
    most = max(other["bytes"] for other in largest.rows(run))
    if row["bytes"] >= most / 2:  # what ranks share is rounded to whole elements of each, so never equal
        return _alone(row, run)
    return f"no size above {size_text(row['bytes'])} was measured, and others reached {size_text(most)}"


def _metrics(op: Op) -> Iterator[Metric]:
    """Yield the bandwidth at the largest size, the share of the sockets, and the time at the smallest size."""
    slug, label, grow = op.name.replace("all_reduce", "allreduce"), op.label.capitalize(), op.latency_may_grow
    for way, more, words in (("library", "", ""), ("direct", "_direct", ", direct")):
        of, is_first = {"operation": op.name, "variant": way}, op.target == way
        rate = partial(Metric, better="higher", may_lose=op.may_lose)
        if op.ends != "none" and op.name in VARIANTS[way].operations:
            bus, about = largest.where(**of)["busbw_gbps"], f"{label}{words} (bus)"
            yield rate(f"{slug}{more}_busbw_gbps", bus, about, series.title, headline=is_first, unless=_no_headline)
        if is_first:
            share, about = asked.where(**of)["share"], f"{label}{words} / raw sockets"
            basis = "of the {bound}, at {bytes}, interleaved"
            yield rate(f"{slug}{more}_socket_share", share, about, basis, headline=op.name == "all_reduce")
    least = smallest.where(operation=op.name, variant="library")["times_us"]
    about, is_key = f"{label} latency", grow is not None
    yield Metric(f"{slug}_latency_us", least, about, series.title, "lower", grow, unless=_alone, headline=is_key)


def _unclaimed(run: Rows) -> str:
    if run.world == 1:
        return "one rank has no bus"
    return "" if links.ran().rows(run) else "; ".join(str(link["reason"]) for link in links.rows(run))


def _ways_unknown(run: Rows) -> str:
    """Return why the ways of the data are not held against a claim."""
    if not (rows := ways.rows(run)):
        return "the library did not say by which ways it moved the data"
    return "" if rows[0]["rdma"] else "the profile claims no adapters that move data themselves (inter_node_rdma)"


def _ways(check: Check, run: Rows) -> Judged:
    named = [str(row["way"]) for row in ways.rows(run)]
    return check.answer(
        "FAIL" if SOCKET in named else "PASS", f"data moved by {listing(named)}", limit="adapters, no sockets"
    )


def _unnamed(run: Rows) -> str:
    return "" if run.config.compare_gradients else "no library was named (compare_gradients)"


def _whole_plan(check: Check, run: Rows) -> Judged:
    """Series with less than half of their time, like those that were cut, are a part of what was asked for: no pass."""
    words, whole, rows = list[str](), True, plan.rows(run)
    for row in rows:
        left, share = row["planned"] - row["measured"], plan["time_share"].number(row, run) or 0.0
        whole = whole and not left and share >= MIN_TIME_SHARE
        if left:
            cut = plan.text("from {cut_from_bytes} to {cut_to_bytes}", row, run)
            words.append(f"{left:,} of {row['planned']:,} {plan.name_of(row, run)} cut, {cut}")
        elif share < 0.99:
            words.append(f"{plan.name_of(row, run)} in {share:.0%} of their time")
    reason = "; ".join(words) or f"all of {sum(row['planned'] for row in rows):,} measurements"
    limit = f">= {MIN_TIME_SHARE:.0%} of its time"
    return check.answer("PASS" if whole else "SKIPPED", reason, limit=limit, gates=True)


def _verified(run: Rows) -> list[dict[str, str]]:
    """Return by operation what was timed and compared, then what no series has; the sums are those of the run."""
    entries = []
    for name, label in [*LABELS.items(), ("", "limits, turns, pairs, overlap, buckets")]:
        tables = [series.where(operation=name)] if name else EVERY[1:]
        rows = [row for table in tables for row in table.ran().rows(run)]
        kinds = {key: ", ".join(dict.fromkeys(row.get(key, "") for row in rows)) for key in ("dtype", "reduction")}
        sums = {col.heading: f"{sum(row[col.name] for row in rows):,}" for col in compared[:2]}
        entries += [{"operation": label, "series": f"{len(rows):,}"} | kinds | sums] if rows else []
    return entries


def _few_sizes(run: Rows, rows: list[Row]) -> list[Row]:
    """Leave at most seven sizes, the largest among them."""
    sizes = sorted({row["bytes"] for row in rows if row.get("bytes")}, reverse=True)
    chosen = sizes[:: max(1, -(-len(sizes) // 7))]
    return [row for row in rows if row.get("bytes") in chosen]


def _refuse(config: CollectivesConfig) -> None:
    if config.nccl_tests:
        from benchlib.benchmarks.collectives.foreign import read  # which imports the exports of all benchmarks

        read(Path(config.nccl_tests))


def _not_compared(run: Rows) -> dict[str, list[str]]:
    done = {row["collective"] for row in gradients.ran().rows(run)}
    return {"compare_gradients": [name for name in run.config.compare_gradients if name not in done]}


def _bandwidth(name: str, operations: Sequence[str], wire: str) -> Chart:
    """Draw the curves of the library and the direct ways, what nccl-tests claims, the sockets and the claimed link."""
    own = curves.where(operation=tuple(operations), variant=("library", "direct"))["busbw_gbps"]
    stated = nccl.where(operation=tuple(operations))["busbw_gbps"]
    return lines(
        name,
        Line(own, "variant flaw", name="library"),
        Line(stated, "placement", "claim", words="nccl-tests, claimed", name="in place"),
        Line(bounds.where(bound=wire)["gbps"], "bound", "limit"),
        Line(links["gbps"], "bound", "limit"),
        title="{operation} {variant} {flaw} reaches {busbw_gbps} at {bytes}",
        empty="No bandwidth between ranks was measured: one rank exchanges nothing.",
        facet="operation",
    )


def _hidden(run: Rows) -> str:
    texts = each(
        overlap.most("hidden_share"), "At best {hidden_share} of what can overlap does: {operation} of {bytes}"
    )(run)
    return texts[0] if texts else "The times do not tell what is hidden: they are too disturbed"


def _share_check(op: Op) -> Check:
    large = shares.where(operation=op.name, variant=op.target, bytes=lambda size: size >= op.target_bytes)
    name, question = f"{op.name.replace('_', '-')} share", f"Does {op.label} reach its share of what raw sockets carry?"
    source = "of raw sockets, interleaved"
    return reached(f"{name} at {{bytes}}", question, large["share"], f"target_share_{op.name}", source=source)


all_wrong = [table["wrong_elements"] for table in (*EVERY, run)]
with_data = series.unless(operation="barrier")
to_one_process = (gradients["max_difference"], gradients["tolerance"])
ALL_RIGHT = "Is every element of every result correct, on every rank?"
FASTER_THAN_LINKS = "Does no operation move more than the links are claimed to carry?"
BY_ADAPTERS = "Do the nodes exchange data by the adapters that are claimed, and not by sockets?"
SAME_GRADIENTS = "Does training over each library give the gradients of a single process?"
FAST_ENOUGH = "Do gradients travel fast enough, over all buckets of a step?"
SPEC = Spec(
    tables=[*EVERY, links, ways, fits, ratios, crossover, gradients, plan, unsupported, nccl, run],
    metrics=[
        *(metric for op in OPS.values() for metric in _metrics(op)),
        Metric("allreduce_alpha_us", start_up["alpha_us"], basis="{points} sizes, residual {residual}"),
        Metric(
            "gradient_allreduce_gbps",
            buckets["busbw_gbps"],
            "All-reduce of gradients (bus)",
            "{buckets} buckets of {least_bytes} to {most_bytes}, one after the other: bytes over time of all",
            "higher",
            may_lose=OPS["all_reduce"].may_lose,
            headline=True,
        ),
        *run_metrics(run),
    ],
    checks=[
        zero("right results", ALL_RIGHT, *all_wrong, rule="right results"),
        above_zero("all verified", "Was every timed result also compared?", with_data["checked_elements"]),
        rule("possible bandwidth", FASTER_THAN_LINKS, "busbw below the links", unless=_unclaimed),
        Check("links", BY_ADAPTERS, judge=_ways, unless=_ways_unknown, when=lambda config: config.nnodes > 1),
        below("same gradients", SAME_GRADIENTS, to_one_process, unless=_unnamed),
        Check("whole plan", "Did everything that was planned fit the time?", judge=_whole_plan),
        reached("gradient all-reduce", FAST_ENOUGH, buckets["busbw_gbps"], "target_allreduce_gbps", sign=">"),
        *(_share_check(op) for op in OPS.values() if op.target),
    ],
    says=[
        each(run, "{checked_elements} elements were compared bit by bit; {wrong_elements} are wrong."),
        each(
            asked.where(operation="all_reduce"),
            "The {operation} {variant} reaches {share} of the {bound} {no_limit} at {bytes}.",
        ),
        each(
            start_up.where(alpha_us=bool), "An all-reduce takes {alpha_us} to start: half of its time at {half_bytes}."
        ),
        each(crossed, "Against the library's all-reduce {variant} is {faster} {bytes}."),
        each(uncrossed, "Against the library's all-reduce {variant} is {faster}."),
    ],
    shows=[
        Show("Wrong results", series.where(wrong_elements=bool), "operation variant dtype bytes wrong_elements first"),
        Show("Verified", series, make=_verified),
        Show("Bus bandwidth by size", curves.pick(_few_sizes), "operation variant busbw_gbps", across="bytes"),
        Show("Median time by size", curves.pick(_few_sizes), "operation variant times_us", across="bytes"),
        Show("Shares of the limits", shares, "operation variant bytes busbw_gbps bound bound_gbps share target"),
        Show("Start-up time and bandwidth", fits),
        Show("Ways of the data, as NCCL says", ways),
        Show("The same gradients over each library", gradients),
        Show("Unsupported", unsupported),
        Show("Plan", plan),
        Show("Results of nccl-tests beside it", nccl),
    ],
    charts=[
        _bandwidth("collective-bandwidth", TOGETHER, "socket_all_ranks"),
        _bandwidth("rooted-bandwidth", [name for name in OPS if name not in TOGETHER], "socket_one_way"),
        bars(
            "limit-shares",
            asked["share"],
            mark=asked["target"],
            line=1.0,
            title="The {operation} {variant} reaches {share} of the {bound} {no_limit}",
            empty="No operation was measured beside a limit.",
        ),
        lines(
            "collective-latency",
            Line(library.where(bytes=lambda size: 0 < size <= 1 << 20)["times_us"], "", name="library"),
            Line(library.where(operation="barrier")["times_us"], "operation", "limit"),
            title="{operation} of {bytes} takes {times_us}",
            about=of_all_reduce.most("bytes", least=True),
            empty="No time of a collective was recorded.",
            facet="operation",
        ),
        grid(
            "pairs",
            pairs["gbps"],
            x="target",
            y="source",
            title="Rank {source} to {target} is the slowest pair: {gbps}",
            empty="No pair of ranks was measured.",
        ),
        lines(
            "crossover",
            Line(ratios["ratio"], "variant"),
            title="{variant} takes {ratio} of the library's time at {bytes}",
            about=ratios.unless(variant="library").most("ratio", least=True),
            empty="No algorithm was timed beside the library's all-reduce.",
        ),
        stacked(
            "overlap",
            overlap["compute_us"],
            overlap["alone_us"],
            mark=overlap["together_us"],
            x="time (µs), one after the other",
            title=_hidden,
            empty="No exchange was timed beside a computation.",
        ),
    ],
    # What is published of other operations the registry does not hold.
    published=[Published("allreduce_gbps", of_all_reduce.most("bytes")["busbw_gbps"], "all-reduce", bus_conditions)],
    verified=each(run, "{checked_elements} elements of every result, bit by bit"),
    bounds=[Bound("{operation} of {bytes}", whole["busbw_gbps"], whole["share"], "of the {bound} {no_limit}")],
    refuse=_refuse,
    missed=_not_compared,
    whole=lambda run: all(row["planned"] == row["measured"] for row in plan.rows(run)),
    exports=[
        (
            "nccl-tests",
            "collectives as nccl-tests prints them, by the times of single operations",
            f"{__package__}.foreign:write",
        )
    ],
)
