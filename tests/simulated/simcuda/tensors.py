"""Tensors of the simulated device: wrappers around tensors of the CPU, so that data are real and device mismatches raise.

What torch does with such a tensor arrives at ``dispatch``; what it makes from nothing on the device arrives there, too, by a
fallback for the dispatch key of CUDA, which a build of torch without CUDA leaves free. Nothing depends on the thread.
"""

import sys
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from simcuda import exchange
from simcuda.device import FREE, Device, aten, storage_of

CPU = torch.device("cpu")
MOVES = (aten.copy_, aten._to_copy)
READS = {aten._local_scalar_dense, aten.equal, aten.is_nonzero}  # they return what the host asks for
SIZED = {
    aten.nonzero,
    aten.masked_select,
    aten._unique2,
    aten.unique_dim,
}  # the host waits to learn how large the result is
VIEW_S = 1e-6  # of the host, for what launches nothing
MIXED = {aten.set_, aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}  # they take indices of the host


class Held:
    """A tensor's claim on its storage, given up with the tensor."""

    def __init__(self, raw: torch.Tensor, index: int) -> None:
        self.storage, self.size, self.memory = (
            storage_of(raw),
            raw.untyped_storage().nbytes(),
            Here.device.memory[index],
        )
        self.memory.hold(self.storage, self.size)

    def __del__(self) -> None:
        if sys.is_finalizing() or not hasattr(self, "memory"):
            return
        if self.storage in self.memory.users and self.memory.drop(self.storage, self.size):
            Here.device.written.pop(self.storage, None)


class Here:
    """The device of this process. Its data are ``on`` the CPU; on "meta" they are shapes alone, for models too large to run."""

    device: Device
    on = CPU


class DeviceTensor(torch.Tensor):
    """A tensor of the device with its data in ``raw``, a tensor of the CPU."""

    raw: torch.Tensor
    held: Held
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, raw: torch.Tensor, where: torch.device) -> "DeviceTensor":
        held = Held(raw, where.index)
        shape = {"strides": raw.stride(), "storage_offset": raw.storage_offset(), "dtype": raw.dtype}
        self: DeviceTensor = torch.Tensor._make_wrapper_subclass(cls, raw.shape, device=where, **shape)
        self.raw, self.held = raw, held
        return self

    def __repr__(self, **_: Any) -> str:
        return f"DeviceTensor({self.raw!r}, device={self.device})"

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        copy: torch.Tensor = self.detach().clone().requires_grad_(self.requires_grad)
        if isinstance(self, torch.nn.Parameter):
            copy = torch.nn.Parameter(copy, self.requires_grad)
        memo[id(self)] = copy
        return copy

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, **_: Any) -> Any:
        raise TypeError(f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() first.")

    def data_ptr(self) -> int:
        return self.raw.data_ptr()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(func, args, kwargs or {})


def install(device: Device) -> torch.library.Library:
    """Let torch find the device; what is returned has to be kept."""
    Here.device = device
    library = torch.library.Library("_", "IMPL")
    library.fallback(lambda func, *args, **kwargs: dispatch(func, args, kwargs), "CUDA")
    return library


def raw_of(value: Any) -> Any:
    """Return what stands for an argument on the CPU."""
    if isinstance(value, DeviceTensor):
        return value.raw
    return Here.on if isinstance(value, torch.device) and value.type == "cuda" else value


def dispatch(func: Any, args: Any, kwargs: Any) -> Any:
    """Do an operation of the device: its numbers now, on the CPU, and its time in the queue."""
    packet, leaves = func.overloadpacket, tree_leaves((args, kwargs))
    ours = [leaf for leaf in leaves if isinstance(leaf, DeviceTensor)]
    if func.namespace in ("c10d", "_c10d_functional"):
        return exchange.dispatch(Here.device, func, args, kwargs, ours)
    if packet is aten._fused_sdp_choice:
        return 0  # attention by matrix products: whose operations are counted
    if packet is aten._pin_memory or packet is aten.is_pinned:
        raise RuntimeError("cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned")
    if packet in MOVES:
        return moved(func, args, kwargs, ours)
    where = on_one_device(func, leaves, ours)
    host_reads = packet in READS or packet in SIZED
    if host_reads:
        Here.device.queue.host_waits_until(Here.device.queue.done_at())
    raw_args, raw_kwargs = tree_map(raw_of, (args, kwargs))
    if raw_kwargs.get("pin_memory"):
        raise RuntimeError("Only dense CPU tensors can be pinned")
    result = func(*raw_args, **raw_kwargs)
    made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    charge(func, packet, raw_args, raw_kwargs, result, [tensor.raw for tensor in ours], made)
    return result if packet in READS else wrapped(result, ours, where)


def charge(func: Any, packet: Any, args: Any, kwargs: Any, result: Any, reads: Any, made: list[torch.Tensor]) -> None:
    """Put an operation into the queue; one that moves no data costs the host alone."""
    device = Here.device
    if func.is_view or packet in FREE:
        device.queue.host_works(VIEW_S)
        return
    device.launch(device.seconds(func, args, kwargs, result, [*reads, *made]), reads, made)


def on_one_device(func: Any, leaves: list[Any], ours: list[DeviceTensor]) -> torch.device:
    """Return the device of an operation. Raises as torch does if its tensors are on several."""
    asked = next((leaf for leaf in leaves if isinstance(leaf, torch.device)), None)
    places = {str(tensor.device) for tensor in ours}
    if ours and func.overloadpacket not in MIXED:
        others = (leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and not isinstance(leaf, DeviceTensor))
        places |= {str(tensor.device) for tensor in others if tensor.dim()}
    if len(places) > 1:
        found = " and ".join(sorted(places, reverse=True))
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, {found}! ({func})"
        )
    where = asked or (ours[0].device if ours else torch.device("cuda"))
    return where if where.index is not None else torch.device(where.type, torch.cuda.current_device())


