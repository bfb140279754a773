"""What the checks and sentences of a parity run say of members that differ, crash, are missing or computed other work."""

import copy
import math
from pathlib import Path

import pytest
from make_parity import LARGEST, facts, tables

from benchlib.benchmarks.parity import tolerances
from benchlib.benchmarks.parity.judge import checks, lacks, limits, reading
from benchlib.config.schema import build, save_config
from benchlib.core.files import write_json
from benchlib.judge.baselines import accept, find
from benchlib.judge.checks import save_verdict, verdict_of
from benchlib.judge.numbers import judged_view
from benchlib.judge.verdict import judged as verdict_on
from benchlib.results.metrics import derived, measured
from benchlib.results.run import Result, Run, save_result

MEMBERS = ("eager", "sdpa_flash", "fp64", "bf16", "native")
SHA = {"model_sha256": "ab" * 32, "inputs_sha256": "cd" * 32}
SAMPLES = [9.5, 10.0, 11.0]


def metrics(found):
    """Return the metrics that belong to the tables."""
    suffix, made = "_minisquad_tiny", [measured("total_s", 20.0, "s", "lower")]
    for row in found["quantities"]:
        if row["quantity"] == tolerances.LOGITS:
            made.append(derived(f"{row['member']}_logits_max_difference{suffix}", row["value"], "", "lower"))
    for row in found["latency"]:
        samples = [value * row["p50_ms"] / 10 for value in SAMPLES]
        row["n"], row["mean_ms"], row["qps"] = 3, sum(samples) / 3, 3e3 / sum(samples)
        made.append(measured(f"{row['member']}_latency_ms{suffix}", samples, "ms", "lower"))
    return made


def run_of(folder: Path, change=lambda found, about: None, then=lambda found, result: None, members=MEMBERS, **values):
    """Store the run of made-up tables after a change to them, and one to the result whose metrics say something else."""
    found, about = copy.deepcopy(tables(members)), facts()
    found["members"] = [row | SHA for row in found["members"]]
    change(found, about)
    config = build("parity", {"benchmark": "parity", **values})
    result = Result.of(
        config,
        status="complete",
        started_at=1.79e9,
        ended_at=1.79e9 + 20,
        metrics=metrics(found),
        facts=about,
        tables=found,
    )
    then(result.tables, result)
    folder.mkdir(exist_ok=True)
    save_config(config, folder)
    write_json(folder / "machine.json", {})
    save_result(folder, result)
    return Run(folder)


def judged(run, root):
    return {check.name: check for check in checks(judged_view(run, lacks, ())[0], find(run, root))}


def quantity(found, member, name):
    return next(row for row in found["quantities"] if (row["member"], row["quantity"]) == (member, name))


def test_a_good_run_passes_every_check(tmp_path):
    run = run_of(tmp_path / "run")
    found = judged(run, tmp_path)
    assert {name for name, check in found.items() if check.status == "FAIL"} == set()
    for name in (
        "parity eager",
        "parity sdpa_flash",
        "parity bf16",
        "same weights and inputs",
        "tolerance sensitivity",
        "reference accuracy",
        "accuracy against double precision",
        "finite",
        "numbers agree",
        "time budget",
    ):
        assert found[name].status == "PASS", (name, found[name].reason)
    assert not found["parity native"].gates
    assert verdict_of(list(found.values())).verdict == "PASS"
    told = " ".join(reading(run))
    assert "tiny, a small stand-in model of 897,794 parameters" in told
    assert "eager, sdpa_flash, fp64, bf16 match the reference within the limits, eager bit by bit" in told
    assert "In fp32 the largest difference of a logit is 1.8e-07 (sdpa_flash)" in told
    assert "bf16 moves a logit by up to 0.008" in told and "different, not worse" in told


def value(name, new):
    def change(found, about):
        quantity(found, "sdpa_flash", name)["value"] = new

    return change


def crashed(found, about):
    row = next(row for row in found["members"] if row["member"] == "sdpa_flash")
    row |= {"outcome": "FAIL", "reason": "ended by SIGSEGV", "model_sha256": "", "inputs_sha256": ""}
    for name in ("quantities", "logits", "latency", "truth", "layers"):
        found[name] = [row for row in found[name] if row["member"] != "sdpa_flash"]


def no_limit(found, about):
    quantity(found, "sdpa_flash", tolerances.LOGITS)["limit"] = None


