"""What holds for every input: the statistics and the regression gate, on inputs that hypothesis makes up."""

import math

import pytest
from bounded import bounded
from hypothesis import given
from hypothesis import strategies as st

from benchlib.core.stats import summary
from benchlib.judge.change import Spread, change
from benchlib.judge.checks import Check, verdict_of
from benchlib.judge.regression import RegressionLimit, Side, regression_check
from benchlib.results.metrics import measured

positive = st.floats(1e-6, 1e6)
run_samples = st.lists(positive, min_size=1, max_size=12)
sides = st.lists(run_samples, min_size=1, max_size=3)


# Statistics


@bounded(40)
@given(samples=st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=40), data=st.data())
def test_a_summary_is_in_order_and_scales(samples, data):
    found = summary(samples)
    assert found.n == len(samples)
    assert min(samples) <= found.p05 <= found.median <= found.p95 <= found.p99 <= max(samples)
    other = summary(data.draw(st.permutations(samples)))
    assert (other.median, other.p05, other.p95, other.p99) == (found.median, found.p05, found.p95, found.p99)
    assert (found.ci_low is None) == (len(samples) < 5)
    if found.ci_low is not None:
        assert min(samples) <= found.ci_low <= found.median <= found.ci_high <= max(samples)
        scaled = summary([4 * value for value in samples])
        assert (scaled.median, scaled.ci_low, scaled.ci_high) == (4 * found.median, 4 * found.ci_low, 4 * found.ci_high)


@bounded(30)
@given(side=sides, spread=st.none() | st.builds(Spread, st.floats(0, 0.5), st.integers(1, 20)))
def test_a_side_against_itself_has_not_changed(side, spread):
    for kind, same in (("ratio", 1.0), ("difference", 0.0)):
        found = change(side, side, kind=kind, known=spread)
        assert found.value == pytest.approx(same)
        assert found.low <= found.value <= found.high
        assert found.band >= 0


@bounded(30)
@given(new=sides, old=sides, factor=st.floats(0.01, 100))
def test_a_ratio_turns_round_and_scales_with_its_sides(new, old, factor):
    found, turned = change(new, old), change(old, new)
    assert turned.value == pytest.approx(1 / found.value)
    assert found.low <= found.value <= found.high
    if found.basis == "none" and all(len(run) == 1 for run in new + old):  # else the two draw other resamples
        assert (turned.low, turned.high) == pytest.approx((1 / found.high, 1 / found.low))
    scaled = change([[factor * value for value in run] for run in new], old)
    assert (scaled.value, scaled.low, scaled.high) == pytest.approx(
        tuple(factor * end for end in (found.value, found.low, found.high)), rel=1e-6
    )


@bounded(25)
@given(new=sides, old=sides, s=st.floats(0, 0.3), more=st.floats(0, 0.3), dof=st.integers(2, 20))
def test_more_spread_between_runs_never_narrows_the_interval(new, old, s, more, dof):
    narrow, wide = (change(new, old, known=Spread(value, dof)) for value in (s, s + more))
    assert wide.low <= narrow.low * (1 + 1e-9)
    assert wide.high >= narrow.high * (1 - 1e-9)
    assert wide.band >= narrow.band - 1e-12


# The gate


SEVERITY = {"PASS": 0, "AMBIGUOUS": 1, "FAIL": 2}
directions = st.sampled_from(["higher", "lower"])
limits = st.builds(lambda share: RegressionLimit(metric="m", share=share), st.floats(0, 0.9)) | st.builds(
    lambda amount: RegressionLimit(metric="m", amount=amount), st.floats(0, 100)
)
STILL = Spread(0.0, 20)
calibrated = st.none() | st.builds(Spread, st.floats(0, 0.3), st.integers(1, 20))


def side_of(runs, direction):
    """Return runs as one side of a comparison."""
    return Side(measured("m", runs[-1], "s", direction), tuple(tuple(run) for run in runs))


def scaled_side(runs, factor, direction):
    return side_of([[factor * value for value in run] for run in runs], direction)


