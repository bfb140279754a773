"""Parity across backends"""

import hashlib
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from filelock import FileLock
from promised import promise, skip_rest
from safetensors.numpy import load_file, save_file

from benchlib import session
from benchlib.judge.verdict import judge
from benchlib.results.run import Run

ROOT = Path(__file__).parents[2]
# Largest difference and cosine of the logits that a backend may have, as the guides to validation across backends ask for.
REQUIRED = {
    "cuda": (1e-4, 0.9999),
    "mps": (1e-4, 0.9999),
    "xpu": (1e-4, 0.9999),
    "rocm": (1e-3, 0.999),
    "tpu": (1e-3, 0.999),
}
WORK = (
    "lengths=32,64,384",
    "batch_sizes=1,8",
    "dev_questions=2",
    "train_steps=2",
    "latency_runs=5",
    "member_timeout_s=300",
)
BOTH_LIMITS = promise(
    "P086",
    "Have both limits gate, with a row for CUDA, MPS, ROCm, TPU and XPU (1e-4/0.9999 or 1e-3/0.999)",
    "benchlib run parity, table Limits and their sources",
)
GUIDE = (ROOT / "docs" / "parity-cloud.md").read_text()
TOO_LARGE = 1.02


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return a function that makes a folder by name once, also if several processes run these tests."""
    shared = tmp_path_factory.getbasetemp()
    shared = shared.parent if os.environ.get("PYTEST_XDIST_WORKER") else shared

    def folder(name, make):
        place = shared / "parity" / name
        place.parent.mkdir(exist_ok=True)
        with FileLock(f"{place}.lock"):
            if not place.exists():
                work = place.with_name(f".{name}")
                shutil.rmtree(work, ignore_errors=True)
                make(work)
                work.rename(place)
        return place

    return folder


@pytest.fixture(scope="module")
def recording(made, program):
    """A folder with a recording, copied as to another machine (``golden``), and the store of the run that made it (``out``)."""

    def record(folder):
        words = [word for setting in WORK for word in ("--set", setting)]
        program("parity", "record", folder / "here", "--out", folder / "out", *words)
        shutil.copytree(folder / "here", folder / "golden")

    return made("recording", record)


@pytest.fixture(scope="module")
def verified(made, program, recording):
    """A run that verifies a recording with four members: the library of one crashes when it is loaded, that of another is broken."""

    def verify(folder):
        libraries = folder / "libraries"
        libraries.mkdir(parents=True)
        (libraries / "onnxruntime.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
        (libraries / "openvino.py").write_text("raise ImportError('libopenvino.so is not there')\n")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", os.pathsep.join([str(libraries), os.environ.get("PYTHONPATH", "")]))
            words = (
                "--members",
                "sdpa_flash,bf16,onnxruntime,openvino",
                "--set",
                "latency_runs=5",
                "--out",
                folder / "out",
            )
            program("parity", "verify", recording / "golden", "--backend", "cpu", *words, code=1)

    return run_in(made("verified", verify))


@pytest.fixture(scope="module")
def altered(made, recording):
    """A run against a recording that was changed: its logits are divided by 1.02, its hidden states from layer 1 on multiplied
    by 1.1, one array of logits is missing and one gradient has another shape."""

    def verify(folder):
        golden = shutil.copytree(recording / "golden", folder / "golden")
        shutil.rmtree(golden / "fp64_reference")
        for file, change in (("outputs", divided), ("gradients", reshaped), ("layers", grown)):
            path = golden / "reference" / f"{file}.safetensors"
            save_file(change(load_file(path)), path)
        sealed = json.loads((golden / "golden.json").read_text())
        paths = [path for path in golden.rglob("*") if path.is_file() and path.name != "golden.json"]
        sealed["files"] = {
            path.relative_to(golden).as_posix(): {
                "bytes": path.stat().st_size,
                "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            }
            for path in paths
        }
        (golden / "golden.json").write_text(json.dumps(sealed))
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("BENCHLIB_HEADLESS", "1")
            patch.setenv("BENCHLIB_OUTPUTS", str(folder / "out"))
            work = dict(setting.split("=") for setting in WORK)
            session.execute(session.open_run("parity", "", "smoke", "cpu", work, golden=str(golden), members="bf16"))

    return run_in(made("altered", verify))


def divided(arrays):
    kept = {name: (array / TOO_LARGE).astype(np.float32) for name, array in arrays.items()}
    del kept["edge-longest/start"]
    return kept


def reshaped(arrays):
    name = next(name for name in arrays if name.endswith("qa_outputs.weight"))
    return arrays | {name: np.ascontiguousarray(arrays[name].T)}


def grown(arrays):
    return {name: array * np.float32(1.1 if int(name) > 1 else 1) for name, array in arrays.items()}


def run_in(folder):
    (config,) = folder.glob("out/*/*/config.json")
    return Run(config.parent)


def row(rows, **wanted):
    """Return the one row with these values."""
    (found,) = (row for row in rows if all(row.get(name) == value for name, value in wanted.items()))
    return found


def table(run, heading):
    """Return a table of the report as rows of texts."""
    return session.table(run, heading).to_dict("records")


def copy_of(run, folder, **config):
    """Copy a run with other values of its config, as a run with them would have written."""
    shutil.copytree(run, folder)
    for name in ("config.json", "result.json"):
        values = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(values | {key: value for key, value in config.items() if key in values}))
    (folder / "files.json").unlink(missing_ok=True)
    return folder


def outcome(run, name):
    return row([check.model_dump() for check in judge(run).checks], name=name)


@promise(
    "P085",
    "Compare a backend with the CPU reference by the same weights and inputs (384 tokens, start and end logits): largest difference and cosine",
    "benchlib run parity --set lengths=384",
)
def test_p085_largest_difference_and_cosine_are_those_of_the_recorded_logits(verified, recording):
    inputs = load_file(recording / "golden" / "inputs.safetensors")
    reference = load_file(recording / "golden" / "reference" / "outputs.safetensors")
    mask = inputs["len384-batch1/attention_mask"] == 1
    for member in ("sdpa_flash", "bf16"):
        own = load_file(verified.path / "members" / member / "outputs.safetensors")
        pairs = [
            (own[f"len384-batch1/{head}"][mask].astype(float), reference[f"len384-batch1/{head}"][mask].astype(float))
            for head in ("start", "end")
        ]
        differences = [
            item
            for item in verified.result.tables["differences"]
            if (item["member"], item.get("at")) == (member, "len384-batch1")
        ]
        apart = max(np.abs(a - b).max() for a, b in pairs)
        assert row(differences, quantity="logits")["value"] == pytest.approx(apart, rel=1e-9) and apart > 0
        angle = max(1 - a @ b / np.linalg.norm(a) / np.linalg.norm(b) for a, b in pairs)
        assert row(differences, quantity="logits cosine")["value"] == pytest.approx(angle, rel=1e-6, abs=1e-15)
    hashes = [(item["model_sha256"], item["inputs_sha256"]) for item in verified.result.tables["members"][:2]]
    assert set(hashes) == {(verified.result.facts["weights_sha256"], verified.result.facts["cases_sha256"])}


@BOTH_LIMITS
@pytest.mark.parametrize("backend", REQUIRED)
def test_p086_both_limits_are_the_required_ones(backend, recorded, tmp_path):
    limits = table(Run(copy_of(recorded("parity"), tmp_path / "run", backend=backend)), "Limits and their sources")
    of_fp32 = {line["quantity"]: float(line["limit"]) for line in limits if "fp32" in line["precision"]}
    difference, cosine = REQUIRED[backend]
    assert of_fp32["logits"] == difference and of_fp32["logits cosine"] == pytest.approx(1 - cosine)


@BOTH_LIMITS
@pytest.mark.parametrize("quantity", ["logits", "logits cosine"])
def test_p086_each_limit_gates_alone(quantity, recorded, tmp_path):
    for share, status in ((0.95, "PASS"), (1.05, "FAIL")):
        run = copy_of(recorded("parity"), tmp_path / status)
        result = json.loads((run / "result.json").read_text())
        place = {"member": "sdpa_flash", "quantity": quantity, "at": "len128-batch1"}
        changed = row(result["tables"]["differences"], **place)
        changed["value"] = share * changed["limit"]
        (run / "result.json").write_text(json.dumps(result))
        check = outcome(run, "parity sdpa_flash")
        assert (check["status"], check["gates"]) == (status, True), check["reason"]


@promise(
    "P087",
    "Have logits that are too large by a factor found, in bf16 too",
    "benchlib parity verify FOLDER --members bf16",
)
def test_p087_bf16_logits_that_are_too_large_fail_and_unchanged_ones_pass(altered, verified):
    for head in ("start logits", "end logits"):
        found = row(altered.result.tables["differences"], quantity="logits scale", at=head)
        assert found["value"] == pytest.approx(TOO_LARGE - 1, abs=2e-3) and found["value"] > found["limit"]
        honest = row(verified.result.tables["differences"], member="bf16", quantity="logits scale", at=head)
        assert 0 < honest["value"] < honest["limit"] < 0.01
        shift = row(verified.result.tables["differences"], member="bf16", quantity="logits offset", at=head)
        assert 0 < shift["value"] < shift["limit"]
    quantities = {line["quantity"] for line in table(altered, "Beyond a limit") if line["at"] != "edge-longest"}
    assert "logits scale" in quantities and not quantities & {"logits cosine", "spans"}, (
        "nothing but the scale shows it"
    )
    assert outcome(verified.path, "parity bf16")["status"] == "PASS"
    assert outcome(altered.path, "parity bf16")["status"] == "FAIL"


@promise(
    "P088",
    "Get repeats, batch 1 to 8, padding, loss curve, gradients and answer spans compared",
    "benchlib run parity",
)
def test_p088_everything_is_compared(verified, recording):
    differences = verified.result.tables["differences"]
    compared = {
        item["quantity"] for item in differences if item["member"] == "sdpa_flash" and item.get("value") is not None
    }
    wanted = {
        "repeats",
        "batch invariance",
        "padding invariance",
        "loss curve",
        "gradients",
        "spans",
        "F1",
        "layers",
        "finite",
    }
    assert wanted <= compared
    assert {"len32-batch1", "len32-batch8", "len384-batch8"} <= {item.get("at") for item in differences}
    reference = json.loads((recording / "golden" / "reference" / "recording.json").read_text())
    own = json.loads((verified.path / "members" / "bf16" / "recording.json").read_text())
    for step in (1, 2):
        value = row(differences, member="bf16", quantity="loss curve", at=f"step {step}")["value"]
        assert value == pytest.approx(abs(own["curve"][step - 1] - reference["curve"][step - 1])) and value > 0
    gradients = {item.get("at") for item in differences if item["member"] == "bf16" and item["quantity"] == "gradients"}
    assert gradients == set(load_file(recording / "golden" / "reference" / "gradients.safetensors"))


@promise("P089", "Be told the first layer that differs", "benchlib parity verify FOLDER")
def test_p089_the_first_layer_that_differs_is_named(altered):
    check = outcome(altered.path, "parity bf16")
    assert check["status"] == "FAIL" and check["reason"].endswith("the first layer beyond its limit is layer 1")
    layers = [item for item in altered.result.tables["differences"] if item["quantity"] == "layers"]
    assert [item["value"] > item["limit"] for item in layers] == [False, False, True, True, True]


@promise("P090", "Have a wrong shape told from a missing tensor, with the shapes", "benchlib parity verify FOLDER")
def test_p090_a_wrong_shape_and_a_missing_tensor_are_told_apart(altered):
    lines = table(altered, "Beyond a limit")
    shape = next(line["note"] for line in lines if line["at"].endswith("qa_outputs.weight"))
    assert shape == "shape (2, 128), the reference's is (128, 2)"
    missing = row(lines, quantity="logits", at="edge-longest")["note"]
    assert missing == "edge-longest/start: missing in the reference"
    reason = outcome(altered.path, "parity bf16")["reason"]
    assert shape in reason and missing in reason


@promise(
    "P091",
    "Record on one machine and verify on another that is never online with it",
    "benchlib parity record FOLDER; benchlib parity verify FOLDER",
)
def test_p091_a_recording_that_was_copied_is_verified(verified, recording, program, tmp_path):
    assert (
        verified.result.facts["golden"] == "golden"
        and verified.result.facts["outputs_sha256"]
        == hashlib.sha256((recording / "golden" / "reference" / "outputs.safetensors").read_bytes()).hexdigest()
    )
    assert outcome(verified.path, "parity sdpa_flash")["status"] == "PASS"
    here, there = ({path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
                   for folder in (recording / "here", recording / "golden"))  # fmt: skip
    assert here == there, "a recording is only read"
    damaged = shutil.copytree(recording / "golden", tmp_path / "golden")
    with (damaged / "weights.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x7f")
    said = program("parity", "verify", damaged, "--out", tmp_path / "out", code=2)
    assert "weights.safetensors was altered" in " ".join(said.split()) and not (tmp_path / "out").exists()


@promise(
    "P092",
    "Read PASSED, largest difference, cosine and latency with QPS at the end of a run",
    "benchlib run parity, table Outcomes",
)
def test_p092_outcome_difference_cosine_and_latency_are_in_one_table(recorded):
    run = Run(recorded("parity"))
    lines = table(run, "Outcomes")
    assert [line["outcome"] for line in lines] == ["PASS"] * len(run.result.tables["members"])
    for line in lines:
        own = [item for item in run.result.tables["differences"] if item["member"] == line["member"]]
        for quantity, heading in (("logits", "difference"), ("logits cosine", "1 - cosine")):
            largest = max(item["value"] for item in own if item["quantity"] == quantity)
            assert float(line[heading]) == pytest.approx(largest, rel=0.06)
        times = run.samples[f"{line['member']}_latency_ms_minisquad_tiny"]
        assert number(line["queries/s"]) == pytest.approx(1000 / np.mean(times), rel=0.01)


def number(text):
    return float(text.split()[0].replace(",", ""))


@promise("P093", "Read p50, p95 and p99 of the latency at batch 1", "benchlib run parity, table Outcomes")
def test_p093_percentiles_of_the_latency(recorded, program, tmp_path):
    run = Run(recorded("parity"))
    program("parity", "merge", run.path, "--to", tmp_path / "results")
    stored = json.loads((tmp_path / "results" / "cpu" / "test_results.json").read_text())["results"]
    for line in table(run, "Outcomes"):
        times = np.array(run.samples[f"{line['member']}_latency_ms_minisquad_tiny"])
        assert len(times) == 30
        merged = row(stored, member=line["member"])
        for share, heading, name in (
            (50, "latency p50", "latency_ms"),
            (95, "p95", "latency_p95_ms"),
            (99, "p99", "latency_p99_ms"),
        ):
            exact = np.percentile(times, share)  # the usual definition: linear between the two times next to it
            assert number(line[heading]) == pytest.approx(exact, rel=0.01) and merged[name] == pytest.approx(exact)


@promise("P094", "Read NOT COMPARED, never PASSED, where there is one backend alone", "benchlib parity merge --strict")
def test_p094_what_was_not_compared_does_not_pass(recorded, recording, program, tmp_path):
    program("parity", "merge", recorded("parity"), "--to", tmp_path / "one")
    backends = json.loads((tmp_path / "one" / "cross_backend_validation.json").read_text())["backends"]
    words = {name: values["outcome"] for name, values in backends.items()}
    assert words == {"cpu": "PASS"} | dict.fromkeys(REQUIRED, "NOT COMPARED")
    said = program("parity", "merge", recording / "out", "--to", tmp_path / "none", "--strict", code=3)
    assert "NOT COMPARED" in said and "only the reference was recorded" in said
    alone = json.loads((tmp_path / "none" / "cpu" / "cross_backend_validation.json").read_text())["backends"]
    assert alone["cpu"]["outcome"] == "NOT COMPARED"


@promise("P095", "See a member that crashes or hangs as FAILED while the others go on", "benchlib parity verify FOLDER")
def test_p095_a_member_that_crashes_fails_and_the_others_are_compared(verified):
    lines = table(verified, "Outcomes")
    outcomes = {"sdpa_flash": "PASS", "bf16": "PASS", "onnxruntime": "FAIL", "openvino": "INCOMPLETE"}
    assert {line["member"]: line["outcome"] for line in lines} == outcomes
    assert "libopenvino.so is not there" in row(lines, member="openvino")["reason"]
    assert "SIGSEGV" in row(lines, member="onnxruntime")["reason"]
    assert (verified.result.status, judge(verified.path).verdict) == ("complete", "FAIL")
    assert outcome(verified.path, "parity onnxruntime")["gates"]


@promise(
    "P096",
    "Get results/BACKEND/test_results.json, cross_backend_validation.json and BERT_SQUAD_BACKEND_REPORT.md for each backend",
    "benchlib parity merge --to DIR",
)
def test_p096_each_backend_has_its_files_and_one_matrix_is_over_all(recorded, program, tmp_path):
    runs = [copy_of(recorded("parity"), tmp_path / f"parity-{name}", backend=name) for name in ("cpu", "cuda")]
    to = tmp_path / "results"
    program("parity", "merge", runs[0], "--to", to, "--as", "laptop")
    program("parity", "merge", runs[1], "--to", to, "--as", "server")
    files = ("test_results.json", "cross_backend_validation.json", "BERT_SQUAD_BACKEND_REPORT.md")
    wanted = {f"{backend}/{file}" for backend in ("cpu", "cuda") for file in files} | {"PARITY.md", files[1]}
    assert {path.relative_to(to).as_posix() for path in to.rglob("*") if path.is_file()} == wanted
    whole = json.loads((to / files[1]).read_text())
    for backend, machine, other in (("cpu", "laptop", "server"), ("cuda", "server", "laptop")):
        own = json.loads((to / backend / files[1]).read_text())
        assert (
            own["backends"] == {backend: whole["backends"][backend]} and own["backends"][backend]["outcome"] == "PASS"
        )
        assert {(line["backend"], line["machine"]) for line in own["matrix"]} == {(backend, machine)}
        report = (to / backend / files[2]).read_text()
        assert report.startswith(f"# BERT on SQuAD: parity of {backend}") and machine in report and other not in report
        assert (
            f"| {backend} | {machine} | sdpa\\_flash | PASS |" in report
            or f"| {backend} | {machine} | sdpa_flash | PASS |" in report
        )
        assert own["agreement"] == whole["agreement"] != []
    assert {(line["backend"], line["machine"]) for line in whole["matrix"]} == {("cpu", "laptop"), ("cuda", "server")}


@promise("P097", "Fail, or be told, where merged results come from a planted run", "benchlib parity merge --strict")
def test_p097_a_planted_run_is_named_and_fails_a_strict_merge(recorded, program, tmp_path):
    honest, to = recorded("parity"), tmp_path / "to"
    for name, value in (("planted_layer", 1), ("planted_slowdown", 0.5)):
        planted = copy_of(honest, tmp_path / f"parity-{name}", **{name: value})
        said = program("parity", "merge", honest, planted, "--to", to)
        assert f"{name}={value} changed this run on purpose" in " ".join(said.split())
        stored = json.loads((to / "cpu" / "test_results.json").read_text())["results"]
        assert {line["run"] for line in stored} == {honest.name} and planted.name in (to / "PARITY.md").read_text()
        program("parity", "merge", honest, planted, "--to", to, "--strict", code=1)
        program("parity", "merge", planted, "--to", tmp_path / f"alone-{name}", "--strict", code=1)
    program("parity", "merge", honest, "--to", to, "--strict")


@promise("P098", "Commit the merged results to a repository", "benchlib parity merge --to DIR")
def test_p098_merged_results_are_committed_and_change_only_with_the_results(recorded, program, in_folder):
    def git(*words):
        told = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words]
        return subprocess.run(told, check=True, capture_output=True, text=True).stdout

    git("init", "-q")
    runs = [
        copy_of(recorded("parity"), in_folder / "runs" / f"parity-{name}", backend=name) for name in ("cpu", "rocm")
    ]
    program("parity", "merge", runs[0], "--to", "parity-results", "--as", "laptop")
    git("add", "parity-results")
    git("commit", "-qm", "Parity of November")
    program("parity", "merge", runs[0], "parity-results", "--to", "parity-results", "--as", "laptop")
    assert git("status", "--porcelain", "parity-results") == ""
    shutil.rmtree("runs/parity-cpu")
    program("parity", "merge", runs[1], "--to", "parity-results", "--as", "MI300X")
    assert "cpu/test_results.json" not in git("status", "--porcelain", "-uall", "parity-results"), "other machines stay"
    assert "rocm/test_results.json" in git("status", "--porcelain", "-uall", "parity-results")


@promise(
    "P099",
    "Start a validation of chosen backends by hand in CI, quick or full",
    ".github/workflows/parity.yml (backends, quick_mode)",
)
def test_p099_the_workflow_takes_backends_and_a_quick_mode(monkeypatch, capsys):
    workflow = yaml.load((ROOT / ".github" / "workflows" / "parity.yml").read_text(), Loader=yaml.BaseLoader)
    assert list(workflow["on"]) == ["workflow_dispatch"]
    assert list(workflow["on"]["workflow_dispatch"]["inputs"]) == ["backends", "quick_mode"]
    assert workflow["env"]["TIER"] == "${{ inputs.quick_mode && 'quick' || 'nightly' }}"
    steps = [step.get("run", "") for job in workflow["jobs"].values() for step in job["steps"]]
    for verb in ("record golden", "verify golden --backend", "merge"):
        assert any(f"benchlib parity {verb}" in step for step in steps), verb
    script = next(re.search(r"scripts/\w+\.py", step) for step in steps if "scripts/" in step)
    monkeypatch.setattr(sys, "argv", [script.group(), "cpu,rocm"])
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    runpy.run_path(str(ROOT / script.group()), run_name="__main__")
    name, _, rows = capsys.readouterr().out.partition("=")
    assert name == "runners" and [item["backend"] for item in json.loads(rows)] == ["cpu", "rocm"]
    monkeypatch.setattr(sys, "argv", [script.group(), "cpu,rocn"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / script.group()), run_name="__main__")
    assert ended.value.code == 2 and "rocm" in capsys.readouterr().err


@promise(
    "P100",
    "Follow a guide for AWS, AMD and Google Cloud: launch, verify device, run, view, clean up",
    "docs/parity-cloud.md",
)
@pytest.mark.parametrize(
    ("provider", "steps"),
    [
        ("AWS", ["run-instances", "nvidia-smi", "benchlib doctor", "--backend cuda", "parity merge", "Clean up", "terminate-instances"]),
        ("AMD", ["Standard_ND96isr_MI300X_v5", "rocminfo", "benchlib doctor", "--backend rocm", "parity merge", "Clean up", "group delete"]),
        ("Google Cloud", ["tpu-vm create", "device='xla'", "benchlib doctor", "--backend tpu", "parity merge", "Clean up", "tpu-vm delete"]),
    ],
)  # fmt: skip
def test_p100_the_guide_leads_from_launch_to_clean_up(provider, steps):
    assert "were not run by us" in " ".join(GUIDE.replace("*", "").split())
    (section,) = (part for part in GUIDE.split("\n## ") if part.startswith(f"{provider}:"))
    places = [section.find(step) for step in steps]
    assert -1 not in places and places == sorted(places), dict(zip(steps, places, strict=True))


@promise(
    "P101",
    "Validate on real A10G or A100, MI300X and TPU v5e",
    "benchlib parity verify golden --backend cuda",
    needs="an A10G or A100, an MI300X and a TPU v5e",
)
def test_p101_a_backend_that_is_not_here_is_skipped_with_its_reason(recording, program, tmp_path):
    said = program("parity", "verify", recording / "golden", "--backend", "tpu", "--out", tmp_path / "out", code=3)
    assert "SKIPPED" in said and "PASS" not in said and "torch_xla" in said
    assert set(re.findall(r"parity verify \S+ --backend (\w+)", GUIDE)) == {"cuda", "rocm", "tpu"}
    skip_rest(
        "an A10G or A100, an MI300X and a TPU v5e are needed; without them verify ends as SKIPPED with the reason"
    )


@promise(
    "P102",
    "Switch to exact attention, compare attention kernels, and read why ROCm's fused attention differs",
    "benchlib run parity --set members=sdpa_math,sdpa_flash; docs/attention.md",
)
def test_p102_kernels_are_chosen_and_compared(recorded, program):
    for member, backends in (("exact", "cuda, rocm, mps, xpu, tpu"), ("flash", "cuda, rocm")):
        said = program("run", "parity", "--backend", "cpu", "--set", f"members={member}", code=2)
        assert f"'{member}' is not of cpu but of {backends}:" in " ".join(said.split())
    run = Run(recorded("parity"))
    kernels = {line["member"]: line["kernel"] for line in table(run, "Executed configuration")}
    assert kernels["sdpa_math"].endswith(": math") and kernels["sdpa_flash"].endswith(": flash")
    assert kernels["eager"] == "matrix products and softmax"
    exact = row(run.result.tables["members"], member="sdpa_math")["executor"]["switches"]
    assert (
        exact["backends.cuda.matmul.fp32_precision"] == "ieee" and exact["sdpa"]["math"] and not exact["sdpa"]["flash"]
    )
    guide = (ROOT / "docs" / "attention.md").read_text()
    (why,) = (part for part in guide.split("\n\n") if part.startswith("**ROCm.**"))
    assert "AOTriton" in why and "`exact`" in why


@promise("P103", "Find help for out of memory, a missing ROCm device and slow TPU compilation", "docs/parity.md")
@pytest.mark.parametrize(
    ("symptom", "remedies"),
    [
        ("out of memory", ["nvidia-smi", "rocm-smi", "--set lengths="]),
        ("sees no device", ["HIP_VISIBLE_DEVICES", "rocminfo", "render,video", "benchlib doctor"]),
        ("first run on a TPU", ["XLA compiles", "XLA_PERSISTENT_CACHE_PATH", "budget_s="]),
    ],
)
def test_p103_the_guide_has_the_symptom_and_what_to_do(symptom, remedies):
    guide = (ROOT / "docs" / "parity.md").read_text()
    (line,) = (line for line in guide.splitlines() if line.startswith("|") and symptom in line.split("|")[1])
    for remedy in remedies:
        assert remedy in line, remedy
