"""The executors of other compilers and runtimes against transformers' eager attention, over sizes they were not traced with.

The models are small and random, with logits of the order of 1; a toy with few kernels where a compiler is at work.
"""

import sys

import pytest
import torch
import transformers

from benchlib.core.errors import BackendUnavailable
from benchlib.workloads.executors import MEMBERS, eager, onnx, translated
from benchlib.workloads.stablehlo.export import Answers

CPU = torch.device("cpu")
SHAPES = [(1, 8), (1, 31), (3, 8), (8, 24), (2, 64)]  # B, S; the example is (1, 16)
LIMIT = 1e-5
# Positions are sums over the mask, and there are token types.
CONFIG = transformers.RobertaConfig(
    initializer_range=0.3, vocab_size=100, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
    intermediate_size=64, max_position_embeddings=66, type_vocab_size=2, pad_token_id=1,
)  # fmt: skip


pytestmark = pytest.mark.usefixtures("one_thread")


class Toy(torch.nn.Module):
    """Attention over embeddings and nothing else: a few kernels, for a C++ compiler."""

    def __init__(self):
        super().__init__()
        self.embedding, self.qa_outputs = torch.nn.Embedding(100, 16), torch.nn.Linear(16, 2)

    def forward(self, input_ids, attention_mask):
        x = self.embedding(input_ids)[:, None]
        mask = attention_mask[:, None, None].bool()
        logits = self.qa_outputs(torch.nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=mask)[:, 0])
        start, end = logits.unbind(-1)
        return transformers.modeling_outputs.QuestionAnsweringModelOutput(start_logits=start, end_logits=end)


def network(kind):
    torch.manual_seed(5)
    auto = transformers.AutoModelForQuestionAnswering
    return (Toy() if kind == "toy" else auto.from_config(CONFIG, attn_implementation="eager")).eval()


