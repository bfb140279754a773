"""Members in processes of their own, honest and faulty, and what is recorded of them."""

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import time
from multiprocessing import forkserver
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from harness import until
from transformers import AutoModelForQuestionAnswering

from benchlib.benchmarks.parity import executors, exercise, inputs, layers, member, processes, switches, weights
from benchlib.benchmarks.parity.config import MEMBERS, ParityConfig
from benchlib.benchmarks.parity.inputs import Inputs
from benchlib.benchmarks.parity.recording import Recording
from benchlib.config.schema import save_config
from benchlib.core.errors import BackendUnavailable, StorageError
from benchlib.core.events import EventWriter, read_events
from benchlib.workloads import encoders

CONFIG = ParityConfig(
    lengths=[8, 24, 48],
    batch_sizes=[1, 3],
    dev_questions=4,
    train_steps=3,
    train_batch=2,
    train_length=32,
    warmup=1,
    latency_runs=3,
    latency_length=40,
)
CPU = torch.device("cpu")
PATIENCE_S = 300.0  # for what comes to pass at once where nobody else has the cores


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """As a rank sets it: several threads on cores that others use are many times slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    forkserver._forkserver._stop()  # other tests started one, with their environment and modules
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("OPENBLAS_NUM_THREADS", "2")  # as a rank with two threads has it: no obstacle to a fork
        yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    save_config(CONFIG, folder)
    inputs.prepare(CONFIG, folder / "golden")
    return folder


@pytest.fixture
def events(run_dir):
    writer = EventWriter(run_dir, "rank0")
    yield writer
    writer.close()


@pytest.fixture
def faulty(run_dir, events, tmp_path, monkeypatch):
    """Run the member `eager` with an executor module made of the given lines."""
    monkeypatch.syspath_prepend(tmp_path)

    def run(source, timeout_s=600.0):
        (tmp_path / "faulty_executor.py").write_text(source)
        ended = processes.run(run_dir, "eager", events, timeout_s, executor="faulty_executor:make")
        assert not (run_dir / "members" / "eager").exists()
        assert not list(run_dir.glob(".member-eager-*"))
        return ended

    return run


def test_a_member_records_what_torch_computes(run_dir, events):
    """The whole of a member's process, against the model called here with a loss by hand and AdamW."""
    ended = processes.run(run_dir, "reference", events, 600)
    assert (ended.status, ended.reason) == ("done", "")
    found = Recording.open(run_dir / "golden" / "reference")
    model = AutoModelForQuestionAnswering.from_pretrained(encoders.TINY, attn_implementation="eager").eval()
    inputs, outputs = Inputs(run_dir / "golden"), found.outputs()
    wanted = {case.id for case in inputs.of("data", "edge", "layer")}
    assert {name.partition("/")[0] for name in outputs} == wanted | {"dev"}
    dev = []
    for case in inputs.of("data", "edge", "layer", "dev"):
        tensors = inputs.tensors(case.id)
        with torch.no_grad():
            output = model(**tensors)
        if case.kind == "dev":
            dev.append(output.end_logits[tensors["attention_mask"] == 1])
            continue
        np.testing.assert_allclose(outputs[f"{case.id}/start"], output.start_logits, rtol=0, atol=2e-5)
        np.testing.assert_allclose(outputs[f"{case.id}/end"], output.end_logits, rtol=0, atol=2e-5)
    np.testing.assert_allclose(outputs["dev/end"], torch.cat(dev), rtol=0, atol=2e-5)

    meta = found.meta
    assert meta["repeats"] == {"runs": 5, "identical": True, "max_abs": 0.0}
    assert meta["invariance"]["batch_max_abs"] < 2e-5 and 0 <= meta["invariance"]["padding_max_abs"] < 2e-5
    assert len(meta["latency"]["samples_ms"]) == 3 and min(meta["latency"]["samples_ms"]) > 0
    assert (meta["absent"], meta["nonfinite"], meta["executor"]["threads"]) == ({}, {}, 1)
    assert [row["name"] for row in meta["layers"]][-1] == "qa_outputs" and len(found.layers()) == 14

    optimizer = torch.optim.AdamW(model.parameters(), lr=CONFIG.learning_rate)
    losses = []
    for case in inputs.of("train"):
        optimizer.zero_grad()
        tensors = inputs.tensors(case.id)
        output = model(**tensors)
        of_rows = [
            torch.logsumexp(row[mask == 1], 0) - row[label]  # no answer begins in padding
            for side, labels in zip((output.start_logits, output.end_logits), inputs.labels(case.id), strict=True)
            for row, mask, label in zip(side, tensors["attention_mask"], labels, strict=True)
        ]
        loss = torch.stack(of_rows).mean()
        loss.backward()
        if not losses:
            gradients = found.gradients()
            assert gradients.keys() == {name for name, _ in model.named_parameters()}
            for name, parameter in model.named_parameters():
                scale = float(parameter.grad.abs().max())
                np.testing.assert_allclose(gradients[name], parameter.grad, rtol=0, atol=1e-4 * scale + 1e-6)
        optimizer.step()
        losses.append(loss.item())
    np.testing.assert_allclose(meta["curve"], losses, rtol=1e-4)
    assert meta["loss"] == meta["curve"][0]
    told = [event for event in read_events(run_dir, {"progress"}) if event["member"] == "reference"]
    assert (
        told[0]["unit"] in ("starting", "loading")
        and told[-1]["unit"] == "done"
        and told[-1]["done"] == told[-1]["total"] == 7
    )
    assert [event["done"] for event in told] == sorted(event["done"] for event in told)


