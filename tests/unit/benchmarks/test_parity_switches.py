"""The switches of exact and native mode: what torch really does inside, and that all of it is put back."""

import contextlib
import importlib.machinery
import sys
import types
import warnings

import pytest
import torch

from benchlib.benchmarks.parity import switches
from benchlib.workloads.executors import MEMBERS, Member

CPU = torch.device("cpu")
EXACT = Member("m", ("cpu",), "exact, math kernel", kernel="math")


def torch_state():
    """What torch itself says, asked apart from the module under test; both interfaces of the precision."""
    b = torch.backends
    parts = (b.cuda.matmul, b.cudnn.conv, b.cudnn.rnn, b.mkldnn.matmul, b.mkldnn.conv, b.mkldnn.rnn)
    sdpa = (
        b.cuda.math_sdp_enabled,
        b.cuda.flash_sdp_enabled,
        b.cuda.mem_efficient_sdp_enabled,
        b.cuda.cudnn_sdp_enabled,
    )
    return {
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "fill": torch.utils.deterministic.fill_uninitialized_memory,
        "benchmark": b.cudnn.benchmark,
        "older": (torch.get_float32_matmul_precision(), b.cuda.matmul.allow_tf32, b.cudnn.allow_tf32),
        "newer": [part.fp32_precision for part in parts],
        "mkldnn": b.mkldnn.deterministic,
        "reduced": b.cuda.matmul.allow_bf16_reduced_precision_reduction,
        "sdpa": [enabled() for enabled in sdpa],
    }


INSIDE = {
    "deterministic": True, "warn only": False, "fill": False, "benchmark": False, "older": ("highest", False, False),
    "newer": ["ieee"] * 6, "mkldnn": True, "reduced": False, "sdpa": [True, False, False, False],
}  # fmt: skip


@pytest.fixture(params=["defaults", "tf32", "tf32 by the older interface"])
def before(request):
    """A state that someone else left, put back after the test."""
    if request.param == "tf32":
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"
        torch.backends.cudnn.benchmark = True
    elif request.param != "defaults":
        torch.set_float32_matmul_precision("high")
    yield switches.state(CPU)
    torch.backends.cudnn.benchmark = False
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.fp32_precision = torch.backends.mkldnn.matmul.fp32_precision = "none"


def test_exact_mode_switches_everything_off_and_puts_it_back(before):
    with switches.held(EXACT, CPU) as reported:
        assert torch_state() == INSIDE
        assert reported["sdpa"] == {"math": True, "flash": False, "efficient": False, "cudnn": False}
    assert switches.state(CPU) == before


def test_switches_are_restored_after_an_exception_and_after_one_that_cannot_be_set(monkeypatch):
    saved = torch_state()
    with contextlib.suppress(ZeroDivisionError), switches.held(EXACT, CPU):
        torch.backends.cudnn.benchmark = True  # a member that changes things itself
        raise ZeroDivisionError
    assert torch_state() == saved

    def refuse(_):
        raise RuntimeError("not on this machine")

    monkeypatch.setitem(switches.SWITCHES, "broken", (lambda: 1, refuse, 2))
    with pytest.raises(RuntimeError, match="not on this machine"), switches.held(EXACT, CPU):
        pytest.fail("the block must not run")
    assert torch_state() == saved


def test_native_mode_changes_nothing():
    saved = torch_state()
    with switches.held(MEMBERS["native"], CPU):
        assert torch_state() == saved
    assert torch_state() == saved


def test_exact_mode_refuses_what_is_not_deterministic():
    source, index = torch.ones(4), torch.tensor([0, 0, 1, 1])

    def nondeterministic():
        # torch alerts in put_ without accumulation whatever the device, since the order of equal places is open
        return torch.zeros(4).put_(index, source)

    with switches.held(EXACT, CPU), pytest.raises(RuntimeError, match="deterministic"):
        nondeterministic()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with switches.held(Member("m", ("cpu",), "", kernel="efficient"), CPU):
            nondeterministic()  # the warning is swallowed, it is asked for
        nondeterministic()


@pytest.mark.parametrize("kernel", ["efficient", "cudnn"])
def test_a_kernel_is_held_to_and_not_replaced(kernel):
    q = torch.zeros(1, 2, 4, 8)
    with (
        switches.held(Member("m", ("cpu",), "", kernel=kernel), CPU),
        pytest.raises(RuntimeError, match=r"[Nn]o (available|viable)"),
        warnings.catch_warnings(action="ignore"),
    ):
        torch.nn.functional.scaled_dot_product_attention(q, q, q)


def test_xla_multiplies_in_full_precision(monkeypatch):
    """A stand-in for torch_xla, which has no wheel for this torch: the calls are those of its documentation."""
    now = ["default"]
    backends = types.ModuleType("torch_xla.backends")
    backends.get_mat_mul_precision = lambda: now[0]
    backends.set_mat_mul_precision = lambda value: now.__setitem__(0, value)
    package = types.ModuleType("torch_xla")
    package.__spec__ = importlib.machinery.ModuleSpec("torch_xla", None)
    monkeypatch.setitem(sys.modules, "torch_xla", package)
    monkeypatch.setitem(sys.modules, "torch_xla.backends", backends)
    with switches.held(EXACT, torch.device("xla")) as reported:
        assert now == ["highest"] and reported["xla.mat_mul_precision"] == "highest"
    assert now == ["default"]
