"""The collectives benchmark on gloo processes: every operation verified, injected faults seen, tables that agree, times by a clock that only the work moves."""

import numpy as np
import pandas as pd
import pytest
import torch
import torch.distributed as dist
from worlds import in_ranks, in_world

from benchlib.benchmarks import BENCHMARKS
from benchlib.benchmarks.collectives import overlap
from benchlib.config.schema import build, save_config
from benchlib.core.events import read_events
from benchlib.judge.baselines import find
from benchlib.results.run import Run
from benchlib.runtime.measurement import executed
from benchlib.workloads import collective_timing
from benchlib.workloads.collective_ops import Place
from benchlib.workloads.collective_timing import Case, Exercise, Pace, interleaved

SMALL = {
    "sizes": "1,999,4KiB,64KiB", "type_sizes": "100", "share_sizes": "64KiB", "bucket_bytes": [1000, 20000],
    "seconds": 0.001, "compare_gradients": [],
    "budget_s": 1e5,  # nothing is cut or shortened, however slow the machine
}  # fmt: skip
CPU = torch.device("cpu")
COLLECTIVES = BENCHMARKS["collectives"]
ROOTED = ("reduce", "gather")  # only rank 0 gets something


def _run(folder, nproc, **values):
    folder.mkdir(exist_ok=True)
    (folder / "logs").mkdir()
    save_config(build("collectives", SMALL | values | {"nproc": nproc}), folder)
    in_ranks(nproc, folder, _work)
    return Run(folder)


def _work(config, folder, events):
    executed(COLLECTIVES)(config, folder, events)


def _checks(run):
    return {check.name: check for check in COLLECTIVES.spec.judge(run, find(run))}


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return _run(tmp_path_factory.mktemp("two") / "run", nproc=2, compare_gradients=["gloo"])


def test_two_ranks_verify_every_operation_type_and_reduction(two):
    series = pd.DataFrame(two.result.tables["series"])
    assert series.wrong_elements.sum() == 0
    assert (series[series.operation != "barrier"].checked_elements > 0).all()
    assert set(series.operation) == set(two.config.operations)
    assert set(series.variant) == {"library", "async", "direct", "ring", "tree", "rs_ag"}
    # gloo averages by a division that whole numbers do not have; everything else it has.
    lacking = {(row["dtype"], row["reduction"]) for row in two.result.tables["unsupported"]}
    assert lacking == {("int32", "avg"), ("int64", "avg"), ("uint8", "avg")}
    assert {row["reason"] for row in two.result.tables["unsupported"]} == {"it does not average whole numbers"}
    library = series[(series.variant == "library") & (series.operation != "barrier")]
    kinds = set(zip(library.operation, library.dtype, library.reduction, strict=True))
    assert len(kinds) == 3 * (6 * 5 - 3) + 6 * 6
    # Less than an element becomes one, or one for each rank; odd sizes are cut to whole elements.
    small = library[(library.dtype == "fp32") & library.reduction.isin(["", "sum"])].groupby("operation").bytes.agg(set)
    assert small["broadcast"] == {4, 996, 4096, 65536, 100}
    assert small["all_gather"] == {8, 992, 4096, 65536, 96}


def test_times_limits_and_pairs_stand_beside_the_curves(two):
    tables = two.result.tables
    for index, row in enumerate(tables["series"]):
        times = two.row_samples[f"series[{index}].times_us"]
        assert row["times_us"] == pytest.approx(np.median(times)) and len(times) >= 3
    assert {row["bound"] for row in tables["bounds"] if row["times_us"] > 0} == {"socket_one_way", "socket_all_ranks"}
    assert all(row["bytes"] == 65536 and row["times_us"] > 0 for row in tables["shares"])
    assert [(row["source"], row["target"]) for row in tables["pairs"]] == [(0, 1), (1, 0)]
    status = {name: check.status for name, check in _checks(two).items()}
    assert "FAIL" not in status.values(), status
    names = ("right results", "all verified", "numbers agree", "same gradients", "whole plan")
    assert {status[name] for name in names} == {"PASS"}
    progress = [event for event in read_events(two.path, {"progress"}) if event["source"] == "rank0"]
    assert progress[-1]["done"] == progress[-1]["total"]


