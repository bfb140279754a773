"""The member that computes in XLA, beside torch: logits, gradients, and weights that training changes."""

import pytest
import torch
import transformers

from benchlib.benchmarks.parity import translated
from benchlib.benchmarks.parity.config import MEMBERS
from benchlib.core.errors import BackendUnavailable

CPU = torch.device("cpu")


def test_xla_follows_the_model(tmp_path):
    pytest.importorskip("jax", reason="pip install 'benchlib[compiled]'")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        vocab_size=50,
        max_position_embeddings=8,
    )
    model = transformers.AutoModelForQuestionAnswering.from_config(config, attn_implementation="eager").eval()
    inputs = {"input_ids": torch.randint(0, 50, (2, 4)), "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])}
    executor = translated.xla(model, MEMBERS["xla"], CPU, inputs, tmp_path)

    def eager():
        with torch.no_grad():
            output = model(**inputs)
        return output.start_logits, output.end_logits

    assert all(torch.allclose(*sides, atol=1e-6) for sides in zip(executor.forward(inputs), eager(), strict=True))
    with torch.no_grad():  # as an optimizer does
        model.qa_outputs.bias += torch.tensor([1.0, -1.0])
    assert all(torch.allclose(*sides, atol=1e-6) for sides in zip(executor.forward(inputs), eager(), strict=True))

    def loss(pair):
        return (pair[0] ** 2).sum() + pair[1].logsumexp(1).sum()

    output = model(**inputs)
    loss((output.start_logits, output.end_logits)).backward()
    wanted = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    loss(executor.module(**inputs)).backward()
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter.grad, wanted[name], rtol=1e-5, atol=1e-6), name
    executor.timed(inputs)()
    assert executor.description["runtime"].startswith("XLA") and len(executor.description["compile_s"]) == 2
    executor.close()


def test_what_is_not_installed_is_named_with_its_remedy(monkeypatch, tmp_path):
    import sys

    for package, make, extra in (("jax", translated.xla, "xla"), ("iree", translated.iree, "compiled")):
        monkeypatch.setitem(sys.modules, package, None)
        monkeypatch.setitem(sys.modules, f"{package}.runtime", None)
        with pytest.raises(BackendUnavailable, match=rf"pip install 'benchlib\[{extra}\]'"):
            make(torch.nn.Linear(1, 1), MEMBERS["xla"], CPU, {}, tmp_path)