def wrapped(result: Any, ours: list[DeviceTensor], where: torch.device) -> Any:
    """Return a result with its tensors on the device; what an operation changed in place stays the same object."""
    known = {id(tensor.raw): tensor for tensor in ours}

    def wrap(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or where.type == "cpu":
            return value
        return known[id(value)] if id(value) in known else DeviceTensor(value, where)

    return tree_map(wrap, result)


def moved(func: Any, args: Any, kwargs: Any, ours: list[DeviceTensor]) -> Any:
    """Copy within the device, to it or to the host; the host waits unless the copy is non-blocking and its memory pinned."""
    device, queue = Here.device, Here.device.queue
    converts = func.overloadpacket is aten._to_copy
    source = args[0] if converts else args[1]
    given = kwargs.get("non_blocking", len(args) > 2 and args[2])
    asked = kwargs.get("device") or source.device
    target_device = asked if converts else args[0].device
    if target_device.type == "cuda" and isinstance(source, DeviceTensor):
        where = on_one_device(func, [target_device] if converts else [], ours)
        raw_args, raw_kwargs = tree_map(raw_of, (args, kwargs))
        result = func(*raw_args, **raw_kwargs)
        charge(func, func.overloadpacket, raw_args, raw_kwargs, result, [tensor.raw for tensor in ours], [result])
        return wrapped(result, ours, where)
    seconds = source.numel() * source.element_size() / device.truth.host_rate
    if target_device.type == "cuda":
        raw_args, raw_kwargs = tree_map(raw_of, (args, kwargs))
        result = func(*raw_args, **raw_kwargs)
        if converts and result is source:
            result = source.clone()
        done = device.launch(seconds, [], [result])
        if not (given and queue.is_pinned(source.untyped_storage().data_ptr())):
            queue.host_waits_until(done)
        return wrapped(result, ours, on_one_device(func, [target_device], []))
    done = device.launch(seconds, [source.raw], [])
    raw_kwargs = {name: CPU if name == "device" else value for name, value in kwargs.items()}
    if not given:
        queue.host_waits_until(done)
        result = func(source.raw, **raw_kwargs) if converts else func(args[0], source.raw)
        return result.clone() if result is source.raw else result
    if converts:
        like = func(source.raw, **raw_kwargs)
        target = torch.empty(like.shape, dtype=like.dtype, pin_memory=True)
    else:
        target = args[0]
    snapshot = source.raw.to(target.dtype).expand(target.shape).contiguous()
    if not (target.is_contiguous() and queue.is_pinned(target.untyped_storage().data_ptr())):
        queue.host_waits_until(done)
        return target.copy_(snapshot)
    queue.copy(done, target.data_ptr(), snapshot.data_ptr(), snapshot.nbytes)
    Here.device.arriving.append(target)
    return target
