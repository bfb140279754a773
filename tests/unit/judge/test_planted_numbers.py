"""A run of the kit whose result was edited does not pass its own checks, whatever class of mistake was planted."""

import copy
import json
import math
import shutil
from pathlib import Path

import pandas as pd
import pytest
from click.testing import CliRunner

from benchlib.benchmarks.squad.judge import limits
from benchlib.cli import main
from benchlib.core.errors import UserError
from benchlib.judge import snapshot as embedded
from benchlib.judge.baselines import Baseline, run_fingerprint
from benchlib.judge.foreign.readers import read_claims
from benchlib.judge.impossible.numbers import Numbers
from benchlib.judge.impossible.own import QUANTILES, own_claims
from benchlib.judge.impossible.rules import judge_claims
from benchlib.judge.regression import KEPT_SAMPLES, RunRecord, thinned
from benchlib.judge.snapshot import snapshot
from benchlib.judge.verdict import judge
from benchlib.results.metrics import derived, measured
from benchlib.results.run import Run

HONEST = Path(__file__).parents[2] / "fixtures" / "honest"


@pytest.fixture
def stored(tmp_path):
    """Return a function that copies a recorded run into a folder, changes its result and judges it."""

    def make(name, change=None):
        folder = tmp_path / name
        shutil.copytree(HONEST / name, folder)
        samples = json.loads((folder / "samples.json").read_text())
        result = json.loads((folder / "result.json").read_text())
        if change:
            change(Edit(result, samples))
        rows = [(metric, index, value) for metric, values in samples.items() for index, value in enumerate(values)]
        pd.DataFrame(rows, columns=["metric", "index", "value"]).to_parquet(folder / "samples.parquet", index=False)
        (folder / "result.json").write_text(json.dumps(result))
        return folder

    return make


class Edit:
    """A result and its raw samples, to be changed by hand."""

    def __init__(self, result, samples):
        self.result, self.facts, self.tables, self.samples = result, result["facts"], result["tables"], samples
        self.metrics = {metric["name"].removesuffix("_minisquad_tiny"): metric for metric in result["metrics"]}

    def scale(self, name, factor, raw=True):
        """Multiply a metric, with its raw samples unless only the result was edited."""
        metric = self.metrics[name]
        metric["value"] *= factor
        if raw:
            full = next(known for known in self.samples if known.removesuffix("_minisquad_tiny") == name)
            self.samples[full] = [factor * value for value in self.samples[full]]

    def swap(self, name):
        """Exchange the ends of an interval."""
        metric = self.metrics[name]
        metric["ci_low"], metric["ci_high"] = metric["ci_high"], metric["ci_low"]


def verdict(folder, tmp_path):
    judged = judge(folder, tmp_path / "no-baselines")
    return judged, {check.name: check for check in judged.checks}


@pytest.mark.parametrize("name", ["squad-run", "machine-run"])
def test_a_recorded_run_passes(stored, tmp_path, name):
    judged, checks = verdict(stored(name), tmp_path)
    assert judged.verdict == "PASS"
    assert {check.status for check in checks.values() if check.kind == "sanity"} == {"PASS"}


SQUAD = [
    ("numbers agree", "median of its", lambda run: run.scale("train_samples_per_s", 10, raw=False)),
    ("numbers agree", "multiplied by the 8 steps", lambda run: run.scale("train_samples_per_s", 8)),
    ("numbers agree", "of what the steps give", lambda run: run.scale("train_samples_per_s", 0.5)),
    ("numbers agree", "no sample is that short or long", lambda run: run.scale("train_tokens_per_s", 4)),
    ("numbers agree", "160 samples counted", lambda run: run.scale("end_to_end_samples_per_s", 2)),
    ("numbers agree", "rate of one of the 2 ranks", lambda run: run.scale("end_to_end_samples_per_s", 0.5)),
    ("numbers agree", "does not follow", lambda run: run.scale("mfu", 2)),
    ("numbers agree", "cannot be", lambda run: run.scale("mfu", 20)),
    ("numbers agree", "the factor of all_reduce", lambda run: run.scale("allreduce_algbw_gbps", 2)),
    ("numbers agree", "loss_final", lambda run: run.scale("loss_final", 0.1, raw=False)),
    ("numbers agree", "p50", lambda run: run.tables["ranks"][0].update(step_s_p05=9.0)),
    ("possible speed", "of the measured peak", lambda run: run.scale("flops_per_s", 4)),
    ("sample count", "160 planned", lambda run: run.facts.update(samples_seen=[80, 70])),
    ("learning rate", "nothing is trained at zero", lambda run: run.facts["learning_rates"].update(min=0.0)),
    ("loss decreases", "nothing was learnt", lambda run: run.samples.update(loss=[5.9] * 10)),
    ("possible quality", "not within 0 and 100", lambda run: run.scale("f1", 2)),
    ("finite", "below zero", lambda run: run.scale("step_s", -1, raw=False)),
    ("finite", "not a finite number", lambda run: run.metrics["train_s"].update(value=None)),
]


