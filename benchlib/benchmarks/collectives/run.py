"""The collectives benchmark as each rank executes it: what is supported, the curves, the limits, the pairs, the types.

The plan is in the order of its worth and is fitted into the tier's time by what its first runs took: rounds are cut
first, then cases from its end, and what was cut is reported.
"""

import contextlib
import statistics
from collections.abc import Sequence
from pathlib import Path

import psutil
import torch

from benchlib.benchmarks.collectives import bench as support
from benchlib.benchmarks.collectives import extras, limits, metrics
from benchlib.benchmarks.collectives.bench import Bench
from benchlib.benchmarks.collectives.config import CollectivesConfig
from benchlib.benchmarks.collectives.plan import plan
from benchlib.config.schema import BaseConfig
from benchlib.core.definitions import size_text
from benchlib.core.errors import UserError
from benchlib.core.events import EventWriter, Moment
from benchlib.launch.nodes import place
from benchlib.results.metrics import measured
from benchlib.results.run import Result, save_result
from benchlib.runtime import group
from benchlib.workloads.collective_timing import Case

WHOLE = 0.99  # of its time: a series that was given less was shortened
# Of the budget, after which nothing more of a part is begun; the rest is for writing, and for what takes longer.
CURVES_SHARE, WAYS_SHARE, TYPES_SHARE = 0.4, 0.7, 0.85


def run(config: BaseConfig, run_dir: Path, events: EventWriter) -> None:
    """Measure as one rank; rank 0 leaves ``result.json``, ``samples.parquet`` and ``ledger.parquet``."""
    if not isinstance(config, CollectivesConfig):
        raise UserError(f"benchmark = {config.benchmark}: this is the collectives benchmark")
    began = Moment.at(psutil.Process().create_time())  # the import of torch is part of the start-up
    events.emit("phase", name="init")
    # Read before anything is measured: a wrong file is refused at once, and only the first node needs to have it.
    foreign = []
    if config.nccl_tests and place().rank == 0:
        from benchlib.benchmarks.collectives import nccl_tests

        foreign = nccl_tests.read(Path(config.nccl_tests))
    with group.world(config, run_dir) as world:
        bench = Bench(world, config, events, began)
        bench.tables["nccl_tests"] = foreign
        startup_s = max(group.all_gather_objects(began.since()))
        events.emit("phase", name="measure")
        _measure(bench)
        events.emit("phase", name="write")
        if world.main:
            _write(bench, run_dir, startup_s)


def _measure(bench: Bench) -> None:
    config, several = bench.config, bench.world.size > 1
    cases = plan(config)
    missing = support.lacking(cases, bench.place)
    bench.tables["unsupported"] = support.rows(missing)
    cases = [case for case in cases if case.kind not in missing]
    curves = [case for case in cases if case.share == 1 and case.variant == "library"]
    ways = [case for case in cases if case.share == 1 and case.variant != "library"]
    shares = limits.share_cases(config, list(missing)) if several else []
    overlaps = extras.overlap_cases(config, missing) if several else []
    bench.total = len(cases) + len(config.size_list) + len(shares) + len(overlaps) + 3
    _take(bench, curves, CURVES_SHARE, "curves")
    with contextlib.ExitStack() as stack:
        try:
            wires: limits.Sockets | str = stack.enter_context(limits.sockets(bench.place))
        except limits.NoSockets as error:
            wires = str(error)
        limits.measure_bounds(bench, wires)
        limits.measure_shares(bench, wires, shares)
    _take(bench, ways, WAYS_SHARE, "curves of other ways")
    extras.measure_pairs(bench)
    extras.measure_overlap(bench, overlaps)
    extras.measure_gradients(bench)
    extras.compare_gradients(bench)
    types = [case for case in cases if case.share < 1]
    _take(bench, types, TYPES_SHARE, "series of other types and reductions")


def _take(bench: Bench, cases: Sequence[Case], share: float, what: str) -> None:
    """Measure the cases one after the other, and tell what the time did not allow. A collective."""
    left_out: list[Case] = []
    granted: list[float] = []
    left_s = bench.left_s(share)
    for index, case in enumerate(cases):
        seconds = bench.schedule.pace(cases[index:], left_s)
        if seconds is None:
            left_out.append(case)
        else:
            granted.append(seconds / (bench.config.seconds * case.share))
            pace = bench.pace(seconds, brief=case.share < 1)
            bench.taken.append(bench.time(case, pace))
            before_s, left_s = left_s, bench.left_s(share)
            bench.schedule.learn(case.bytes, (before_s - left_s) / (len(bench.taken[-1].series.times_s) + pace.warmup))
        bench.step()
    if granted and statistics.fmean(granted) < WHOLE:
        bench.shortened[what] = statistics.fmean(granted)
    if left_out:
        sizes = sorted({case.bytes for case in left_out})
        bench.cut.append(
            f"{len(left_out)} of {len(cases)} {what}, from {size_text(sizes[0])} to {size_text(sizes[-1])}: no time in the budget of {bench.config.budget_s:g} s"
        )


def _write(bench: Bench, run_dir: Path, startup_s: float) -> None:
    config = bench.config
    lines = metrics.curves(bench.taken)
    fits = metrics.fit_rows(lines)
    bench.tables |= {
        "series": [metrics.series_row(taken) for taken in bench.taken],
        "ranks": [row for taken in bench.taken for row in metrics.rank_rows(taken, bench.world.hosts)],
        "fits": fits,
        "crossover": metrics.crossover_rows(lines),
        "wrong": bench.wrong,
    }
    metrics.save_ledger(run_dir, bench.taken)
    values = metrics.metrics(lines, fits, bench.world.size) + bench.metrics
    values.append(measured("startup_s", startup_s, "s", "lower"))
    values.append(measured("total_s", bench.began.since(), "s", "lower"))
    facts = {
        "wrong_elements": bench.wrong_elements,
        "checked_elements": bench.checked_elements,
        "collective": bench.world.collective,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "cut": bench.cut,
        "shortened": bench.shortened,
    }
    result = Result.of(
        config,
        status="complete",
        started_at=bench.began.wall,
        ended_at=bench.began.wall + bench.began.since(),
        metrics=values,
        facts=facts,
        tables=bench.tables,
        notes=[
            *([f"Groups of the exchange: {bench.world.layout}."] if bench.world.layout else []),
            *(f"Cut: {text}." for text in bench.cut),
        ],
    )
    save_result(run_dir, result)
