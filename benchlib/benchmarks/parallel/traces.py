"""What torch's profiler saw of some steps: time by class of kernels, communication by kind, and how much of it was exposed.

On a CPU an operation's own time is taken, and the spans of the collective library's work; on an accelerator those of its kernels.
FLOPs and bytes follow from the shapes of the operations: bytes are those that an operation must read and write at least.
"""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchlib.runtime import devices
from benchlib.runtime.timing import union

CLASSES = ("matmul", "attention", "elementwise", "communication", "copy", "optimizer", "other")
_COMMUNICATION = re.compile(r"^(?:gloo|nccl|xccl|ucc|mpi):(\w+)")
_KERNELS = (  # of accelerators, by name
    ("communication", re.compile("nccl|xccl", re.I)),
    ("attention", re.compile("flash|fmha|attention|sdpa", re.I)),
    ("matmul", re.compile("gemm|cutlass|cublas|nvjet|xmma|matmul", re.I)),
    ("copy", re.compile("memcpy|memset|copy|cat_", re.I)),
    ("optimizer", re.compile("adam|multi_tensor", re.I)),
)
_MATMULS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::mv", "aten::dot")
_COPIES = tuple(
    f"aten::{name}" for name in ("copy_", "cat", "clone", "_to_copy", "split_with_sizes_copy", "fill_", "zero_")
)
_VIEWS = re.compile(
    r"aten::(view|as_strided|empty|detach|t$|transpose|expand|reshape|permute|slice|select|unsqueeze|resolve|_unsafe_view|resize|chunk|split)"
)
# AdamW by parameter, fp32: weight, gradient and two moments are read, three of them written.
UPDATE_FLOPS, UPDATE_BYTES = 15, 28
Span = tuple[float, float]


@dataclass
class Trace:
    """Per step: rows of ``kernels`` and ``communication``, and the seconds of communication, busy and not hidden."""

    kernels: list[dict[str, Any]] = field(default_factory=list)
    communication: list[dict[str, Any]] = field(default_factory=list)
    busy_s: float = 0.0
    exposed_s: float = 0.0


def traced(device: torch.device) -> Any:
    """Return a profiler, to be given to ``read`` after its block."""
    kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    kinds += [ProfilerActivity.XPU] if device.type == "xpu" else []
    return profile(activities=kinds, record_shapes=True)


def read(profiler: Any, device: torch.device, steps: int, precision: str, updated: int) -> Trace:
    """Return what a profiler saw, by step; AdamW updates ``updated`` parameters of this rank."""
    events = list(profiler.events())
    host = [event for event in events if event.device_type == DeviceType.CPU]
    kernels = [event for event in events if event.device_type != DeviceType.CPU]
    rows: dict[str, dict[str, Any]] = {
        name: {"class": name, "time_s": 0.0, "flops": 0.0, "bytes": 0.0, "calls": 0.0} for name in CLASSES
    }
    updates = [_span(event) for event in host if event.name.startswith("Optimizer.step")]
    for event in host:
        if not event.name.startswith("aten::"):
            continue
        name = _class(event, updates)
        flops, moved = _work(event, name, precision)
        row = rows[name]
        row["flops"] += flops / steps
        row["bytes"] += moved / steps
        if not devices.has_events(device):
            row["time_s"] += 1e-6 * event.self_cpu_time_total / steps
            row["calls"] += 1 / steps
    rows["optimizer"] |= {"flops": UPDATE_FLOPS * updated, "bytes": UPDATE_BYTES * updated}
    for event in kernels:
        row = rows[next((name for name, pattern in _KERNELS if pattern.search(event.name)), "elementwise")]
        row["time_s"] += 1e-6 * event.time_range.elapsed_us() / steps
        row["calls"] += 1 / steps
    if kernels:
        compute = [_span(event) for event in kernels if not _KERNELS[0][1].search(event.name)]
        talk = [(_kind(event.name), event) for event in kernels if _KERNELS[0][1].search(event.name)]
    else:
        compute = [_span(event) for event in host if _pure(event)]
        talk = [(match[1], event) for event in host if (match := _COMMUNICATION.match(event.name))]
    trace = Trace(list(rows.values()), busy_s=union([_span(event) for _, event in talk]) / steps)
    trace.exposed_s = exposed([_span(event) for _, event in talk], compute) / steps
    for kind in dict.fromkeys(kind for kind, _ in talk):
        mine = [event for own, event in talk if own == kind]
        spans = [_span(event) for event in mine]
        trace.communication.append(
            {
                "kind": kind,
                "bytes": sum(4 * math.prod(event.input_shapes[0]) for event in mine if event.input_shapes and event.input_shapes[0]) / steps,
                "calls": len(mine) / steps,
                "time_s": union(spans) / steps,
                "exposed_s": exposed(spans, compute) / steps,
            }
        )  # fmt: skip
    rows["communication"] |= {
        "time_s": trace.busy_s,
        **{name: sum(row[name] for row in trace.communication) for name in ("bytes", "calls")},
    }
    return trace


def exposed(spans: Sequence[Span], compute: Sequence[Span]) -> float:
    """Return how long some span of ``spans`` was under way and none of ``compute``."""
    return union([*spans, *compute]) - union(list(compute))


def _span(event: Any) -> Span:
    return 1e-6 * event.time_range.start, 1e-6 * event.time_range.end


def _kind(kernel: str) -> str:
    names = ("all_reduce", "all_gather", "reduce_scatter", "send_recv")
    return next((name for name in names if name.replace("_", "") in kernel.lower()), "other")


def _pure(event: Any) -> bool:
    """Whether an operation computes and waits for nobody: what a tensor subclass makes of one may exchange within it."""
    return event.name.startswith(("aten::", "detach")) and all(_pure(child) for child in event.cpu_children)


def _class(event: Any, updates: Iterable[Span]) -> str:
    begin, end = _span(event)
    if any(first <= begin and end <= last for first, last in updates):
        return "optimizer"
    if event.name in _MATMULS:
        return "matmul"
    if "attention" in event.name:
        return "attention"
    if event.name in _COPIES:
        return "copy"
    return "other" if _VIEWS.match(event.name) else "elementwise"


def _work(event: Any, kind: str, precision: str) -> tuple[float, float]:
    """Return FLOPs and bytes of an operation by its shapes; (0, 0) of those that pass the work on to others."""
    shapes = [shape for shape in event.input_shapes or [] if shape and all(isinstance(size, int) for size in shape)]
    within = [child.name for child in event.cpu_children if child.name.startswith("aten::")]
    if not shapes or kind == "other" or (kind != "matmul" and any(not _VIEWS.match(name) for name in within)):
        return 0.0, 0.0
    sizes = [math.prod(shape) for shape in shapes]
    width = 2 if precision == "bf16" and kind in ("matmul", "attention") else 4
    if kind == "matmul" and len(shapes) > 1:
        left, right = shapes[-2:]
        output = math.prod(left[:-1]) * right[-1]
        return 2.0 * output * left[-1], width * (math.prod(left) + math.prod(right) + output)
    if kind == "attention" and len(shapes) > 1 and len(shapes[0]) == 4:
        batch, heads, rows, depth = shapes[0]
        flops = (10.0 if "backward" in event.name else 4.0) * batch * heads * rows * shapes[1][2] * depth
        return flops, width * (sum(sizes) + sizes[0])
    return float(max(sizes)), width * (sum(sizes) + max(sizes))
