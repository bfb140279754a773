"""Impossible figures are refused, each with its reason; honest ones pass untouched."""

from pathlib import Path

import pytest

from benchlib.judge.foreign.readers import read_claims
from benchlib.judge.impossible.claim import Claim, Collective, Compute, Latency, Learning, Requests, Speed
from benchlib.judge.impossible.findings import half_unit
from benchlib.judge.impossible.rules import RULES, judge_claims, wire_rate

FIXTURES = Path(__file__).parents[2] / "fixtures"
HONEST = sorted((FIXTURES / "honest").iterdir())

IMPOSSIBLE = {
    "01-bert-base-8xh200.json": {"rate from counts": "7,362", "scaling": "21.1 times"},
    "02-bert-base-8xh100.json": {"rate from counts": "6,372", "scaling": "10.9 times"},
    "03-bert-base-8xb200.csv": {"scaling": "21.5 times the 1,405 samples/s of one (B200), an efficiency of 2.69"},
    "04-bert-base-8xa100.md": {"scaling": "9.65 times the 443 samples/s of one (A100 80GB SXM4), an efficiency of 1.21"},
    "05-planned-steps.json": {"rate from counts": "6,441.41 samples/s by 70 steps × 320 samples × 8 ranks in 27.82 s"},
    "06-learning-rate-zero.json": {"learning rate": "from step 1 on, trained nothing", "loss falls": "loss from 5.900 to 5.900"},
    "07-rate-times-steps.json": {"rate from raw steps": "80 samples/s by the raw times of 100 steps", "rate from counts": "100 times that"},
    "08-rate-of-one-rank.json": {"rate from counts": "320 samples/s by 3,200 samples counted in 10 s: 0.25 times that"},
    "09-unknown-device.json": {"share of the peak": "MFU 563.0%: the peak is another"},
    "10-wrong-peak.json": {"share of the peak": "is that of tf32, while the work ran in bf16", "below the peak": "157.3% of the measured peak (mamf-finder) of 794.5 TFLOP/s"},
    "11-negative-first-token.json": {"no time below zero": "time to first token: mean -1.7e+09 s"},
    "12-failed-requests.json": {"requests add up": "1,000 are in the latency, 640 completed"},
    "13-doubled-algbw.json": {"algbw is S/t": "2 times that", "busbw factor": "0.5 times that"},
    "14-not-waited.txt": {"busbw below the links": "timed before it had ended", "transfer takes time": "it was not waited for"},
    "15-laptop.json": {"below the peak": "2.5 PFLOP/s"},
    "16-speed-up.json": {"speed-up": "2 × by 0.36 samples/s / 0.18 samples/s"},
    "18-tokens-and-samples.json": {"tokens and samples": "319,898 tokens/s by 156.2 samples/s × 2,048 tokens"},
    "20-schedule-too-short.json": {"learning rate": "3 of 10 steps: the others, from step 4 on, trained nothing"},
    "21-first-token-not-reported.txt": {"no errors logged": "50 errors in the log", "tokens take time": "first token: 6 of 6 times are zero"},
    "22-completed-twice.txt": {"no errors logged": "50 errors in the log"},
}  # fmt: skip


def test_every_published_figure_that_cannot_be_has_its_reasons():
    assert {path.name for path in (FIXTURES / "impossible").iterdir()} == set(IMPOSSIBLE)


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_published_figures_that_cannot_be_are_refused_for_these_reasons_alone(name):
    _, claims = read_claims(FIXTURES / "impossible" / name)
    failures = {judgement.rule.name: judgement.failures for judgement in judge_claims(claims) if judgement.failures}
    assert set(failures) == set(IMPOSSIBLE[name])
    assert all(any(why in failure for failure in failures[rule]) for rule, why in IMPOSSIBLE[name].items()), failures


@pytest.mark.parametrize("path", HONEST, ids=lambda path: path.name)
def test_honest_results_pass_untouched(path):
    _, claims = read_claims(path)
    judged = judge_claims(claims)
    assert [judgement.failures for judgement in judged if judgement.failures] == []
    assert any(judgement.passed for judgement in judged)


