"""What the checks and sentences of the collectives say of results that are wrong, impossible, short or cut."""

import math
from types import SimpleNamespace

import pytest
from make_collectives import CLAIMED, MIB, row, stored, tables, time_us

from benchlib.benchmarks.collectives.curves import crossing
from benchlib.benchmarks.collectives.spec import SPEC, _claimed_gbps
from benchlib.judge.baselines import find
from benchlib.spec.tables import Rows


@pytest.fixture
def judged(tmp_path):
    """Return a run of the made-up tables that ``change`` made another, and its checks by name."""

    def judge(change=lambda data: None, ranks=2, **values):
        data = tables(ranks)
        change(data)
        run = stored(tmp_path / str(len(list(tmp_path.iterdir()))), data, ranks, **values)
        return run, {check.name: check for check in SPEC.judge(run, find(run))}

    return judge


def test_an_honest_result_passes(judged):
    run, checks = judged(target_allreduce_gbps=20, target_share_all_reduce=0.8, target_share_broadcast=0.9)
    assert {name: check.reason for name, check in checks.items() if check.status == "FAIL"} == {}
    asked = {"gradient all-reduce", "all-reduce share at 64 MiB", "broadcast share at 64 MiB", "possible bandwidth"}
    assert {name for name in asked if checks[name].status == "PASS"} == asked
    assert "skipped: ucc: no UCC here" in checks["same gradients"].reason
    said = plain(" ".join(SPEC.reading(run)))
    # α is 60 µs, and half of B = 18 Gbps is reached at α·B = 135,000 bytes.
    assert "takes 60 µs to start: half of its time at 132 KiB" in said
    assert "The all-reduce reaches 90% of the TCP socket all ranks at 64 MiB." in said
    # The ratios 1.25 at 1 MiB and 0.8 at 16 MiB are one above and one below by the same factor: 4 MiB.
    assert "ring is faster from 4 MiB" in said
    (rate,) = SPEC.placed(run)
    assert (rate.quantity, rate.conditions["message_bytes"]) == ("allreduce_gbps", 64 * MIB)


def test_metrics_by_hand(judged):
    run, _ = judged()
    values = {metric.name: metric for metric in run.result.metrics}
    rate = 8e-3 * 64 * MIB / time_us("all_reduce", 64 * MIB, 2)  # of two ranks the bus factor is 1
    assert values["allreduce_busbw_gbps"].value == pytest.approx(rate)
    assert values["allreduce_socket_share"].value == pytest.approx(rate / 20)
    assert values["allreduce_latency_us"].value == pytest.approx(time_us("all_reduce", 1024, 2))
    assert values["gradient_allreduce_gbps"].value == pytest.approx(8e-3 * (MIB + 4096) / 305)
    assert values["allreduce_alpha_us"].value == pytest.approx(60, rel=1e-3)


def plain(text):
    return "".join(" " if sign.isspace() else sign for sign in text if sign != "\u2060")


def injected(table, column, value, place=0):
    return lambda data: data[table][place].update({column: value})


