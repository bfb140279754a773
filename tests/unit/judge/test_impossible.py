"""Impossible figures are refused, each with its reason; honest ones pass untouched."""

from pathlib import Path

import pytest

from benchlib.judge.foreign.readers import judged, read_claims
from benchlib.judge.impossible.claim import Claim, Collective, Compute, Latency, Learning, Requests, Speed
from benchlib.judge.impossible.findings import half_unit
from benchlib.judge.impossible.rules import RULES, judge_claims, wire_rate

FIXTURES = Path(__file__).parents[2] / "fixtures"
HONEST = sorted((FIXTURES / "honest").iterdir())

IMPOSSIBLE = {
    "01-bert-base-8xh200.json": {"rate from counts": "7,362", "scaling": "21.1 times"},
    "02-bert-base-8xh100.json": {"rate from counts": "6,372"},
    "03-bert-base-8xb200.csv": {"scaling": "21.5 times the 1,405 samples/s of one (B200), an efficiency of 2.69"},
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
    "23-loadgen-negative-rate.txt": {"possible values": "Samples per second = -400 is below zero"},
    "24-loadgen-negative-server.txt": {"possible values": "Completed samples per second = -3,601.87 is below zero"},
    "25-loadgen-count-and-duration.txt": {"rate from counts": "400 samples/s by 24,000 samples of the query in 60 s"},
    "26-loadgen-unmet-beside-valid.txt": {"valid verdict": "Early stopping not satisfied"},
    "27-loadgen-p99-above-target.txt": {"limits met": "p99 of latency 0.121005 s, at most 0.1 s"},
    "28-loadgen-headline-percentile.txt": {"average of its rows": "0.0012312 s stated, 0.0016312 s by the value of its row (90th percentile latency)"},
    "29-loadgen-overhead-below-zero.txt": {"limits met": "time of a query 0.0010534 s, at least 0.00153583 s"},
    "30-loadgen-first-token-after-the-last.txt": {"limits met": "maximum of first token 24.1004 s, at most 14.171 s"},
    "31-loadgen-too-short.txt": {"limits met": "duration 60 s, at least 600 s"},
    "32-loadgen-tokens-negative.txt": {"possible values": "Tokens per second = -51,200 is below zero"},
    "33-loadgen-not-a-number.txt": {"possible values": "Samples per second is not a finite number"},
    "34-loadgen-completed-late.txt": {"limits met": "time from the last query to its answer 599.998 s, at most 0.171004 s"},  # 600 × (3602.11 / 1801.05 - 1)
    "35-loadgen-detail-unmet.txt": {"valid verdict": "Performance constraints not satisfied"},
    "36-loadgen-detail-count-and-duration.txt": {"limits met": "270,336 queries and their rate 75.0492 s, at least 600 s"},
    "37-nccl-average-of-other-rows.txt": {"average of its rows": "481.2 GB/s stated, 331.39 GB/s by the mean of 6 values"},
    "38-nccl-wrong-elements.txt": {"right results": "56 wrong elements"},
    "39-nccl-one-nic.txt": {"busbw below the links": "at most 1,800 GB/s can be moved (no link is faster)"},
    "40-nccl-above-nvlink.txt": {"busbw below the links": "busbw 310 GB/s, at least 199.286 GB/s on the wire; at most 150 GB/s"},
    "41-nccl-no-time.txt": {"transfer takes time": "bytes in 0 us", "possible values": "algbw_gbytes_per_s is not a finite number"},
    "42-nccl-time-below-zero.txt": {"possible values": "seconds = -0.000512 is below zero"},
    "43-nccl-factor-of-another-operation.txt": {"busbw factor": "0.875, the factor of all_gather over 8 ranks: 2 times that", "busbw below the links": "521.96 GB/s"},
    "44-rccl-doubled-bandwidth.csv": {"algbw is S/t": "166.73 GB/s by 268,435,456 bytes / 1,610 us: 2 times that"},
    "45-rccl-wrong-elements.csv": {"right results": "12 wrong elements"},
    "46-table-f1.md": {"possible scores": "F1 = 140.00 is not within 0 and 100"},
    "47-table-exact-match.md": {"possible scores": "exact match 91.25 above F1 88.52"},
    "48-table-efficiency.md": {"scaling": "an efficiency of 2.40 stated for 8 devices"},
    "49-table-efficiency-nodes.csv": {"scaling": "an efficiency of 1.90"},
    "50-table-negative.csv": {"possible values": "samples/s = -3,210 is below zero"},
    "51-table-not-finite.csv": {"possible values": "samples/s is not a finite number"},
    "52-table-percentiles.md": {"percentiles in order": "p50 0.45 s above p99 0.39 s"},
    "53-table-mean-above-max.csv": {"percentiles in order": "mean 0.0084 s above maximum 0.0042 s"},
    "54-table-concurrency.md": {"requests under way": "310 requests/s of 0.11 s each are 34.1 at once: 8 are stated"},
    "55-table-tflops.md": {"below the peak": "423.0 TFLOP/s are 135.6%"},
    "56-table-mfu.csv": {"share of the peak": "MFU 127.0%"},
    "57-table-step-time.md": {"rate from counts": "3,723.64 samples/s by 2,048 samples of a step in 0.55 s", "scaling": "75.6 times"},
    "58-table-hours.md": {"rate from counts": "1,281,167 samples counted in 72 s"},
    "59-table-per-gpu.md": {"scaling": "an efficiency of 1.98"},
    "60-table-tokens.csv": {"tokens and samples": "50,790.4 tokens/s by 12.4 samples/s × 4,096 tokens: 1.5 times that"},
    "61-table-speed-up.md": {"speed-up": "48 × stated, 23.9024 × by 980 samples/s / 41 samples/s"},
    "62-table-scaling-only.csv": {"scaling": "an efficiency of 1.98 stated for 4 devices"},
    "63-one-nic.json": {"busbw below the links": "busbw 3,000 GB/s"},
    "64-negative-rate.json": {"possible values": "speed.samples_per_s = -443 is below zero"},
    "65-full-fine-tuning.json": {"below the peak": "163.6% of the claimed dense bf16 peak"},  # 6 × 6.74e9 × 40,000; 109% by 4 operations each
    "66-long-context-mfu.json": {"operations of tokens": "773.1 TFLOP/s of attention"},  # 12 × 32 × 4,096 × 8,192 × 60,000
    "67-f1.json": {"possible scores": "F1 = 140.00"},
    "68-accuracy.json": {"possible scores": "rouge1 = 138.80"},
    "69-failed-and-completed.json": {"requests add up": "more than were issued"},
    "70-percentiles.json": {"percentiles in order": "p50 0.41 s above p99 0.39 s"},
    "71-efficiency.json": {"scaling": "an efficiency of 2.69"},
    "72-average.json": {"average of its rows": "90.9 stated, 88.32 by the mean of 5 values (F1)"},
    "73-little.json": {"requests under way": "34.1 at once: 8 are stated"},
    "74-infinite-scaling.json": {"scaling": "an efficiency of 6.25"},
    "75-table-average.md": {"average of its rows": "512 stated, 443 by the mean of 3 values (samples/s)"},
}  # fmt: skip

