"""How much of an asynchronous collective is hidden behind a computation.

Each round times the collective alone, the computation alone and both together, and the medians over the rounds are
compared by ``hidden_share``: 1 where the shorter one costs nothing, 0 where they run one after the other. Times that give no
share (the two get in each other's way, or one alone was disturbed) are kept without one. On a CPU the collective computes
too (copies, sums), so that as many free cores as its threads need are the condition for a high share. On an accelerator the
computation occupies every multiprocessor: the share is what a collective hides beside a busy device.
"""

import gc
import math
import statistics
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchlib.benchmarks.collectives.bench import Bench, Row
from benchlib.benchmarks.collectives.config import CollectivesConfig
from benchlib.core.definitions import algbw_gbps, hidden_share, size_text
from benchlib.core.machine import MOVES
from benchlib.results.metrics import derived, not_available
from benchlib.runtime import devices, group
from benchlib.runtime import group as process_group
from benchlib.runtime.group import World
from benchlib.runtime.libraries import LIBRARIES, Library
from benchlib.workloads.collective_ops import OPS, message
from benchlib.workloads.collective_timing import Case, Exercise, Kind, Series, take, time_all_reduce

ROUNDS = 7
WARMUP = 2
SIDE = 256  # of the matrices: their products stay in a core's cache, so they compete for cores, not for memory
BATCH = 128  # products at once on an accelerator: 512 tiles of 128 x 128, more than any has multiprocessors
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Overlap:
    """Medians over the rounds; a time is that of the slowest rank. The same on every rank."""

    alone_s: float
    compute_s: float
    together_s: float

    @property
    def hidden_share(self) -> float | None:
        """The part of the shorter one that costs no time; None where the times give no share."""
        return hidden_share(self.alone_s, self.compute_s, self.together_s)[0]


def overlapped(
    start: Callable[[], dist.Work],
    compute: Callable[[], object] | None = None,
    device: torch.device = CPU,
    group: dist.ProcessGroup | None = None,
    rounds: int = ROUNDS,
    prepare: Callable[[], object] = lambda: None,
    verify: Callable[[], object] = lambda: None,
) -> Overlap:
    """Measure what ``start`` begins, ``compute``, and both. Collective: all ranks of ``group`` call it.

    ``start`` begins a collective on ``group`` and returns its work; without ``compute`` matrix products that take as
    long as the collective are used. Around every run of the collective, alone or beside the computation, ``prepare`` is
    called before it and ``verify`` after it, neither of which is timed.
    """

    def alone() -> None:
        start().wait()

    if compute is None:
        runs = [_exchange(alone, device, group, prepare, verify) for _ in range(WARMUP + rounds)]
        compute = products(statistics.median(runs[WARMUP:]), device, group)

    def together() -> None:
        work = start()
        compute()
        work.wait()

    phases: list[tuple[Callable[[], object], list[float]]] = [(alone, []), (compute, []), (together, [])]
    for count in range(WARMUP + rounds):
        for phase, times in phases:
            if phase is compute:
                taken = _time(phase, device, group)
            else:
                taken = _exchange(phase, device, group, prepare, verify)
            if count >= WARMUP:
                times.append(taken)
    return Overlap(*(statistics.median(times) for _, times in phases))


def _exchange(
    phase: Callable[[], object],
    device: torch.device,
    group: dist.ProcessGroup | None,
    prepare: Callable[[], object],
    verify: Callable[[], object],
) -> float:
    prepare()
    taken = _time(phase, device, group)
    verify()
    return taken


def products(seconds: float, device: torch.device = CPU, group: dist.ProcessGroup | None = None) -> Callable[[], None]:
    """Return a computation of about ``seconds`` on the slowest rank, the same on all of them: products of matrices.

    Collective: all ranks of ``group`` call it.
    """
    matrix = torch.full((1 if device.type == "cpu" else BATCH, SIDE, SIDE), 1.0 / SIDE, device=device)
    product = torch.empty_like(matrix)

    def multiply(count: int) -> None:
        for _ in range(count):
            torch.bmm(matrix, matrix, out=product)

    some = 20
    one_s = _median(lambda: multiply(some), device, group, ROUNDS) / some
    count = max(1, math.ceil(seconds / one_s))
    return lambda: multiply(count)


def _median(phase: Callable[[], object], device: torch.device, group: dist.ProcessGroup | None, rounds: int) -> float:
    return statistics.median([_time(phase, device, group) for _ in range(WARMUP + rounds)][WARMUP:])


def _time(phase: Callable[[], object], device: torch.device, group: dist.ProcessGroup | None) -> float:
    """Return the seconds that a phase takes on the slowest rank."""
    devices.synchronize(device)
    dist.barrier(group)
    began = time.perf_counter()
    phase()
    devices.synchronize(device)
    taken = torch.tensor([time.perf_counter() - began], dtype=torch.float32, device=device)
    dist.all_reduce(taken, op=dist.ReduceOp.MAX, group=group)
    return float(taken)


