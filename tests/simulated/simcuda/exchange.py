"""Exchanges between ranks: their numbers go over gloo, their time is that of the simulated link, the same on all ranks.

Before an exchange each rank tells when it would begin, and the latest counts. The stream of a rank goes on meanwhile: only
who waits for the work goes on behind it, and who uses the result without a wait is caught by ``Device.launch``.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves, tree_map

from simcuda.device import span_of

TIME_TAG = 1 << 20  # of the message beside each one that is sent, with the sender's time
WORKS: list[dist.Work] = []  # C++ holds no reference to what is in Python


class Exchange(dist.Work):
    """An exchange that ends at ``done``; a barrier lets the host wait as well."""

    def __init__(self, device: Any, done: float, tensors: list[torch.Tensor], host_waits: bool = False) -> None:
        super().__init__()
        self.device, self.done, self.tensors, self.host_waits = device, done, tensors, host_waits

    def wait(self, timeout: Any = None) -> bool:
        self.device.queue.stream_waits_until(self.done)
        if self.host_waits:
            self.device.queue.host_waits_until(self.done)
        return True

    def is_completed(self) -> bool:
        return bool(self.device.queue.host() >= self.done)

    def result(self) -> list[torch.Tensor]:
        return self.tensors

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future whose callbacks run behind the exchange, on a stream of their own."""
        where = torch.device("cuda", torch.cuda.current_device())
        future: torch.futures.Future[Any] = torch.futures.Future(devices=[where])
        with torch.Stream(device=where):
            self.device.queue.stream_waits_until(self.done)
            future.set_result(self.tensors)
        return future


class Message(Exchange):
    """What one rank sends to another: when it arrives is known after it was received."""

    def __init__(
        self, device: Any, tensors: list[torch.Tensor], works: list[dist.Work], began: Any, received: bool
    ) -> None:
        super().__init__(device, float("inf"), tensors)
        self.works, self.began, self.received = works, began, received
        self.own_began = device.queue.done_at()

    def wait(self, timeout: Any = None) -> bool:
        for work in self.works:
            work.wait()
        if self.works and self.received:
            for tensor in self.tensors:
                self.device.coming.remove(span_of(tensor))
        self.works = []
        began = max(self.own_began, float(self.began)) if self.received else self.own_began
        truth = self.device.truth
        self.done = began + truth.exchange_s + size_of(self.tensors) / truth.exchange_rate / self.device.slow()
        self.device.exchanged(self.done)
        if self.received:
            self.device.wrote(self.tensors, self.done)  # of the whole storage: later than it may be
        return super().wait()

    def is_completed(self) -> bool:
        return not self.works and super().is_completed()


def size_of(tensors: list[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def share(name: str, ranks: int) -> float:
    """Return how much of the largest side of an exchange crosses a rank's link in each direction, with a ring."""
    if "barrier" in name or ranks == 1:
        return 0.0
    if any(part in name for part in ("allreduce", "all_reduce")):
        return 2 * (ranks - 1) / ranks
    if any(part in name for part in ("broadcast", "reduce_.", "send", "recv")) and "scatter" not in name:
        return 1.0
    return (ranks - 1) / ranks


def group_of(func: Any, args: Any, kwargs: Any) -> dist.ProcessGroup:
    """Return the process group among the arguments: an object, or its name as the last text."""
    leaves = tree_leaves((args, kwargs))
    for leaf in leaves:
        if isinstance(leaf, torch.ScriptObject) and "ProcessGroup" in str(leaf._type()):
            return dist.ProcessGroup.unbox(leaf)
    name = [leaf for leaf in leaves if isinstance(leaf, str)][-1]
    return dist.distributed_c10d._resolve_process_group(name)


def dispatch(device: Any, func: Any, args: Any, kwargs: Any, ours: list[Any]) -> Any:
    """Do an exchange of tensors of the device."""
    from simcuda.tensors import raw_of, wrapped

    name = func.name().partition("::")[2] + "."
    if name.startswith("wait_tensor"):
        device.queue.stream_waits_until(device.written_at(ours[0].raw))
        return args[0]
    raw_args, raw_kwargs = tree_map(raw_of, (args, kwargs))
    group = group_of(func, args, kwargs)
    began = max(device.queue.done_at(), device.queue.host(), device.exchanged())
    raws = [tensor.raw for tensor in ours]
    device.ready(raws, began)
    if name.startswith(("send", "recv_")):
        return message(device, func, raw_args, raw_kwargs, group, raws, name.startswith("recv_"))
    latest = torch.tensor([began], dtype=torch.float64)
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MAX
    group.allreduce([latest], options).wait()
    result = func(*raw_args, **raw_kwargs)
    flat = tree_leaves(result)
    for leaf in flat:
        if isinstance(leaf, torch.ScriptObject):
            dist.Work.unbox(leaf).wait()
        elif isinstance(leaf, torch.Tensor) and func.namespace == "_c10d_functional":
            torch.ops._c10d_functional.wait_tensor(leaf)
    made = [leaf for leaf in flat if isinstance(leaf, torch.Tensor)]
    sides = [size_of([*tree_leaves(argument)]) for argument in (*raw_args, made) if tensors_of(argument)]
    truth = device.truth
    seconds = truth.exchange_s + share(name, group.size()) * max(sides, default=0) / truth.exchange_rate / device.slow()
    device.queue.host_works(truth.launch_s)
    done = device.exchanged(float(latest) + seconds)
    device.wrote(made or raws, done)
    where = ours[0].device
    given = {id(tensor.raw): tensor for tensor in ours}
    out = [given.get(id(leaf), leaf) for leaf in made]
    work = boxed(Exchange(device, done, out or list(ours), name.startswith("barrier")))
    return tree_map(lambda leaf: work if isinstance(leaf, torch.ScriptObject) else leaf, wrapped(result, ours, where))


def boxed(work: dist.Work) -> Any:
    """Return a work as C++ hands it on."""
    WORKS.append(work)
    del WORKS[:-1024]
    return work.boxed()


def tensors_of(argument: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(argument))


def message(device: Any, func: Any, args: Any, kwargs: Any, group: Any, raws: Any, received: bool) -> Any:
    """Send or receive; beside the data goes the time at which the sender began."""
    own = torch.tensor([max(device.queue.done_at(), device.queue.host())], dtype=torch.float64)
    peer, tag = args[2], args[3]
    works = [dist.Work.unbox(func(*args, **kwargs))]
    works.append(group.recv([own], peer, tag + TIME_TAG) if received else group.send([own], peer, tag + TIME_TAG))
    device.queue.host_works(device.truth.launch_s)
    if received:
        device.coming.extend(map(span_of, raws))
    return boxed(Message(device, raws, works, own, received))
