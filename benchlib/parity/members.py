"""The ways to compute that are compared. Adding one is a row here and an executor."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from benchlib.errors import UserError
from benchlib.spelling import nearest

DEVICES = ("cuda", "rocm", "mps", "xpu", "tpu")
EAGER = "benchlib.parity.eager"


@dataclass(frozen=True)
class Member:
    """One way to compute the model's outputs on some backends.

    ``executor`` is the module whose ``make`` builds it. ``attention`` is transformers' implementation and ``kernel`` the
    kernel that scaled_dot_product_attention is held to ('' leaves the choice to torch). In mode ``exact`` reduced
    precision and nondeterminism are switched off, in ``native`` torch's own defaults hold. ``gates`` says whether a
    difference beyond tolerance fails the run; ``slow`` members compile or export the model first.
    """

    name: str
    backends: tuple[str, ...]
    what: str
    executor: str = EAGER
    precision: Literal["fp32", "bf16", "fp64"] = "fp32"
    attention: Literal["eager", "sdpa"] = "sdpa"
    kernel: Literal["", "math", "flash", "efficient", "cudnn"] = ""
    mode: Literal["exact", "native"] = "exact"
    gates: bool = True
    threads: int = 0
    slow: bool = False


MEMBERS: dict[str, Member] = {
    member.name: member
    for member in (
        Member("eager", ("cpu",), "the reference's own way in another process", attention="eager"),
        Member("sdpa_math", ("cpu",), "scaled_dot_product_attention, math kernel", kernel="math"),
        Member("sdpa_flash", ("cpu",), "scaled_dot_product_attention, flash kernel", kernel="flash"),
        Member("one_thread", ("cpu",), "one thread: another order of additions", attention="eager", threads=1),
        Member("fp64", ("cpu", "cuda", "rocm", "xpu"), "double precision", precision="fp64", kernel="math"),
        Member("bf16", ("cpu", *DEVICES), "matrix products in bfloat16 (autocast)", precision="bf16", kernel="math"),
        Member("exact", DEVICES, "math attention, no TF32, deterministic", kernel="math"),
        Member("native", ("cpu", *DEVICES), "torch's own defaults", mode="native", gates=False),
        Member("flash", ("cuda", "rocm"), "flash attention in bfloat16", precision="bf16", kernel="flash", gates=False),
        Member("efficient", ("cuda", "rocm"), "memory-efficient attention", kernel="efficient", gates=False),
        Member("cudnn", ("cuda",), "cuDNN attention in bfloat16", precision="bf16", kernel="cudnn", gates=False),
        Member("compile", ("cpu", *DEVICES), "torch.compile (Inductor)", "benchlib.parity.compiled", kernel="math", slow=True),
        Member("aotinductor", ("cpu", "cuda", "rocm", "xpu"), "AOTInductor: exported, compiled ahead of time", "benchlib.parity.aotinductor", kernel="math", slow=True),
        Member("onnxruntime", ("cpu", "cuda"), "ONNX Runtime", "benchlib.parity.onnx_runtime", attention="eager", slow=True),
        Member("openvino", ("cpu",), "OpenVINO held to f32", "benchlib.parity.openvino_runtime", attention="eager", slow=True),
        Member("openvino_default", ("cpu",), "OpenVINO as it comes: bfloat16 where the CPU has it", "benchlib.parity.openvino_runtime", attention="eager", mode="native", gates=False, slow=True),
    )
}  # fmt: skip


class Choice(Protocol):
    """What of a config says which members take part."""

    @property
    def backend(self) -> str:
        """Where the members compute."""

    @property
    def members(self) -> Sequence[str]:
        """Their names; none: all of the backend."""

    @property
    def slow(self) -> bool:
        """Whether all includes those that compile or export."""


def chosen(config: Choice) -> tuple[Member, ...]:
    """Return the members that take part, in the order of the table: those that are named, else all of the backend.

    ``UserError`` for a name that there is none of, or not on this backend.
    """
    here = {name: member for name, member in MEMBERS.items() if config.backend in member.backends}
    for name in config.members:
        if name not in here:
            where = (
                f"is not of {config.backend} but of {', '.join(MEMBERS[name].backends)}"
                if name in MEMBERS
                else "is unknown"
            )
            raise UserError(f"members: {name!r} {where}: {nearest(name, here)}")
    if config.members:
        return tuple(member for name, member in here.items() if name in config.members)
    return tuple(member for member in here.values() if config.slow or not member.slow)