# Does training give the same gradients whichever library exchanges them?
#
#     rows = compare(world, ["gloo", "mpi", "ucc"])
#
# Within one set of processes a small model is trained once per library, data-parallel (DDP) over a group of that library
# alone, in fp64. Every gradient of every step and the weights at the end are held against the same training by a single
# process on the whole batch, which each rank computes for itself, and against what gloo gave. In fp64 only the order of
# the sums differs, some 1e-16 of each value; a contribution that is lost, doubled or divided by the wrong count shows in
# the first digits.


TOLERANCE = 1e-12
STEPS = 3
SAMPLES = 4  # of each rank and step
BUCKET_MB = 0.001  # so small that the model's gradients travel in several all-reduces

Trace = list[torch.Tensor]


def compare(world: World, names: Sequence[str]) -> list[dict[str, Any]]:
    """Train over each library and return a row for each, in the order of ``names``, the same on every rank.

    Rows: {collective, max_difference (to the single process; None where skipped), gloo_difference (to gloo's run; no
    column for gloo and where gloo did not come before), tolerance, status: "compared" or "skipped", reason}. A collective: every
    rank of the default group calls it with the same names, and asks for gloo first so that others can be held to it.
    """
    reference = _train(None, range(world.size), torch.device("cpu"))
    rows, by_gloo = [], None
    for name in names:
        row: dict[str, Any] = {
            "collective": name, "max_difference": None, "tolerance": TOLERANCE, "status": "skipped", "reason": _lacking(name),
        }  # fmt: skip
        if not row["reason"]:
            trace = _train_over(LIBRARIES[name], world)
            mine = [difference(trace, reference), difference(trace, by_gloo) if by_gloo else 0.0]
            worst = [max(values) for values in zip(*process_group.all_gather_objects(mine), strict=True)]
            row |= {"status": "compared", "max_difference": worst[0]} | (
                {"gloo_difference": worst[1]} if by_gloo else {}
            )
            by_gloo = trace if name == "gloo" else by_gloo
        rows.append(row)
    return rows


def difference(item: Trace, other: Trace) -> float:
    """Return the largest absolute difference between two runs; infinite where either has a number that is not finite."""
    worst = float(torch.stack([(a - b).abs().max() for a, b in zip(item, other, strict=True)]).max())
    return worst if math.isfinite(worst) else math.inf


def _lacking(name: str) -> str:
    """Return why the library cannot be used on some rank, the same text on all; '' where it can on all of them."""
    reasons = process_group.all_gather_objects(LIBRARIES[name].unavailable())
    return next((f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason), "")


def _train_over(library: Library, world: World) -> Trace:
    kinds = MOVES[library.name]
    device = world.device if world.device.type in kinds else torch.device(kinds[0])
    group = dist.new_group(backend=library.register())
    try:
        return _train(group, [world.rank], device)
    finally:
        gc.collect()  # the reducer goes before the group that it talks through
        dist.destroy_process_group(group)


def _train(group: dist.ProcessGroup | None, parts: Sequence[int], device: torch.device) -> Trace:
    """Train on the given parts of each step's batch; return all gradients and the last weights as fp64 on the CPU."""
    torch.manual_seed(7)
    model = torch.nn.Sequential(
        torch.nn.Linear(12, 33), torch.nn.Tanh(), torch.nn.LayerNorm(33), torch.nn.Linear(33, 5)
    ).to(device=device, dtype=torch.float64)
    wrapped: torch.nn.Module = model
    if group is not None:
        wrapped = DistributedDataParallel(model, process_group=group, bucket_cap_mb=BUCKET_MB)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trace: Trace = []
    for step in range(STEPS):
        pairs = [_batch(step, part) for part in parts]
        inputs, targets = (torch.cat(tensors).to(device) for tensors in zip(*pairs, strict=True))
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(wrapped(inputs), targets).backward()
        trace += [item.grad.detach().cpu().clone() for item in model.parameters() if item.grad is not None]
        optimizer.step()
    return trace + [item.detach().cpu().clone() for item in model.parameters()]


