"""What the checks and sentences of a parity run say of members that differ, crash, are missing or computed other work."""

import math

import pytest
from make_parity import left, run_of

from benchlib.benchmarks.parity.spec import SPEC
from benchlib.judge.baselines import accept, find
from benchlib.judge.checks import save_verdict, verdict_of
from benchlib.results.run import Run
from benchlib.workloads.numerics import COSINE, GRADIENTS, LAYERS, LOGITS


def judged(run, root):
    return {check.name: check for check in SPEC.judge(run, find(run, root))}


def of(data, member, quantity=LOGITS):
    return next(row for row in data["differences"] if (row["member"], row["quantity"]) == (member, quantity))


def test_a_good_run_passes_every_check(tmp_path):
    run = run_of(tmp_path / "run")
    checks = judged(run, tmp_path)
    assert {name: check.reason for name, check in checks.items() if check.status == "FAIL"} == {}
    for name in ("parity eager", "parity bf16", "same weights and inputs", "tolerance sensitivity", "reference accuracy",
                 "accuracy against double precision", "finite", "time budget"):  # fmt: skip
        assert checks[name].status == "PASS", (name, checks[name].reason)
    assert checks["parity eager"].gates and not checks["parity native"].gates and not checks["parity"].gates
    assert verdict_of(list(checks.values())).verdict == "PASS"
    said = " ".join(SPEC.reading(run))
    assert "Within the limits: eager, sdpa_flash, fp64 and bf16; equal bit by bit: eager." in said
    assert "bf16 moves a logit by up to 0.008" in said
    assert run.result.value("sdpa_flash_logits_max_difference_minisquad_tiny") == 1.8e-7
    assert run.result.value("bf16_queries_per_s_minisquad_tiny") == pytest.approx(3e3 / 30.5)


def value(quantity, number):
    return lambda data: of(data, "sdpa_flash", quantity).update(value=number)


def exact_bf16(data):
    of(data, "bf16")["value"] = of(data, "bf16", COSINE)["value"] = 0.0


def injected(data):
    value(LOGITS, 0.3)(data)
    for row in data["differences"]:
        if (row["member"], row["quantity"]) == ("sdpa_flash", LAYERS) and row["at"] != "layer 0":
            row["value"] = 0.1


def reshaped(data):
    of(data, "sdpa_flash", GRADIENTS).update(value=math.nan, note="shape (2, 3), the reference's is (3, 2)")


WRONG = [
    (value(LOGITS, 2e-5), "parity sdpa_flash", "logits len8-batch1: difference 2e-05, not <= 1e-05"),
    (value(GRADIENTS, None), "parity sdpa_flash", "value is missing in row 10 of differences"),
    (reshaped, "parity sdpa_flash", "not comparable: gradients a.weight: shape (2, 3), the reference's is (3, 2)"),
    (injected, "parity sdpa_flash", "the first layer beyond its limit is layer 1"),
    (left("sdpa_flash", "failed", "ended by SIGSEGV"), "parity sdpa_flash", "ended by SIGSEGV"),
    (left("sdpa_flash", "skipped", ""), "parity sdpa_flash", ""),
    (lambda data: data["members"][1].update(model_sha256="x"), "same weights and inputs", "sdpa_flash: hashes that are not the reference's 1"),
    (exact_bf16, "tolerance sensitivity", "bf16 computed in full precision, or the comparison detects nothing"),
    (lambda data: data["run"][0].update(reference_error=1.1e-4), "reference accuracy", "0.00011, not <= 0.0001"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "name", "words"), WRONG)
def test_what_is_wrong_fails_with_its_reason(change, name, words, tmp_path):
    check = judged(run_of(tmp_path / "run", change), tmp_path)[name]
    assert (check.status, check.gates) == ("FAIL", True), check.reason
    assert words in check.reason


@pytest.mark.parametrize("number", [0.5, math.nan])
def test_a_member_that_does_not_gate_fails_no_run(tmp_path, number):
    checks = judged(run_of(tmp_path / "run", lambda data: of(data, "native").update(value=number)), tmp_path)
    assert verdict_of(list(checks.values())).verdict == "PASS"
    assert (checks["parity native"].status, checks["parity native"].gates) == ("FAIL", False)


def skip_all(data):
    for row in data["members"]:
        left(row["member"], "skipped", f"{row['member']} is not installed")(data)


@pytest.mark.parametrize(
    ("change", "values", "words"),
    [
        (skip_all, {}, "eager is not installed; sdpa_flash is not installed"),
        (lambda data: None, {"names": ("native",)}, "native only informs: name a member that gates"),
    ],
)
def test_what_was_not_compared_never_passes(tmp_path, change, values, words):
    checks = judged(run_of(tmp_path / "run", change, **values), tmp_path)
    assert (checks["parity"].status, checks["parity"].gates) == ("SKIPPED", True)
    assert checks["parity"].reason.startswith(f"no member that gates was compared: {words}")
    verdict = verdict_of(list(checks.values()))
    if "names" not in values:
        assert verdict.verdict == "SKIPPED" and "no member that gates" in verdict.sentence
    assert verdict.exit_code(strict=True) == 3


def test_a_recording_compares_nothing_and_passes_where_its_inputs_were_computed(tmp_path):
    checks = judged(run_of(tmp_path / "run", names=(), record=True), tmp_path)
    assert "parity" not in checks and checks["recorded"].status == "PASS"
    assert verdict_of(list(checks.values())).verdict == "PASS"


@pytest.mark.parametrize(
    ("distance", "status"), [(6e-7, "PASS"), (6.1e-7, "FAIL"), (None, "SKIPPED")]
)  # reference: 3e-7
def test_worse_is_more_than_twice_the_references_distance_and_informs(tmp_path, distance, status):
    def change(data):
        for row in data["members"]:
            row["fp64_max_abs"] = distance
            row["why"] = {"fp64_max_abs": "no time for double precision"} if distance is None else {}

    run = run_of(tmp_path / "run", change)
    check = judged(run, tmp_path)["accuracy against double precision"]
    assert (check.status, check.gates) == (status, False)
    said = any("worse and not only different" in sentence for sentence in SPEC.reading(run))
    assert said == (status == "FAIL")


def test_a_driver_that_changes_numerics_is_noticed(tmp_path):
    accepted = run_of(tmp_path / "accepted")
    save_verdict(accepted.path, verdict_of(list(judged(accepted, tmp_path).values())))
    accept(Run(accepted.path), "test", SPEC.limits(accepted), root=tmp_path)
    name = "sdpa_flash_logits_max_difference_minisquad_tiny vs baseline"
    for place, (factor, status, word) in enumerate(
        [(1.0, "PASS", "PASS"), (1.9, "PASS", "FAIL"), (2.1, "FAIL", "FAIL")], 1
    ):
        run = run_of(tmp_path / f"again{factor}", value(LOGITS, 1.8e-7 * factor), started=1.79e9 + place)
        checks = judged(run, tmp_path)
        assert (checks[name].status, checks["numerics unchanged"].status) == (status, word), factor
        assert not checks["numerics unchanged"].gates
