"""The switches of exact and native mode: what torch really does inside, and that all of it is put back."""

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
    return {
        "deterministic": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        "fill": torch.utils.deterministic.fill_uninitialized_memory,
        "benchmark": b.cudnn.benchmark,
        "older": (torch.get_float32_matmul_precision(), b.cuda.matmul.allow_tf32, b.cudnn.allow_tf32),
        "newer": [
            one.fp32_precision
            for one in (
                b, b.cuda.matmul, b.cudnn, b.cudnn.conv, b.cudnn.rnn, b.mkldnn, b.mkldnn.matmul, b.mkldnn.conv, b.mkldnn.rnn,
            )
        ],
        "mkldnn": b.mkldnn.deterministic,
        "reduced": b.cuda.matmul.allow_bf16_reduced_precision_reduction,
        "sdpa": (
            b.cuda.math_sdp_enabled(),
            b.cuda.flash_sdp_enabled(),
            b.cuda.mem_efficient_sdp_enabled(),
            b.cuda.cudnn_sdp_enabled(),
        ),
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
    saved = [one.fp32_precision for one in (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)]
    yield saved
    torch.backends.cudnn.benchmark = False
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.fp32_precision = torch.backends.mkldnn.matmul.fp32_precision = "none"


def readable(state):
    """The newer interface and the flags, which can be read whatever was set."""
    return {name: value for name, value in state().items() if value is not None}


def test_exact_mode_switches_everything_off_and_puts_it_back(before):
    saved = readable(lambda: switches.state(CPU))
    with switches.held(EXACT, CPU) as told:
        inside = torch_state()
        assert inside["older"] == ("highest", False, False)
        assert inside["newer"][1:2] + inside["newer"][3:5] + inside["newer"][6:] == ["ieee"] * 6
        assert inside["deterministic"] == (True, False) and inside["mkldnn"] is True
        assert (inside["benchmark"], inside["fill"], inside["reduced"]) == (False, False, False)
        assert inside["sdpa"] == (True, False, False, False)
        assert told["sdpa"] == {"math": True, "flash": False, "efficient": False, "cudnn": False}
    assert readable(lambda: switches.state(CPU)) == saved
    assert [torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision] == before


def test_switches_are_restored_after_an_exception():
    def fail():
        with switches.held(EXACT, CPU):
            assert torch_state() != saved
            torch.backends.cudnn.benchmark = True  # a member that changes things itself
            raise ZeroDivisionError

    saved = torch_state()
    with pytest.raises(ZeroDivisionError):
        fail()
    assert torch_state() == saved


def test_a_switch_that_cannot_be_set_leaves_none_behind(monkeypatch):
    saved = torch_state()

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

    with switches.exact(CPU), pytest.raises(RuntimeError, match="deterministic"):
        nondeterministic()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with switches.exact(CPU, warn_only=True):
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
    import importlib.machinery
    import sys
    import types

    now = ["default"]
    backends = types.ModuleType("torch_xla.backends")
    backends.get_mat_mul_precision = lambda: now[0]
    backends.set_mat_mul_precision = lambda value: now.__setitem__(0, value)
    package = types.ModuleType("torch_xla")
    package.__spec__ = importlib.machinery.ModuleSpec("torch_xla", None)
    monkeypatch.setitem(sys.modules, "torch_xla", package)
    monkeypatch.setitem(sys.modules, "torch_xla.backends", backends)
    with switches.held(EXACT, torch.device("xla")) as told:
        assert now == ["highest"] and told["xla.mat_mul_precision"] == "highest"
    assert now == ["default"]
