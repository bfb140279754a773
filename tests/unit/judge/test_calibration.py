"""What a calibration says of made-up runs whose numbers are worked out by hand, and that reports and gates use it."""

import math

import pytest
from series import record

from benchlib.judge import baselines
from benchlib.judge.calibration import Calibration, load_calibration, save_calibration
from benchlib.judge.regression import LEVEL, RegressionLimit
from benchlib.results.metrics import measured

LIMIT = RegressionLimit(metric="rate", share=0.10)


def calibration(*runs, limits=(LIMIT,), slowed=()):
    slower = [run.model_copy(update={"config": {"planted_slowdown": 0.25}}) for run in slowed]
    return Calibration(runs=[*runs, *slower], limits=limits)


def rates(*values, **more):
    return [record(value, **more) for value in values]


def test_the_counts_are_those_of_the_gate():
    """98, 100, 102: each run differs from the mean of the others by 3% at most, within the limit of 10%."""
    result = calibration(*rates(98.0, 100.0, 102.0), slowed=rates(80.0, 79.0)).calibrated["rate"]
    logs = [math.log(v) for v in (98.0, 100.0, 102.0)]
    mean = sum(logs) / 3
    assert result.spread.s == pytest.approx(math.sqrt(sum((v - mean) ** 2 for v in logs) / 2))
    assert result.statuses == {"PASS": 3}
    ratio, judged = result.slowed[0.25]
    assert (ratio, judged.total()) == (pytest.approx(math.sqrt(80 * 79) / math.exp(mean)), 2)
    assert result.effect > 0.10  # no loss within the limit is a regression


def test_a_throughput_has_a_spread_of_its_undisturbed_level():
    """Of each run the first half stalls, by another factor: levels are alike to 1%, throughputs are not."""
    runs = []
    for level, stall in ((99.0, 2.0), (100.0, 4.0), (101.0, 8.0)):
        rate = measured("rate", [level / stall] * 20 + [level] * 20, "samples/s", "higher", average="harmonic")
        run = record(1.0)
        run.result.metrics[:] = [rate]
        runs.append(run.model_copy(update={"samples": {"rate": rate.samples}}))
    known = calibration(*runs)
    assert known.spread("rate").s > 0.3
    assert known.spread(f"rate{LEVEL}").s == pytest.approx(math.log(1.01) * math.sqrt(2 / 3), rel=0.05)
    assert known.calibrated["rate"].effect < 0.4


def test_an_alarm_among_unchanged_runs_is_counted_once_a_run_in_however_many_metrics():
    """Of four runs one fails in each of two metrics: no more than two runs did, of four,."""
    limits = [LIMIT, RegressionLimit(metric="speed", share=0.10)]
    runs = rates(100.0, 100.0, 100.0, 80.0)
    for run in runs:
        run.result.metrics += [run.result.metrics[0].model_copy(update={"name": "speed"})]
    result = calibration(*runs, limits=limits)
    assert [item.statuses["FAIL"] for item in result.calibrated.values()] == [1, 1]
    assert "at most 2 of the 4 unchanged failed in a metric" in result.sentence()


def test_a_calibration_is_found_by_fingerprint_and_is_no_baseline(tmp_path):
    about = {"benchmark": "squad", "tier": "smoke", "fingerprint": {"cpu": "Z80"}}
    stored = calibration(*(run.model_copy(update=about) for run in rates(98.0, 100.0, 102.0)))
    save_calibration(tmp_path, stored)
    result = load_calibration(tmp_path, "squad", "smoke", {"cpu": "Z80"})
    assert result.rows() == stored.rows() and result.spread("rate").dof == 2 and result.spread("other") is None
    assert load_calibration(tmp_path, "squad", "smoke", {"cpu": "Z81"}) is None
    assert baselines.stored(tmp_path) == ([], {})
    assert "none of the 3 unchanged failed in a metric against the others" in result.sentence()