def _batch(step: int, part: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return one rank's part of a step's batch: inputs (SAMPLES, 12) and targets (SAMPLES, 5)."""
    source = torch.Generator().manual_seed(1000 * step + part)
    return (
        torch.randn(SAMPLES, 12, generator=source, dtype=torch.float64),
        torch.randn(SAMPLES, 5, generator=source, dtype=torch.float64),
    )


# What a run measures beside the curves: pairs of ranks, what hides behind computing, the gradients of a training.


PAIR_SHARE = 0.3  # of the time of a series that a pair gets
LATENCY_BYTES = 8
# What training hides behind its computation: gradients, and the parts of sharded weights.
OVERLAPPED = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
OVERLAP_BYTES = 16 << 20
OVERLAP_SERIES = 8  # series of an operation that ``overlapped`` takes as long as
GRADIENTS = "gradient_allreduce_gbps"


def measure_pairs(bench: Bench) -> None:
    """Send a message from each rank to each other one, pair by pair, into the table ``pairs``. A collective."""
    rows: list[Row] = []
    size, ranks = bench.config.pair_bytes, bench.world.size
    pairs = [(source, target) for source in range(ranks) for target in range(ranks) if source != target]
    if bench.config.pairs and pairs and bench.fits(f"the matrix of {len(pairs)} pairs", size, 2 * len(pairs)):
        for source, target in pairs:
            small, large = (_message(bench, source, target, each) for each in (LATENCY_BYTES, size))
            rows.append(
                {
                    "source": source,
                    "target": target,
                    "bytes": large.bytes,
                    "gbps": algbw_gbps(large.bytes, float(np.median(large.seconds))),
                    "latency_us": 1e6 * float(np.median(small.seconds)),
                }
            )
    bench.tables["pairs"] = rows
    bench.step()


def _message(bench: Bench, source: int, target: int, size: int) -> Series:
    case = Case("send_recv", "library", "uint8", "", False, size)
    exercise = Exercise(case, bench.place, bench.fault, message(source, target))
    series = take(exercise, bench.world.device, bench.pace(PAIR_SHARE * bench.config.seconds))
    bench.tally(f"rank {source} to rank {target}, {size_text(size)}", series, exercise)
    return series


def measure_overlap(bench: Bench, cases: Sequence[Case]) -> None:
    """Run each operation beside matrix products of the same length, into the table ``overlap``. A collective."""
    rows: list[Row] = []
    for case in cases:
        if bench.fits(f"the overlap of {case.label()}", case.bytes, OVERLAP_SERIES):
            exercise = Exercise(case, bench.place, bench.fault)
            timed, wrong, checked = _overlapped(exercise, bench)
            rows.append(
                {
                    "operation": case.operation,
                    "bytes": exercise.bytes,
                    "alone_us": 1e6 * timed.alone_s,
                    "compute_us": 1e6 * timed.compute_s,
                    "together_us": 1e6 * timed.together_s,
                    "hidden_share": timed.hidden_share,
                }
            )
            bench.count(f"overlapped {case.label()}", *_over_ranks(wrong, checked), exercise.first_wrong)
        bench.step()
    bench.tables["overlap"] = rows


def _overlapped(exercise: Exercise, bench: Bench) -> tuple[Overlap, int, int]:
    """Return the times of an operation beside a computation, and this rank's wrong and checked elements of all its runs."""
    counts: list[tuple[int, int]] = []

    def verify() -> None:
        counts.append(exercise.check())

    timed = overlapped(exercise.start, device=bench.world.device, prepare=exercise.restore, verify=verify)
    return timed, sum(count[0] for count in counts), sum(count[1] for count in counts)


def overlap_cases(config: CollectivesConfig, lacking: Collection[Kind]) -> list[Case]:
    """Return the operations that run beside a computation: those between all ranks, in the headline type."""
    if "overlap" not in config.variants:
        return []
    size = min(config.size_list[-1], OVERLAP_BYTES)
    chosen = []
    for operation in config.operations:
        if operation in OVERLAPPED:
            reduction = config.reductions[0] if OPS[operation].reduces else ""
            chosen.append(Case(operation, "async", config.dtypes[0], reduction, OPS[operation].placements[0], size))
    return [case for case in chosen if case.kind not in lacking]


def measure_gradients(bench: Bench) -> None:
    """Time the all-reduce of the gradient buckets one after the other, as a training step has them. A collective."""
    config, total = bench.config, sum(bench.config.bucket_bytes)
    buckets = f"{len(config.bucket_bytes)} buckets of {size_text(min(config.bucket_bytes))} to {size_text(max(config.bucket_bytes))}, one after the other"
    if bench.world.size == 1:
        metric = not_available(GRADIENTS, "Gbps", "higher", "one rank has nobody to exchange with")
    elif not bench.fits("the gradient buckets", total):
        metric = not_available(GRADIENTS, "Gbps", "higher", bench.cut[-1])
    else:
        exchange = time_all_reduce(config.bucket_bytes, bench.world.device, bench.pace(config.seconds), bench.fault)
        bench.count("the gradient buckets", exchange.wrong, exchange.checked)
        metric = derived(
            GRADIENTS, exchange.busbw_gbps, "Gbps", "higher", f"bus bandwidth of {buckets}: bytes over time of all"
        )
    bench.metrics.append(metric)
    bench.step()


def _over_ranks(wrong: int, checked: int) -> tuple[int, int]:
    counts = group.all_gather_objects((wrong, checked))
    return sum(item[0] for item in counts), sum(item[1] for item in counts)


def compare_gradients(bench: Bench) -> None:
    """Train a small model over each library and compare the gradients, into the table ``gradients``. A collective.

    The library that the run itself uses is one of them.
    """
    named = bench.config.compare_gradients
    names: list[str] = list(dict.fromkeys([*named, bench.world.collective])) if named else []
    bench.tables["gradients"] = compare(bench.world, names) if names else []
    bench.step()
