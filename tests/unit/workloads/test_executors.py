"""The executors of other compilers and runtimes against transformers' eager attention, over sizes they were not traced with.

The models are small and random, with logits of the order of 1.
"""

import logging
import sys
import types

import pytest
import torch
import transformers

from benchlib.core.errors import BackendUnavailable, UserError
from benchlib.workloads.executors import MEMBERS, Member, eager, onnx, translated
from benchlib.workloads.stablehlo.export import Answers, trace_inputs

CPU = torch.device("cpu")
SHAPES = [(1, 8), (1, 31), (3, 8), (8, 24), (2, 64)]  # B, S; the example is (1, 16)
LIMIT = 1e-5
WIDE = {"initializer_range": 0.3, "vocab_size": 100}
CONFIGS = {
    "bert": lambda: transformers.BertConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, max_position_embeddings=64, **WIDE
    ),
    "roberta": lambda: transformers.RobertaConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, max_position_embeddings=66,
        type_vocab_size=1, pad_token_id=1, **WIDE,
    ),
    "distilbert": lambda: transformers.DistilBertConfig(
        dim=32, n_layers=1, n_heads=2, hidden_dim=64, max_position_embeddings=64, **WIDE
    ),
}  # fmt: skip


pytestmark = pytest.mark.usefixtures("one_thread")


def network(kind, attention="eager"):
    torch.manual_seed(5)
    config = CONFIGS[kind]()
    return transformers.AutoModelForQuestionAnswering.from_config(config, attn_implementation=attention).eval()