def not_finite(found, about, member="sdpa_flash"):
    """As a member leaves it that gave NaN: its rows say so, and have no number."""
    quantity(found, member, tolerances.GRADIENTS).update(value=None, status="FAIL", reason="not finite")
    for row in found["gradients"]:
        if row["member"] == member:
            row.update(relative_l2=None, beyond=True)


def other_weights(found, about):
    found["members"][1]["model_sha256"] = "ef" * 32


def exact_bf16(found, about):
    quantity(found, "bf16", tolerances.LOGITS)["value"] = quantity(found, "bf16", tolerances.COSINE)["value"] = 0.0
    found["logits"] = [row for row in found["logits"] if row["member"] != "bf16"]


@pytest.mark.parametrize(
    ("change", "name", "words"),
    [
        # The status in the table says PASS each time: the numbers count.
        (value(tolerances.LOGITS, 2e-5), "parity sdpa_flash", "logits max difference 2e-05 (<= 1e-05) at len128-batch8"),
        (value(tolerances.COSINE, 1e-9), "parity sdpa_flash", "1 - cosine of the logits 1e-09 (<= 1e-10)"),
        (value(tolerances.SPANS, 0.99), "parity sdpa_flash", "span agreement 0.99 (>= 1)"),
        (value(tolerances.GRADIENTS, None), "parity sdpa_flash", "value is missing in row 22 of quantities (sdpa_flash, gradients, <= 0.0001)"),
        (value(tolerances.GRADIENTS, math.nan), "parity sdpa_flash", "value is nan in row 22 of quantities"),
        (no_limit, "parity sdpa_flash", "limit is missing in row 16 of quantities"),
        (not_finite, "parity sdpa_flash", "gradients: not finite at bert.encoder.layer.0.attention.self.key.bias"),
        (crashed, "parity sdpa_flash", "ended by SIGSEGV"),
        (other_weights, "same weights and inputs", "others: sdpa_flash"),
        (exact_bf16, "tolerance sensitivity", "bf16 computed in full precision, or the comparison detects nothing"),
    ],
)  # fmt: skip
def test_what_is_wrong_fails_with_its_reason(change, name, words, tmp_path):
    check = judged(run_of(tmp_path / "run", change), tmp_path)[name]
    assert (check.status, check.gates) == ("FAIL", True)
    assert words in check.reason


@pytest.mark.parametrize(("member", "verdict"), [("sdpa_flash", "FAIL"), ("native", "PASS")])
def test_a_nan_fails_the_run_only_of_a_member_that_gates(tmp_path, member, verdict):
    run = run_of(tmp_path / "run", lambda found, about: not_finite(found, about, member))
    (tmp_path / "run" / "status.json").write_text('{"outcome": "complete", "reason": "", "ranks": []}')
    word = verdict_on(run, tmp_path)
    assert word.verdict == verdict, word.sentence
    check = next(check for check in word.checks if check.name == f"parity {member}")
    assert (check.status, check.gates) == ("FAIL", verdict == "FAIL")


@pytest.mark.parametrize(
    ("table", "row", "columns"),
    [
        ("quantities", {"status": "SKIPPED", "reason": "no dev set"}, {"value"}),
        ("quantities", {"status": "SKIPPED", "reason": ""}, set()),
        ("quantities", {"status": "PASS", "reason": "5 runs of one input"}, set()),
        ("logits", {"case": "edge-one-token", "truth_max_abs": 1e-6}, {"one_minus_cosine"}),
        ("logits", {"case": "dev", "truth_max_abs": None, "reference_truth_max_abs": None}, {"truth_max_abs"}),
        ("logits", {"case": "dev", "truth_max_abs": None, "reference_truth_max_abs": 1e-6}, set()),
        ("layers", {"beyond": True}, {"relative_l2"}),
        ("layers", {"beyond": False}, set()),
        ("attention", {"status": "SKIPPED", "reason": "no such kernel"}, {"max_abs_math", "gradient_max_abs_truth", "median_us"}),
        ("attention", {"status": "MEASURED", "reason": "", "kernel": "math"}, {"max_abs_math"}),
        ("attention", {"status": "MEASURED", "reason": "", "kernel": "flash"}, set()),
        ("attention", {"status": "MEASURED", "reason": "no gradients: no", "kernel": "flash"}, {"gradient_max_abs_truth"}),
        ("curves", {"step": 0}, set()),
        ("latency", {"member": "eager"}, set()),
    ],
)  # fmt: skip
def test_a_null_needs_a_reason_of_its_row(table, row, columns):
    names = (
        "value",
        "limit",
        "max_abs",
        "truth_max_abs",
        "relative_l2",
        "max_abs_math",
        "gradient_max_abs_truth",
        "median_us",
    )
    names += ("one_minus_cosine",) * (table == "logits")
    assert {name for name in names if lacks(table, row, name)} == columns


