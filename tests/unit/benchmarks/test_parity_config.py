"""Parameters of the parity benchmark, and the members that they choose."""

import pytest

from benchlib.benchmarks.parity.config import ParityConfig, chosen
from benchlib.core.errors import UserError
from benchlib.core.machine import BACKENDS
from benchlib.launch import plan


def names(**values):
    return [member.name for member in chosen(ParityConfig(**values))]


def test_members_of_a_backend():
    assert names() == ["eager", "sdpa_math", "sdpa_flash", "fp64", "bf16", "native"]
    assert names(slow=True)[6:] == ["compile", "aotinductor", "onnxruntime", "openvino", "xla", "iree"]
    assert names(backend="mps") == ["bf16", "exact", "native"]
    assert names(members=["compile", "bf16"]) == ["bf16", "compile"]  # named: also a slow one
    for backend in BACKENDS:
        assert any(member.gates and member.precision == "fp32" for member in chosen(ParityConfig(backend=backend)))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"members": ["sdpa_mth"]}, "did you mean sdpa_math"),
        ({"data": "files"}, "needs dev_file=FILE"),
        ({"record": True, "members": ["bf16"]}, "omit members"),
        ({"record": True, "golden": "folder"}, "omit golden"),
        ({"record": True, "planted_layer": 0}, "omit planted_layer"),
        ({"lengths": [7]}, "lengths"),
        ({"nproc": 2}, "one process"),
    ],
)
def test_wrong_values_say_what_to_do(values, words):
    with pytest.raises(ValueError, match=words):
        ParityConfig(**values)


def test_a_member_of_another_backend_is_refused_before_anything_starts():
    config = ParityConfig(members=["efficient"])
    with pytest.raises(UserError, match="'efficient' is not of cpu but of cuda, rocm"):
        config.check_whole()
    ParityConfig(members=["efficient"], backend="cuda").check_whole()


def test_a_file_is_the_data_and_a_golden_folder_has_its_own():
    assert ParityConfig(dev_file="dev.json").data == "files"
    assert ParityConfig(data="files", golden="folder").golden == "folder"


def test_the_work_is_said_and_is_what_the_members_compute():
    config = ParityConfig(lengths=[8, 64], batch_sizes=[1, 4], reference="cuda", backend="rocm", latency_runs=7)
    for part in ("exact", "of rocm", "fp32 on cuda", "4 inputs", "8 to 64 tokens", "7 timed passes"):
        assert part in config.expected_work()
    recording = ParityConfig(record=True, train_steps=0, backend="cuda").expected_work()
    assert recording.startswith("records eager attention in fp32 on cuda") and "training" not in recording
    same = ParityConfig(members=["bf16"], slow=True, keep=True, planted_layer=1, golden="", member_timeout_s=9)
    assert same.work() == ParityConfig().work()
    assert ParityConfig(golden="/a/h100").work() == ParityConfig(golden="/b/h100").work() != ParityConfig().work()
    assert ParityConfig(lengths=[8]).work() != ParityConfig().work()


def test_a_parameter_that_went_says_what_to_use():
    with pytest.raises(UserError, match="attention_kernels any more: name kernels among members"):
        plan.plans("parity", "smoke", "cpu", ["attention_kernels=false"], None)


def test_a_tier_over_many_ranks_gives_parity_one_process_and_none_over_nodes(capsys):
    eight = plan.plans("nightly", None, "cpu", ["nproc=8"], None)
    assert {one.config.benchmark: one.config.nproc for one in eight} == {
        "machine": 8, "squad": 8, "collectives": 8, "parity": 1, "inference": 1, "serving": 1, "seq2seq": 8, "compiled": 8,
        "parallel": 8,
    }  # fmt: skip
    nodes = plan.plans("nightly", None, "cuda", ["nproc=8", "nnodes=2", "launcher=slurm", "cluster=slurm"], None)
    assert "parity" not in [one.config.benchmark for one in nodes]
    assert "left out: parity runs in one process" in capsys.readouterr().err
    with pytest.raises(UserError, match="parity is the work of one process"):
        plan.plans("parity", "nightly", "cpu", ["nproc=8"], None)