CASES = [
    *(("right results", injected(table, "wrong_elements", 3)) for table in ("series", "bounds", "shares", "pairs", "overlap", "buckets", "run")),
    ("right results", injected("series", "wrong_elements", None)),
    ("all verified", injected("series", "checked_elements", 0)),
    *(("same gradients", injected("gradients", "max_difference", value)) for value in (1e-9, math.inf)),
    ("possible bandwidth", injected("series", "times_us", [8e-3 * MIB / (1.2 * CLAIMED)], 2)),
    ("finite", injected("series", "times_us", [1.0, math.nan])),
    ("numbers agree", injected("series", "times_us", [1e-3], 2)),
    ("all-reduce share at 64 MiB", injected("shares", "times_us", [1e9])),
    ("gradient all-reduce", injected("buckets", "times_us", [1e9])),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change"), CASES)
def test_what_is_planted_fails(judged, name, change):
    _, checks = judged(change, target_share_all_reduce=0.8, target_allreduce_gbps=20)
    assert checks[name].status == "FAIL"
    assert checks[name].gates


@pytest.mark.parametrize(("nodes", "operation", "most"), [
    (1, "all_reduce", 400), (1, "send_recv", 400),
    # Two nodes of eight: S bytes enter each of them, and the bus bandwidth counts 2 * 15/16 S.
    (2, "all_reduce", 1.875 * 400), (2, "all_gather", 1.875 * 400), (2, "broadcast", 400), (2, "all_to_all", 1.875 * 50),
    (2, "send_recv", None),  # ranks 0 and 1 are on the same node
])  # fmt: skip
def test_the_adapters_of_a_node_carry_the_traffic_between_nodes_alone(nodes, operation, most):
    links = [{"bound": "link", "gbps": 400.0, "source": "data sheet"}]
    config = SimpleNamespace(nnodes=nodes, nproc=16 // nodes)
    assert _claimed_gbps(operation, Rows(config, 16, {"links": links})) == (most and pytest.approx(most))


@pytest.mark.parametrize(
    ("rdma", "ways", "status"),
    [
        (True, ["NET/Socket", "P2P"], "FAIL"),
        (True, ["NET/IB", "P2P"], "PASS"),
        (True, [], "SKIPPED"),
        (False, ["NET/Socket"], "SKIPPED"),
        (None, None, "SKIPPED"),  # a run of before
    ],
)
def test_sockets_beside_a_claim_of_adapters_fail(judged, rdma, ways, status):
    found = {} if ways is None else {"ways": [{"way": way, "rdma": rdma} for way in ways]}
    _, checks = judged(lambda data: data.update(found), 2, nnodes=2, nproc=1, launcher="slurm")
    assert checks["links"].status == status
    assert "links" not in judged()[1]  # one node has no network


@pytest.mark.parametrize(("variant", "library", "possible"), [("library", "nccl", True), ("library", "gloo", False), ("ring", "nccl", False)])  # fmt: skip
def test_only_a_switch_that_adds_lets_an_all_reduce_exceed_its_link(judged, variant, library, possible):
    # 8 x H100 with NVLS: busbw 480 GB/s over links of 450 GB/s; the wire carries algbw x (n+1)/n = 309 GB/s.
    def switched(data):
        fast = row("all_reduce", 2**30, 8, variant, times_us=[1e6 * 2**30 * 1.75 / 480e9])
        data["series"] = [fast]
        data["links"][0]["gbps"] = 3600.0
        data["run"][0]["collective"] = library

    _, checks = judged(switched, 8)
    assert (checks["possible bandwidth"].status == "PASS") is possible


def test_targets_fail_where_they_are_missed_and_where_nothing_was_measured(judged):
    def small(data):
        data["shares"] = [item for item in data["shares"] if item["operation"] != "broadcast"]

    targets = {
        "target_allreduce_gbps": judged()[0].result.value("gradient_allreduce_gbps"),
        "target_share_broadcast": 0.9,
    }
    _, checks = judged(small, **targets)
    assert checks["gradient all-reduce"].status == "FAIL"  # what is reached is not exceeded
    assert (checks["broadcast share"].status, checks["broadcast share"].gates) == ("SKIPPED", True)


@pytest.mark.parametrize(("share", "measured", "status"), [(1.0, 50, "PASS"), (0.5, 50, "PASS"), (0.49, 50, "SKIPPED"), (1.0, 49, "SKIPPED")])  # fmt: skip
def test_what_was_cut_is_told(judged, share, measured, status):
    cut = {"planned": 50, "measured": measured, "time_share": share, "cut_from_bytes": MIB, "cut_to_bytes": 2 * MIB}
    check = judged(lambda data: data["plan"][0].update(cut))[1]["whole plan"]
    assert (check.status, check.gates) == (status, True)
    assert measured == 50 or "1 of 50 curves cut, from 1 MiB to 2 MiB" in check.reason
    assert share == 1 or f"curves in {share:.0%} of their time" in check.reason


@pytest.mark.parametrize(("ratios", "faster", "size"), [
    ([0.5, 2, 4], "below", 2048),  # on the logarithms the sign changes half way between the first two sizes
    ([2, 2, 0.5], "above", 8192), ([0.5, 0.5, 0.5], "always", None), ([1, 2, 4], "never", None), ([0.5, 1.5, 0.5], "mixed", None),
    ([0.5], "unknown", None),
])  # fmt: skip
def test_crossings_by_hand(ratios, faster, size):
    assert crossing([1024, 4096, 16384][: len(ratios)], ratios) == (faster, size and pytest.approx(size))
