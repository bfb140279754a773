"""Compiled path: trace, StableHLO, run"""

import json
import re

import numpy as np
import pytest
from promised import promise, skip_rest

pytest.importorskip("jax", reason="pip install -e '.[compiled]'")

# Of the smallest BERT: one layer of width 32, feed-forward 64, for 2 rows of 16 tokens.
LAYERS, HIDDEN, INTERMEDIATE, B, S = 1, 32, 64, 2, 16
NORMS, PRODUCTS = 1 + 2 * LAYERS, 8 * LAYERS + 1  # the embeddings have a norm, too; the answer layer is one product
PARAMETERS = 3 + 2 + 16 * LAYERS + 2
TRAINED = (
    "threads=1",
    "learning_rate=1e-4",
    "train_questions=8",
    "eval_questions=2",
    "attention_dropout=0",
    "hidden_dropout=0",
    "epochs=4",
)
ONE_PROCESS = (*TRAINED, "nproc=1", "batch_size=8")


@pytest.fixture(scope="module")
def compiled(ran):
    """Return a run that leaves each program, and says what every runtime and target did with it."""
    ways = ("runtimes=interpreter,xla,iree", "targets=cuda,rocm,vulkan-spirv,metal-spirv", "gelu=custom_call")
    return ran("compiled", *ways, "nproc=2", "train_steps=3", "rounds=2", "executors=eager")


def counts(program, path):
    """Return how often each operation is in a program, by ``benchlib inspect``."""
    return {name: int(number) for name, number in re.findall(r"^(\w+) +(\d+) *$", program("inspect", path), re.M)}


def by_runtime(run):
    return {row["runtime"]: row for row in run.result.tables["runtimes"]}


@promise(
    "P039",
    "Trace a PyTorch BERT to a graph and translate it to StableHLO text in an .mlir file",
    "benchlib run compiled",
)
def test_p039_a_traced_bert_is_stablehlo_text_with_its_weights_as_arguments(compiled):
    text = (compiled.path / "programs" / "bert.mlir").read_text()
    assert text.startswith("module @bert {") and "stablehlo.dot_general" in text
    arguments = json.loads((compiled.path / "programs" / "bert.mlir.json").read_text())["arguments"]
    roles = [item["role"] for item in arguments]
    assert (roles.count("parameter"), roles.count("input")) == (PARAMETERS, 3)
    assert "%model.bert.encoder.layer.0.attention.self.query.weight: tensor<32x32xf32>" in text


@promise(
    "P040",
    "Find attention as dot_general and layer norm as reduce + broadcast_in_dim in the text",
    "benchlib inspect FILE.mlir",
)
def test_p040_operations_are_counted_as_the_layers_have_them(compiled, program):
    path = compiled.path / "programs" / "bert.mlir"
    found = counts(program, path)
    # Each norm has a mean and a variance, each softmax a maximum and a sum.
    assert (found["dot_general"], found["reduce"]) == (PRODUCTS, 2 * NORMS + 2 * LAYERS)
    assert found["broadcast_in_dim"] >= found["reduce"]
    per_token = 4 * HIDDEN**2 + 2 * HIDDEN * INTERMEDIATE + 2 * HIDDEN * S
    flops = 2 * B * S * (LAYERS * per_token + 2 * HIDDEN)
    assert f"{flops:,} FLOPs" in program("inspect", path)


@promise("P041", 'Get GELU as stablehlo.custom_call("gelu") on request', "benchlib run compiled --set gelu=custom_call")
def test_p041_gelu_is_a_custom_call_where_asked_for_and_each_runtime_says_what_it_does_with_it(compiled, program):
    folder = compiled.path / "programs"
    plain, whole = counts(program, folder / "bert.mlir"), counts(program, folder / "bert_gelu.mlir")
    assert (plain.get("custom_call", 0), whole["custom_call"]) == (0, LAYERS)
    assert whole["dot_general"] == plain["dot_general"] and sum(whole.values()) < sum(plain.values())
    (call,) = re.findall(r"custom_call @gelu.*", (folder / "bert_gelu.mlir").read_text())
    wide = f"tensor<{B}x{S}x{INTERMEDIATE}xf32>"
    assert '"approximate = none"' in call and call.endswith(f": ({wide}) -> {wide}")
    said = {name.split(",")[0]: row for name, row in by_runtime(compiled).items() if "GELU" in name}
    assert "No registered implementation for" in said["xla"]["reason"]
    assert "reference interpreter does not compute: convert the model with plain" in said["interpreter"]["reason"]
    assert said["iree"].get("reason") or said["iree"]["max_abs"] <= 1e-5