SQUAD += [
    ("numbers agree", "world_size: 8 stated, 2 by the config", lambda run: run.result.update(world_size=8)),
    ("numbers agree", "world_size: -2 stated", lambda run: run.result.update(world_size=-2)),
    ("numbers agree", "ranks: 2 stated, 3 by samples_seen", lambda run: run.facts.update(samples_seen=[80, 40, 40])),
    ("numbers agree", "planned_steps: 5 stated, 10 by the losses", lambda run: run.facts.update(planned_steps=5)),
    ("numbers agree", "total_steps: 40 stated, 10 by 1 epoch of 160 features", lambda run: run.facts.update(total_steps=40)),
    ("numbers agree", "samples_expected: 320 stated, 160", lambda run: run.facts.update(samples_expected=320, samples_seen=[160, 160])),
    ("numbers agree", "epoch_share: 0.5 stated, 1", lambda run: run.facts.update(epoch_share=0.5)),
    ("numbers agree", "steady_from_step: 1 stated, 3", lambda run: run.facts.update(steady_from_step=1)),
    ("ranks equal", "they differ", lambda run: run.facts.update(checksums=[["a", "a"], ["b", "c"]])),
    ("numbers agree", "checksums: equal stated, different", lambda run: run.facts.update(checksums=[["a", "b"]])),
    ("numbers agree", "before the start stated", lambda run: run.result.update(ended_at=run.result["started_at"] - 60)),
    ("numbers agree", "total_s", lambda run: run.result.update(ended_at=run.result["started_at"] + 3600)),
    ("numbers agree", "not within its interval", lambda run: run.swap("step_s")),
    ("numbers agree", "not within its interval", lambda run: run.metrics["step_s"].update(ci_low=9.0, ci_high=10.0)),
    ("numbers agree", "not within its interval", lambda run: run.metrics["step_s"].update(ci_high=0.0)),
    ("numbers agree", "in Mbps, its name stands for Gbps", lambda run: run.metrics["allreduce_gbps"].update(unit="Mbps")),
    ("numbers agree", "step_s_minisquad_tiny is stated in ms", lambda run: run.metrics["step_s"].update(unit="ms")),
    ("numbers agree", "f1 stated, f1_minisquad_tiny by the config", lambda run: run.metrics["f1"].update(name="f1")),
    ("numbers agree", "mfu_tiny stated", lambda run: run.metrics["mfu"].update(name="mfu_tiny")),
    ("numbers agree", "resumed_step: 5 stated, 0 by the config", lambda run: run.facts.update(resumed_step=5)),
    ("numbers agree", "which stands once", lambda run: run.result["metrics"].append(run.metrics["step_s"])),
    ("numbers agree", "backend: cuda stated, cpu by the config", lambda run: run.result.update(backend="cuda")),
]  # fmt: skip


@pytest.mark.parametrize(("name", "reason", "change"), SQUAD, ids=[f"{row[0]}: {row[1]}" for row in SQUAD])
def test_planted_numbers_fail_the_run(stored, tmp_path, name, reason, change):
    judged, checks = verdict(stored("squad-run", change), tmp_path)
    assert judged.verdict == "FAIL"
    assert checks[name].status == "FAIL"
    assert reason in checks[name].reason


@pytest.mark.parametrize(("restarts", "allowed", "status"), [(1, 2, "PASS"), (1, 0, "FAIL"), (0, 2, "FAIL")])
def test_only_a_recorded_restart_explains_a_resumed_step(stored, tmp_path, restarts, allowed, status):
    """The config has to allow restarts and the facts have to count one; then the run passes, and says so."""
    folder = stored("squad-run", lambda run: run.facts.update(resumed_step=5, restarts=restarts))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "launcher": "torchrun", "max_restarts": allowed}))
    judged, checks = verdict(folder, tmp_path)
    assert (judged.verdict, checks["numbers agree"].status) == (status, status)
    assert status == "PASS" or "resumed_step: 5 stated, 0 by the config" in checks["numbers agree"].reason
    assert not restarts or (checks["no restart"].status, checks["no restart"].gates) == ("AMBIGUOUS", False)


