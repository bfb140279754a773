"""What torch saw of some steps: time by class of kernels, communication by kind and how much of it was exposed, FLOPs and bytes.

Times are the profiler's: on a CPU an operation's own time and the spans of the collective library's work, on an accelerator
those of its kernels. FLOPs and bytes are counted in a step of its own, at the operations that torch dispatches.
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd import DeviceType
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from torch.utils import flop_counter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchlib.runtime import devices
from benchlib.runtime.timing import union

CLASSES = ("matmul", "attention", "elementwise", "communication", "copy", "optimizer", "other")
_OPERATIONS = {  # by name; what none of them matches is element-wise
    "attention": re.compile(".*attention"),
    "matmul": re.compile("(mm|addmm|bmm|baddbmm|mv|dot)$"),
    "copy": re.compile("(copy_|cat|clone|_to_copy|split_with_sizes_copy|fill_|zero_)$"),
    # Views, and what only makes room.
    "other": re.compile(
        "(_unsafe_)?view|as_strided|empty|detach|t$|transpose|expand|reshape|permute|slice|select|unsqueeze|resolve|resize|"
        "chunk|split"
    ),
}
_KERNELS = {  # of accelerators, likewise
    "communication": re.compile(".*(nccl|xccl)", re.I),
    "attention": re.compile(".*(flash|fmha|attention|sdpa)", re.I),
    "matmul": re.compile(".*(gemm|cutlass|cublas|nvjet|xmma|matmul)", re.I),
    "copy": re.compile(".*(memcpy|memset|copy|cat_)", re.I),
    "optimizer": re.compile(".*(adam|multi_tensor)", re.I),
}
_COLLECTIVE = re.compile(r"^(?:gloo|nccl|xccl|ucc|mpi):(\w+)")
# AdamW by parameter, fp32: weight, gradient and two moments are read, three of them written.
UPDATE_FLOPS, UPDATE_BYTES = 15, 28
Row = dict[str, Any]
Span = tuple[float, float]


class Trace(NamedTuple):
    """Per step: rows of ``kernels`` and ``communication``, and the seconds of communication, busy and not hidden."""

    kernels: list[Row]
    communication: list[Row]
    busy_s: float
    exposed_s: float


def _flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> int:
    return flop_counter.sdpa_flop_count(q.shape, k.shape, v.shape)


def _flash_back(grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> int:
    return flop_counter.sdpa_backward_flop_count(grad.shape, q.shape, k.shape, v.shape)


class Counter(TorchDispatchMode):
    """Counts FLOPs and bytes by class of what this rank computes while it is active.

    FLOPs are those of torch's own counter, which lacks the attention of CPUs and would take a ``DTensor`` for all of its
    parts; an element-wise operation has one for each element. Bytes are those of all tensors that an operation takes and gives.
    """

    supports_higher_order_operators = True
    of_cpus: dict[Any, Callable[..., int]] = {  # noqa: RUF012 - torch's metaclass takes no ClassVar
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _flash,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _flash_back,
    }

    def __init__(self) -> None:
        super().__init__()
        self.flops: dict[str, float] = defaultdict(float)
        self.bytes: dict[str, float] = defaultdict(float)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # its operations on the local part come here next
        out = func(*args, **(kwargs or {}))
        kind = _first(_OPERATIONS, getattr(func, "__name__", "").split(".")[0])
        if getattr(func, "namespace", "") == "aten" and kind != "other":
            tensors = [leaf for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, torch.Tensor)]
            packet = func.overloadpacket
            count = self.of_cpus.get(packet) or flop_counter.flop_registry.get(packet)
            largest = max((tensor.numel() for tensor in tensors), default=0)
            self.flops[kind] += count(*args, **(kwargs or {}), out_val=out) if count else largest
            self.bytes[kind] += sum(tensor.nbytes for tensor in tensors)
        return out


def _first(patterns: Mapping[str, re.Pattern[str]], name: str) -> str:
    return next((kind for kind, pattern in patterns.items() if pattern.match(name)), "elementwise")


def traced(device: torch.device) -> Any:
    """Return a profiler, to be given to ``read`` after its block."""
    kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    kinds += [ProfilerActivity.XPU] if device.type == "xpu" else []
    return profile(activities=kinds, record_shapes=True)


def read(profiler: Any, device: torch.device, steps: int, counter: Counter, updated: int) -> Trace:
    """Return what a profiler saw, by step, and what was counted in one; AdamW updates ``updated`` parameters of this rank."""
    events = list(profiler.events())
    host = [event for event in events if event.device_type == DeviceType.CPU]
    named: list[tuple[str, Any, float]]  # kernels, or operations, with their classes and microseconds
    if devices.has_events(device):
        kernels = [event for event in events if event.device_type != DeviceType.CPU]
        named = [(_first(_KERNELS, event.name), event, event.time_range.elapsed_us()) for event in kernels]
        compute = [_span(event) for name, event, _ in named if name != "communication"]
        talk = [(_kind(event.name), event) for name, event, _ in named if name == "communication"]
    else:
        updates = [_span(event) for event in host if event.name.startswith("Optimizer.step")]
        operations = [event for event in host if event.name.startswith("aten::")]
        named = [(_operation(event, updates), event, event.self_cpu_time_total) for event in operations]
        compute = [_span(event) for event in host if _pure(event)]
        talk = [(match[1], event) for event in host if (match := _COLLECTIVE.match(event.name))]
    rows = dict[str, Row]()
    for name in CLASSES:
        times = [1e-6 * time / steps for kind, _, time in named if kind == name]
        work = {"flops": counter.flops[name], "bytes": counter.bytes[name]}
        rows[name] = {"class": name, "time_s": sum(times), "calls": len(times) / steps, **work}
    rows["optimizer"] |= {"flops": UPDATE_FLOPS * updated, "bytes": UPDATE_BYTES * updated}
    whole = _talk([event for _, event in talk], compute, steps)
    rows["communication"] |= {name: value for name, value in whole.items() if name != "exposed_s"}
    kinds = dict.fromkeys(kind for kind, _ in talk)
    own = {kind: [event for other, event in talk if other == kind] for kind in kinds}
    communication = [{"kind": kind, **_talk(mine, compute, steps)} for kind, mine in own.items()]
    return Trace(list(rows.values()), communication, whole["time_s"], whole["exposed_s"])


def _talk(events: Sequence[Any], compute: Sequence[Span], steps: int) -> Row:
    """Return calls, bytes and times of exchanges, by step."""
    spans, shapes = [_span(event) for event in events], [event.input_shapes for event in events]
    size = sum(4 * math.prod(given[0]) for given in shapes if given and given[0])
    found = {"bytes": size, "calls": len(events), "time_s": union(spans), "exposed_s": exposed(spans, compute)}
    return {name: value / steps for name, value in found.items()}


def exposed(spans: Sequence[Span], compute: Sequence[Span]) -> float:
    """Return how long some span of ``spans`` was under way and none of ``compute``."""
    return union([*spans, *compute]) - union(list(compute))


def _span(event: Any) -> Span:
    return 1e-6 * event.time_range.start, 1e-6 * event.time_range.end


def _operation(event: Any, updates: Sequence[Span]) -> str:
    begin, end = _span(event)
    if any(first <= begin and end <= last for first, last in updates):
        return "optimizer"
    return _first(_OPERATIONS, event.name.removeprefix("aten::"))


def _kind(kernel: str) -> str:
    names = ("all_reduce", "all_gather", "reduce_scatter", "send_recv")
    return next((name for name in names if name.replace("_", "") in kernel.lower()), "other")


def _pure(event: Any) -> bool:
    """Whether an operation computes and waits for nobody: what a tensor subclass makes of one may exchange within it."""
    return event.name.startswith(("aten::", "detach")) and all(_pure(child) for child in event.cpu_children)
