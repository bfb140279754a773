"""The ways to compute a question answering model: a table of members, each with what makes its executor.

    eager.py        torch call by call, torch.compile, AOTInductor; the protocol of all executors
    onnx.py         ONNX Runtime and OpenVINO, from an exported file
    translated.py   XLA and IREE, from StableHLO text

To add a member: a row of ``MEMBERS``, and an executor where none of the present ones fits: all but ``Eager`` take the model in
fp32. No torch here.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

DEVICES = ("cuda", "rocm", "mps", "xpu", "tpu")
GPUS = ("cuda", "rocm")


@dataclass(frozen=True)
class Member:
    """One way to compute the model's outputs on some backends.

    ``executor`` is the class or function, ``module:name``, that makes it, in this package where it begins with a dot. ``attention``
    is transformers' implementation and ``kernel`` the kernel that scaled_dot_product_attention is held to ('' leaves
    the choice to torch). In mode ``exact`` reduced precision and nondeterminism are switched off, in ``native`` torch's
    own defaults hold. Without ``masks`` the kernel takes no attention mask, and so no padded input. ``gates`` says whether a difference beyond its limit fails a run; ``slow`` ones compile or export.
    """

    name: str
    backends: tuple[str, ...]
    what: str
    executor: str = ".eager:Eager"
    precision: Literal["fp32", "bf16", "fp64"] = "fp32"
    attention: Literal["eager", "sdpa"] = "sdpa"
    kernel: Literal["", "math", "flash", "efficient", "cudnn"] = ""
    mode: Literal["exact", "native"] = "exact"
    masks: bool = True
    gates: bool = True
    slow: bool = False

    @property
    def make(self) -> Callable[..., Any]:
        """The function that builds the executor, see ``eager.Make``. Raises ``BackendUnavailable`` where its package is lacking."""
        module, _, name = self.executor.partition(":")
        return getattr(importlib.import_module(module, __name__), name)  # type: ignore[no-any-return]


def _exported(name: str, backends: tuple[str, ...], what: str, executor: str) -> Member:
    return Member(name, backends, what, executor, attention="eager", slow=True)


MEMBERS: dict[str, Member] = {
    member.name: member
    for member in (
        Member("eager", ("cpu",), "the reference's own way in another process", attention="eager"),
        Member("sdpa_math", ("cpu",), "scaled_dot_product_attention, math kernel", kernel="math"),
        Member("sdpa_flash", ("cpu",), "scaled_dot_product_attention, flash kernel", kernel="flash"),
        Member("fp64", ("cpu", *GPUS, "xpu"), "double precision", precision="fp64", kernel="math"),
        Member("bf16", ("cpu", *DEVICES), "matrix products in bfloat16 (autocast)", precision="bf16", kernel="math"),
        Member("exact", DEVICES, "math attention, no TF32, deterministic", kernel="math"),
        Member("native", ("cpu", *DEVICES), "torch's own defaults", mode="native", gates=False),
        Member(
            "flash", GPUS, "flash attention in bfloat16", precision="bf16", kernel="flash", masks=False, gates=False
        ),
        Member("efficient", GPUS, "memory-efficient attention", kernel="efficient", gates=False),
        Member("cudnn", ("cuda",), "cuDNN attention in bfloat16", precision="bf16", kernel="cudnn", gates=False),
        Member("compile", ("cpu", *DEVICES), "torch.compile", ".eager:Compiled", kernel="math", slow=True),
        Member("aotinductor", ("cpu", *GPUS, "xpu"), "AOTInductor", ".eager:aotinductor", kernel="math", slow=True),
        _exported("onnxruntime", ("cpu", "cuda"), "ONNX Runtime", ".onnx:OnnxRuntime"),
        _exported("openvino", ("cpu",), "OpenVINO held to f32", ".onnx:OpenVino"),
        _exported("xla", ("cpu", *GPUS, "tpu"), "StableHLO text in XLA", ".translated:Translated"),
        _exported("iree", ("cpu",), "StableHLO text in IREE", ".translated:Translated"),
    )
}
