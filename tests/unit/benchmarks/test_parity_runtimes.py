"""The executors of other compilers and runtimes against transformers' eager attention, over sizes they were not traced with.

The models are small and random, with logits of the order of 1.
"""

import logging
import types

import pytest
import torch
import transformers

from benchlib.benchmarks.parity import executors, runtimes
from benchlib.benchmarks.parity.config import MEMBERS, Member
from benchlib.core.errors import BackendUnavailable, UserError

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
    return request.param, model, runtimes.write_onnx(model, inputs(request.param, 1, 16), folder)


def test_runtimes_of_an_onnx_file_take_any_number_of_rows_and_tokens(exported):
    kind, model, file = exported
    for executor in (
        runtimes.start_onnxruntime(file, MEMBERS["onnxruntime"], CPU),
        runtimes.start_openvino(file, MEMBERS["openvino"]),
    ):
        assert worst(executor, model, kind) <= LIMIT
        assert executor.description["precision"] == "fp32"
        assert executor.description["threads"] == torch.get_num_threads()
        assert executor.timed(inputs(kind, 1, 8))() is None
        executor.close()


def test_openvino_as_it_comes_computes_in_bfloat16_where_the_cpu_has_it(exported):
    kind, model, file = exported
    executor = runtimes.start_openvino(file, MEMBERS["openvino_default"])
    if "BF16" not in executor.description["cpu_offers"]:
        pytest.skip("this CPU has no bfloat16")
    assert executor.description["precision"] == "bf16"
    assert executor.description["operations"]["bf16"] > 0
    assert "bf16" not in runtimes.start_openvino(file, MEMBERS["openvino"]).description["operations"]
    assert worst(executor, model, kind) > 10 * LIMIT


def test_a_row_without_an_attended_token_leaves_the_others_alone(exported):
    kind, model, file = exported
    given = inputs(kind, 2, 8)
    given["attention_mask"][1] = 0
    with torch.no_grad():
        expected = model(**given).start_logits
    for executor in (
        runtimes.start_onnxruntime(file, MEMBERS["onnxruntime"], CPU),
        runtimes.start_openvino(file, MEMBERS["openvino"]),
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
    executor = executors.compiled(model, MEMBERS["compile"], CPU, inputs("distilbert", 1, 16), tmp_path)
    assert not executor.hooks
    worst(executor, plain, "distilbert", [(1, 8)])
    with torch.compiler.set_stance("fail_on_recompile"):
        assert worst(executor, plain, "distilbert") <= LIMIT
    assert executor.description["graphs"] == 2

    given = inputs("distilbert", 4, 16)
    for pair in (executor.module, executors.Pair(plain)):
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
    executor = executors.aotinductor(model, MEMBERS["aotinductor"], CPU, inputs("bert", 1, 16), tmp_path)
    with torch.no_grad():
        model.qa_outputs.bias += 1.0  # the package has weights of its own
    assert worst(executor, plain, "bert") <= LIMIT
    assert executor.timed(inputs("bert", 1, 8))() is None
    assert executor.description["package_bytes"] == (tmp_path / "model.pt2").stat().st_size
    executor.close()


def test_exporters_say_nothing(tmp_path, capfd, caplog):
    with caplog.at_level(logging.WARNING):
        runtimes.write_onnx(network("distilbert"), inputs("distilbert", 1, 16), tmp_path)
    assert capfd.readouterr() == ("", "") and caplog.records == []
    assert logging.getLogger("torch.onnx").level == logging.NOTSET


@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (2, 2), (5, 16)])
def test_no_size_is_traced_that_a_tracer_takes_for_a_constant_or_for_another(shape):
    traced = executors.trace_inputs(inputs("bert", *shape))
    sizes = {tuple(tensor.shape) for tensor in traced.values()}
    assert len(sizes) == 1
    rows, tokens = sizes.pop()
    assert rows >= 2 and tokens >= 2 and rows != tokens


@pytest.mark.parametrize("name", ["compile", "aotinductor"])
def test_without_a_compiler_inductor_is_unavailable(name, monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", str(tmp_path / "no-such-compiler"))
    make = {"compile": executors.compiled, "aotinductor": executors.aotinductor}[name]
    with pytest.raises(BackendUnavailable, match="no-such-compiler: install it"):
        make(network("bert"), MEMBERS[name], CPU, inputs("bert", 1, 16), tmp_path)


def test_missing_headers_are_no_failure_of_the_compiler():
    with pytest.raises(BackendUnavailable, match="python3-dev"), executors.built():
        raise RuntimeError("fatal error: Python.h: No such file or directory")
    with pytest.raises(RuntimeError, match="internal compiler error"), executors.built():
        raise RuntimeError("internal compiler error")


@pytest.mark.parametrize("package", ["onnx", "onnxscript", "onnxruntime"])
def test_a_missing_package_is_named_with_its_extra(package, monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, package, None)
    with pytest.raises(BackendUnavailable, match=rf"{package} cannot be imported .*pip install 'benchlib\[parity\]'"):
        runtimes.onnxruntime(network("bert"), MEMBERS["onnxruntime"], CPU, inputs("bert", 1, 16), tmp_path)


def test_onnxruntime_without_the_cuda_provider_is_unavailable_and_never_the_cpu(monkeypatch, tmp_path):
    """ONNX Runtime falls back to the CPU by itself, both where the provider is not built in and where it fails to start."""
    providers = ["CPUExecutionProvider"]
    session = types.SimpleNamespace(get_providers=lambda: ["CPUExecutionProvider"], get_inputs=list)
    runtime = types.SimpleNamespace(
        __version__="1.0", get_available_providers=lambda: providers, InferenceSession=lambda *_, **__: session,
        SessionOptions=types.SimpleNamespace,
    )  # fmt: skip
    monkeypatch.setattr(runtimes, "require_package", lambda name: runtime)
    file = runtimes.OnnxFile(tmp_path / "model.onnx", {})
    with pytest.raises(BackendUnavailable, match=r"has no CUDAExecutionProvider .*onnxruntime-gpu"):
        runtimes.start_onnxruntime(file, MEMBERS["onnxruntime"], torch.device("cuda", 0))
    providers.insert(0, "CUDAExecutionProvider")
    with pytest.raises(BackendUnavailable, match=r"did not start \(active: CPUExecutionProvider\)"):
        runtimes.start_onnxruntime(file, MEMBERS["onnxruntime"], torch.device("cuda", 0))
    with pytest.raises(BackendUnavailable, match="no provider for xpu"):
        runtimes.start_onnxruntime(file, MEMBERS["onnxruntime"], torch.device("xpu", 0))


def test_a_member_in_another_precision_is_refused(tmp_path):
    member = Member("half", ("cpu",), "", "benchlib.benchmarks.parity.executors:compiled", precision="bf16")
    for make in (executors.compiled, executors.aotinductor, runtimes.onnxruntime, runtimes.openvino):
        with pytest.raises(UserError, match="precision = bf16"):
            make(network("bert"), member, CPU, inputs("bert", 1, 16), tmp_path)