def test_a_fault_of_one_rank_alone_is_found_in_every_operation(tmp_path):
    """Also beside a computation, and in the buckets of gradients."""
    values = {"dtypes": ["fp32"], "sizes": "3,4KiB", "bucket_bytes": [1, 4000]}
    run = _run(tmp_path / "run", nproc=2, planted_fault_rank=1, **values)
    series = pd.DataFrame(run.result.tables["series"])
    wrong = series[series.wrong_elements > 0]
    # Of what only the root gets, the faulty rank has nothing to spoil.
    assert set(wrong.operation) == set(run.config.operations) - {"barrier", *ROOTED}
    assert (series[~series.operation.isin(["barrier", *ROOTED])].wrong_elements > 0).all()
    check = _checks(run)["right results"]
    assert check.status == "FAIL"
    assert "on rank 1 is" in check.reason and "on rank 0" not in check.reason
    (beside,) = [row for row in run.result.tables["overlap"] if row["operation"] == "all_reduce"]
    # One element of each run of rank 1 is wrong: 9 to size the computation, 9 alone and 9 together; both ranks compare all.
    assert (beside["wrong_elements"], beside["checked_elements"]) == (27, 27 * 2 * 1024)
    # Two buckets, of 1 and of 1,000 elements, on both ranks; the rounds of warm-up are compared as well.
    (buckets,) = run.result.tables["buckets"]
    rounds, rest = divmod(buckets["checked_elements"], 2 * 1001)
    assert rest == 0
    assert buckets["wrong_elements"] == 2 * rounds


def test_one_rank_measures_without_a_bus(tmp_path):
    run = _run(tmp_path / "run", nproc=1, dtypes=["fp32"], sizes="4,999")
    assert run.result.metric("allreduce_busbw_gbps").value is None
    assert run.result.facts["wrong_elements"] == 0
    reasons = {row["operation"]: row["reason"] for row in run.result.tables["unsupported"]}
    assert reasons["send_recv"] == "one rank has nobody to send to"
    assert [row["reason"] for row in run.result.tables["bounds"]] == ["one rank has nobody to talk to"] * 2


class Clock:
    """Seconds that only ``Work`` moves."""

    now = 0.0

    def perf_counter(self):
        return self.now


class Work(Exercise):
    """An operation that holds its caller up, then goes on by itself; every run has one wrong element of ten."""

    def __init__(self, clock, held=0.005, seconds=0.0, is_limit=False):
        super().__init__(Case("all_reduce", "async", "fp32", "sum", True, 4), Place(0, 1, CPU))
        self.clock, self.held, self.seconds, self.is_limit = clock, held, seconds, is_limit

    def restore(self):
        self.ready = True

    def start(self, later=True):
        self.clock.now += self.held
        self.end = self.clock.now + self.seconds
        return self

    def wait(self):
        self.clock.now = max(self.clock.now, self.end)

    def check(self):
        was, self.ready = self.ready, False
        return int(was), 10


@pytest.fixture
def clock(group, monkeypatch):
    own = Clock()
    monkeypatch.setattr(collective_timing, "time", own)
    return own


def test_every_run_is_compared_and_a_planted_slowdown_holds_operations_but_not_limits(clock, monkeypatch):
    held = []
    monkeypatch.setattr(collective_timing, "hold", held.append)
    pace = Pace(seconds=0.0, slowdown=1.0, least=5, warmup=2)
    own, other = interleaved([Work(clock), Work(clock, is_limit=True)], CPU, pace)
    assert (own.wrong, own.checked, len(own.seconds)) == (other.wrong, other.checked, len(other.seconds)) == (7, 70, 5)
    assert held == pytest.approx([0.005] * 7)  # the operation's runs
    assert other.seconds == pytest.approx([0.005] * 5)


def test_seconds_and_the_most_rounds_bound_a_series(clock):
    for pace, rounds in ((Pace(seconds=0.1, most=3), 3), (Pace(seconds=0.099), 20)):
        (series,) = interleaved([Work(clock)], CPU, pace)
        assert len(series.seconds) == rounds


SHORT_S, LONG_S = 0.02, 0.05


def _hidden_share(rank, size):
    """The share of a collective that is hidden behind a computation of known times; of one that blocks none is."""
    clock = collective_timing.time = Clock()
    overlap.PACE, own = overlap.PACE._replace(least=3, most=3), LONG_S if rank == size - 1 else SHORT_S
    products = lambda seconds: lambda *_: lambda: setattr(clock, "now", clock.now + seconds)  # noqa: E731
    overlap.products = products(own)
    behind = overlap.overlapped(Work(clock, 0.0, SHORT_S), CPU)
    assert behind["alone_us"] == pytest.approx([1e6 * SHORT_S] * 3)
    assert behind["compute_us"] == pytest.approx([1e6 * LONG_S] * 3)  # that of the slowest rank, on all ranks
    assert behind["hidden_share"] == pytest.approx(1) and "why" not in behind
    # Alone twice and together, those that warm up as well, on both ranks.
    assert (behind["wrong_elements"], behind["checked_elements"]) == (15 * size, 150 * size)
    overlap.products = products(LONG_S)
    blocking = overlap.overlapped(Work(clock, SHORT_S), CPU)
    assert blocking.get("hidden_share", 0.0) == pytest.approx(0, abs=1e-4)
    seen = [None] * size
    dist.all_gather_object(seen, behind)
    assert seen == [behind] * size


def test_what_is_hidden_behind_a_computation(tmp_path):
    in_world(2, tmp_path, _hidden_share)