MACHINE = [
    ("all-reduce right", "3 wrong elements", lambda run: run.facts.update(allreduce_wrong_elements=3)),
    ("possible all-reduce", "before it had ended", lambda run: run.scale("allreduce_gbps", 400)),
    ("numbers agree", "world_size: 4 stated, 2 by the config", lambda run: run.result.update(world_size=4)),
    ("numbers agree", "in Mbps", lambda run: run.metrics["allreduce_gbps"].update(unit="Mbps")),
    ("possible scaling", "2 devices cannot do more", lambda run: run.scale("matmul_fp32_flops", 4)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "reason", "change"), MACHINE, ids=[f"{row[0]}: {row[1]}" for row in MACHINE])
def test_planted_peaks_fail_the_machine(stored, tmp_path, name, reason, change):
    judged, checks = verdict(stored("machine-run", change), tmp_path)
    assert (judged.verdict, checks[name].status) == ("FAIL", "FAIL")
    assert reason in checks[name].reason


@pytest.mark.parametrize("file", ["config.json", "result.json"])
def test_a_cut_file_of_a_run_is_said_and_no_traceback(stored, tmp_path, file):
    folder = stored("squad-run")
    text = (folder / file).read_text()
    (folder / file).write_text(text[: len(text) // 2])
    if file == "result.json":
        assert judge(folder, tmp_path).broken
    answer = CliRunner().invoke(main, ["judge", str(folder)])
    assert answer.exit_code == 2 and answer.exception.__class__ is SystemExit


def test_the_kit_s_own_files_are_read_alone_and_as_a_folder(stored, tmp_path):
    folder = stored("squad-run")
    verdict(folder, tmp_path)
    for path, name in ((folder, "run"), (folder / "result.json", "result"), (folder / "verdict.json", "verdict")):
        found, claims = read_claims(path)
        judged = judge_claims(claims)
        assert (found, [judgement.failures for judgement in judged if judgement.failures]) == (name, [])
        assert len(judged) == 17
    alone = tmp_path / "alone.json"
    alone.write_text((folder / "result.json").read_text())
    assert 5 < len(judge_claims(read_claims(alone)[1])) < 17  # without raw samples and config fewer rules apply


def test_a_shared_report_is_read_by_the_run_it_carries(stored, tmp_path):
    folder = stored("squad-run", lambda run: run.scale("mfu", 20))
    data = embedded.link(snapshot(Run(folder)))
    path = tmp_path / "report.html"
    link = f'<a {embedded.ATTRIBUTE}="{data.version}" data-sha256="{data.sha256}" href="{data.href}">data</a>'
    path.write_text(f"<!doctype html><html><body>{link}</body></html>")
    name, claims = read_claims(path)
    found = {judgement.rule.name: judgement.status for judgement in judge_claims(claims)}
    assert name == "report"
    assert {rule for rule, status in found.items() if status == "FAIL"} == {"share of the peak", "intervals"}
    path.write_text(path.read_text()[:-40])
    with pytest.raises(UserError, match="cut"):
        read_claims(path)


def test_thinned_samples_accuse_nobody():
    losses = [5.0 - 0.004 * step + 0.3 * (step % 2) for step in range(1000)]
    metrics = [measured("loss", losses, ""), derived("loss_final", 1.2, "", "lower"), measured("step_s", losses, "s")]
    numbers = Numbers(metrics, world_size=1, samples={metric.name: metric.samples[::7] for metric in metrics[::2]})
    assert not any(judgement.failures for judgement in judge_claims(own_claims(numbers)))


def test_a_baseline_is_read_by_its_runs(stored, tmp_path):
    run = Run(stored("squad-run"))
    path = tmp_path / "baseline.json"

    def write(record):
        values = {"benchmark": "squad", "tier": "smoke", "fingerprint": {"world_size": "2"}, "runs": [record]}
        path.write_text(Baseline.model_validate(values).model_dump_json())
        return {judgement.rule.name: judgement.status for judgement in judge_claims(read_claims(path)[1])}

    record = RunRecord.of(run, limits(run), "the first").model_dump()
    found = write(record)
    assert read_claims(path)[0] == "baseline"
    assert set(found.values()) == {"PASS"} and {"below the peak", "busbw factor", "raw samples"} <= set(found)
    for metric in record["metrics"]:
        metric["value"] = 9 * metric["value"] if metric["name"] == "f1_minisquad_tiny" else metric["value"]
    assert write(record)["possible scores"] == "FAIL"


def test_an_edited_baseline_contradicts_itself(stored, tmp_path):
    run = Run(stored("squad-run"))
    path = tmp_path / "baseline.json"

    def write(change):
        record = RunRecord.of(run, limits(run), "the first").model_dump()
        change({metric["name"].removesuffix("_minisquad_tiny"): metric for metric in record["metrics"]}, record)
        values = {"benchmark": "squad", "tier": "smoke", "fingerprint": run_fingerprint(run), "runs": [record]}
        path.write_text(Baseline.model_validate(values).model_dump_json())
        return {judged.rule.name: judged.failures for judged in judge_claims(read_claims(path)[1]) if judged.failures}

    def triple(metrics, record):
        name = "train_samples_per_s_minisquad_tiny"
        record["samples"][name] = [3 * value for value in record["samples"][name]]
        for key in ("value", "ci_low", "ci_high"):
            metrics["train_samples_per_s"][key] *= 3

    assert write(lambda metrics, record: None) == {}
    failures = write(triple)["rate from raw steps"]
    assert failures[0].startswith("squad-run, steady steps:") and "at most" in failures[0]
    assert "raw samples" in write(lambda metrics, record: metrics["train_samples_per_s"].update(value=1e3))
    assert "units" in write(lambda metrics, record: metrics["allreduce_gbps"].update(unit="Mbps"))
    assert "stated twice" in write(lambda metrics, record: metrics["f1"].update(name="f1"))


def test_a_value_lies_between_the_quantiles_that_are_kept_beside_its_median():
    times = [0.1 + 0.001 * ((7 * step) % 1000) for step in range(1000)]
    metric = measured("step_s", times, "s")
    kept = {"step_s": thinned(times)}
    assert len(kept["step_s"]) == QUANTILES == KEPT_SAMPLES

    def status(value):
        stated = [metric.model_copy(update={"value": value, "ci_low": None, "ci_high": None})]
        claims = own_claims(Numbers(stated, world_size=1, samples=kept))
        return {judged.rule.name: judged.status for judged in judge_claims(claims)}["raw samples"]

    assert (status(metric.value), status(1.02 * metric.value)) == ("PASS", "FAIL")


CALIBRATION = {
    "benchmark": "machine", "tier": "smoke", "fingerprint": {"backend": "cpu"}, "made_at": 1.8e9, "runs": 3, "planted_runs": 1,
    "schema_version": 1,
    "metrics": [
        {
            "metric": "matmul_fp32_flops", "unit": "FLOP/s", "direction": "higher", "kind": "ratio",
            "limit": {"metric": "matmul_fp32_flops", "share": 0.2, "amount": None},
            # logarithms 0, 0.1 and 0.2 above each other: a standard deviation of 0.1
            "values": [1e11, 1e11 * math.exp(0.1), 1e11 * math.exp(0.2)], "spread": 0.1,
            "single": {"comparisons": 6, "fail": 0, "ambiguous": 1},
            "left_out": {"comparisons": 3, "fail": 0, "ambiguous": 0},
            "planted": [{"share": 0.25, "expected": 0.8, "measured": 0.79, "verdicts": {"comparisons": 1, "fail": 1, "ambiguous": 0}}],
            "false_alarms": 0.001, "comparisons": 10000, "effect": 0.4,
        }
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("part", "change", "says"),
    [
        ("", {}, ""),
        ("", {"spread": 0.01}, "spread: 0.01 stated, 0.1 by the values"),
        ("single", {"fail": 6}, "verdicts one with one: 7 stated, 6 at most"),
        ("left_out", {"fail": -1}, "none below zero"),
        ("left_out", {"comparisons": 50}, "comparisons with all others: 50 stated, 3"),
        ("", {"false_alarms": 1.5}, "false alarms"),
        ("", {"effect": 0.05}, "loss found: 0.05 stated, 0.2"),
        ("", {"unit": "GB/s"}, "its name stands for FLOP/s"),
        ("", {"values": [1.0, -1.0, 1.0]}, "below zero"),
    ],
)
def test_a_calibration_is_held_against_its_runs(tmp_path, part, change, says):
    values = copy.deepcopy(CALIBRATION)
    item = values["metrics"][0]
    (item[part] if part else item).update(change)
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps(values))
    name, claims = read_claims(path)
    failures = [reason for judged in judge_claims(claims) for reason in judged.failures]
    assert name == "calibration"
    assert any(says in failure for failure in failures) if says else failures == []


def test_a_skipped_run_states_nothing(stored):
    folder = stored("squad-run", lambda run: run.result.update(metrics=[], facts={}, tables={}, status="skipped"))
    (folder / "samples.parquet").unlink()
    assert read_claims(folder)[1] == []
    assert CliRunner().invoke(main, ["judge", str(folder)]).exit_code == 3