@bounded(40)
@given(old=sides, limit=limits, direction=directions, factor=st.floats(1, 10), spread=calibrated)
def test_better_is_never_a_regression(old, limit, direction, factor, spread):
    better = scaled_side(old, factor if direction == "higher" else 1 / factor, direction)
    assert regression_check(limit, better, side_of(old, direction), spread).status != "FAIL"


@bounded(40)
@given(new=sides, old=sides, limit=limits, direction=directions, factor=st.floats(1, 10), spread=calibrated)
def test_a_worse_run_is_never_judged_better(new, old, limit, direction, factor, spread):
    base = side_of(old, direction)
    worse = 1 / factor if direction == "higher" else factor
    before = regression_check(limit, side_of(new, direction), base, spread).status
    after = regression_check(limit, scaled_side(new, worse, direction), base, spread).status
    assert SEVERITY[after] >= SEVERITY[before]


@bounded(80)
@given(value=st.floats(1e-2, 1e6), share=st.floats(0, 0.9), amount=st.floats(0, 1e5), direction=directions)
def test_a_boundary_value_passes_and_one_beyond_it_fails(value, share, amount, direction):
    sign = -1 if direction == "higher" else 1
    by_share, by_amount = RegressionLimit(metric="m", share=share), RegressionLimit(metric="m", amount=amount)
    base = side_of([[value]], direction)
    for limit, edge, step in (
        (by_share, value * (1 + sign * share), value * (1 + sign * share) * 1e-3),
        (by_amount, value + sign * amount, max(value, amount) * 1e-3),
    ):
        # Runs that never differ: the interval is a point. What only the default tells stays open just beyond a small limit.
        assert regression_check(limit, side_of([[edge]], direction), base, STILL).status == "PASS"
        assert regression_check(limit, side_of([[edge + sign * step]], direction), base, STILL).status == "FAIL"


@bounded(30)
@given(new=sides, old=sides, amount=st.floats(0, 100), spread=calibrated)
def test_the_gate_has_no_favourite_direction(new, old, amount, spread):
    limit = RegressionLimit(metric="m", amount=amount)
    up = regression_check(limit, side_of(new, "higher"), side_of(old, "higher"), spread)
    down = regression_check(limit, scaled_side(new, -1, "lower"), scaled_side(old, -1, "lower"), spread)
    assert up.status == down.status


@bounded(20)
@given(new=run_samples, wrong=st.sampled_from([math.nan, math.inf, -math.inf]), limit=limits, direction=directions)
def test_what_is_no_number_fails(new, wrong, limit, direction):
    side = Side.of(measured("m", [*new, wrong], "s", direction))
    check = regression_check(limit, side, side_of([new], direction))
    assert (check.status, check.value) == ("FAIL", None)


statuses = st.sampled_from(["PASS", "FAIL", "AMBIGUOUS", "SKIPPED", "NO_BASELINE", "NOT_COMPARABLE"])
some_checks = st.lists(
    st.builds(
        lambda status, gates: Check(name="c", kind="sanity", question="?", status=status, reason="r", gates=gates),
        statuses,
        st.booleans(),
    ),
    max_size=6,
)


@bounded(100)
@given(checks=some_checks, place=st.integers(0, 6), strict=st.booleans(), broken=st.sampled_from(["", "it broke"]))
def test_one_failed_gate_fails_the_run(checks, place, strict, broken):
    before = verdict_of(checks, broken)
    failing = Check(name="f", kind="target", question="?", status="FAIL", reason="r")
    after = verdict_of([*checks[:place], failing, *checks[place:]], broken)
    assert (after.verdict, after.exit_code(strict)) == (("BROKEN", 2) if broken else ("FAIL", 1))
    assert before.exit_code(strict=True) >= before.exit_code(strict=False)
    assert (before.exit_code() == 0) == (
        not broken and not any(check.gates and check.status == "FAIL" for check in checks)
    )
    if before.verdict == "PASS":
        assert any(check.status == "PASS" for check in checks)