def one(rule, **parts):
    """Return the status of the one finding of a rule on a claim of these parts, '' for none."""
    findings = list(RULES[rule].findings(Claim(**parts)))
    assert len(findings) <= 1
    return findings[0].status if findings else ""


# Two steps of 8 samples: the median of their rates is the mean of the two, and neither the mean nor the median step gives it.
@pytest.mark.parametrize(
    ("rate", "status"),
    [(82.94, "PASS"), (73.79, "PASS"), (110.47, "FAIL"), (55.40, "FAIL"), (2 * 82.94, "FAIL"), (2 * 73.79, "FAIL")],
)
def test_the_median_of_two_noisy_rates_follows_from_their_steps(rate, status):
    speed = Speed(samples_per_s=rate, ranks=1, batch_per_rank=8, step_s=[8 / 110.47, 8 / 55.40])
    assert one("rate from raw steps", speed=speed) == status


def test_an_unknown_peak_is_not_available_and_never_a_guess():
    unknown = Compute(flops_per_s=1e15, device="Imaginary 3000", mfu=0.4)
    assert one("below the peak", compute=unknown) == "SKIPPED"
    assert one("share of the peak", compute=unknown) == "SKIPPED"
    known = Compute(flops_per_s=1.2e15, device="NVIDIA H100 80GB HBM3", precision="bf16")
    assert one("below the peak", compute=known) == "FAIL"
    assert one("below the peak", compute=known.model_copy(update={"ranks": 2})) == "PASS"


@pytest.mark.parametrize(
    ("operation", "algorithm", "ranks", "algbw", "busbw", "status"),
    [
        # Above the link of 450 GB/s an all-reduce is possible with NVLS only: 309 GB/s on the wire for 481.
        ("all_reduce", "NVLS", 8, 480 / 1.75, 480.0, "PASS"),
        ("all_reduce", "Ring", 8, 480 / 1.75, 480.0, "FAIL"),
        ("all_reduce", "", 8, 480 / 1.75, 480.0, "PASS"),
        ("all_reduce", "", 8, 740 / 1.75, 740.0, "FAIL"),
        ("all_reduce", "Ring", 8, 470 / 1.75, 470.0, "PASS"),
        ("all_gather", "", 8, 600.0, 525.0, "FAIL"),
        ("", "", 8, 600.0, 525.0, ""),  # which factor it has is not stated
    ],
)
def test_bus_bandwidth_above_the_links(operation, algorithm, ranks, algbw, busbw, status):
    rates = {"algbw_gbytes_per_s": algbw, "busbw_gbytes_per_s": busbw, "bound_gbytes_per_s": 450}
    stated = Collective(operation=operation, algorithm=algorithm, ranks=ranks, **rates)
    assert one("busbw below the links", collective=stated) == status


def test_the_wire_rate_of_nvls_is_that_of_nccl_tests_pull_request_239():
    stated = Collective(operation="all_reduce", busbw_gbytes_per_s=481, ranks=8, algorithm="NVLS")
    assert wire_rate(stated) == pytest.approx(309, abs=0.5)


@pytest.mark.parametrize(
    ("value", "half"), [(156.2, 0.05), (8000, 240), (10000, 300), (5, 0.15), (19667, 0.5), (0.18, 0.005), (0.0, 0.0)]
)
def test_a_number_stands_for_what_rounds_to_it(value, half):
    assert half_unit(value) == pytest.approx(half)


A100 = {"device": "NVIDIA A100-SXM4-80GB", "precision": "bf16"}
COUNTED = {"samples_per_s": 80.0, "ranks": 4, "samples_counted": 3200, "wall_s": 10.0}
ORDERED = {"min_s": 0.1, "max_s": 2.0, "mean_s": 0.5, "percentiles_s": {99.0: 1.9, 50.0: 0.4, 90.0: 0.4}}
TOKENS = {"tokens_per_s": 20_000.0, "parameters": 1e9}  # 120 TFLOP/s of training


