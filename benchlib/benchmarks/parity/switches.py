"""The switches that decide how exactly a device computes: read, set for one member, and put back whatever happens.

In mode ``exact`` products of fp32 numbers are computed in fp32 (no TF32, no bf16 passes), sums in bf16 are not rounded
in between, kernels are deterministic and none is chosen by racing. In mode ``native`` torch's own defaults hold. In both
scaled_dot_product_attention is held to the member's kernel, where it names one.

torch has two interfaces to the same precision. The older one (``allow_tf32``, ``set_float32_matmul_precision``) raises
when it is read while the newer one (``fp32_precision`` of each operator) says something else, so both are set, the
older first, and both are put back in that order.
"""

import contextlib
import importlib
import importlib.util
import operator
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchlib.benchmarks.parity.config import Member

KERNELS = {
    "math": SDPBackend.MATH,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
# Attention kernels whose gradients add up in any order: there torch is asked for determinism and warns, else it raises.
_UNORDERED = ("efficient", "cudnn")


@dataclass(frozen=True)
class _Switch:
    name: str
    read: Callable[[], Any]
    put: Callable[[Any], None]
    exact: Any


def _attribute(path: str, exact: Any) -> _Switch:
    """Return the switch of an attribute below ``torch.backends``."""
    owner, _, name = path.rpartition(".")
    module = operator.attrgetter(owner)(torch.backends)
    return _Switch(path, lambda: getattr(module, name), lambda value: setattr(module, name, value), exact)


def _deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _set_deterministic(value: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(value[0], warn_only=value[1])


_OLDER = (
    _Switch(
        "float32_matmul_precision", torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "highest"
    ),
    _attribute("cudnn.allow_tf32", False),
)
# One by one and not by their parents: setting a parent overwrites its children, which could not be put back one by one.
_NEWER = tuple(
    _attribute(f"{part}.fp32_precision", "ieee")
    for part in ("cuda.matmul", "cudnn.conv", "cudnn.rnn", "mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn")
)
_FILL: Any = torch.utils.deterministic
_OTHERS = (
    _attribute("cuda.matmul.allow_bf16_reduced_precision_reduction", False),
    _attribute("cudnn.benchmark", False),
    _attribute("cudnn.deterministic", True),
    _attribute("mkldnn.deterministic", True),
    _Switch("deterministic_algorithms", _deterministic, _set_deterministic, (True, False)),
    # It would fill every new tensor, which costs time and no result depends on.
    _Switch(
        "fill_uninitialized_memory",
        lambda: _FILL.fill_uninitialized_memory,
        lambda value: setattr(_FILL, "fill_uninitialized_memory", value),
        False,
    ),
)


def _xla() -> tuple[_Switch, ...]:
    """Return the switch of XLA devices, whose default on a TPU multiplies in bf16; none where torch_xla is missing."""
    if importlib.util.find_spec("torch_xla") is None:
        return ()
    backends = importlib.import_module("torch_xla.backends")
    return (
        _Switch("xla.mat_mul_precision", backends.get_mat_mul_precision, backends.set_mat_mul_precision, "highest"),
    )


def _all(where: torch.device) -> tuple[_Switch, ...]:
    return (*_OLDER, *_NEWER, *_OTHERS, *(_xla() if where.type == "xla" else ()))


def state(where: torch.device) -> dict[str, Any]:
    """Return what every switch says now; None where torch refuses to say, because its two interfaces disagree."""
    values: dict[str, Any] = {}
    for switch in _all(where):
        try:
            values[switch.name] = switch.read()
        except RuntimeError:
            values[switch.name] = None
    names = {"math": "math", "flash": "flash", "efficient": "mem_efficient", "cudnn": "cudnn"}
    return values | {
        "sdpa": {kernel: getattr(torch.backends.cuda, f"{name}_sdp_enabled")() for kernel, name in names.items()}
    }


@contextlib.contextmanager
def exact(where: torch.device, warn_only: bool = False) -> Iterator[None]:
    """Switch reduced precision and nondeterminism off while the block runs, and put everything back after it.

    ``warn_only`` lets operations without a deterministic kernel run, which raise otherwise.
    """
    before = state(where)
    try:
        for switch in _all(where):
            switch.put((True, warn_only) if switch.name == "deterministic_algorithms" else switch.exact)
        with warnings.catch_warnings():
            if warn_only:
                warnings.filterwarnings("ignore", message=".*deterministic.*", category=UserWarning)
            yield
    finally:
        with contextlib.ExitStack() as stack:  # every one is put back, also after one that raises
            for switch in reversed(_all(where)):
                if before[switch.name] is not None:
                    stack.callback(switch.put, before[switch.name])


@contextlib.contextmanager
def held(member: Member, where: torch.device) -> Iterator[dict[str, Any]]:
    """Set what ``member`` asks for, and yield what the switches then say, for its recording."""
    with contextlib.ExitStack() as stack:
        if member.mode == "exact":
            stack.enter_context(exact(where, warn_only=member.kernel in _UNORDERED))
        if member.kernel:
            stack.enter_context(sdpa_kernel(KERNELS[member.kernel]))
        yield state(where)
