"""The parity benchmark from weights to verdict, with the embedded model and a few members on the CPU."""

import hashlib
import json
import shutil

import numpy as np
import pandas as pd
import pytest
from harness import in_this_process
from safetensors.numpy import load_file, save_file

from benchlib.benchmarks.parity import golden, recording, run
from benchlib.benchmarks.parity.run import Bench
from benchlib.benchmarks.parity.spec import SPEC
from benchlib.config.schema import build, save_config
from benchlib.core.errors import BackendUnavailable, RunBroken, UserError
from benchlib.judge import verdict as judge
from benchlib.judge.baselines import find
from benchlib.launch.launch import execute
from benchlib.results.run import Run
from benchlib.runtime.child import Ended

SMALL = {
    "benchmark": "parity", "lengths": [8, 32], "batch_sizes": [1, 2], "dev_questions": 4, "train_steps": 3, "train_length": 32,
    "latency_runs": 7, "threads": 1, "member_timeout_s": 3600,
    "budget_s": 86400,  # the run counts from the start of its process, which is here that of all tests
}  # fmt: skip
SUFFIX = "_minisquad_tiny"


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    """For members of runs in this process, as the worker does for its own: two spin where another test has a core."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def prepared(folder, **values):
    folder.mkdir()
    (folder / "logs").mkdir()
    save_config(build("parity", SMALL | values), folder)
    return folder


def here(folder):
    """Run the benchmark in this process; its members are in their own all the same."""
    in_this_process(folder)
    return Run(folder)


def members(trial):
    return {row["member"]: (row["status"], row["reason"]) for row in trial.result.tables["members"]}


def named(trial):
    return {check.name: check for check in SPEC.judge(trial, find(trial))}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """One run through supervisor and rank, whose golden folder the others take."""
    folder = prepared(tmp_path_factory.mktemp("parity") / "run", members=["sdpa_flash", "bf16"], keep=True)
    assert execute(folder)["outcome"] == "complete"
    return Run(folder)


def test_every_number_of_a_run_follows_from_its_recordings(whole):
    result, place = whole.result, whole.path / "golden"
    assert members(whole) == {"sdpa_flash": ("ok", ""), "bf16": ("ok", "")}
    inputs = load_file(place / "inputs.safetensors")
    reference, fp64 = (load_file(place / name / "outputs.safetensors") for name in ("reference", "fp64_reference"))
    rows = pd.DataFrame(result.tables["differences"]).set_index(["member", "quantity", "at"]).sort_index()
    for row in result.tables["members"]:
        member = row["member"]
        outputs = load_file(whole.path / "members" / member / "outputs.safetensors")
        real = inputs["len32-batch2/attention_mask"] == 1
        ends = ("len32-batch2/start", "len32-batch2/end")
        apart = max(np.abs(outputs[name].astype(float) - reference[name])[real].max() for name in ends)
        assert rows.loc[(member, "logits", "len32-batch2"), "value"] == pytest.approx(apart, rel=1e-12)
        logits = rows.loc[(member, "logits")]
        assert result.value(f"{member}_logits_max_difference{SUFFIX}") == logits["value"].max()
        far = []
        for name, exact in fp64.items():
            mask = inputs.get(f"{name.rpartition('/')[0]}/attention_mask", np.ones(exact.shape)) == 1
            far.append(np.abs(outputs[name] - exact)[mask].max())
        assert row["fp64_max_abs"] == pytest.approx(max(far), rel=1e-12)
        times = whole.samples[f"{member}_latency_ms{SUFFIX}"]
        assert len(times) == 7 == result.metric(f"{member}_latency_ms{SUFFIX}").n
        assert result.value(f"{member}_queries_per_s{SUFFIX}") == pytest.approx(1000 / np.mean(times))
    largest = {name: rows.loc[(name, "logits"), "value"].max() for name in ("sdpa_flash", "bf16")}
    assert 0 < largest["sdpa_flash"] < 1e-4 < 1e-3 < largest["bf16"]
    assert list(rows.loc[("bf16", "loss curve")].index) == ["step 1", "step 2", "step 3"]
    digest = hashlib.sha256((place / "reference" / "outputs.safetensors").read_bytes()).hexdigest()
    assert result.facts["outputs_sha256"] == digest
    verdict = judge.judge(whole.path)
    assert verdict.verdict == "PASS", [check for check in verdict.checks if check.status == "FAIL"]


def test_a_layer_planted_in_the_candidate_is_found_against_a_recorded_reference(whole, tmp_path):
    folder = prepared(tmp_path / "run", members=["sdpa_math"], golden=str(whole.path / "golden"), planted_layer=1)
    trial = here(folder)
    check = named(trial)["parity sdpa_math"]
    assert (check.status, check.gates) == ("FAIL", True)
    assert check.reason.endswith("the first layer beyond its limit is layer 1")
    rows = [row for row in trial.result.tables["differences"] if row["quantity"] == "layers"]
    beyond = [row["at"] for row in rows if row["value"] > row["limit"]]
    assert beyond == ["layer 1", "layer 2", "layer 3"]
    assert trial.result.facts["golden"] == "golden" and "golden folder golden" in " ".join(SPEC.reading(trial))
    assert not (folder / "golden").exists() and golden.read(whole.path / "golden"), (
        "a folder that is compared with stays"
    )
    assert not (folder / "members" / "sdpa_math" / "gradients.safetensors").exists(), "large files go unless kept"


def copies(whole, status="done"):
    """Stand in for processes: the reference and the fp64 reference of another run, whatever else is asked for ends by ``status``."""

    def started(work, folder, name, place, timeout_s, **more):
        source = whole.path / "golden" / name
        if source.exists():
            shutil.copytree(source, folder / "golden" / name)
            return Ended("done", None, "", 2.0)
        return Ended(status, None, f"it ended by {status} after {timeout_s:.0f} s", timeout_s)

    return started


WHO_HAD_NO_TIME = [
    ("timeout", 300, 5.0, "failed", "timeout after 5 s"),  # it had its own limit
    ("timeout", 9, 300.0, "skipped", "ended after 9 s: the budget of 99 s was used up: --set budget_s=396 gives more"),
    ("done", 300, 300.0, "failed", "its recording cannot be compared"),  # and left nothing
    ("done", 0, 300.0, "skipped", "the budget of 99 s was used up: --set budget_s=396"),
]


@pytest.mark.parametrize(("status", "left_s", "limit_s", "outcome", "words"), WHO_HAD_NO_TIME)
def test_who_had_no_time_is_skipped_and_who_used_it_up_failed(
    status, left_s, limit_s, outcome, words, whole, tmp_path, monkeypatch
):
    monkeypatch.setattr(run.child, "run", copies(whole, status))
    monkeypatch.setattr(Bench, "left_s", lambda self: left_s)
    values = {"budget_s": 99, "member_timeout_s": limit_s, "members": ["sdpa_math"]}
    trial = here(prepared(tmp_path / "run", **values))
    word, reason = members(trial)["sdpa_math"]
    assert (word, trial.result.status) == (outcome, "complete") and words in reason
    if not left_s:
        assert trial.result.facts["why"]["reference_error"] == reason


def test_without_a_reference_there_is_no_run(whole, tmp_path, monkeypatch):
    backends = {"cuda": {"available": False, "reason": "no driver"}, "cpu": {"available": True}}
    monkeypatch.setattr(run, "probe_devices", lambda: {"backends": backends})
    with pytest.raises(BackendUnavailable, match="backend cuda is not available: no driver"):
        here(prepared(tmp_path / "elsewhere", backend="cuda", golden=str(whole.path / "golden")))
    for status, error in (("unavailable", BackendUnavailable), ("crashed", RunBroken)):
        ended = Ended(status, None, "no libfoo", 1.0)
        monkeypatch.setattr(run.child, "run", lambda *args, ended=ended, **more: ended)
        with pytest.raises(error, match="no libfoo"):
            here(prepared(tmp_path / status))


def test_a_layer_that_is_not_there_is_refused_before_a_member_runs(whole, tmp_path):
    with pytest.raises(UserError, match="planted_layer = 900: the model has 4 layers"):
        here(prepared(tmp_path / "run", golden=str(whole.path / "golden"), planted_layer=900, members=["bf16"]))
    assert not list(tmp_path.glob("*/members/*"))


def test_a_first_run_is_compared_with_the_recording_that_comes_with_the_kit(whole, tmp_path, monkeypatch):
    def answer(name, add=0.0, **meta):
        folder = tmp_path / name / "golden"
        shutil.copytree(whole.path / "golden", folder)
        for file, key in ((recording.OUTPUTS, "layer/start"), (recording.LAYERS, "002")):
            arrays = load_file(folder / golden.REFERENCE / file)
            save_file(arrays | {key: arrays[key] + np.float32(add)}, folder / golden.REFERENCE / file)
        about = folder / golden.REFERENCE / recording.NAME
        about.write_text(json.dumps(json.loads(about.read_text()) | meta))
        golden.write(folder, golden.manifest(folder))
        monkeypatch.setattr(golden, "shipped", lambda config: folder)
        return named(here(prepared(tmp_path / name / "run", members=["sdpa_math"])))["shipped recording"]

    assert answer("same").status == "PASS"
    assert "the first layer beyond its limit is layer 1" in answer("both", 0.1).reason
    assert "the reference has 000000000000" in answer("weights", model_sha256="0" * 64).reason
