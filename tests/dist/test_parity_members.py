"""Members honest and faulty, and what is recorded of them, against the model called here with a loss by hand and AdamW."""

import functools
import shutil

import numpy as np
import pytest
import torch
from transformers import AutoModelForQuestionAnswering

from benchlib.benchmarks.parity import exercise, inputs, switches, weights
from benchlib.benchmarks.parity.config import ParityConfig
from benchlib.benchmarks.parity.inputs import Inputs
from benchlib.benchmarks.parity.recording import Recording
from benchlib.config.schema import save_config
from benchlib.workloads import encoders
from benchlib.workloads.executors import MEMBERS
from benchlib.workloads.executors import eager as executors

CONFIG = ParityConfig(
    lengths=[8, 24, 48], batch_sizes=[1, 3], dev_questions=4, train_steps=3, train_batch=2, train_length=32,
    latency_runs=3,
)  # fmt: skip
SHORT = CONFIG.model_copy(update={"latency_runs": 0, "train_steps": 1})
CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def as_it_was():
    """One thread as a rank sets it, for several on cores that others use are many times slower; then torch's own defaults."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True
    for name in switches.KERNELS.values():
        getattr(torch.backends.cuda, f"enable_{name}")(True)
    for part in switches.PARTS:
        functools.reduce(getattr, part.split("."), torch.backends).fp32_precision = "none"


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    save_config(CONFIG, folder)
    inputs.prepare(CONFIG, folder / "golden")
    return folder


def test_a_member_records_what_torch_computes(run_dir, tmp_path):
    progress = []
    exercise.record(run_dir, "eager", tmp_path, progress.append)
    recording = Recording.open(run_dir / "members" / "eager")
    model = AutoModelForQuestionAnswering.from_pretrained(encoders.TINY, attn_implementation="eager").eval()
    inputs, outputs = Inputs(run_dir / "golden"), recording.outputs
    cases = {case.id for case in inputs.of("data", "edge", "layer")}
    assert {name.partition("/")[0] for name in outputs} == cases | {"dev"}
    dev = []
    for case in inputs.of("data", "edge", "layer", "dev"):
        tensors = inputs.tensors(case.id)
        with torch.no_grad():
            output = model(**tensors, output_hidden_states=True)
        if case.kind == "dev":
            dev.append(output.end_logits[tensors["attention_mask"] == 1])
            continue
        np.testing.assert_allclose(outputs[f"{case.id}/start"], output.start_logits, rtol=0, atol=2e-5)
        np.testing.assert_allclose(outputs[f"{case.id}/end"], output.end_logits, rtol=0, atol=2e-5)
        if case.kind == "layer":
            for own, state in zip(recording.layers.values(), output.hidden_states, strict=True):
                np.testing.assert_allclose(own, state, rtol=0, atol=1e-5)
    np.testing.assert_allclose(outputs["dev/end"], torch.cat(dev), rtol=0, atol=2e-5)

    meta = recording.meta
    assert meta["repeats_max_abs"] == 0.0 and meta["batch_max_abs"] < 2e-5 and 0 <= meta["padding_max_abs"] < 2e-5
    assert len(meta["latency_ms"]) == 3 and min(meta["latency_ms"]) > 0 and meta["absent"] == {}
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
            assert recording.gradients.keys() == {name for name, _ in model.named_parameters()}
            for name, parameter in model.named_parameters():
                scale = float(parameter.grad.abs().max())
                np.testing.assert_allclose(recording.gradients[name], parameter.grad, rtol=0, atol=1e-4 * scale + 1e-6)
        optimizer.step()
        losses.append(loss.item())
    np.testing.assert_allclose(meta["curve"], losses, rtol=1e-4)
    assert meta["loss"] == meta["curve"][0]
    steps = [report["unit"] for report in progress if report["unit"] != "training steps"]
    assert steps == ["loading", "outputs", "repeats", "invariance", "layers", "gradients", "latency", "curve"]


def test_candidates_are_timed_and_take_the_fault_and_the_references_do_not(run_dir, tmp_path):
    shutil.copytree(run_dir / "golden", tmp_path / "golden")
    save_config(CONFIG.model_copy(update={"planted_layer": 1, "latency_runs": 1, "train_steps": 1}), tmp_path)
    recordings = {}
    for name, folder in (("eager", "members"), ("reference", "golden"), ("fp64_reference", "golden")):
        (tmp_path / f"of {name}").mkdir()
        exercise.record(tmp_path, name, tmp_path / f"of {name}", lambda progress: None)
        recordings[name] = Recording.open(tmp_path / folder / name)
    assert [name for name, one in recordings.items() if "latency_ms" in one.meta] == ["eager"]
    for name, honest in (("eager", False), ("reference", True)):
        pairs = ((array, recordings["fp64_reference"].layers[key]) for key, array in recordings[name].layers.items())
        close = [np.allclose(array, exact, rtol=0, atol=1e-4) for array, exact in pairs]
        assert close == [True, True, honest, honest, honest]


def computed(run_dir, name, config=CONFIG, change=None):
    """What a member finds, in this process. ``change`` gets the model after its weights were loaded."""
    member, place = exercise.task(config, run_dir, name)[0], run_dir / "golden"
    inputs, model = Inputs(place), weights.loaded(place, member.attention)[0]
    if change:
        change(model)
    switches.hold(member, CPU)
    executor = member.make(model, member, CPU, inputs.tensors("layer"), run_dir)
    work = exercise.Exercise(config, member, model, executor, inputs, CPU, lambda progress: None)
    return work.run(latency=name in MEMBERS)


def test_the_fp64_reference_is_in_double_precision_throughout_and_nearer(run_dir):
    fp64, fp32, bf16 = (computed(run_dir, name) for name in ("fp64_reference", "sdpa_flash", "bf16"))
    for arrays in (fp64.outputs, fp64.gradients, fp64.layers):
        assert {array.dtype for array in arrays.values()} == {np.dtype("float64")}
    assert "latency_ms" not in fp64.facts
    distance = {}
    for kind, result in (("fp32", fp32), ("bf16", bf16)):
        assert {array.dtype for array in result.outputs.values()} == {np.dtype("float32")}
        pairs = [(result.outputs[name], fp64.outputs[name]) for name in fp64.outputs if "len48" in name]
        distance[kind] = max(np.abs(outputs - exact).max() for outputs, exact in pairs)
        assert abs(result.facts["loss"] - fp64.facts["loss"]) < {"fp32": 1e-5, "bf16": 0.1}[kind]
    assert 1e-8 < distance["fp32"] < 1e-4 < 1e-2 < distance["bf16"] < 1


def careless(model):
    """Leave the mask of padding out of training alone."""
    honest = model.forward

    def forward(**inputs):
        mask = inputs["attention_mask"]
        return honest(**inputs | {"attention_mask": torch.ones_like(mask) if torch.is_grad_enabled() else mask})

    model.forward = forward


def test_a_mask_that_only_training_leaves_out_shows_in_the_gradients(run_dir):
    """Half of the rows of the first training batch are padded; outputs are honest, gradients are not."""
    mask = Inputs(run_dir / "golden").tensors("train-00")["attention_mask"]
    assert [bool(row.all()) for row in mask] == [True, False]
    right, wrong = (computed(run_dir, "eager", SHORT, change) for change in (None, careless))
    for name, array in right.outputs.items():
        np.testing.assert_array_equal(array, wrong.outputs[name])
    name = "qa_outputs.weight"
    off = np.linalg.norm(right.gradients[name] - wrong.gradients[name]) / np.linalg.norm(right.gradients[name])
    assert off > 1e-2 and abs(right.facts["loss"] - wrong.facts["loss"]) > 1e-4


def test_differences_between_batches_and_repeats_are_seen(run_dir, monkeypatch):
    """An executor whose result depends on the number of rows, on padding and on the call."""
    calls, honest = iter(range(1000)), executors.Eager.forward

    def forward(self, inputs):
        start, end = honest(self, inputs)
        rows, length = inputs["input_ids"].shape
        return start + rows / 8 + length / 1024, end + next(calls) / 4096

    monkeypatch.setattr(executors.Eager, "forward", forward)
    facts = computed(run_dir, "eager").facts
    assert facts["repeats_max_abs"] == pytest.approx(4 / 4096, abs=1e-5)
    assert facts["batch_max_abs"] == pytest.approx(2 / 8, abs=1e-4)  # 3 rows, then 1
    assert facts["padding_max_abs"] == pytest.approx(24 / 1024, abs=1e-4)  # 24 tokens, then 48
