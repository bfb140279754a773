"""The converter against torch, by compilers that know nothing of it: a program is right if XLA and the interpreter give torch's numbers."""

import os

import numpy as np
import pytest
import torch
import transformers

from benchlib.core.definitions import encoder_forward_flops
from benchlib.core.errors import UserError
from benchlib.workloads.stablehlo import emit, export, lowerings, mlir, runtimes
from benchlib.workloads.stablehlo.convert import Unsupported, convert
from benchlib.workloads.stablehlo.inspection import inspect

pytest.importorskip("jax", reason="pip install -e '.[compiled]'")

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 100, "max_position_embeddings": 32}  # fmt: skip
HIDDEN, LAYERS, INTERMEDIATE, B, S = 32, 2, 64, 2, 8


def bert():
    torch.manual_seed(0)
    config = transformers.BertConfig(**SIZES)
    return transformers.AutoModelForQuestionAnswering.from_config(config, attn_implementation="eager").eval()


def inputs(seed=0):
    generator = torch.Generator().manual_seed(seed)
    mask = torch.ones(B, S, dtype=torch.int64)
    mask[1, 5:] = 0
    ids = torch.randint(0, 100, (B, S), generator=generator)
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": torch.zeros_like(ids)}


@pytest.fixture(scope="module")
def answers():
    model = bert()
    return model, convert(export.forward(export.Answers(model), inputs()), "answers")


@pytest.fixture(scope="module")
def gradients():
    model = bert()
    batch = {"start": torch.tensor([1, 2]), "end": torch.tensor([3, 4]), **inputs()}
    program = export.joint(export.AnswerLoss(model), batch)
    return model, batch, convert(program, "gradients"), program


def computed(converted, batch):
    program = runtimes.Xla(converted.text, converted.manifest)
    return [
        np.asarray(value)
        for value in program.run(program.place(runtimes.arguments(converted.manifest, converted.weights, batch)))
    ]


def test_xla_gives_the_logits_of_torch(answers):
    model, converted = answers
    with torch.no_grad():
        wanted = export.pair(model(**inputs(3)))
    for actual, side in zip(computed(converted, inputs(3)), wanted, strict=True):
        np.testing.assert_allclose(actual, side.numpy(), rtol=0, atol=1e-6)


def test_the_joint_program_gives_the_gradients_of_torch(gradients):
    model, batch, converted, _ = gradients
    loss = export.AnswerLoss(model)
    loss(**batch).backward()
    results = dict(zip(converted.manifest.results, computed(converted, batch), strict=True))
    roles = [item.role for item in results]
    assert roles.count("loss") == 1 and roles.count("gradient") == sum(1 for _ in model.parameters())
    off = size = 0.0
    for item, value in results.items():
        if item.role == "gradient":
            wanted = dict(loss.named_parameters())[item.name].grad.numpy()
            off, size = off + float(((value - wanted) ** 2).sum()), size + float((wanted**2).sum())
    assert (off / size) ** 0.5 < 1e-6
    model.zero_grad()


def test_the_interpreter_agrees_with_the_specification_of_the_same_text(tmp_path):
    layer = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU(), torch.nn.LayerNorm(4)).eval()
    x = {"input": torch.randn(2, 4, generator=torch.Generator().manual_seed(0))}
    converted = convert(export.forward(layer, x))
    converted.manifest.write(tmp_path / "m.mlir", converted.text)
    program = runtimes.load("interpreter", tmp_path / "m.mlir")
    assert program.manifest == converted.manifest
    (actual,) = program.run(program.place(runtimes.arguments(program.manifest, converted.weights, x)))
    np.testing.assert_allclose(actual, layer(**x).detach().numpy(), atol=2e-6)