def inputs(kind, rows, tokens):
    """Return random tokens, each row padded more than the one before; token types only for BERT."""
    ids = torch.randint(5, 100, (rows, tokens), generator=torch.Generator().manual_seed(rows * 1000 + tokens))
    mask = (torch.arange(tokens) < (tokens - 3 * torch.arange(rows)[:, None]).clamp(min=1)).long()
    found = {"input_ids": torch.where(mask == 1, ids, 1), "attention_mask": mask}
    return found | ({"token_type_ids": (torch.arange(tokens) >= tokens // 2).long() * mask} if kind == "bert" else {})


def worst(executor, model, kind, shapes=SHAPES):
    """Return the largest difference of any logit at an attended position, over all shapes."""
    found = 0.0
    for shape in shapes:
        given = inputs(kind, *shape)
        attended = given["attention_mask"] == 1
        with torch.no_grad():
            expected = model(**given)
        for name, logits in zip(("start_logits", "end_logits"), executor.forward(given), strict=True):
            assert logits.shape == shape and logits.dtype == torch.float32
            found = max(found, float((logits - expected[name])[attended].abs().max()))
    return found


@pytest.fixture(scope="module", params=sorted(CONFIGS))
def exported(request, tmp_path_factory):
    """One export of each kind of model: (kind, model, file)."""
    model = network(request.param)
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, model, onnx.write_onnx(model, inputs(request.param, 1, 16), folder)


def test_runtimes_of_an_onnx_file_take_any_number_of_rows_and_tokens(exported):
    kind, model, file = exported
    for executor in (
        onnx.start_onnxruntime(file, CPU),
        onnx.start_openvino(file),
    ):
        assert worst(executor, model, kind) <= LIMIT
        assert executor.description["precision"] == "fp32"
        assert executor.description["threads"] == torch.get_num_threads()
        assert executor.timed(inputs(kind, 1, 8))() is None
        executor.close()


def test_a_row_without_an_attended_token_leaves_the_others_alone(exported):
    kind, model, file = exported
    given = inputs(kind, 2, 8)
    given["attention_mask"][1] = 0
    with torch.no_grad():
        expected = model(**given).start_logits
    for executor in (
        onnx.start_onnxruntime(file, CPU),
        onnx.start_openvino(file),
    ):
        start, _ = executor.forward(given)
        assert (start - expected)[0].abs().max() <= LIMIT
        assert torch.isfinite(start).all()  # transformers' eager mask is finfo.min, which softmax makes uniform


@pytest.fixture
def scalar_kernels():
    """Kernels without vector instructions, which a C++ compiler is done with much sooner."""
    from torch._inductor import config

    with config.patch("cpp.simdlen", 1):
        yield


@pytest.mark.timeout(600)  # a C++ compiler at work, on a machine that may be busy
@pytest.mark.usefixtures("scalar_kernels")
def test_torch_compile_computes_gradients_and_follows_the_model(tmp_path):
    """One general graph and one for batch 1 serve all sizes; the training step goes through it and changes the model."""
    plain, model = network("distilbert"), network("distilbert", "sdpa")
    executor = eager.compiled(model, MEMBERS["compile"], CPU, inputs("distilbert", 1, 16), tmp_path)
    assert executor.hidden(inputs("distilbert", 1, 8)) == []
    worst(executor, plain, "distilbert", [(1, 8)])
    with torch.compiler.set_stance("fail_on_recompile"):
        assert worst(executor, plain, "distilbert") <= LIMIT
    assert executor.description["graphs"] == 2

    given = inputs("distilbert", 4, 16)
    for pair in (executor.module, Answers(plain)):
        start, end = pair(**given)
        (start.square().mean() + end[:, 3].sum()).backward()
    other = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        assert (parameter.grad - other[name].grad).norm() <= 1e-5 * max(1.0, float(other[name].grad.norm())), name
    with torch.no_grad():
        for network_ in (plain, model):
            network_.qa_outputs.bias += 1.0
    assert worst(executor, plain, "distilbert", [(2, 16)]) <= LIMIT
    executor.close()


@pytest.mark.timeout(600)  # a C++ compiler at work, on a machine that may be busy
@pytest.mark.usefixtures("scalar_kernels")
def test_an_aotinductor_package_takes_any_number_of_rows_and_tokens(tmp_path):
    plain, model = network("bert"), network("bert", "sdpa")
    executor = eager.aotinductor(model, MEMBERS["aotinductor"], CPU, inputs("bert", 1, 16), tmp_path)
    with torch.no_grad():
        model.qa_outputs.bias += 1.0  # the package has weights of its own
    assert worst(executor, plain, "bert") <= LIMIT
    assert executor.timed(inputs("bert", 1, 8))() is None
    assert executor.description["package_bytes"] == (tmp_path / "model.pt2").stat().st_size
    executor.close()


def test_exporters_say_nothing(tmp_path, capfd, caplog):
    with caplog.at_level(logging.WARNING):
        onnx.write_onnx(network("distilbert"), inputs("distilbert", 1, 16), tmp_path)
    assert capfd.readouterr() == ("", "") and caplog.records == []
    assert logging.getLogger("torch.onnx").level == logging.NOTSET


@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (2, 2), (5, 16)])
def test_no_size_is_traced_that_a_tracer_takes_for_a_constant_or_for_another(shape):
    traced = trace_inputs(inputs("bert", *shape))
    sizes = {tuple(tensor.shape) for tensor in traced.values()}
    assert len(sizes) == 1
    rows, tokens = sizes.pop()
    assert rows >= 2 and tokens >= 2 and rows != tokens


@pytest.mark.parametrize("name", ["compile", "aotinductor"])
def test_without_a_compiler_inductor_is_unavailable(name, monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", str(tmp_path / "no-such-compiler"))
    make = {"compile": eager.compiled, "aotinductor": eager.aotinductor}[name]
    with pytest.raises(BackendUnavailable, match="no-such-compiler: install it"):
        make(network("bert"), MEMBERS[name], CPU, inputs("bert", 1, 16), tmp_path)


def test_missing_headers_are_no_failure_of_the_compiler():
    with pytest.raises(BackendUnavailable, match="python3-dev"), eager.built():
        raise RuntimeError("fatal error: Python.h: No such file or directory")
    with pytest.raises(RuntimeError, match="internal compiler error"), eager.built():
        raise RuntimeError("internal compiler error")


@pytest.mark.parametrize("package", ["onnx", "onnxscript", "onnxruntime"])
def test_a_missing_package_is_named_with_its_extra(package, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(BackendUnavailable, match=rf"{package} cannot be imported .*pip install 'benchlib\[parity\]'"):
        onnx.onnxruntime(network("bert"), MEMBERS["onnxruntime"], CPU, inputs("bert", 1, 16), tmp_path)


def test_onnxruntime_without_the_cuda_provider_is_unavailable_and_never_the_cpu(monkeypatch, tmp_path):
    """ONNX Runtime falls back to the CPU by itself, both where the provider is not built in and where it fails to start."""
    providers = ["CPUExecutionProvider"]
    session = types.SimpleNamespace(get_providers=lambda: ["CPUExecutionProvider"], get_inputs=list)
    runtime = types.SimpleNamespace(
        __version__="1.0", get_available_providers=lambda: providers, InferenceSession=lambda *_, **__: session,
        SessionOptions=types.SimpleNamespace,
    )  # fmt: skip
    monkeypatch.setattr(onnx, "require_package", lambda name: runtime)
    file = onnx.OnnxFile(tmp_path / "model.onnx", {})
    with pytest.raises(BackendUnavailable, match=r"has no CUDAExecutionProvider .*onnxruntime-gpu"):
        onnx.start_onnxruntime(file, torch.device("cuda", 0))
    providers.insert(0, "CUDAExecutionProvider")
    with pytest.raises(BackendUnavailable, match=r"did not start \(active: CPUExecutionProvider\)"):
        onnx.start_onnxruntime(file, torch.device("cuda", 0))
    with pytest.raises(BackendUnavailable, match="no provider for xpu"):
        onnx.start_onnxruntime(file, torch.device("xpu", 0))


def test_a_member_in_another_precision_is_refused(tmp_path):
    member = Member("half", ("cpu",), "", ".eager:compiled", precision="bf16")
    for make in (eager.compiled, eager.aotinductor, onnx.onnxruntime, onnx.openvino):
        with pytest.raises(UserError, match="precision = bf16"):
            make(network("bert"), member, CPU, inputs("bert", 1, 16), tmp_path)


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
    for package, make, extra in (("jax", translated.xla, "xla"), ("iree", translated.iree, "compiled")):
        monkeypatch.setitem(sys.modules, package, None)
        monkeypatch.setitem(sys.modules, f"{package}.runtime", None)
        with pytest.raises(BackendUnavailable, match=rf"pip install 'benchlib\[{extra}\]'"):
            make(torch.nn.Linear(1, 1), MEMBERS["xla"], CPU, {}, tmp_path)
