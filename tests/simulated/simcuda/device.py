"""The device: what its operations cost, and what its memory holds."""

import ctypes
import functools
import threading
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from simcuda.truth import Truth

aten = torch.ops.aten
BLOCK, SEGMENT = 512, 2 << 20  # bytes that the allocator rounds tensors and reservations up to
# They read or write no data.
FREE = {
    aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided, aten.detach, aten.alias,
    aten._local_scalar_dense, aten.set_, aten.resize_,
}  # fmt: skip


class Memory:
    """The memory of a device: bytes of live storages, rounded as the allocator does, and the peaks."""

    def __init__(self, size: int) -> None:
        self.size, self.limit = size, size
        self.allocated = self.highest = self.reserved = self.highest_reserved = 0
        self.users: dict[int, int] = {}  # tensors by storage
        self.lock = threading.RLock()

    def hold(self, storage: int, size: int) -> None:
        """Count one more tensor of a storage; raise as CUDA does if a new one does not fit."""
        with self.lock:
            if storage not in self.users:
                rounded = -(-size // BLOCK) * BLOCK
                if self.allocated + rounded > self.limit:
                    free = (self.limit - self.allocated) / 2**20
                    raise torch.OutOfMemoryError(
                        f"CUDA out of memory. Tried to allocate {size / 2**20:.2f} MiB. GPU 0 has a total capacity of "
                        f"{self.size / 2**30:.2f} GiB of which {free:.2f} MiB is free."
                    )
                self.users[storage] = 0
                self.allocated += rounded
                self.highest = max(self.highest, self.allocated)
                self.reserved = max(self.reserved, -(-self.allocated // SEGMENT) * SEGMENT)
                self.highest_reserved = max(self.highest_reserved, self.reserved)
            self.users[storage] += 1

    def drop(self, storage: int, size: int) -> bool:
        """Count one tensor less; return whether it was the last one of its storage, which is free now."""
        with self.lock:
            self.users[storage] -= 1
            if self.users[storage]:
                return False
            del self.users[storage]
            self.allocated -= -(-size // BLOCK) * BLOCK
            return True

    def reset(self) -> None:
        self.highest, self.highest_reserved = self.allocated, self.reserved

    def empty(self) -> None:
        self.reserved = -(-self.allocated // SEGMENT) * SEGMENT


class Device:
    """The simulated device of this process. ``written`` has the moment at which the last write to a storage is done."""

    def __init__(self, queue: ctypes.CDLL, truth: Truth) -> None:
        self.queue: Any = queue
        self.truth = truth
        self.memory = [Memory(truth.memory_bytes) for _ in range(truth.devices)]
        self.written: dict[int, float] = {}
        self.arriving: deque[torch.Tensor] = deque(maxlen=256)  # they stay alive until their bytes have come
        self.coming: list[tuple[int, int]] = []  # addresses of what is being received
        self.operations = 0
        self.work = 0.0  # floating-point operations so far
        self.seen: set[Any] = set()  # kinds of operations
        queue.start(truth.devices, truth.wait_s)

    def slow(self) -> float:
        """Return by what all rates are multiplied now."""
        return self.truth.throttled_to if self.queue.host() >= self.truth.throttled_at_s else 1.0

    def launch(self, seconds: float, reads: Iterable[torch.Tensor], writes: Iterable[torch.Tensor]) -> float:
        """Put work on the current stream; return when it will be done.

        Raises ``RuntimeError`` if another stream is still writing what it reads or writes: nobody has waited for that.
        """
        self.operations += 1
        self.queue.host_works(self.truth.launch_s)
        writes = [*writes]
        self.ready([*reads, *writes], max(self.queue.done_at(), self.queue.host()))
        done: float = self.queue.launch(seconds / self.slow())
        self.wrote(writes, done)
        return done

    def ready(self, tensors: Iterable[torch.Tensor], began: float) -> None:
        """Raise ``RuntimeError`` if another stream is still writing tensors that are used from ``began`` on."""
        for tensor in tensors:
            late = self.written_at(tensor) - began
            if late > 1e-12:
                raise RuntimeError(
                    f"a race: data that another stream writes are used {late:.3g} s before they are there"
                )
            if self.coming and any(overlap(span_of(tensor), other) for other in self.coming):
                raise RuntimeError("a race: data that are being received are used before anybody waits for them")

    def wrote(self, tensors: Iterable[torch.Tensor], done: float) -> None:
        self.written.update((storage_of(tensor), done) for tensor in tensors)

    def written_at(self, tensor: torch.Tensor) -> float:
        """Return the moment at which the last write to a tensor's storage is done."""
        return self.written.get(storage_of(tensor), 0.0)

    def seconds(self, func: Any, args: Any, kwargs: Any, result: Any, tensors: list[torch.Tensor]) -> float:
        """Return what an operation over these ``tensors`` takes: its operations or its bytes, whichever take longer."""
        packet, work = func.overloadpacket, 0.0
        if func.is_view or packet in FREE:
            return 0.0
        if packet in flop_registry:
            work = float(flop_registry[packet](*args, **kwargs, out_val=result))
            self.work += work
        moved = sum(
            tensor.numel() * tensor.element_size() for tensor in {id(tensor): tensor for tensor in tensors}.values()
        )
        first = self.truth.first_s * (packet not in self.seen)
        self.seen.add(packet)
        return first + max(work / self.rate(tensors), moved / self.truth.memory_rate)

    @functools.cached_property
    def link(self) -> torch.Stream:
        """The stream of the exchanges, which follow each other."""
        return torch.Stream(device=torch.device("cuda", torch.cuda.current_device()))

    def exchanged(self, done: float = 0.0) -> float:
        """Let the link be busy until ``done``; return until when it is."""
        with self.link:
            self.queue.stream_waits_until(done)
            return float(self.queue.done_at())

    def rate(self, tensors: list[torch.Tensor]) -> float:
        """Return the operations per second for factors of this type."""
        kind = next(
            (str(tensor.dtype).removeprefix("torch.") for tensor in tensors if tensor.is_floating_point()), "float32"
        )
        if kind == "float32" and torch.backends.cuda.matmul.fp32_precision == "tf32":
            kind = "tf32"
        return self.truth.flops[kind]


def storage_of(raw: torch.Tensor) -> int:
    """Return what stands for the storage of a tensor of the CPU, as long as it lives."""
    return raw.untyped_storage()._cdata


def span_of(raw: torch.Tensor) -> tuple[int, int]:
    """Return the addresses of a tensor's first byte and behind its last one."""
    steps = zip(raw.shape, raw.stride(), strict=True)
    elements = 1 + sum((size - 1) * stride for size, stride in steps) if raw.numel() else 0
    return raw.data_ptr(), raw.data_ptr() + elements * raw.element_size()


def overlap(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return one[0] < other[1] and other[0] < one[1]