@pytest.mark.parametrize(
    ("rule", "status", "parts"),
    [
        ("scaling", "PASS", {"speed": Speed(samples_per_s=840, ranks=8, one_device_samples_per_s=100.01)}),  # up to 5% above
        ("scaling", "FAIL", {"speed": Speed(samples_per_s=841, ranks=8, one_device_samples_per_s=100.01)}),
        ("rate from counts", "FAIL", {"speed": Speed(**COUNTED)}),
        ("rate from counts", "PASS", {"speed": Speed(**COUNTED, stands_for="one rank")}),
        # Only the last step may have a rate of zero.
        *(("learning rate", status, {"learning": Learning(learning_rates=rates)})
          for rates, status in (([0.0], "FAIL"), ([1e-5, 0.0], "PASS"), ([1e-5, 0.0, 0.0], "FAIL"), ([1e-5, 1e-6], "PASS"))),
        *(("percentiles in order", status, {"latencies": [Latency(**ORDERED | change)]})
          for change, status in (({}, "PASS"), ({"percentiles_s": {50.0: 0.4, 90.0: 0.3}}, "FAIL"), ({"min_s": 0.5}, "FAIL"), ({"max_s": 1.0}, "FAIL"), ({"mean_s": 2.1}, "FAIL"))),
        # A peak that the claim brings along does not raise that of a known device: 312 TFLOP/s.
        ("below the peak", "FAIL", {"compute": Compute(flops_per_s=500e12, peak_flops=600e12, **A100)}),
        # fp32 is not what the tensor cores do: 19.5 TFLOP/s.
        ("below the peak", "FAIL", {"compute": Compute(flops_per_s=22e12, device="NVIDIA A100-SXM4-40GB", precision="fp32")}),
        ("below the peak", "PASS", {"compute": Compute(flops_per_s=19e12, device="NVIDIA A100-SXM4-40GB", precision="fp32")}),
        ("share of the peak", "FAIL", {"compute": Compute(mfu=1.3, device="NVIDIA H200", precision="fp8")}),
        ("operations of tokens", "PASS", {"compute": Compute(mfu=0.55, **A100, **TOKENS)}),  # attention
        ("operations of tokens", "FAIL", {"compute": Compute(mfu=0.9, **A100, **TOKENS)}),
        # Rounding is a few per cent, not a factor.
        ("sample count", "FAIL", {"speed": Speed(samples_counted=5000, features=10_000, epochs=1.0)}),
        # Schedules and losses of the field.
        ("learning rate", "PASS", {"learning": Learning(learning_rates=[0.0, 1e-5, 2e-5, 1e-5, 0.0])}),
        ("learning rate", "FAIL", {"learning": Learning(learning_rates=[1e-5, -1e-5, 1e-5])}),
        ("loss falls", "SKIPPED", {"learning": Learning(loss_first=0.310, loss_last=0.312)}),
        ("loss falls", "FAIL", {"learning": Learning(loss_first=0.31, loss_last=0.40)}),
        ("sample count", "PASS", {"speed": Speed(samples_counted=96, features=110, epochs=1.0, batch_per_rank=32, ranks=1)}),
        ("requests add up", "PASS", {"requests": Requests(issued=1000, completed=980, failed=4)}),
        ("requests add up", "FAIL", {"requests": Requests(issued=1000, completed=980, failed=24)}),
        # Latencies.
        ("percentiles in order", "FAIL", {"latencies": [Latency(percentiles_s={50: 1.0, 150: 2.0})]}),
        ("transfer takes time", "FAIL", {"collective": Collective(size_bytes=8, seconds=1e-9, ranks=2)}),
        ("transfer takes time", "PASS", {"collective": Collective(size_bytes=8, seconds=2e-6, ranks=2)}),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_and_what_is_only_unusual_is_not(rule, status, parts):
    assert one(rule, **parts) == status
