"""What the checks and sentences of the collectives say of results that are wrong, impossible, short or cut."""

import copy
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchlib.benchmarks.collectives import extras, tables
from benchlib.benchmarks.collectives import metrics as outcome
from benchlib.benchmarks.collectives.bench import Taken
from benchlib.benchmarks.collectives.judge import _possible, checks, claims, lacks, limits, missed, published, reading
from benchlib.benchmarks.collectives.limits import ALL_RANKS, CLAIMED, ONE_WAY, paired_shares
from benchlib.config.schema import build, save_config
from benchlib.core.definitions import BUS_FACTORS
from benchlib.judge.baselines import find
from benchlib.judge.impossible.own import Numbers
from benchlib.judge.numbers import judged_view
from benchlib.results.metrics import derived, measured
from benchlib.results.run import Result, Run, save_result
from benchlib.workloads.collective_timing import Case, Series

MIB = 2**20
SIZES = [2**power for power in range(10, 27, 2)]


def taken(size, variant="library", alpha=1e-4, beta=5e-10, wrong=0, dtype="fp32"):
    times = np.repeat(alpha + beta * size, 20).reshape(10, 2)
    times[:, 1] *= 0.9  # rank 0 is always the last
    case = Case("all_reduce", variant, dtype, "sum", True, size)
    return Taken(case, Series(size, times, wrong, 10 * size // 4), size // 4)


def honest(config):
    everything = [taken(size) for size in SIZES] + [taken(size, "tree", 5e-5, 1e-9) for size in SIZES]
    lines = outcome.curves(everything)
    fits = outcome.fit_rows(lines)
    metrics = outcome.metrics(lines, fits, 2)
    metrics += [
        derived("gradient_allreduce_gbps", [31.0, 32.0, 31.5], "Gbps", "higher", "bus bandwidth"),
        measured("total_s", 10.0, "s", "lower"),
    ]
    share = {
        "operation": "all_reduce", "variant": "library", "bytes": 64 * MIB, "busbw_gbps": 16.0, "bound": ALL_RANKS,
        "bound_gbps": 18.0, "share": 0.88, "rounds": 9, "target": config.target_share_all_reduce,
    }  # fmt: skip
    tables = {
        "series": [outcome.series_row(one) for one in everything],
        "ranks": [row for one in everything for row in outcome.rank_rows(one)],
        "fits": fits,
        "crossover": outcome.crossover_rows(lines),
        "bounds": [
            {"bound": ONE_WAY, "bytes": 64 * MIB, "gbps": 18.0, "latency_us": 8e-3 * 64 * MIB / 18, "provenance": "measured", "source": "sockets"},
            {"bound": CLAIMED, "bytes": None, "gbps": None, "latency_us": None, "provenance": "not_available", "source": "no profile"},
        ],
        "shares": [share],
        "wrong": [],
        "unsupported": [],
        "gradients": [
            {"collective": "gloo", "max_difference": 1e-16, "tolerance": 1e-12, "status": "compared", "reason": ""},
            {"collective": "ucc", "max_difference": None, "tolerance": 1e-12, "status": "skipped", "reason": "no UCC here"},
        ],
    }  # fmt: skip
    facts = {"wrong_elements": 0, "checked_elements": 500_000_000, "collective": "gloo", "cut": [], "shortened": {}}
    return Result.of(
        config, status="complete", started_at=100.0, ended_at=110.0, metrics=metrics, tables=tables, facts=facts
    )


@pytest.fixture
def judged(tmp_path):
    """Return what judges an honest result that ``change`` made another."""

    def judge(change=lambda result: None, **values):
        config = build("collectives", {"nproc": 2, "sizes": "1KiB:64MiB:4"} | values)
        result = honest(config)
        samples = [metric.samples for metric in result.metrics]
        result = copy.deepcopy(result)
        for metric, kept in zip(result.metrics, samples, strict=True):
            metric.samples.extend(kept if not metric.samples else [])
        change(result)
        save_config(config, tmp_path)
        save_result(tmp_path, result)
        run = Run(tmp_path)
        judged, _ = judged_view(run, lacks, ())
        return run, {check.name: check for check in checks(judged, find(run))}

    return judge


def test_an_honest_result_passes(judged):
    run, found = judged(target_allreduce_gbps=30, target_share_all_reduce=0.8)
    assert {name: check.reason for name, check in found.items() if check.status == "FAIL"} == {}
    assert found["gradient all-reduce"].status == "PASS"
    assert found["all-reduce share at 64 MiB"].status == "PASS"
    assert found["same gradients"].reason == "largest difference in fp64: gloo 1e-16; ucc skipped: no UCC here"
    said = " ".join(reading(run))
    # alpha / beta by hand: 1e-4 / 5e-10 bytes.
    assert "gives 100.0 µs to start, more than half of the time below 195 KiB (n1/2)" in said
    assert "The all-reduce reaches 88% of raw TCP bandwidth at 64 MiB; 80% expected." in said
    # 16 of 18 Gbps are 89%: rates beside a median of ratios would show a second value of one quantity.
    assert "medians of the ratios of single rounds" in said
    assert "16.00 of 18.00" not in said
    # 5e-5 + 1e-9 S = 1e-4 + 5e-10 S at S = 1e5 bytes; between the sizes the times are taken as straight lines.
    row = next(row for row in run.result.tables["crossover"] if row["algorithm"] == "tree")
    assert row["bytes"] == pytest.approx(1e5, rel=0.1)
    assert "recursive doubling is faster up to 9" in said
    assert {limit.metric for limit in limits(run)} >= {
        "allreduce_busbw_gbps",
        "gradient_allreduce_gbps",
        "allreduce_latency_us",
    }
    (rate,) = published(run)
    assert (rate.quantity, rate.conditions["message_bytes"], rate.conditions["devices"]) == (
        "allreduce_gbps",
        64 * MIB,
        2,
    )


def test_wrong_elements_fail_with_the_case_and_the_rank(judged):
    def wrong(result):
        result.facts["wrong_elements"] = 3
        result.tables["wrong"] = [
            {"case": "all-reduce sum fp32, 1,024 bytes", "wrong_elements": 3, "checked_elements": 9, "first": "element 7 of 256 on rank 1 is 2.0"}
        ]  # fmt: skip

    run, found = judged(wrong)
    assert found["right results"].status == "FAIL"
    assert "all-reduce sum fp32, 1,024 bytes: 3 wrong, element 7 of 256 on rank 1" in found["right results"].reason
    assert "no speed of this run counts" in reading(run)[0]


def test_a_total_cannot_hide_wrong_series(judged):
    def wrong(result):
        result.tables["series"][0]["wrong_elements"] = 5

    _, found = judged(wrong)
    assert found["right results"].status == "FAIL"


def test_a_series_without_a_comparison_fails(judged):
    def unchecked(result):
        result.tables["series"][2]["checked_elements"] = 0

    _, found = judged(unchecked)
    assert found["all verified"].status == "FAIL"
    assert "17 of 18 series" in found["all verified"].reason


def exchanged(ranks, gbps, claimed, operation="all_reduce", nproc=0):
    """Return the numbers of one operation of 256 MiB over ranks whose links are claimed to carry some Gbps."""
    rate, size = gbps / BUS_FACTORS[operation](ranks), 256 * MIB
    row = {
        "operation": operation,
        "variant": "library",
        "dtype": "fp32",
        "bytes": size,
        "algbw_gbps": rate,
        "busbw_gbps": gbps,
    }
    bounds = [
        {"bound": "memory copy", "gbps": 1e6, "provenance": "measured", "bytes": size},
        {
            "bound": CLAIMED,
            "gbps": claimed,
            "provenance": "claimed" if claimed else "not_available",
            "source": "data sheet",
        },
    ]
    config = build(
        "collectives",
        {"nproc": nproc or ranks, "nnodes": ranks // nproc if nproc else 1, "launcher": "slurm" if nproc else "local"},
    )
    tables = {"series": [row | {"median_us": 8e-3 * size / rate, "wrong_elements": 0}], "bounds": bounds}
    return Numbers("collectives", [], ranks, {"collective": "gloo"}, tables, config=config)


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_three_times_what_the_links_carry_fails_at_any_number_of_ranks(ranks):
    """Eight devices whose links carry 3,600 Gbps: the copies of all memories together are no limit of one rank's links."""
    assert _possible(list(claims(exchanged(ranks, 3400, 3600))), ranks).status == "PASS"
    failed = _possible(list(claims(exchanged(ranks, 3 * 3600, 3600))), ranks)
    assert failed.status == "FAIL"
    assert "all_reduce library fp32, 256 MiB: busbw 1,350 GB/s" in failed.reason
    assert "at most 450 GB/s can be moved (claimed: data sheet)" in failed.reason


def test_the_adapters_of_a_node_carry_the_traffic_between_nodes_alone():
    # Two nodes of eight: S bytes enter each of them, and the bus bandwidth counts 2 * 15/16 S.
    for operation, most in (
        ("all_reduce", 1.875 * 400),
        ("all_gather", 1.875 * 400),
        ("broadcast", 400),
        ("all_to_all", 1.875 * 50),
    ):
        for gbps, status in ((most, "PASS"), (3 * most, "FAIL")):
            stated = list(claims(exchanged(16, gbps, 400, operation, nproc=8)))
            assert _possible(stated, 16).status == status
    # Ranks 0 and 1 are on the same node.
    assert _possible(list(claims(exchanged(16, 3600, 400, "send_recv", nproc=8))), 16).status == "SKIPPED"


def test_without_a_claim_nothing_limits_a_bandwidth(judged):
    _, found = judged()
    assert (found["possible bandwidth"].status, found["possible bandwidth"].gates) == ("SKIPPED", False)
    assert "set cluster=NAME or FILE" in found["possible bandwidth"].reason
    # The copies of eight memories together are no limit of one rank's links, and held against them all passed.
    assert _possible(list(claims(exchanged(8, 3 * 3600, None))), 8).status == "SKIPPED"


def test_metrics_and_pictures_show_the_same_type(judged):
    """Two types at the same sizes: the card showed the first one, tables and pictures fp32."""
    everything = [
        taken(size, dtype=dtype, beta=beta) for dtype, beta in (("bf16", 5e-10), ("fp32", 1e-9)) for size in SIZES
    ]
    lines = outcome.curves(everything)
    (metric,) = [item for item in outcome.metrics(lines, [], 2) if item.name == "allreduce_busbw_gbps"]
    shown = tables.main(
        SimpleNamespace(result=SimpleNamespace(tables={"series": [outcome.series_row(one) for one in everything]}))
    )
    assert set(shown["dtype"]) == {"bf16"} == {line.case.dtype for line in lines["all_reduce", "library"]}
    assert shown["busbw_gbps"].iloc[-1] == pytest.approx(metric.value)


@pytest.mark.parametrize(("device", "least"), [("cpu", 1), ("meta", 304)])  # multiprocessors of an MI300X
def test_a_computation_has_a_tile_for_every_multiprocessor(monkeypatch, device, least):
    shapes = []
    monkeypatch.setattr(torch, "bmm", lambda left, right, out: shapes.append(left.shape))
    monkeypatch.setattr(extras, "_median", lambda phase, *_: 0.02)  # of 20 products
    extras.products(0.1, torch.device(device))()
    assert len(shapes) == 100  # a tenth of a second
    count, rows, columns = shapes[0]
    assert count * -(-rows // 128) * -(-columns // 128) >= least


@pytest.mark.parametrize(
    ("column", "factor", "rule"),
    [("algbw_gbps", 2, "2·S/t"), ("busbw_gbps", 2, "their ratio is 2"), ("median_us", 3, "times S/t")],
)
def test_numbers_that_do_not_follow_from_each_other_fail(judged, column, factor, rule):
    def changed(result):
        result.tables["series"][4][column] *= factor

    _, found = judged(changed)
    assert found["numbers agree"].status == "FAIL"
    assert rule in found["numbers agree"].reason


def test_targets_fail_where_they_are_missed_and_where_nothing_was_measured(judged):
    _, found = judged(target_allreduce_gbps=31.5, target_share_all_reduce=0.9, target_share_broadcast=0.9)
    assert found["gradient all-reduce"].status == "FAIL"  # 31.5 is not above 31.5
    assert found["all-reduce share at 64 MiB"].status == "FAIL"
    assert "0.88 misses >= 0.9: median of the ratios of 9 rounds" in found["all-reduce share at 64 MiB"].reason
    assert (found["broadcast share"].status, found["broadcast share"].gates) == ("SKIPPED", True)


def test_targets_and_libraries_that_were_named_and_not_judged(judged):
    run, _ = judged(
        target_allreduce_gbps=30,
        target_share_all_reduce=0.8,
        target_share_broadcast=0.9,
        compare_gradients=["gloo", "ucc"],
    )
    assert missed(run) == {"target_share_broadcast": ["= 0.9"], "compare_gradients": ["ucc"]}


@pytest.mark.parametrize("difference", [1e-13, 1e-9, None, math.nan, math.inf])
def test_gradients_that_differ_from_those_of_gloo_fail(judged, difference):
    def differ(result):
        result.tables["gradients"][1] |= {"status": "compared", "max_difference": 0.0, "gloo_difference": difference}

    _, found = judged(differ)
    assert found["same gradients"].status == ("PASS" if difference == 1e-13 else "FAIL")
    assert (difference and difference < 1) or "gloo_difference is" in found["same gradients"].reason


@pytest.mark.parametrize("difference", [None, math.nan, math.inf])
def test_gradients_without_a_difference_fail(judged, difference):
    def differ(result):
        result.tables["gradients"][0]["max_difference"] = difference

    _, found = judged(differ)
    assert found["same gradients"].status == "FAIL"
    assert "max_difference is" in found["same gradients"].reason


def test_series_without_their_wrong_elements_fail(judged):
    def lost(result):
        for row in result.tables["series"]:
            row["wrong_elements"] = None

    _, found = judged(lost)
    assert found["right results"].status == "FAIL"
    assert "wrong_elements is missing in row 1 of series" in found["right results"].reason


def test_what_was_cut_is_told(judged):
    def cut(result):
        result.facts.update(cut=["5 of 9 curves: no time"], shortened={"curves": 0.4})

    run, found = judged(cut)
    assert (found["whole plan"].status, found["whole plan"].gates) == ("SKIPPED", True)
    assert "5 of 9 curves: no time" in found["whole plan"].reason
    assert "curves in 40% of their time" in found["whole plan"].reason
    assert any("did not hold all that was planned: 5 of 9 curves" in sentence for sentence in reading(run))
    for share, status in ((0.26, "SKIPPED"), (0.49, "SKIPPED"), (0.5, "PASS"), (0.9, "PASS")):
        given = {"curves": 0.95, "curves of other ways": share}
        _, found = judged(lambda result, given=given: result.facts.update(shortened=given))
        assert (found["whole plan"].status, found["whole plan"].gates) == (status, True)
        assert f"curves of other ways in {share:.0%} of their time" in found["whole plan"].reason


def test_sockets_that_are_slower_than_the_library_are_no_limit(judged):
    def faster(result):
        result.tables["shares"][0] |= {"busbw_gbps": 112.0, "share": 6.2}

    run, found = judged(faster, target_share_all_reduce=0.8)
    said = next(sentence for sentence in reading(run) if "raw TCP bandwidth" in sentence)
    assert "620% of raw TCP bandwidth" in said
    assert "the library is faster than the sockets, which are no limit in this run" in said
    assert "expected" not in said
    assert "no limit here" in found["all-reduce share at 64 MiB"].reason


def test_what_crosses_several_times_and_what_lies_on_no_line_is_not_told(judged):
    def noisy(result):
        result.tables["crossover"][0] |= {
            "bytes": None,
            "reason": "neither consistently faster nor slower: the curves cross 3 times",
        }
        line = next(row for row in result.tables["fits"] if row["variant"] == "library")
        line |= {"alpha_us": None, "bandwidth_gbps": None, "reason": "the times of 9 sizes are on no line"}

    said = " ".join(reading(judged(noisy)[0]))
    assert (
        "recursive doubling is neither consistently faster nor slower: the curves cross 3 times (9 sizes were timed)."
        in said
    )
    assert "cannot be separated: the times of 9 sizes are on no line." in said


def test_a_share_outside_0_to_100_percent_is_not_stated(judged):
    times = {"all_reduce": (3170, 609, 1570), "all_gather": (337, 611, 1500), "all_to_all": (500, 500, 700)}

    def overlapped(result):
        result.tables["overlap"] = [
            {"operation": name, "bytes": MIB, "alone_us": alone, "compute_us": compute, "together_us": together,
             "hidden_share": (alone + compute - together) / min(alone, compute)}
            for name, (alone, compute, together) in times.items()
        ]  # fmt: skip

    said = next(sentence for sentence in reading(judged(overlapped)[0]) if "Beside a computation" in sentence)
    assert said.endswith(
        "is hidden at 1 MiB: all-to-all 60%. Together slower than one after the other: all-gather. "
        "Not known, since the time alone was disturbed: all-reduce."
    )


def test_the_bandwidth_of_a_line_that_was_cut_is_no_headline():
    lines = outcome.curves([taken(size) for size in SIZES] + [taken(SIZES[0], "direct")])
    values = {metric.name: metric for metric in outcome.metrics(lines, [], 2)}
    assert values["allreduce_busbw_gbps"].value > 10
    assert values["allreduce_direct_busbw_gbps"].value is None
    assert "no size above 1 KiB was measured, and others reached 64 MiB" in values["allreduce_direct_busbw_gbps"].reason


def test_series_by_hand():
    times = np.array([[1.0, 3.0], [2.0, 2.5], [9.0, 4.0], [1.0, 2.0]])
    series = Series(10**9, times, 0, 1)
    assert series.seconds.tolist() == [3.0, 2.5, 9.0, 2.0]
    assert series.skew_s == 1.5  # of 2, 0.5, 5 and 1
    assert series.slowest_shares.tolist() == [0.25, 0.75]
    assert outcome.bus("all_gather", series) == pytest.approx([4 / 3, 1.6, 4 / 9, 2.0])
    limit = Series(10**9, times / 2, 0, 1)
    assert paired_shares("all_gather", series, limit) == pytest.approx([0.25] * 4)


def test_a_barrier_has_no_bandwidth_and_one_rank_no_bus():
    barrier = Taken(Case("barrier", "library", "fp32", "", False, 0), Series(0, np.ones((5, 2)), 0, 0), 0)
    row = outcome.series_row(barrier)
    assert (row["algbw_gbps"], "busbw_gbps" in row, row["dtype"]) == (None, False, "")
    alone = Taken(taken(1024).case, Series(1024, np.ones((5, 1)), 0, 1), 256)
    assert "busbw_gbps" not in outcome.series_row(alone)
    assert outcome.series_row(alone)["algbw_gbps"] > 0
