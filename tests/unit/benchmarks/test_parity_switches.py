"""The switches of exact and native mode: what torch really does inside of a process that set them."""

import warnings

import torch

from benchlib.benchmarks.parity import switches
from benchlib.runtime import child
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
        "fill": torch.utils.deterministic.fill_uninitialized_memory,
        "benchmark": b.cudnn.benchmark,
        "older": (torch.get_float32_matmul_precision(), b.cuda.matmul.allow_tf32, b.cudnn.allow_tf32),
        "newer": [part.fp32_precision for part in parts],
        "mkldnn": b.mkldnn.deterministic,
        "reduced": b.cuda.matmul.allow_bf16_reduced_precision_reduction,
        "sdpa": [enabled() for enabled in sdpa],
    }


INSIDE = {
    "deterministic": True, "fill": False, "benchmark": False, "older": ("highest", False, False),
    "newer": ["ieee"] * 6, "mkldnn": True, "reduced": False, "sdpa": [True, False, False, False],
}  # fmt: skip


def tf32():
    torch.set_float32_matmul_precision("high")
    torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision = "tf32", "bf16"
    torch.backends.cudnn.benchmark = True


def put_unordered():
    # torch alerts in put_ without accumulation whatever the device, since the order of equal places is open
    torch.zeros(4).put_(torch.tensor([0, 0, 1, 1]), torch.ones(4))


def attention():
    q = torch.zeros(1, 2, 4, 8)
    torch.nn.functional.scaled_dot_product_attention(q, q, q)


def said_inside(before, member, tell):
    """Return what torch says before and after a member was held, and what an operation without an order then raises."""
    before()
    saved = {} if before is tf32 else torch_state()  # torch refuses to say where its two interfaces disagree
    reported = switches.hold(member, CPU)
    inside, raised = torch_state(), []
    warnings.simplefilter("error", append=True)
    for call in (put_unordered, attention):
        try:
            call()
        except (RuntimeError, Warning) as error:
            raised.append(str(error))
    return saved, inside, reported, raised


def held(member, before=dict):
    ended = child.run(said_inside, before, member, timeout_s=100, tell=lambda _: None)
    assert ended.status == "done", ended.reason
    return ended.value


def test_exact_mode_switches_everything_off_and_refuses_what_is_not_deterministic():
    _, inside, reported, (raised,) = held(EXACT, tf32)
    assert inside == INSIDE and "deterministic" in raised
    assert reported["sdpa"] == {"math": True, "flash": False, "efficient": False, "cudnn": False}


def test_native_mode_changes_nothing():
    saved, inside, _, raised = held(MEMBERS["native"])
    assert (saved, raised) == (inside, [])


def test_a_kernel_is_held_to_and_not_replaced():
    """What has no order is no error there, and the warning, which is asked for, is swallowed."""
    _, inside, _, (raised,) = held(Member("m", ("cpu",), "", kernel="efficient"))
    assert inside["deterministic"] and ("available" in raised or "viable" in raised)
