"""What a parity run leaves of recordings and comparisons: rows, metrics and their names, and who still fits the time."""

import math
from types import SimpleNamespace

import pytest

from benchlib.benchmarks.parity import metrics, tolerances
from benchlib.benchmarks.parity.compare import Comparison
from benchlib.benchmarks.parity.config import MEMBERS
from benchlib.benchmarks.parity.metrics import Turn
from benchlib.benchmarks.parity.run import COMPILING_S, Pace
from benchlib.benchmarks.parity.tolerances import Judge
from benchlib.config.schema import build

SAMPLES = [2.0, 4.0, 9.0]
META = {
    "device": "CPU",
    "model_sha256": "a",
    "inputs_sha256": "b",
    "latency": {"length": 16, "batch": 1, "samples_ms": SAMPLES, "warmup": 3},
}


def turn(name="sdpa_flash", value=1e-6, status="PASS"):
    judge = Judge(MEMBERS[name], "cpu", "cpu")
    rows = (judge.judge(tolerances.LOGITS, value, "len8-batch1"), judge.judge(tolerances.COSINE, 1e-12, "len8-batch2"))
    logits = [{"case": "len8-batch1", "max_abs": 0.5}]
    return Turn(MEMBERS[name], "cpu", "compared", "", 2.5, META, Comparison(name, status, "", rows, {"logits": logits}))


@pytest.mark.parametrize(
    ("data", "model", "init", "suffix"),
    [
        ("minisquad", "tiny", "pretrained", "_minisquad_tiny"),
        ("squad", "bert-base-uncased", "pretrained", ""),
        ("squad", "bert-base-uncased", "random", "_random"),
        ("minisquad", "bert-base", "random", "_minisquad_random"),
    ],
)
def test_the_names_say_what_stands_in_for_a_real_model(data, model, init, suffix):
    config = build("parity", {"benchmark": "parity", "data": data})
    about = {"name": model, "init": init}
    assert metrics.scope(config, about) == suffix
    assert {metric.name.removesuffix(suffix) for metric in metrics.metrics([turn()], suffix)} == {
        "sdpa_flash_logits_max_difference", "sdpa_flash_one_minus_cosine", "sdpa_flash_latency_ms", "sdpa_flash_queries_per_s",
    }  # fmt: skip


def test_latency_is_the_median_of_all_samples_and_the_rate_that_of_the_mean():
    found = {metric.name: metric for metric in metrics.metrics([turn()], "")}
    latency = found["sdpa_flash_latency_ms"]
    assert (latency.value, latency.n, latency.samples, latency.unit) == (4.0, 3, SAMPLES, "ms")
    assert found["sdpa_flash_queries_per_s"].value == 200.0  # 1000 / 5 ms
    row = metrics.latency_row("sdpa_flash", META["latency"])
    assert (row["mean_ms"], row["p50_ms"], row["p95_ms"], row["p99_ms"]) == pytest.approx((5.0, 4.0, 8.5, 8.9))
    assert metrics.latency_row("truth", None) is None and metrics.latency_metrics("truth", None, "") == []


def test_a_crash_fails_and_what_is_not_there_is_skipped():
    member = MEMBERS["bf16"]
    rows = [
        metrics.member_row(Turn(member, "cpu", status, "why"))
        for status in ("failed", "unavailable", "no time")
    ]  # fmt: skip
    assert [(row["outcome"], row["reason"]) for row in rows] == [
        ("FAIL", "why"),
        ("SKIPPED", "why"),
        ("SKIPPED", "why"),
    ]
    assert metrics.metrics([Turn(member, "cpu", "failed", "why")], "") == []


def test_what_is_no_number_fails_a_member_that_gates_and_is_not_available_of_one_that_does_not():
    broken, informative = (
        next(iter(metrics.metrics([turn(name, math.nan, "FAIL")], ""))) for name in ("sdpa_flash", "native")
    )
    assert (broken.fault, broken.provenance) == ("nan", "derived")
    assert (informative.value, informative.provenance) == (None, "not_available")
    assert metrics.comparison_rows([turn()])["logits"] == [
        {"member": "sdpa_flash", "case": "len8-batch1", "max_abs": 0.5}
    ]


def pace(budget_s=100.0, gone_s=0.0):
    return Pace(SimpleNamespace(since=lambda: gone_s), budget_s)


def test_a_member_begins_only_where_the_longest_of_its_kind_would_fit():
    quick, slow, double = MEMBERS["sdpa_math"], MEMBERS["compile"], MEMBERS["fp64"]
    early = pace(gone_s=80)  # 17 s are left after the reserve
    assert not early.lacking(quick), "nothing is known yet"
    early.took(10.0)
    assert not early.lacking(quick) and not early.lacking(double)
    assert early.expected_s("slow") == 10 + COMPILING_S and "17 s left, 30 s needed" in early.lacking(slow)
    early.took(12.0, "slow")
    assert not early.lacking(slow)
    early.took(18.0, "fp64")
    assert early.lacking(double) and not early.lacking(quick)
    early.took(18.0)
    assert early.lacking(quick)
    assert "0 s left" in pace(gone_s=200).lacking(quick)


def test_a_member_that_had_three_times_what_was_expected_is_at_fault():
    early = pace()
    assert not early.was_fair(90.0, MEMBERS["sdpa_math"]), "nothing to hold it against"
    early.took(10.0)
    assert early.was_fair(30.0, MEMBERS["sdpa_math"]) and not early.was_fair(29.0, MEMBERS["sdpa_math"])
