"""The switches that decide how exactly a device computes, set for the one member that a process computes.

In mode ``exact`` products of fp32 numbers are computed in fp32 (no TF32, no bf16 passes), sums in bf16 are not rounded
in between, kernels are deterministic and none is chosen by racing. In mode ``native`` torch's own defaults hold. In both
scaled_dot_product_attention is held to the member's kernel, where it names one.

torch has two interfaces to the same precision. The older one (``allow_tf32``, ``set_float32_matmul_precision``) raises
when it is read while the newer one (``fp32_precision`` of each operator) says something else, so both are set, the
older first.
"""

import contextlib
import functools
import importlib
import warnings
from typing import Any

import torch

from benchlib.workloads.executors import Member

KERNELS = {"math": "math_sdp", "flash": "flash_sdp", "efficient": "mem_efficient_sdp", "cudnn": "cudnn_sdp"}
# Attention kernels whose gradients add up in any order: there torch is asked for determinism and warns, else it raises.
_UNORDERED = ("efficient", "cudnn")
PARTS = ("cuda.matmul", "cudnn.conv", "cudnn.rnn", "mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn")
# Below torch, in the order in which they are set.
EXACT = {
    "backends.cudnn.allow_tf32": False,
    **dict.fromkeys([f"backends.{part}.fp32_precision" for part in PARTS], "ieee"),
    "backends.cuda.matmul.allow_bf16_reduced_precision_reduction": False,
    "backends.cudnn.benchmark": False,
    "backends.cudnn.deterministic": True,
    "backends.mkldnn.deterministic": True,
    # It would fill every new tensor, which costs time and no result depends on.
    "utils.deterministic.fill_uninitialized_memory": False,
}


def hold(member: Member, where: torch.device) -> dict[str, Any]:
    """Set what ``member`` asks for, for the rest of the process, and return what the switches then say."""
    places = {path: (functools.reduce(getattr, path.split(".")[:-1], torch), path.split(".")[-1]) for path in EXACT}
    if member.mode == "exact":
        torch.set_float32_matmul_precision("highest")
        for path, (module, name) in places.items():
            setattr(module, name, EXACT[path])
        torch.use_deterministic_algorithms(True, warn_only=member.kernel in _UNORDERED)
        if member.kernel in _UNORDERED:
            warnings.filterwarnings("ignore", message=".*deterministic.*", category=UserWarning)
    for kernel, name in KERNELS.items() if member.kernel else ():
        getattr(torch.backends.cuda, f"enable_{name}")(kernel == member.kernel)
    says: dict[str, Any] = {"deterministic_algorithms": torch.are_deterministic_algorithms_enabled()}
    if where.type == "xla":  # it multiplies in bf16 by default
        xla = importlib.import_module("torch_xla.backends")
        if member.mode == "exact":
            xla.set_mat_mul_precision("highest")
        says["xla.mat_mul_precision"] = xla.get_mat_mul_precision()
    for path, (module, name) in places.items():
        with contextlib.suppress(RuntimeError):  # its two interfaces disagree, and torch refuses to say
            says[path] = getattr(module, name)
    return says | {
        "sdpa": {kernel: getattr(torch.backends.cuda, f"{name}_enabled")() for kernel, name in KERNELS.items()}
    }
