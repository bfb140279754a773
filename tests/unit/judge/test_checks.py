"""Checks and the regression gate against cases that were worked out by hand."""

import math

import pytest
from make_run import make_run

from benchlib.core.text import band_text, quantity
from benchlib.judge.checks import Check, Verdict, finite_check, limit_check, rule_check, verdict_of
from benchlib.judge.impossible.claim import Claim, Compute
from benchlib.judge.impossible.own import Numbers, own_claims
from benchlib.judge.regression import RegressionLimit, Side, regression_check
from benchlib.judge.verdict import judged
from benchlib.results.metrics import Metric, measured, not_available
from benchlib.results.record import load
from benchlib.results.run import Run


def rate(samples):
    return measured("rate", samples, "samples/s", "higher")


def gate(new, old, limit=None):
    new_metric, old_metric = rate(new), rate(old)
    return regression_check(
        limit or RegressionLimit(metric="rate", share=0.2),
        Side.of(new_metric, new_metric.samples),
        Side.of(old_metric, old_metric.samples),
    )


@pytest.mark.parametrize(
    ("new", "status"),
    [
        ([80.0], "PASS"),  # the boundary of -20% passes
        ([79.9], "FAIL"),
        ([1000.0], "PASS"),  # better is never a regression
        ([100.0 + i * 0.1 for i in range(50)], "PASS"),
        ([70.0 + i * 0.01 for i in range(50)], "FAIL"),
        ([60.0] * 10 + [100.0] * 10, "PASS"),  # disturbed: its undisturbed half passes, and so does the median of all
        ([60.0] * 12 + [100.0] * 8, "AMBIGUOUS"),  # disturbed: its undisturbed part passes, the median of all fails
        ([math.nan], "FAIL"),
        ([math.inf], "FAIL"),
    ],
)
def test_gate_on_a_rate(new, status):
    assert gate(new, [100.0]).status == status


@pytest.mark.parametrize(("new", "status"), [(120.0, "PASS"), (120.1, "FAIL"), (50.0, "PASS")])
def test_gate_on_a_metric_where_lower_is_better(new, status):
    old, now = measured("memory", 100.0, "GB", "lower"), measured("memory", new, "GB", "lower")
    assert regression_check(RegressionLimit(metric="memory", share=0.2), Side.of(now), Side.of(old)).status == status


@pytest.mark.parametrize(("new", "status"), [(87.5, "PASS"), (87.4, "FAIL"), (90.0, "PASS")])
def test_gate_in_points(new, status):
    old, now = measured("f1", 88.5, "", "higher"), measured("f1", new, "", "higher")
    assert regression_check(RegressionLimit(metric="f1", amount=1.0), Side.of(now), Side.of(old)).status == status


def test_a_metric_that_one_side_lacks_is_not_comparable():
    old, new = measured("m", 5.0, "GB", "lower"), not_available("m", "GB", "lower", "no sensor")
    check = regression_check(RegressionLimit(metric="m", share=0.1), Side.of(new), Side.of(old))
    assert (check.status, "no sensor" in check.reason) == ("NOT_COMPARABLE", True)


def test_targets_pass_on_the_boundary_unless_strict():
    f1 = measured("f1", 88.0, "", "higher")
    assert limit_check("F1", "?", f1, 88.0, source="tier").status == "PASS"
    assert limit_check("F1", "?", f1, 88.0, source="tier", strict=True).status == "FAIL"
    assert limit_check("F1", "?", f1, None, source="no target").status == "SKIPPED"
    missing = not_available("f1", "", "higher", "no data")
    assert limit_check("F1", "?", missing, 88.0, source="tier").status == "SKIPPED"
    assert limit_check("F1", "?", missing, 88.0, source="tier").gates  # a target that nobody measured is not met
    assert not limit_check("F1", "?", missing, None, source="no target").gates
    assert limit_check("F1", "?", measured("f1", math.nan, "", "higher"), 88.0, source="tier").status == "FAIL"


def test_a_value_above_its_measured_peak_is_impossible():
    def judged(rate, peak):
        claim = Claim(compute=Compute(flops_per_s=rate, peak_flops=peak, peak_kind="measured"))
        return rule_check("p", "?", "below the peak", [claim])

    for value, status in ((100.0, "PASS"), (105.0, "PASS"), (105.1, "FAIL")):
        assert judged(value, 100.0).status == status
    unknown = judged(1.0, None)
    assert (unknown.status, unknown.gates) == ("SKIPPED", False)
    nothing = rule_check("p", "?", "below the peak", [], missing="why not")
    assert (nothing.status, nothing.reason) == ("SKIPPED", "why not")


def claims_of(*metrics: Metric) -> list[Claim]:
    return own_claims(Numbers("squad", metrics, world_size=1))


def test_values_that_cannot_be_fail():
    assert finite_check(claims_of(measured("a", [1.0, 2.0], "s"))).status == "PASS"
    assert finite_check(claims_of(measured("a", math.nan, "s"))).status == "FAIL"
    assert (
        finite_check(claims_of(measured("latency", [3.0, -0.1, 3.0], "s"))).status == "FAIL"
    )  # hidden behind the median
    assert finite_check(claims_of()).status == "FAIL"  # nothing was measured: nothing passes


