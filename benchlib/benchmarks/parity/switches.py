"""The switches that decide how exactly a device computes: read, set for one member, and put back whatever happens.

In mode ``exact`` products of fp32 numbers are computed in fp32 (no TF32, no bf16 passes), sums in bf16 are not rounded
in between, kernels are deterministic and none is chosen by racing. In mode ``native`` torch's own defaults hold. In both
scaled_dot_product_attention is held to the member's kernel, where it names one.

torch has two interfaces to the same precision. The older one (``allow_tf32``, ``set_float32_matmul_precision``) raises
when it is read while the newer one (``fp32_precision`` of each operator) says something else, so both are set, the
older first, and both are put back in that order.
"""

import contextlib
import functools
import importlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchlib.workloads.executors import Member

KERNELS = {
    "math": (SDPBackend.MATH, torch.backends.cuda.math_sdp_enabled),
    "flash": (SDPBackend.FLASH_ATTENTION, torch.backends.cuda.flash_sdp_enabled),
    "efficient": (SDPBackend.EFFICIENT_ATTENTION, torch.backends.cuda.mem_efficient_sdp_enabled),
    "cudnn": (SDPBackend.CUDNN_ATTENTION, torch.backends.cuda.cudnn_sdp_enabled),
}
# Attention kernels whose gradients add up in any order: there torch is asked for determinism and warns, else it raises.
_UNORDERED = ("efficient", "cudnn")
Switch = tuple[Callable[[], Any], Callable[[Any], None], Any]  # read, set, the value in mode exact


def _attribute(owner: Any, path: str, exact: Any) -> Switch:
    *parts, name = path.split(".")
    module = functools.reduce(getattr, parts, owner)
    return lambda: getattr(module, name), lambda value: setattr(module, name, value), exact


# The newer interface one by one and not by parents: setting a parent overwrites its children.
PARTS = ("cuda.matmul", "cudnn.conv", "cudnn.rnn", "mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn")
ATTRIBUTES = {
    "cudnn.allow_tf32": False,
    **dict.fromkeys([f"{part}.fp32_precision" for part in PARTS], "ieee"),
    "cuda.matmul.allow_bf16_reduced_precision_reduction": False,
    "cudnn.benchmark": False,
    "cudnn.deterministic": True,
    "mkldnn.deterministic": True,
}
DETERMINISTIC = "deterministic_algorithms"
SWITCHES: dict[str, Switch] = {
    "float32_matmul_precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "highest"),
    **{path: _attribute(torch.backends, path, exact) for path, exact in ATTRIBUTES.items()},
    DETERMINISTIC: (  # whether, and whether it only warns
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
        (True, False),
    ),
    # It would fill every new tensor, which costs time and no result depends on.
    "fill_uninitialized_memory": _attribute(torch.utils.deterministic, "fill_uninitialized_memory", False),
}


def _all(where: torch.device) -> dict[str, Switch]:
    """Return the switches of a device, in the order in which they are set; an XLA device by default multiplies in bf16."""
    if where.type != "xla":
        return SWITCHES
    xla = importlib.import_module("torch_xla.backends")
    return SWITCHES | {"xla.mat_mul_precision": (xla.get_mat_mul_precision, xla.set_mat_mul_precision, "highest")}


def state(where: torch.device) -> dict[str, Any]:
    """Return what every switch says now; None where torch refuses to say, because its two interfaces disagree."""
    values: dict[str, Any] = {}
    for name, (read, _, _) in _all(where).items():
        try:
            values[name] = read()
        except RuntimeError:
            values[name] = None
    return values | {"sdpa": {name: enabled() for name, (_, enabled) in KERNELS.items()}}


@contextlib.contextmanager
def held(member: Member, where: torch.device) -> Iterator[dict[str, Any]]:
    """Set what ``member`` asks for while the block runs, yield what the switches then say, and put everything back after it."""
    before, switches = state(where), _all(where) if member.mode == "exact" else {}
    with contextlib.ExitStack() as stack:  # every one is put back, also after one that raises
        for name, (_, put, _) in reversed(switches.items()):
            if before[name] is not None:
                stack.callback(put, before[name])
        for name, (_, put, value) in switches.items():
            put((True, member.kernel in _UNORDERED) if name == DETERMINISTIC else value)
        if switches and member.kernel in _UNORDERED:
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", message=".*deterministic.*", category=UserWarning)
        if member.kernel:
            stack.enter_context(sdpa_kernel(KERNELS[member.kernel][0]))
        yield state(where)