# Rare, and possible: each is named with what would explain it, and nothing is refused.
SUSPICIOUS = {
    "impossible/04-bert-base-8xa100.md": ("scaling", "9.65 times the 443 samples/s of one (A100 80GB SXM4), an efficiency of 1.21"),
    "honest/superlinear.json": ("scaling", "an efficiency of 1.10"),
    "honest/superlinear.csv": ("scaling", "an efficiency of 1.21"),
    "honest/long.json": ("operations of tokens", "only attention over long sequences takes so many"),
}  # fmt: skip


def test_every_published_figure_that_cannot_be_has_its_reasons():
    rare = {name.removeprefix("impossible/") for name in SUSPICIOUS if "impossible/" in name}
    assert {path.name for path in (FIXTURES / "impossible").iterdir()} == {*IMPOSSIBLE, *rare}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_published_figures_that_cannot_be_are_refused_for_these_reasons_alone(name):
    _, claims = read_claims(FIXTURES / "impossible" / name)
    failures = {judgement.rule.name: judgement.failures for judgement in judge_claims(claims) if judgement.failures}
    assert set(failures) == set(IMPOSSIBLE[name])
    assert all(any(why in failure for failure in failures[rule]) for rule, why in IMPOSSIBLE[name].items()), failures


@pytest.mark.parametrize("path", HONEST, ids=lambda path: path.name)
def test_honest_results_pass_untouched(path):
    _, claims = read_claims(path)
    judgements = judge_claims(claims)
    assert [judgement.failures for judgement in judgements if judgement.failures] == []
    assert any(judgement.passed or judgement.suspicious for judgement in judgements)


@pytest.mark.parametrize("name", SUSPICIOUS)
def test_what_is_rare_is_called_suspicious_with_its_reason_and_refused_by_no_rule(name):
    rule, why = SUSPICIOUS[name]
    document = judged(FIXTURES / name)
    assert document["exit_code"] == 0 and f"Suspicious: {rule} (" in document["sentence"]
    [finding] = [row for row in document["findings"] if row["status"] == "AMBIGUOUS"]
    assert finding["rule"] == rule and why in " ".join(finding["suspicious"])


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
        ("scaling", "AMBIGUOUS", {"speed": Speed(samples_per_s=841, ranks=8, one_device_samples_per_s=100.01)}),
        ("scaling", "AMBIGUOUS", {"speed": Speed(efficiency=1.21, ranks=8)}),
        ("scaling", "FAIL", {"speed": Speed(efficiency=1.52, ranks=8)}),
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
        ("operations of tokens", "AMBIGUOUS", {"compute": Compute(mfu=0.9, **A100, **TOKENS)}),  # 281 TFLOP/s: which length?
        # 12 × 32 × 4,096 × 2,048 × 20,000 tokens/s are 64 TFLOP/s of attention, 184 with the 120 of the parameters.
        ("operations of tokens", "FAIL", {"compute": Compute(mfu=0.9, **A100, **TOKENS, layers=32, hidden=4096, sequence_length=2048)}),
        ("operations of tokens", "PASS", {"compute": Compute(mfu=0.59, **A100, **TOKENS, layers=32, hidden=4096, sequence_length=2048)}),
        # Where an adapter alone is trained, 4 operations in place of 6 are enough: 80 TFLOP/s, not 60.
        ("operations of tokens", "PASS", {"compute": Compute(flops_per_s=80e12, **A100, **TOKENS)}),
        ("operations of tokens", "FAIL", {"compute": Compute(flops_per_s=60e12, **A100, **TOKENS)}),
        # 6 × 1e9 × 70,000 are 420 TFLOP/s, 4 × are 280 of the A100's 312.
        ("below the peak", "AMBIGUOUS", {"compute": Compute(**A100, **TOKENS | {"tokens_per_s": 70_000.0})}),
        ("below the peak", "FAIL", {"compute": Compute(**A100, **TOKENS | {"tokens_per_s": 90_000.0})}),
        ("below the peak", "FAIL", {"compute": Compute(**A100, **TOKENS | {"tokens_per_s": 180_000.0}, work="inference")}),
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
