"""What a calibration says of made-up runs whose numbers are worked out by hand, and that reports and gates use it."""

import math

import pytest
from series import record

from benchlib.judge import baselines
from benchlib.judge.calibration import Calibration, calibrate_metric, load_calibration, save_calibration
from benchlib.judge.regression import RegressionLimit

LIMIT = RegressionLimit(metric="rate", share=0.10)


def test_the_counts_are_those_of_the_gate():
    """98, 100, 102: each run against each other differs by 2 or 4%, within the limit of 10%."""
    found = calibrate_metric(LIMIT, [record(v) for v in (98.0, 100.0, 102.0)], {0.25: [record(80.0), record(79.0)]})
    logs = [math.log(v) for v in (98.0, 100.0, 102.0)]
    mean = sum(logs) / 3
    assert found.spread == pytest.approx(math.sqrt(sum((v - mean) ** 2 for v in logs) / 2))
    assert (found.left_out.comparisons, found.left_out.fail) == (3, 0)
    (planted,) = found.planted
    assert planted.measured == pytest.approx(math.sqrt(80 * 79) / math.exp(mean))
    assert planted.verdicts.comparisons == 2
    assert found.effect > 0.10  # no loss within the limit is a regression


def test_an_alarm_among_unchanged_runs_is_counted():
    found = calibrate_metric(LIMIT, [record(v) for v in (100.0, 100.0, 100.0, 80.0)], {})
    assert found.left_out.fail == 1
    assert found.left_out.upper == pytest.approx(0.751, abs=0.01)  # where (1-p)^4 + 4p(1-p)^3 = 0.05


def test_what_a_slow_down_cannot_change_has_no_planted_row():
    limit = RegressionLimit(metric="f1", amount=1.0)
    runs = [record(v, "f1", "") for v in (88.0, 88.2, 87.9)]
    found = calibrate_metric(limit, runs, {0.25: [record(88.0, "f1", "")]})
    assert found.planted == []
    assert calibrate_metric(LIMIT, [record(1.0), record(1.1)], {}) is None  # too few runs
    assert calibrate_metric(RegressionLimit(metric="other", share=0.1), [record(1.0)] * 3, {}) is None
    assert found.kind == "difference"
    assert found.effect > 1.0


@pytest.fixture
def stored(tmp_path):
    metric = calibrate_metric(LIMIT, [record(v) for v in (98.0, 100.0, 102.0)], {})
    factors = {"cpu": "Z80"}
    made = Calibration(
        benchmark="squad", tier="smoke", fingerprint=factors, made_at=0.0, runs=3, planted_runs=0, metrics=[metric]
    )
    save_calibration(tmp_path, made)
    return made


def test_a_calibration_is_found_by_fingerprint_and_is_no_baseline(stored, tmp_path):
    assert load_calibration(tmp_path, "squad", "smoke", {"cpu": "Z80"}) == stored
    assert load_calibration(tmp_path, "squad", "smoke", {"cpu": "Z81"}) is None
    assert baselines.stored(tmp_path) == ([], {})
    assert stored.spread("rate").dof == 2
    assert stored.spread("other") is None
    assert "none of the 3 unchanged failed in a metric against the others" in stored.sentence()


def test_runs_are_counted_and_not_the_metrics_of_a_run():
    """Of four runs one fails in each of two metrics: no more than two runs did, of four, and not two of eight trials."""
    limits = [RegressionLimit(metric=name, share=0.10) for name in ("rate", "speed")]
    metrics = [
        calibrate_metric(limit, [record(v, limit.metric) for v in (100.0, 100.0, 100.0, 80.0)], {}) for limit in limits
    ]
    made = Calibration(
        benchmark="squad", tier="smoke", fingerprint={}, made_at=0.0, runs=4, planted_runs=0, metrics=metrics
    )
    assert [item.left_out.fail for item in metrics] == [1, 1]
    assert "at most 2 of the 4 unchanged failed in a metric" in made.sentence()
    assert "8" not in made.sentence().partition("slowed runs: ")[2].partition(";")[0]
    assert "one-sided 95% bound" in made.method() and "exact" not in made.method()
