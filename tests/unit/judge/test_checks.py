"""Checks and verdicts against cases that were worked out by hand."""

import math

import pytest
from bounded import bounded
from hypothesis import given
from hypothesis import strategies as st

from benchlib.judge.checks import Check, Verdict, finite_check, verdict_of
from benchlib.judge.impossible.claim import Claim, Compute
from benchlib.judge.impossible.own import Numbers
from benchlib.judge.impossible.rules import RULES
from benchlib.results.metrics import measured
from benchlib.results.run import Result


@pytest.mark.parametrize(("flops_per_s", "status"), [(105.0, "PASS"), (105.1, "FAIL")])
def test_a_value_above_its_measured_peak_is_impossible(flops_per_s, status):
    claim = Claim(compute=Compute(flops_per_s=flops_per_s, peak_flops=100.0))
    assert [finding.status for finding in RULES["below the peak"].findings(claim)] == [status]


@pytest.mark.parametrize(
    ("metrics", "status"),
    [
        ([measured("a", [1.0, 2.0], "s")], "PASS"),
        ([measured("a", math.nan, "s")], "FAIL"),
        ([measured("latency", [3.0, -0.1, 3.0], "s")], "FAIL"),  # hidden behind the median
        ([], "FAIL"),  # nothing was measured: nothing passes
    ],
)
def test_values_that_cannot_be_fail(metrics, status):
    result = Result(benchmark="squad", tier="smoke", backend="cpu", world_size=1, metrics=metrics)
    assert finite_check(Numbers(result)).status == status


def check(status, gates=True, **more):
    fields = {"name": status, "kind": "sanity", "question": "?", "reason": ""} | more
    return Check(status=status, gates=gates, **fields)


ENDED = check("PASS", name="run completed", kind="outcome", reason="1 of 1 ranks")
POSSIBLE = check("PASS", name="finite", kind="sanity", reason="2 values")
LONELY = check("SKIPPED", name="parity", kind="reference", reason="only the reference ran")


@pytest.mark.parametrize(
    ("checks", "options", "word", "code", "strict"),
    [
        ([check("PASS")], {}, "PASS", 0, 0),
        ([check("PASS"), check("NO_BASELINE")], {}, "PASS", 0, 3),
        ([check("PASS"), check("NOT_COMPARABLE")], {}, "PASS", 0, 3),
        ([check("PASS"), check("AMBIGUOUS")], {}, "AMBIGUOUS", 0, 3),
        ([check("PASS"), check("AMBIGUOUS"), check("FAIL")], {}, "FAIL", 1, 1),
        ([check("PASS"), check("FAIL", gates=False)], {}, "PASS", 0, 0),
        ([check("SKIPPED")], {}, "SKIPPED", 0, 3),
        ([], {}, "SKIPPED", 0, 3),
        ([ENDED, LONELY], {}, "SKIPPED", 0, 3),  # that a run ended in order is no pass
        ([ENDED, POSSIBLE, LONELY], {}, "SKIPPED", 0, 3),  # nor that its numbers are possible
        ([ENDED, LONELY, check("PASS")], {}, "PASS", 0, 3),
        ([check("PASS")], {"broken": "rank 1 was killed by SIGKILL"}, "BROKEN", 2, 2),
        ([check("PASS")], {"stopped": "stopped by the user"}, "STOPPED", 130, 130),
    ],
)
def test_verdicts_and_exit_codes(checks, options, word, code, strict):
    verdict = verdict_of(checks, **options)
    assert (verdict.verdict, verdict.exit_code(), verdict.exit_code(strict=True)) == (word, code, strict)
    assert Verdict.model_validate_json(verdict.model_dump_json()) == verdict


statuses = st.sampled_from(["PASS", "FAIL", "AMBIGUOUS", "SKIPPED", "NO_BASELINE", "NOT_COMPARABLE"])
some_checks = st.lists(st.builds(check, statuses, st.booleans()), max_size=6)


@bounded(100)
@given(checks=some_checks, place=st.integers(0, 6), strict=st.booleans(), broken=st.sampled_from(["", "it broke"]))
def test_one_failed_gate_fails_the_run(checks, place, strict, broken):
    before = verdict_of(checks, broken)
    after = verdict_of([*checks[:place], check("FAIL"), *checks[place:]], broken)
    assert (after.verdict, after.exit_code(strict)) == (("BROKEN", 2) if broken else ("FAIL", 1))
    assert before.exit_code(strict=True) >= before.exit_code(strict=False)
    failed = any(item.gates and item.status == "FAIL" for item in checks)
    assert (before.exit_code() == 0) == (not broken and not failed)
    if before.verdict == "PASS":
        assert any(item.status == "PASS" for item in checks)