def inputs(kind, rows, tokens):
    """Return random tokens, each row padded more than the one before; token types only for the encoder."""
    ids = torch.randint(5, 100, (rows, tokens), generator=torch.Generator().manual_seed(rows * 1000 + tokens))
    mask = (torch.arange(tokens) < (tokens - 3 * torch.arange(rows)[:, None]).clamp(min=1)).long()
    arrays = {"input_ids": torch.where(mask == 1, ids, 1), "attention_mask": mask}
    return arrays | (
        {"token_type_ids": (torch.arange(tokens) >= tokens // 2).long() * mask} if kind == "encoder" else {}
    )


def worst(executor, model, kind, shapes=SHAPES):
    """Return the largest difference of any logit at an attended position, over all shapes."""
    largest = 0.0
    for shape in shapes:
        arrays = inputs(kind, *shape)
        attended = arrays["attention_mask"] == 1
        with torch.no_grad():
            expected = model(**arrays)
        for name, logits in zip(("start_logits", "end_logits"), executor.forward(arrays), strict=True):
            assert logits.shape == shape and logits.dtype == torch.float32
            largest = max(largest, float((logits - expected[name])[attended].abs().max()))
    return largest


def test_runtimes_of_an_onnx_file_take_any_number_of_rows_and_tokens(tmp_path, monkeypatch):
    """One file serves both runtimes; what they load lies where each would have written it."""
    model, written, write = network("encoder"), {}, onnx.write_onnx

    def once(*arguments):
        written.update(written or write(*arguments))
        return dict(written)

    monkeypatch.setattr(onnx, "write_onnx", once)
    masked = inputs("encoder", 2, 8)
    masked["attention_mask"][1] = 0  # a row without an attended token leaves the others alone
    for name in ("onnxruntime", "openvino"):
        executor = MEMBERS[name].make(network("encoder"), MEMBERS[name], CPU, inputs("encoder", 1, 16), tmp_path)
        assert worst(executor, model, "encoder") <= LIMIT
        with torch.no_grad():
            expected = model(**masked).start_logits
        start, _ = executor.forward(masked)
        assert (start - expected)[0].abs().max() <= LIMIT
        assert torch.isfinite(start).all()  # transformers' eager mask is finfo.min, which softmax makes uniform
    # ONNX Runtime falls back to the CPU by itself where the provider is not built in, or does not start.
    with pytest.raises(BackendUnavailable, match=r"by CPUExecutionProvider and not by CUDA.*onnxruntime-gpu"):
        onnx.OnnxRuntime(model, MEMBERS["onnxruntime"], torch.device("cuda", 0), inputs("encoder", 1, 16), tmp_path)


def train(executor, model, plain):
    """Compare gradients through the executor with those of torch, and outputs after the weights have changed in place."""
    arrays = inputs("toy", 4, 16)
    for pair in (executor.module, Answers(plain)):
        start, end = pair(**arrays)
        (start.square().mean() + end[:, 3].sum()).backward()
    other = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        assert (parameter.grad - other[name].grad).norm() <= 1e-5 * max(1.0, float(other[name].grad.norm())), name
    with torch.no_grad():
        for owner in (plain, model):
            owner.qa_outputs.bias += torch.tensor([1.0, -1.0])
    assert worst(executor, plain, "toy", [(4, 16)]) <= LIMIT


@pytest.fixture
def scalar_kernels():
    """Kernels without vector instructions, and a wrapper without optimisation, which a C++ compiler is done with much sooner."""
    from torch._inductor import config

    with config.patch({"cpp.simdlen": 1, "aot_inductor.compile_wrapper_opt_level": "O0"}):
        yield


@pytest.mark.timeout(600)  # a C++ compiler at work, on a machine that may be busy
@pytest.mark.usefixtures("scalar_kernels")
def test_torch_compile_computes_gradients_and_follows_the_model(tmp_path):
    """One general graph and one for batch 1 serve all sizes; the training step goes through it and changes the model."""
    plain, model = network("toy"), network("toy")
    executor = eager.Compiled(model, MEMBERS["compile"], CPU, inputs("toy", 1, 16), tmp_path)
    assert executor.hidden(inputs("toy", 1, 8)) == []
    worst(executor, plain, "toy", [(1, 8)])
    with torch.compiler.set_stance("fail_on_recompile"):
        assert worst(executor, plain, "toy") <= LIMIT

    train(executor, model, plain)


@pytest.mark.timeout(600)  # a C++ compiler at work, on a machine that may be busy
@pytest.mark.usefixtures("scalar_kernels")
def test_an_aotinductor_package_takes_any_number_of_rows_and_tokens(tmp_path):
    plain, model = network("toy"), network("toy")
    executor = eager.aotinductor(model, MEMBERS["aotinductor"], CPU, inputs("toy", 1, 16), tmp_path)
    with torch.no_grad():
        model.qa_outputs.bias += 1.0  # the package has weights of its own
    assert worst(executor, plain, "toy") <= LIMIT
    assert executor.timed(inputs("toy", 1, 8))() is None
    assert executor.description["package_bytes"] == (tmp_path / "model.pt2").stat().st_size


@pytest.mark.parametrize(
    ("package", "member", "extra"),
    [
        ("onnx", "onnxruntime", "parity"),
        ("jax", "xla", "xla"),
        ("iree.runtime", "iree", "compiled"),
    ],
)
def test_a_missing_package_is_named_with_its_extra(package, member, extra, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(BackendUnavailable, match=rf"{package} cannot be imported .*pip install -e '\.\[{extra}\]'"):
        MEMBERS[member].make(network("toy"), MEMBERS[member], CPU, inputs("toy", 1, 16), tmp_path)


def test_xla_computes_gradients_and_follows_the_model(tmp_path):
    pytest.importorskip("jax", reason="pip install -e '.[compiled]'")
    plain, model = network("toy"), network("toy")
    executor = translated.Translated(model, MEMBERS["xla"], CPU, inputs("toy", 4, 16), tmp_path)
    assert executor.hidden(inputs("toy", 1, 8)) == []
    assert worst(executor, plain, "toy", [(4, 16), (2, 8)]) <= LIMIT
    train(executor, model, plain)
    assert executor.description["runtime"].startswith("XLA") and len(executor.description["compile_s"]) == 3