def test_a_planted_layer_is_named(tmp_path):
    def change(found, about):
        value(tolerances.LOGITS, 0.3)(found, about)
        found["layers"] = tables(MEMBERS, planted={"sdpa_flash": 2})["layers"]
        row = quantity(found, "sdpa_flash", tolerances.LAYERS)
        row |= {"value": 0.1, "status": "FAIL", "worst": "bert.encoder.layer.2.intermediate"}
        found["members"][1] |= {"outcome": "FAIL", "reason": "logits max difference 0.3; loss; gradients; spans; curve"}

    run = run_of(tmp_path / "run", change, planted_layer=2)
    assert "reference: logits max difference 0.3; loss; gradients; and 2 more; it first" in " ".join(reading(run))
    for told in (judged(run, tmp_path)["parity sdpa_flash"].reason, " ".join(reading(run))):
        assert "it first diverges in bert.encoder.layer.2.intermediate, at 62% of the depth" in told


def test_only_the_reference_is_not_compared_and_never_passes(tmp_path):
    def nothing(found, about):
        for name in found:
            found[name] = []

    def skipped(found, about):
        rows = found["members"]
        nothing(found, about)
        found["members"] = [row | {"outcome": "SKIPPED", "reason": "torch_xla is not installed"} for row in rows]

    recorded = run_of(tmp_path / "recorded", nothing)
    (only,) = checks(recorded, find(recorded, tmp_path))
    lonely = run_of(tmp_path / "skipped", skipped)
    first, *rest = checks(lonely, find(lonely, tmp_path))
    for check, words in ((only, "no member was requested"), (first, "torch_xla is not installed")):
        assert (check.name, check.status, check.gates) == ("parity", "SKIPPED", True)
        assert check.reason == f"nothing to compare with the reference on cpu ({words})"
    assert [check.name for check in rest] == [
        check.name for check in judged(run_of(tmp_path / "good"), tmp_path).values()
    ][1 : len(rest) + 1], "whatever is skipped, the checks are the same"
    assert {check.name for check in rest if check.status == "PASS"} == {"time budget"}
    for found in ([only], [first, *rest]):
        assert verdict_of(found).verdict == "SKIPPED" and "nothing to compare" in verdict_of(found).sentence


def test_members_that_do_not_gate_are_no_comparison(tmp_path):
    found = judged(run_of(tmp_path / "run", members=("native",)), tmp_path)
    assert (found["parity"].status, found["parity native"].status) == ("SKIPPED", "SKIPPED")
    assert (
        "native is informative only" in found["parity"].reason and "1.5e-07 (<= 1e-05)" in found["parity native"].reason
    )
    assert verdict_of(list(found.values())).verdict == "SKIPPED"


def test_a_reference_far_from_double_precision_is_named(tmp_path):
    """No limit is eased beyond ten times the table's, 1e-4 on CPUs: a reference that is itself farther off is none."""

    def off(size):
        def change(found, about):
            found["logits"][0]["reference_truth_max_abs"] = size

        return change

    for size, status in ((1e-4, "PASS"), (1.1e-4, "FAIL"), (1.0, "FAIL")):
        check = judged(run_of(tmp_path / f"run{size}", off(size)), tmp_path)["reference accuracy"]
        assert check.status == status and check.gates, check.reason

    def without(truth, nonfinite):
        def change(found, about):
            about |= {"truth": truth, "truth_nonfinite": nonfinite}
            found["truth"] = []
            for row in found["logits"]:
                row["reference_truth_max_abs"] = row["truth_max_abs"] = None

        return change

    for truth, nonfinite, told in (
        (False, 0, "there is no recording in double"),
        (True, 7, "7 numbers of the recording"),
    ):
        found = judged(run_of(tmp_path / f"without{nonfinite}", without(truth, nonfinite)), tmp_path)
        for name in ("reference accuracy", "accuracy against double precision"):
            assert found[name].status == "SKIPPED" and told in found[name].reason