@promise(
    "P042",
    "Have a StableHLO file parsed and its types checked, and be told line and column of an error",
    "benchlib inspect FILE.mlir",
)
def test_p042_damaged_programs_are_refused_by_line_and_column(in_folder, program):
    text = (
        "func.func @main(%w: tensor<3x4xf32>, %x: tensor<2x3xf32>) -> tensor<2x4xf32> {\n"
        "  %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0] : "
        "(tensor<2x3xf32>, tensor<3x4xf32>) -> tensor<2x4xf32>\n"
        "  return %0 : tensor<2x4xf32>\n}\n"
    )
    file = in_folder / "m.mlir"
    file.write_text(text)
    assert "48 FLOPs" in program("inspect", file)  # 2 * 2 * 4 * 3
    damages = {
        ("[1] x [0]", "[0] x [0]"): ("m.mlir:2:8", "contracting dimension sizes must match"),
        ("-> tensor<2x4xf32> {", "-> tensor<2x5xf32> {"): ("m.mlir:3:3", "type of return operand 0"),
        ("dot_general", "dot_fancy"): ("m.mlir:2:8", "unknown"),
        ("return %0", "return %1"): ("m.mlir:3:10", "undeclared SSA value"),
    }
    for (old, new), words in damages.items():
        file.write_text(text.replace(old, new))
        said = program("inspect", file, code=2)
        assert all(word in said for word in words), said


@promise(
    "P043",
    "Run one .mlir file in a reference interpreter, XLA and IREE and compare with torch",
    "benchlib run compiled --set runtimes=interpreter,xla,iree",
    needs="the package IREE",
)
def test_p043_runtimes_compute_the_numbers_of_torch_from_one_file(compiled):
    rows = by_runtime(compiled)
    for name in ("interpreter", "xla"):
        assert rows[name]["max_abs"] <= 1e-5 and rows[name]["one_minus_cos"] <= 1e-9
    iree = rows["iree"]
    if "max_abs" not in iree:
        assert iree["reason"].endswith("pip install -e '.[compiled]'")
        skip_rest("IREE is not installed: pip install -e '.[compiled]'")
    assert iree["max_abs"] <= 1e-5


@promise(
    "P044",
    "Train through the compiled program with all-reduce in it, to the losses of torch",
    "benchlib run squad --set engine=compiled",
)
def test_p044_training_through_the_compiled_program_has_the_losses_of_torch(compiled, program, ran):
    assert counts(program, compiled.path / "programs" / "replicas.mlir")["all_reduce"] == PARAMETERS + 1  # and the loss
    of_ranks = next(row for row in compiled.result.tables["gradients"] if row["replicas"] == 2)
    assert of_ranks["gradients"] == "2 replicas against DDP" and of_ranks["relative"] <= 1e-6
    curve = compiled.result.tables["curve"]
    np.testing.assert_allclose([row["xla"] for row in curve], [row["eager"] for row in curve], rtol=1e-5)
    by_xla, by_torch = ran("squad", *ONE_PROCESS, "engine=compiled"), ran("squad", *ONE_PROCESS)
    np.testing.assert_allclose(by_xla.samples["loss"], by_torch.samples["loss"], rtol=1e-4)


@promise(
    "P045",
    "Compile the same program for CUDA, ROCm, Vulkan and Metal",
    "benchlib run compiled --set targets=cuda,rocm,vulkan-spirv,metal-spirv",
    needs="the package IREE",
)
def test_p045_the_program_is_compiled_for_targets_that_are_not_here(compiled):
    rows = {row["target"]: row for row in compiled.result.tables["targets"]}
    assert list(rows) == ["cuda", "rocm", "vulkan-spirv", "metal-spirv"]
    if all(row.get("status") == "skipped" for row in rows.values()):
        assert all(row["reason"].endswith("pip install -e '.[compiled]'") for row in rows.values())
        skip_rest("IREE is not installed: pip install -e '.[compiled]'")
    assert all(row["module_bytes"] > 1000 for row in rows.values()), rows


@promise(
    "P046",
    "Run the compiled program on an NVIDIA or AMD GPU through the vendor's libraries",
    "benchlib run parity --backend cuda --set members=xla",
    needs="an NVIDIA or AMD GPU with jax's plugin",
)
def test_p046_xla_on_a_gpu_is_planned_and_refused_with_what_is_missing(program):
    for backend in ("cuda", "rocm"):
        shown = program("run", "parity", "--backend", backend, "--set", "members=xla", "--dry-run")
        assert re.search(r"members +\['xla'\] +set by hand", shown), shown
        if "(not available: " not in shown:
            continue
        assert re.search(rf"backend {backend} \(not available: this torch .* .*: pip install torch", shown)
    skip_rest("no program of XLA was run on a GPU yet: jax's plugins for CUDA and ROCm are not tried")