CRASH = "import ctypes\ndef dig():\n    ctypes.string_at(0)\ndig()\n"


def test_a_crash_names_its_signal_and_place(faulty):
    ended = faulty(CRASH)
    assert ended.status == "crashed" and ended.reason.startswith("ended by SIGSEGV: Fatal Python error: Segmentation")
    assert "string_at" in ended.reason


def test_an_error_is_told_with_its_last_words(faulty):
    ended = faulty("raise ValueError('the driver said no')")
    assert ended.status == "crashed" and ended.reason.startswith("exit code 1")
    assert ended.reason.endswith("ValueError: the driver said no")


def test_a_missing_library_is_unavailable_with_the_reason(faulty):
    ended = faulty(
        "from benchlib.core.errors import BackendUnavailable\nraise BackendUnavailable('no openvino:\\n pip install it')"
    )
    assert (ended.status, ended.reason) == ("unavailable", "no openvino: pip install it")


def test_a_backend_without_its_library_is_unavailable_before_anything_is_loaded(run_dir):
    with pytest.raises(BackendUnavailable, match="torch_xla is not installed: pip install torch_xla"):
        member.record(CONFIG.model_copy(update={"backend": "tpu"}), run_dir / "nowhere", "exact")


@pytest.mark.parametrize(("given", "found"), [(None, "PASSIVE"), ("", "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_threads_do_not_spin_unless_the_user_wants_it(given, found, monkeypatch):
    if given is None:
        monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    else:
        monkeypatch.setenv("OMP_WAIT_POLICY", given)
    assert processes._waiting() == {"OMP_WAIT_POLICY": found}


def test_a_full_disk_ends_the_run_and_not_the_member_alone(faulty):
    """As `told` words it, as a library raises it, and from a process that cannot even say so."""
    full = "OSError(errno.ENOSPC, 'No space left on device', '/a/file')"
    for source, words in {
        f"import errno\nraise {full}": "^/a/file cannot be written: no space left on device; free some space",
        "import os\nos._exit(74)": "^a file of member eager cannot be written: no space left on device; free some space",
    }.items():
        with pytest.raises(StorageError, match=words):
            faulty(source)


def test_what_a_killed_member_had_begun_to_write_is_gone(run_dir, faulty):
    begun = [run_dir / ".member-eager-x1", run_dir / "members" / ".eager.x2", run_dir / "golden" / ".eager.x3"]
    other = run_dir / "members" / ".eager_one_thread.x4"
    for folder in (*begun, other):
        folder.mkdir(parents=True)
        (folder / "outputs.safetensors").write_bytes(b"half")
    assert faulty("import os\nos._exit(3)").status == "crashed"
    assert not any(folder.exists() for folder in begun) and other.exists()
    processes.clear(run_dir)
    assert not other.exists() and (run_dir / "golden" / "inputs.safetensors").exists()


def test_variables_that_are_read_at_the_start_are_set_before_it():
    one, native, reference = (processes._variables(name) for name in ("one_thread", "native", "reference"))
    assert {one[name] for name in processes.THREAD_VARIABLES} == {"1"} and "OMP_NUM_THREADS" not in native
    assert one["CUBLAS_WORKSPACE_CONFIG"] == reference["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert "CUBLAS_WORKSPACE_CONFIG" not in native  # torch's own defaults


HANG = """
import subprocess, sys, time
# A helper in a session of its own, as compilers start them: neither the parent's death nor its group reaches it.
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
def wait_for_the_device():
    print("helper", child.pid, flush=True)
    time.sleep(600)
wait_for_the_device()
"""


def helper(run_dir):
    """The id of the process that the hanging member started, 0 while it is not there."""
    out = run_dir / "logs" / "member-eager.out"
    words = out.read_text().split() if out.exists() else []
    return int(words[words.index("helper") + 1]) if "helper" in words else 0


def test_a_hang_ends_in_time_with_its_place_and_leaves_no_process(faulty, run_dir, monkeypatch):
    """The time is over as soon as the member hangs and has given signs of life, however long that takes."""

    def beats():
        return [event for event in read_events(run_dir, {"progress"}) if event["member"] == "eager"]

    before = len(beats())

    def now():
        return time.monotonic() + (1e6 if helper(run_dir) and len(beats()) > before + 5 else 0)

    monkeypatch.setattr(processes, "BEAT_S", 0.05)
    monkeypatch.setattr(processes, "STACKS_S", 3.0)
    monkeypatch.setattr(processes, "time", SimpleNamespace(monotonic=now))
    ended = faulty(HANG)
    assert ended.status == "timeout" and ended.reason.startswith("not done after 600 s")
    assert "wait_for_the_device" in ended.reason
    with contextlib.suppress(psutil.NoSuchProcess):
        assert gone(psutil.Process(helper(run_dir)))


def gone(process):
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def rank(run_dir, tmp_path, arguments):
    """Start a process that runs a member as a rank does."""
    code = (
        "from pathlib import Path\nfrom benchlib.core.events import EventWriter\nfrom benchlib.benchmarks.parity import processes\n"
        f"path = Path({str(run_dir)!r})\nprocesses.run(path, {arguments[0]!r}, EventWriter(path, 'rank1'), 600, {arguments[1]!r})"
    )
    return subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(tmp_path)})


def test_a_member_dies_with_its_rank(run_dir, tmp_path):
    (tmp_path / "faulty_executor.py").write_text(HANG)
    (run_dir / "logs" / "member-eager.out").unlink(missing_ok=True)
    process = rank(run_dir, tmp_path, ("eager", "faulty_executor:make"))
    try:
        started = until(lambda: helper(run_dir), PATIENCE_S)
        living = psutil.Process(started).parent()
        process.kill()
        process.wait()
        until(lambda: not living.is_running(), PATIENCE_S)
    finally:
        process.kill()
        with contextlib.suppress(OSError, UnboundLocalError):
            os.kill(started, signal.SIGKILL)  # in a run the supervisor, who adopts it, does this


@pytest.fixture
def endless(run_dir, tmp_path):
    """A run whose member `eager`, which is forked, takes its time for an hour."""
    folder = tmp_path / "endless"
    folder.mkdir()
    save_config(CONFIG.model_copy(update={"latency_runs": 100000, "golden": str(run_dir / "golden")}), folder)
    return folder


@pytest.mark.skipif(sys.platform != "linux", reason="members are forked on Linux only")
def test_a_forked_member_and_its_server_die_with_their_rank(endless, tmp_path):
    out = endless / "logs" / "member-eager.out"
    process = rank(endless, tmp_path, ("eager", ""))
    try:
        until(lambda: out.exists() and "latency" in out.read_text(), PATIENCE_S)
        living = psutil.Process(process.pid).children(recursive=True)
        assert any(os.getsid(one.pid) == one.pid and one.ppid() != process.pid for one in living), (
            "a fork of the server"
        )
        process.kill()
        process.wait()
        until(lambda: all(map(gone, living)), PATIENCE_S)
    finally:
        process.kill()


@pytest.mark.skipif(sys.platform != "linux", reason="members are forked on Linux only")
def test_forked_members_end_alone_and_with_their_server(endless, tmp_path):
    out, err = tmp_path / "out", tmp_path / "err"

    def start(name):
        for path in (out, err):
            path.write_text("")
        process = processes._start(endless, name, "", {}, out, err)
        assert psutil.Process(process.pid).ppid() != os.getpid()
        return process

    crashing = start("eager")
    until(lambda: out.stat().st_size, PATIENCE_S)
    os.kill(crashing.pid, signal.SIGSEGV)
    crashing.join(PATIENCE_S)
    assert crashing.exitcode == -signal.SIGSEGV
    orphan = start("eager")
    until(lambda: out.stat().st_size, PATIENCE_S)
    process = psutil.Process(orphan.pid)
    process.parent().kill()
    until(lambda: gone(process), PATIENCE_S)
    unknown = start("unheard-of")  # by a new server
    unknown.join(PATIENCE_S)
    assert unknown.exitcode == 1 and "KeyError: 'unheard-of'" in err.read_text()


def computed(run_dir, name, config=CONFIG, change=lambda model: None):
    """What a member finds, in this process. ``change`` gets the model after its weights were loaded."""
    todo = member.task(config, run_dir, name)
    place = run_dir / "golden"
    inputs, model = Inputs(place), weights.loaded(config, place, todo.member.attention)[0]
    change(model)
    with switches.held(todo.member, CPU), layers.planted(model, config.planted_layer if todo.planted else -1):
        made = member.factory(todo.member.executor)(model, todo.member, CPU, inputs.tensors("layer"), run_dir)
        told = exercise.Exercise(config, todo.member, model, made, inputs, CPU, lambda *_: None)
        return told.run(latency=todo.timed)


def test_truth_is_in_double_precision_throughout_and_nearer(run_dir):
    truth, fp32, bf16 = (computed(run_dir, name) for name in ("truth", "sdpa_flash", "bf16"))
    for arrays in (truth.outputs, truth.gradients, truth.layers):
        assert {array.dtype for array in arrays.values()} == {np.dtype("float64")}
    assert truth.facts["latency"] is None
    distance = {}
    for kind, found in (("fp32", fp32), ("bf16", bf16)):
        assert {array.dtype for array in found.outputs.values()} == {np.dtype("float32")}
        pairs = [(found.outputs[name], truth.outputs[name]) for name in truth.outputs if "len48" in name]
        distance[kind] = max(np.abs(one - other).max() for one, other in pairs)
        assert abs(found.facts["loss"] - truth.facts["loss"]) < {"fp32": 1e-5, "bf16": 0.1}[kind]
    assert 1e-8 < distance["fp32"] < 1e-4 < 1e-2 < distance["bf16"] < 1


def test_a_mask_that_only_training_leaves_out_shows_in_the_gradients(run_dir):
    """Half of the rows of the first training batch are padded; outputs are honest, gradients are not."""
    kept = ParityConfig.model_copy(CONFIG, update={"latency_runs": 0, "train_steps": 1})

    def careless(model):
        honest = model.forward

        def forward(*args, **kwargs):
            if torch.is_grad_enabled():
                kwargs["attention_mask"] = torch.ones_like(kwargs["attention_mask"])
            return honest(*args, **kwargs)

        model.forward = forward

    mask = Inputs(run_dir / "golden").tensors("train-00")["attention_mask"]
    assert [bool(row.all()) for row in mask] == [True, False]
    right, wrong = computed(run_dir, "eager", kept), computed(run_dir, "eager", kept, change=careless)
    for name, array in right.outputs.items():
        np.testing.assert_array_equal(array, wrong.outputs[name])
    name = "qa_outputs.weight"
    off = np.linalg.norm(right.gradients[name] - wrong.gradients[name]) / np.linalg.norm(right.gradients[name])
    assert off > 1e-2 and abs(right.facts["loss"] - wrong.facts["loss"]) > 1e-4


def test_logits_of_padding_are_no_part_of_the_loss(run_dir):
    kept = ParityConfig.model_copy(CONFIG, update={"latency_runs": 0, "train_steps": 1})

    def noisy(model):
        honest = model.forward

        def forward(*args, **kwargs):
            found = honest(*args, **kwargs)
            found.start_logits = found.start_logits + 100.0 * (kwargs["attention_mask"] == 0)
            return found

        model.forward = forward

    right, wrong = computed(run_dir, "eager", kept), computed(run_dir, "eager", kept, change=noisy)
    assert right.facts["loss"] == wrong.facts["loss"] and right.facts["curve"] == wrong.facts["curve"]


def test_a_nan_of_one_weight_is_in_the_record_of_everything(run_dir):
    def spoil(model):
        with torch.no_grad():
            model.bert.encoder.layer[2].output.dense.weight[0, 0] = torch.nan

    found = computed(run_dir, "eager", change=spoil)
    assert np.isnan(found.outputs["len8-batch1/start"]).any() and np.isnan(found.outputs["dev/end"]).any()
    assert np.isnan([found.facts["loss"], found.facts["repeats"]["max_abs"], *found.facts["curve"]]).all()
    clean = [name for name, array in found.layers.items() if np.isfinite(array).all()]
    assert len(clean) == len([name for name in found.layers if name < "009"])  # up to what layer 2 feeds on


def test_a_planted_fault_is_in_candidates_and_not_in_the_reference(run_dir):
    planted = CONFIG.model_copy(update={"planted_layer": 1, "latency_runs": 0, "train_steps": 1})
    reference, candidate = (computed(run_dir, name, planted) for name in ("reference", "eager"))
    differing = [name for name in reference.layers if not np.allclose(reference.layers[name], candidate.layers[name])]
    assert differing[0].endswith("encoder.layer.1")
    assert candidate.facts["absent"]["latency"] == "latency_runs = 0"


def test_differences_between_batches_and_repeats_are_seen(run_dir, monkeypatch):
    """An executor whose result depends on the number of rows, on padding and on the call."""
    calls = iter(range(1000))
    honest = executors.Eager.forward

    def forward(self, inputs):
        start, end = honest(self, inputs)
        rows, length = inputs["input_ids"].shape
        return start + rows / 8 + length / 1024, end + next(calls) / 4096

    monkeypatch.setattr(executors.Eager, "forward", forward)
    found = computed(run_dir, "eager").facts
    assert found["repeats"]["identical"] is False
    assert found["repeats"]["max_abs"] == pytest.approx(4 / 4096, abs=1e-5)
    assert found["invariance"]["batch_max_abs"] == pytest.approx(2 / 8, abs=1e-4)  # 3 rows, then 1
    assert found["invariance"]["padding_max_abs"] == pytest.approx(24 / 1024, abs=1e-4)  # 24 tokens, then 48


def test_a_compiled_graph_says_what_it_cannot_tell(run_dir, monkeypatch):
    class Graph(executors.Eager):
        hooks = False

        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.inner, self.module = self.module, None

        def run(self, placed):
            with torch.no_grad():
                return executors.logits(self.inner(**placed))

    monkeypatch.setattr(executors, "Eager", Graph)
    found = computed(run_dir, "eager")
    assert set(found.facts["absent"]) == {"layers", "loss", "gradients", "loss curve"}
    assert (found.gradients, found.layers, found.facts["curve"]) == ({}, {}, None)
    assert np.isfinite(found.outputs["len48-batch3/end"]).all()


def test_planted_slowdown_makes_timed_calls_longer(run_dir, monkeypatch):
    held, clock = [], itertools.count(0.0, 2.0)  # each look at it is 2 s after the last one
    monkeypatch.setattr(exercise, "hold", held.append)
    monkeypatch.setattr(exercise, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    for share, milliseconds in ((0.0, 2000), (0.5, 4000)):
        config = CONFIG.model_copy(update={"planted_slowdown": share})
        todo = exercise.Exercise(config, MEMBERS["eager"], None, None, None, CPU, lambda *_: None)
        assert todo._timed(lambda: None) == milliseconds
    assert held == [1.0]