class Each(torch.nn.Module):
    """One operation of each class of lowering, on values that tell a wrong one."""

    def forward(self, x, y, index, condition):
        norm = torch.nn.functional.layer_norm(x, (4,))
        picked = x[index, index]
        put = torch.zeros_like(x).index_put((index,), x[:2], accumulate=True)
        return (
            torch.softmax(x, 1), torch.log_softmax(x, 0), norm, torch.nn.functional.gelu(x), x @ y.T, x.gather(1, condition.long()[:, :2]),
            picked, put, x.scatter(1, condition.long()[:, :1], 2.5), torch.where(condition, x, y), x.clamp(-0.5, 0.5), (x < y).sum(1),
            x[:, 1:3].mean(1), torch.cat([x, y], 1).amax(1), x.pow(3), torch.arange(1, 9, 2) * index[0],
            condition.any(1), x.sub(y, alpha=2), torch.tensor([[1.5, -2.0], [3.0, 0.25]]) @ x[:2], x.split([1, 3], 1)[1], x.cumsum(0), condition.cumsum(1),
        )  # fmt: skip


def each():
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(4, 4, generator=generator) for _ in range(2))
    return {"x": x, "y": y, "index": torch.tensor([2, -2]), "condition": x > y}


@pytest.fixture(scope="module")
def exported_each():
    batch = each()
    return export.forward(Each(), batch), batch


def test_each_class_of_lowering_gives_what_torch_gives(exported_each):
    program, batch = exported_each
    for place, (actual, wanted) in enumerate(zip(computed(convert(program), batch), Each()(**batch), strict=True)):
        np.testing.assert_allclose(actual, wanted.numpy(), rtol=1e-6, atol=1e-6, err_msg=str(place))


def test_operations_without_a_lowering_are_listed_at_once_with_their_nodes():
    class Unknown(torch.nn.Module):
        def forward(self, x):
            return torch.sort(torch.nn.functional.conv1d(x, x))[0]

    with pytest.raises(Unsupported) as error:
        convert(export.forward(Unknown(), {"x": torch.ones(1, 1, 4)}))
    assert error.value.operations == [("aten.convolution.default", "convolution"), ("aten.sort.default", "sort")]


def test_a_result_of_another_shape_than_torchs_is_no_program(monkeypatch, exported_each):
    monkeypatch.setitem(lowerings.LOWERINGS, "aten.amax", lambda w, node, x, *_: w.reduce("maximum", x, [0], 0))
    with pytest.raises(AssertionError, match=r"aten\.amax\.default in node amax"):
        convert(exported_each[0])


def test_inspection_counts_the_flops_of_the_formula(answers, gradients):
    converted = answers[1]
    arguments, counts = converted.manifest.arguments, inspect(converted.text)
    head = 2 * HIDDEN * 2 * S  # the output layer: two logits a token
    assert counts.dot_flops == B * (encoder_forward_flops(LAYERS, HIDDEN, INTERMEDIATE, S) + head)
    assert counts.argument_bytes == sum(4 * int(np.prod(item.shape)) for item in arguments)
    assert counts.result_bytes == 2 * 4 * B * S
    assert inspect(gradients[2].text).dot_flops == 3 * counts.dot_flops


def test_more_replicas_than_devices_are_refused(gradients):
    converted = convert(gradients[3], replicas=64)
    assert converted.text.count('"stablehlo.all_reduce"') == sum(
        item.role in ("loss", "gradient") for item in converted.manifest.results
    )
    with pytest.raises(UserError, match="64 replicas and cpu has"):
        runtimes.Xla(converted.text, converted.manifest)


def test_literals_are_exact():
    for value in (0.1, 1e-12, -3.4028234663852886e38, 2 / 3):
        digits = emit.literal(value, "f32")
        assert np.float32(digits) == np.float32(value)
    assert emit.literal(-np.inf, "f32") == "0xFF800000"
    with pytest.raises(ValueError, match="beyond 32 bits"):
        emit.literal(2**40, "i32")


def test_jax_does_not_take_the_memory_that_torch_needs_beside_it(monkeypatch):
    monkeypatch.delenv("XLA_PYTHON_CLIENT_PREALLOCATE", raising=False)
    mlir.jax()
    assert os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "true")
    mlir.jax()
    assert os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] == "true", "what the user says stands"