def test_a_difference_that_does_not_gate_is_told_and_does_not_fail(tmp_path):
    def change(found, about):
        quantity(found, "native", tolerances.LOGITS)["value"] = 0.5
        found["logits"] = []
        found["truth"] = [
            row | {"verdict": "farther"} if row["member"] == "sdpa_flash" else row for row in found["truth"]
        ]

    run = run_of(tmp_path / "run", change)
    found = judged(run, tmp_path)
    assert found["parity native"].status == "FAIL"
    assert found["accuracy against double precision"].status == "FAIL"
    assert verdict_of(list(found.values())).verdict == "PASS"
    assert (
        "Worse than the reference (3e-07 from double precision), not only different: sdpa_flash (3.6e-07)."
        in reading(run)
    )


def test_a_broken_attention_kernel_is_told(tmp_path):
    def change(found, about):
        row = next(row for row in found["attention"] if row["kernel"] == "flash")
        row |= {"status": "FAIL", "reason": "numbers in the output are NaN or infinite", "max_abs_truth": None}

    check = judged(run_of(tmp_path / "run", change), tmp_path)["attention kernels"]
    assert (check.status, check.gates) == ("FAIL", False)
    assert check.reason == "flash in fp32 at 64: numbers in the output are NaN or infinite"
    told = " ".join(reading(run_of(tmp_path / "good")))
    # 1e-6 at length 128 and the root of the length: flash is 0.8 of it from math, as make_parity has it.
    assert (
        "Attention in fp32: flash is up to 2.3e-06 from the math kernel (length 1024), which is itself up to 2.8e-06"
        in told
    )


def test_one_recording_is_counted_as_one(tmp_path):
    found = judged(run_of(tmp_path / "run", members=("eager",)), tmp_path)
    assert found["same weights and inputs"].reason.startswith("1 recording with")


def test_without_bf16_nothing_shows_that_the_tolerance_can_fail(tmp_path):
    check = judged(run_of(tmp_path / "run", members=("eager", "sdpa_flash")), tmp_path)["tolerance sensitivity"]
    assert (check.status, check.gates) == ("SKIPPED", False)


def column(table, member, **new):
    def then(found, result):
        for row in found[table]:
            if row["member"] == member:
                row |= new

    return then


def test_percentiles_that_fall_are_impossible(tmp_path):
    run = run_of(tmp_path / "run", then=column("latency", "bf16", p95_ms=90.0, p99_ms=80.0))
    check = judged(run, tmp_path)["numbers agree"]
    assert check.status == "FAIL" and "p95 0.09 s above p99 0.08 s" in check.reason


def test_a_driver_that_changes_numerics_is_noticed(tmp_path):
    accepted = run_of(tmp_path / "accepted")
    save_verdict(accepted.path, verdict_of(list(judged(accepted, tmp_path).values())))
    accept(Run(accepted.path), "test", limits(accepted), root=tmp_path)

    def grown(factor):
        def change(found, about):
            for row in [*found["quantities"], *found["logits"]]:
                key = "value" if "value" in row else "max_abs"
                if row["member"] == "sdpa_flash" and row.get("quantity", tolerances.LOGITS) == tolerances.LOGITS:
                    row[key] *= factor

        return change

    name, same = "sdpa_flash_logits_max_difference_minisquad_tiny vs baseline", "numerics unchanged"
    for factor, status, word in ((1.0, "PASS", "PASS"), (1.9, "PASS", "FAIL"), (2.1, "FAIL", "FAIL")):
        found = judged(
            run_of(
                tmp_path / f"again{factor}",
                grown(factor),
                then=lambda _, result: setattr(result, "started_at", 1.79e9 + 1),
            ),
            tmp_path,
        )
        assert (found[name].status, found[same].status) == (status, word), factor
    assert LARGEST["eager"] == 0.0

    def apart(found, about):
        quantity(found, "eager", tolerances.LOGITS)["value"] = 1e-9
        column("logits", "eager", max_abs=1e-9)(found, None)

    later = run_of(tmp_path / "later", apart, then=lambda _, result: setattr(result, "started_at", 1.79e9 + 2))
    assert judged(later, tmp_path)["eager_logits_max_difference_minisquad_tiny vs baseline"].status == "FAIL", (
        "0 may not grow"
    )


@pytest.mark.parametrize(
    ("age_s", "words"), [(-60, "less than a day"), (86_400, "1 day"), (2e6, "23 days")], ids=["clocks", "one", "many"]
)
def test_the_age_of_a_recording_is_told_in_days(tmp_path, age_s, words):
    def aged(found, about):
        about["golden"] = {"given": True, "age_s": age_s}

    told = " ".join(reading(run_of(tmp_path, aged)))
    assert f", recorded {words} ago, " in told
