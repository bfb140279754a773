"""The parity benchmark from weights to verdict, with the embedded model and a few members on the CPU."""

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from safetensors.numpy import load_file, save_file

from benchlib.benchmarks.parity import golden, processes, run
from benchlib.benchmarks.parity.judge import checks, reading
from benchlib.benchmarks.parity.processes import Ended
from benchlib.benchmarks.parity.run import Pace
from benchlib.config.schema import build, save_config
from benchlib.core.errors import BackendUnavailable, RunBroken, UserError
from benchlib.core.events import EventWriter
from benchlib.judge import verdict as judge
from benchlib.judge.baselines import find
from benchlib.launch.launch import execute
from benchlib.launch.plan import plan
from benchlib.results.run import Run

SMALL = {
    "benchmark": "parity",
    "lengths": [8, 32],
    "batch_sizes": [1, 2],
    "dev_questions": 4,
    "train_steps": 3,
    "train_length": 32,
    "latency_runs": 7,
    "latency_length": 16,
    "warmup": 1,
    "repeats": 2,
    "attention_kernels": False,
    "threads": 1,
    "member_timeout_s": 3600,
    "budget_s": 86400,  # the run counts from the start of its process, which is here that of all tests
}
SUFFIX = "_minisquad_tiny"


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    """For members of runs in this process, as the worker does for its own: two spin where another test has a core."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def prepared(folder: Path, **values) -> Path:
    folder.mkdir()
    (folder / "logs").mkdir()
    save_config(build("parity", SMALL | values), folder)
    return folder


def here(folder: Path) -> Run:
    """Run the benchmark in this process; its members are in their own all the same."""
    run.run(Run(folder).config, folder, EventWriter(folder, "rank0"))
    return Run(folder)


def outcomes(found: Run) -> dict[str, str]:
    return {row["member"]: row["outcome"] for row in found.result.tables["members"]}


def named(found: Run) -> dict[str, object]:
    return {check.name: check for check in checks(found, find(found))}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """One run through supervisor and rank, whose golden folder the others take."""
    folder = prepared(tmp_path_factory.mktemp("parity") / "run", members=["sdpa_flash", "bf16"], keep=True)
    assert execute(folder)["outcome"] == "complete"
    return Run(folder)


def test_every_number_of_a_run_follows_from_its_recordings(whole):
    result = whole.result
    assert outcomes(whole) == {"sdpa_flash": "PASS", "bf16": "PASS"}
    inputs = load_file(whole.path / "golden" / "inputs.safetensors")
    reference, truth = (
        load_file(whole.path / "golden" / name / "outputs.safetensors") for name in ("reference", "truth")
    )
    logits = pd.DataFrame(result.tables["logits"]).set_index(["member", "case"])
    for member in ("sdpa_flash", "bf16"):
        outputs = load_file(whole.path / "members" / member / "outputs.safetensors")
        real = inputs["len32-batch2/attention_mask"] == 1
        names = ("len32-batch2/start", "len32-batch2/end")
        apart = [(np.abs(outputs[name].astype(float) - reference[name])[real]).max() for name in names]
        off = [(np.abs(outputs[name] - truth[name])[real]).max() for name in names]
        row = logits.loc[member, "len32-batch2"]
        assert (row.max_abs, row.truth_max_abs) == pytest.approx((max(apart), max(off)), rel=1e-12)
        cases = logits.loc[member]
        worst = cases.max_abs[(cases.max_abs / cases.limit).idxmax()]
        assert result.value(f"{member}_logits_max_difference{SUFFIX}") == worst
        assert (
            result.metric(f"{member}_latency_ms{SUFFIX}").n == 7 == len(whole.samples[f"{member}_latency_ms{SUFFIX}"])
        )
        times = np.array(whole.samples[f"{member}_latency_ms{SUFFIX}"])
        latency = next(row for row in result.tables["latency"] if row["member"] == member)
        assert latency["qps"] == pytest.approx(1000 / times.mean())
        assert latency["p95_ms"] == pytest.approx(np.percentile(times, 95))
    assert 0 < logits.loc["sdpa_flash"].max_abs.max() < 1e-4 < 1e-3 < logits.loc["bf16"].max_abs.max()
    assert result.facts["cases"] == len(json.loads((whole.path / "golden" / "golden.json").read_text())["cases"])
    assert [row["step"] for row in result.tables["curves"] if row["member"] == "bf16"] == [0, 1, 2]
    assert {row["member"] for row in result.tables["gradients"]} == {"sdpa_flash", "bf16"}
    outputs = whole.path / "golden" / "reference" / "outputs.safetensors"
    assert result.facts["reference"]["outputs_sha256"] == hashlib.sha256(outputs.read_bytes()).hexdigest()
    assert result.facts["scores"]["reference"].keys() >= {"f1", "exact_match"}


def test_a_good_run_is_judged_and_told(whole):
    verdict = judge.judge(whole.path)
    assert verdict.verdict == "PASS", [check for check in verdict.checks if check.status == "FAIL"]
    found = {check.name: check for check in verdict.checks}
    for name in (
        "parity sdpa_flash",
        "parity bf16",
        "same weights and inputs",
        "tolerance sensitivity",
        "numbers agree",
        "finite",
    ):
        assert found[name].status == "PASS", found[name].reason
    told = " ".join(reading(whole))
    assert "sdpa_flash, bf16 match the reference" in told and "What bf16 costs" in told
    assert golden.read(whole.path / "golden")["digest"] == whole.result.facts["golden"]["digest"]


def test_a_layer_planted_in_the_candidate_is_found_against_a_recorded_reference(whole, tmp_path):
    folder = prepared(tmp_path / "run", members=["sdpa_math"], golden=str(whole.path / "golden"), planted_layer=1)
    before = sorted(path.name for path in (whole.path / "golden").rglob("*"))
    found = here(folder)
    assert outcomes(found) == {"sdpa_math": "FAIL"}
    check = named(found)["parity sdpa_math"]
    assert (check.status, check.gates) == ("FAIL", True)
    assert "it first diverges in bert.encoder.layer.1" in check.reason
    beyond = [row["layer"] for row in found.result.tables["layers"] if row["beyond"]]
    assert beyond and not any("encoder.layer.0" in layer or "embeddings" in layer for layer in beyond)
    assert found.result.facts["golden"]["given"] and "golden folder golden" in " ".join(reading(found))
    assert (
        not (folder / "golden").exists() and sorted(path.name for path in (whole.path / "golden").rglob("*")) == before
    )
    assert not (folder / "members" / "sdpa_math" / "gradients.safetensors").exists(), "large files go unless kept"


def test_a_member_that_crashes_fails_and_one_without_its_library_is_skipped(whole, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent)
    real = processes.run
    monkeypatch.setattr(
        run.processes, "run", lambda *args, **kwargs: real(*args, **kwargs, executor="parity_faults:make")
    )
    found = here(prepared(tmp_path / "run", members=["sdpa_math", "native"], golden=str(whole.path / "golden")))
    assert outcomes(found) == {"sdpa_math": "FAIL", "native": "SKIPPED"}
    assert found.result.status == "complete"
    check = named(found)["parity sdpa_math"]
    assert check.status == "FAIL" and "SIGSEGV" in check.reason
    assert "its library is not installed" in named(found)["parity native"].reason


def _copies(whole, status="done"):
    """Stand in for processes: the reference and the truth of another run, whatever else is asked for ends by ``status``."""

    def started(folder, name, events, timeout_s):
        source = whole.path / "golden" / name
        if source.exists():
            shutil.copytree(source, folder / "golden" / name)
            return Ended("done", "", 2.0)
        return Ended(status, f"it ended by {status} after {timeout_s:.0f} s", timeout_s)

    return started


def test_only_the_reference_is_not_compared_and_never_passes(whole, tmp_path, monkeypatch):
    monkeypatch.setattr(run.processes, "run", _copies(whole))
    found = here(prepared(tmp_path / "run", record=True, keep=True))
    assert found.result.tables["members"] == []
    (check,) = checks(found, find(found))
    assert check.status == "SKIPPED" and check.reason.startswith(
        "nothing to compare with the reference on cpu"
    )
    assert golden.WEIGHTS in golden.read(found.path / "golden")["files"]


@pytest.mark.parametrize(
    ("status", "budget_s", "member_timeout_s", "outcome", "words"),
    [
        ("timeout", 300, 5.0, "FAIL", "timeout after 5 s"),  # it had its own limit
        ("timeout", 60, 300.0, "FAIL", "timeout after"),  # and here so much more than the reference that it hangs
        ("timeout", 9, 300.0, "SKIPPED", "the budget of 9 s was used up"),
        ("crashed", 300, 300.0, "FAIL", "it ended by crashed"),
        ("done", 300, 300.0, "FAIL", "its recording cannot be compared"),  # and left nothing
        ("done", 4, 300.0, "SKIPPED", "no time in the budget of 4 s"),
    ],
)
def test_who_had_no_time_is_skipped_and_who_used_it_up_failed(
    status, budget_s, member_timeout_s, outcome, words, whole, tmp_path, monkeypatch
):
    monkeypatch.setattr(run.processes, "run", _copies(whole, status))
    monkeypatch.setattr(Pace, "left_s", lambda self: self.budget_s - 4.0)  # as on a machine that nobody else uses
    values = {"budget_s": budget_s, "member_timeout_s": member_timeout_s, "members": ["sdpa_math"]}
    found = here(prepared(tmp_path / "run", **values))
    row = found.result.tables["members"][0]
    assert (row["outcome"], found.result.status) == (outcome, "complete")
    assert words in row["reason"]
    if outcome == "SKIPPED":
        assert named(found)["parity"].reason.endswith("; raise budget_s, or name fewer members")


def test_without_a_reference_there_is_no_run(whole, tmp_path, monkeypatch):
    monkeypatch.setattr(
        run,
        "probe_devices",
        lambda: {"backends": {"cuda": {"available": False, "reason": "no driver"}, "cpu": {"available": True}}},
    )
    with pytest.raises(BackendUnavailable, match="backend cuda is not available: no driver"):
        here(prepared(tmp_path / "elsewhere", backend="cuda", golden=str(whole.path / "golden")))
    for status, error in (("unavailable", BackendUnavailable), ("crashed", RunBroken)):
        monkeypatch.setattr(run.processes, "run", lambda *args, status=status: Ended(status, "libfoo is missing", 1.0))
        folder = prepared(tmp_path / status)
        with pytest.raises(error, match="libfoo is missing"):
            here(folder)
    left = Run(folder).result
    assert (left.status, left.facts["model"]["name"]) == ("partial", "tiny") and "libfoo" in left.reason
    assert judge.judged(Run(folder)).verdict == "BROKEN"


def test_a_layer_that_is_not_there_and_a_reference_without_logits_are_refused_before_a_member_runs(whole, tmp_path):
    place = tmp_path / "golden"
    shutil.copytree(whole.path / "golden", place)
    with pytest.raises(UserError, match="planted_layer = 900: the model has 4 layers"):
        here(prepared(tmp_path / "planted", golden=str(place), planted_layer=900, members=["bf16"]))
    path, fields = place / "reference" / "outputs.safetensors", golden.manifest(place)
    left = {name: array for name, array in load_file(path).items() if not name.startswith("len32-batch2/")}
    save_file(left, path)
    golden.write(place, **{name: fields[name] for name in ("model", "inputs_sha256", "cases", "work", "environment")})
    with pytest.raises(UserError, match="the logits len32-batch2/start are missing, so there is nothing to compare"):
        here(prepared(tmp_path / "sealed", golden=str(place), members=["bf16"]))
    assert not list(tmp_path.glob("*/members/*"))


def test_it_is_one_process_on_every_machine():
    eight = {"backends": {"cuda": {"available": True, "count": 8, "names": ["gpu"] * 8, "reason": ""}}}
    assert plan("parity", "smoke", "cuda", {}, eight).config.nproc == 1
    assert plan("machine", "smoke", "cuda", {}, eight).config.nproc == 8
    with pytest.raises(UserError, match="the work of one process"):
        plan("parity", "smoke", "cuda", {"nproc": 2}, eight)
