"""What torch saw of some steps: time by class of kernels, what of communication was exposed, FLOPs, bytes.

Times are the profiler's: on a CPU an operation's own time and the spans of the collective library's work, on an
accelerator those of its kernels. FLOPs and bytes are counted in a step of its own, where torch dispatches operations.
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.distributed.tensor import DTensor
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
        "(_unsafe_)?view|as_strided|empty|detach|t$|transpose|expand|reshape|permute|slice|select|unsqueeze|"
        "resolve|resize|chunk|split"
    ),
}
_KERNELS = {  # of accelerators, likewise
    "communication": re.compile(".*(nccl|xccl)", re.I),
    "attention": re.compile(".*(flash|fmha|attention|sdpa)", re.I),
    "matmul": re.compile(".*(gemm|cutlass|cublas|nvjet|xmma|matmul)", re.I),
    "copy": re.compile(".*(memcpy|memset|copy|cat_)", re.I),
    "optimizer": re.compile(".*(adam|multi_tensor)", re.I),
}
_COLLECTIVE = re.compile("(gloo|nccl|xccl|ucc|mpi):")
# Bytes of an element by the profiler's name of its type; any other has four.
_SIZES = {
    "double": 8,
    "long int": 8,
    "c10::BFloat16": 2,
    "c10::Half": 2,
    "unsigned char": 1,
    "signed char": 1,
    "bool": 1,
}
# AdamW by parameter, fp32: weight, gradient and two moments are read, three of them written.
UPDATE_FLOPS, UPDATE_BYTES = 15, 28
SHOWN = 12  # single operations of a strategy
Row = dict[str, Any]
Span = tuple[float, float]


class Counter(TorchDispatchMode):
    """Counts FLOPs and bytes by class of what this rank computes while it is active.

    FLOPs are those of torch's own counter, which lacks the attention of CPUs and would take a ``DTensor`` for all of
    its parts; an element-wise operation has one an element. Bytes are those of all tensors that it takes and gives.
    """

    supports_higher_order_operators = True
    of_cpus: dict[Any, Callable[..., int]] = {  # noqa: RUF012 - torch's metaclass takes no ClassVar
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: (
            lambda q, k, v, *_, **__: flop_counter.sdpa_flop_count(q.shape, k.shape, v.shape)
        ),
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
            lambda out, q, k, v, *_, **__: flop_counter.sdpa_backward_flop_count(out.shape, q.shape, k.shape, v.shape)
        ),
    }

    def __init__(self) -> None:
        super().__init__()
        self.flops: dict[str, float] = defaultdict(float)
        self.bytes: dict[str, float] = defaultdict(float)
        self.single: dict[str, Row] = {}  # by operation

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # its operations on the local part come here next
        out = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "").split(".")[0]
        kind = _first(_OPERATIONS, name)
        if getattr(func, "namespace", "") == "aten" and kind != "other":
            tensors = [leaf for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, torch.Tensor)]
            packet = func.overloadpacket
            count = self.of_cpus.get(packet) or flop_counter.flop_registry.get(packet)
            largest = max((tensor.numel() for tensor in tensors), default=0)
            flops = count(*args, **(kwargs or {}), out_val=out) if count else largest
            size = sum(tensor.nbytes for tensor in tensors)
            self.flops[kind] += flops
            self.bytes[kind] += size
            row = self.single.setdefault(name, {"operation": name, "class": kind, "flops": 0.0, "bytes": 0.0})
            row |= {"flops": row["flops"] + flops, "bytes": row["bytes"] + size}
        return out


def _first(patterns: Mapping[str, re.Pattern[str]], name: str) -> str:
    return next((kind for kind, pattern in patterns.items() if pattern.match(name)), "elementwise")


def read(profiler: Any, device: torch.device, steps: int, counter: Counter, updated: int) -> Row:
    """Return what a profiler saw, by step, and what was counted in one; AdamW updates ``updated`` parameters.

    It is rows of ``kernels`` and ``operations``, and as ``exposed_s`` the seconds of exchanges while nothing was computed.
    """
    named, talk, compute = defaultdict[str, list[float]](list), list[Any](), list[Span]()
    events = profiler.events()
    of_host = [event for event in events if event.device_type == DeviceType.CPU]
    updates = [_span(event) for event in of_host if event.name.startswith("Optimizer.step")]
    if devices.has_events(device):
        # Among the kernels lie the spans of annotations (an optimizer's step, an exchange, a whole pass): they are no kernels.
        for event in (
            event for event in events if event.device_type != DeviceType.CPU and not event.is_user_annotation
        ):
            kind = _first(_KERNELS, event.name)
            named[kind].append(event.time_range.elapsed_us())
            if kind == "communication":
                talk.append(event)
            else:
                compute.append(_span(event))
        # A kernel has no shapes: those are with the call on the host.
        calls = [event for event in of_host if _COLLECTIVE.match(event.name)]
    else:
        calls = talk
        for event in events:
            begin, end = _span(event)
            if event.name.startswith("aten::"):
                update = any(first <= begin and end <= last for first, last in updates)
                kind = "optimizer" if update else _first(_OPERATIONS, event.name.removeprefix("aten::"))
                named[kind].append(event.self_cpu_time_total)
            if _COLLECTIVE.match(event.name):
                talk.append(event)
            elif _pure(event):
                compute.append((begin, end))
    spans, size = [_span(event) for event in talk], sum(map(_bytes, calls))
    whole = {"time_s": union(spans) / steps, "calls": len(talk) / steps, "bytes": size / steps}
    rows = dict[str, Row]()
    for name in CLASSES:
        row = {"class": name, "time_s": 1e-6 * sum(named[name]) / steps, "calls": len(named[name]) / steps}
        rows[name] = row | {"flops": counter.flops[name], "bytes": counter.bytes[name]}
    rows["optimizer"] |= {"flops": UPDATE_FLOPS * updated, "bytes": UPDATE_BYTES * updated}
    rows["communication"] |= whole
    exposed_s = (union([*spans, *compute]) - union(compute)) / steps
    own = _single(of_host, updates, steps, counter, devices.has_events(device))
    return {"kernels": list(rows.values()), "operations": own, "exposed_s": exposed_s}


def _single(events: Any, updates: list[Span], steps: int, counter: Counter, on_device: bool) -> list[Row]:
    """Return the ``SHOWN`` operations of forward and backward pass that take longest, with time, calls, FLOPs and bytes by step."""
    times = defaultdict[str, list[float]](list)
    for event in events:
        begin, end = _span(event)
        if event.name.startswith("aten::") and not any(first <= begin and end <= last for first, last in updates):
            spent = event.self_device_time_total if on_device else event.self_cpu_time_total
            times[event.name.removeprefix("aten::")].append(1e-6 * spent)
    rows = [
        row | {"time_s": sum(times[name]) / steps, "calls": len(times[name]) / steps}
        for name, row in counter.single.items()
        if sum(times[name])
    ]
    return sorted(rows, key=lambda row: -row["time_s"])[:SHOWN]


def _bytes(event: Any) -> int:
    """Return the bytes of the first tensor of an exchange; 0 where the profiler does not tell its shape."""
    shapes, kinds = event.input_shapes, event.input_dtypes
    return _SIZES.get(kinds[0], 4) * math.prod(shapes[0]) if shapes and shapes[0] and kinds else 0


def _span(event: Any) -> Span:
    return 1e-6 * event.time_range.start, 1e-6 * event.time_range.end


def _pure(event: Any) -> bool:
    """Whether an operation computes and waits for nobody: one of a tensor subclass may exchange within it."""
    return event.name.startswith(("aten::", "detach")) and all(_pure(child) for child in event.cpu_children)