def check(status, gates=True):
    return Check(name=status, kind="sanity", question="?", status=status, reason="", gates=gates)


@pytest.mark.parametrize(
    ("statuses", "word", "code", "strict"),
    [
        (["PASS"], "PASS", 0, 0),
        (["PASS", "NO_BASELINE"], "PASS", 0, 3),
        (["PASS", "NOT_COMPARABLE"], "PASS", 0, 3),
        (["PASS", "AMBIGUOUS"], "AMBIGUOUS", 0, 3),
        (["PASS", "AMBIGUOUS", "FAIL"], "FAIL", 1, 1),
        (["SKIPPED"], "SKIPPED", 0, 3),
        ([], "SKIPPED", 0, 3),
    ],
)
def test_verdicts_and_exit_codes(statuses, word, code, strict):
    verdict = verdict_of([check(status) for status in statuses])
    assert (verdict.verdict, verdict.exit_code(), verdict.exit_code(strict=True)) == (word, code, strict)


def test_a_run_that_only_ended_in_order_has_passed_nothing():
    ended = Check(name="run completed", kind="outcome", question="?", status="PASS", reason="1 of 1 ranks")
    lonely = Check(name="parity", kind="reference", question="?", status="SKIPPED", reason="only the reference ran")
    possible = Check(name="finite", kind="sanity", question="?", status="PASS", reason="2 values")
    verdict = verdict_of([ended, possible, lonely])
    assert (verdict.verdict, verdict.exit_code(), verdict.exit_code(strict=True)) == ("SKIPPED", 0, 3)
    assert verdict.sentence == "Nothing that the run was for could be evaluated: parity: only the reference ran."
    assert verdict_of([ended, lonely, check("PASS")]).verdict == "PASS"


def test_a_broken_run_exits_with_2_whatever_passed():
    verdict = verdict_of([check("PASS")], broken="rank 1 was killed by SIGKILL")
    assert (verdict.verdict, verdict.exit_code()) == ("BROKEN", 2)
    assert verdict.sentence == "Rank 1 was killed by SIGKILL"


def test_a_stopped_run_has_one_word(tmp_path):
    verdict = verdict_of([check("PASS")], stopped="stopped by the user")
    assert (verdict.verdict, verdict.sentence, verdict.exit_code()) == ("STOPPED", "Stopped by the user", 130)
    folder = make_run(tmp_path / "run", outcome="stopped", reason="stopped by the user", steps=5, with_samples=False)
    assert judged(Run(folder)).verdict == load(folder).word == "STOPPED"


def test_a_gate_that_lacks_its_numbers_is_incomplete_and_no_question_without_a_target():
    assert [check("SKIPPED").word, check("SKIPPED", False).word] == ["INCOMPLETE", "SKIPPED"]
    assert [check("FAIL", False).word, check("FAIL").word, check("NO_BASELINE").word] == [
        "DIFFERS",
        "FAIL",
        "NO_BASELINE",
    ]


def test_an_informative_check_does_not_fail_the_run():
    assert verdict_of([check("PASS"), check("FAIL", gates=False)]).verdict == "PASS"


def test_verdicts_keep_their_numbers_on_disk():
    verdict = verdict_of([gate([100.0], [100.0])])
    assert Verdict.model_validate_json(verdict.model_dump_json()) == verdict


def test_medians_and_intervals():
    metric = measured("t", [1.0, 2.0, 3.0, 4.0, 100.0], "s", "lower")
    assert (metric.value, metric.n) == (3.0, 5)
    assert metric.ci_low <= 3.0 <= metric.ci_high
    # Three samples lie on one side of the median in a quarter of all cases: no interval of 95% can be made of them.
    few = measured("t", [1.0, 2.0, 3.0, 4.0], "s")
    assert (few.value, few.n, few.ci_low, few.ci_high) == (2.5, 4, None, None)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (0.05123, "0.0512"), (88.4123, "88.41"), (1234.5, "1,234"), (1.5e9, "1.5e+09"), (3e-7, "3e-07")],
)
def test_quantities_are_short(value, text):
    assert quantity(value) == text


def test_rates_of_operations_have_a_prefix_and_a_percentage_no_space():
    assert quantity(65.31, "%") == "65.31%"
    assert quantity(2.201e11, "FLOP/s") == "220.1 GFLOP/s"
    assert quantity(9.89e14, "FLOP/s") == "989.0 TFLOP/s"


@pytest.mark.parametrize(
    ("band", "kind", "text"),
    [
        (0.0, "ratio", "±0.0%"),
        (0.004, "ratio", "±0.4%"),
        (0.345, "ratio", "-25.7% to +34.5%"),
        (0.4, "difference", "±0.4"),
    ],
)
def test_a_band_is_written_as_the_ratios_that_it_is(band, kind, text):
    assert band_text(band, kind) == text
