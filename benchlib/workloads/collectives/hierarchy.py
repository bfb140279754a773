"""All-reduce over ranks whose libraries cannot talk to each other: NCCL beside RCCL beside gloo.

    load(); dist.init_process_group("hierarchical", pg_options=Member("cuda nccl 2.27.3", "cuda nccl 2.27.3"), ...)

Ranks with a library in common are a group, in whatever order. Each group reduces to its first rank by its own library,
the first ranks add up over gloo (from pinned host memory where tensors lie on a device), and each group broadcasts the
sum by its own library. Long tensors go in segments: while one crosses, the next one is reduced. All of it runs in a
thread and, for a device, on a stream of its own, so DDP's buckets travel while the backward pass goes on.

What is no all-reduce (weights at the start, barriers, objects) goes over one gloo group of all ranks; ``flat_allreduce`` too,
to be set beside.

Sums within a group are its library's; those of the groups are added in gloo's order. All ranks get the same bits.
"""

import contextlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from benchlib.config.schema import BaseConfig
from benchlib.core.errors import BackendUnavailable, UserError
from benchlib.core.machine import BACKENDS
from benchlib.runtime.libraries import LIBRARIES
from benchlib.runtime.queued import QueuedGroup, Tensors
from benchlib.workloads.collectives.exchange import combination, flat

BACKEND = "hierarchical"
SEGMENT_BYTES = 4 << 20
LEAVE_S = 10  # that a rank waits until all have read why there is no group: the store ends with the first one
KINDS = ("cpu", "cuda")  # the types of device whose tensors are exchanged
_Op = dist.ReduceOp


@dataclass(frozen=True)
class Member:
    """What a rank states of itself: its group, the library that reduces within it, and why it has none ('': it has)."""

    group: str
    library: str
    missing: str = ""


def member(backend: str, group: str = "", missing: str = "") -> Member:
    """Return what a rank on ``backend`` states; without a ``group`` the ranks of the same library and version are one."""
    kind, library = BACKENDS[backend].device_type, BACKENDS[backend].collective
    if kind not in KINDS and not missing:
        missing = f"backend {backend} has tensors of {kind}, and it takes those of {' and '.join(KINDS)}"
    if library != "gloo":
        version = "" if missing else ".".join(map(str, torch.cuda.nccl.version()))
        library = f"{backend} {library} {version}".strip()  # RCCL goes by the name of NCCL, too
    return Member(group or library, library, missing)


def options(config: BaseConfig, rank: int) -> dict[str, Any]:
    group = config.exchange_groups.split(",")[rank].strip() if config.exchange_groups else ""
    library = LIBRARIES[BACKENDS[config.backend].collective]
    return {"pg_options": member(config.backend, group, library.unavailable())}


def load() -> None:
    """Register the backend with torch. Does nothing the second time."""
    if BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=list(KINDS))


def _create(options: Any, mine: Member | None) -> "Hierarchy":
    """Make a group. Without a statement a rank states what it did in the run's default group."""
    whole = dist.group.WORLD if dist.is_initialized() else None
    if mine is None and isinstance(whole, Hierarchy):
        mine = whole.members[whole.rank()]
    if mine is None:
        raise UserError("a hierarchical group needs to know its ranks: start the run with collective=hierarchical")
    members = agree(options.store, options.group_rank, options.group_size, mine)
    return Hierarchy(options.store, options.group_rank, members, options.timeout)


def agree(store: dist.Store, rank: int, size: int, mine: Member) -> list[Member]:
    """Return what every rank states, by rank; the ranks meet in the store.

    Raises ``BackendUnavailable`` or ``UserError`` on all of them alike where a rank has no library, or not that of its group.
    """
    store.set(f"member {rank}", json.dumps(asdict(mine)))
    members = [Member(**json.loads(store.get(f"member {other}"))) for other in range(size)]
    store.set(f"done {rank}", "")
    if error := _fault(members):
        with contextlib.suppress(RuntimeError):
            store.wait([f"done {other}" for other in range(size)], timedelta(seconds=LEAVE_S))
        raise error
    return members


def _fault(members: Sequence[Member]) -> Exception | None:
    for rank, each in enumerate(members):
        if each.missing:
            return BackendUnavailable(f"rank {rank} has no group of the hierarchical exchange: {each.missing}")
        first = next(other for other, item in enumerate(members) if item.group == each.group)
        if each.library != members[first].library:
            theirs = f"rank {first} with {members[first].library} and rank {rank} with {each.library}"
            remedy = "which cannot talk to each other: give them groups of their own, or leave it out"
            return UserError(f"exchange_groups: group {each.group} has {theirs}, {remedy}")
    return None


def grouped(members: Sequence[Member]) -> list[list[int]]:
    """Return the ranks of each group, the group of rank 0 first; each list rises."""
    names = dict.fromkeys(each.group for each in members)
    return [[rank for rank, each in enumerate(members) if each.group == name] for name in names]


def layout(members: Sequence[Member]) -> str:
    """Say which ranks are in which group: ``a: ranks 0, 1 by gloo; b: rank 2 by gloo``."""
    return "; ".join(_named(ranks, members) for ranks in grouped(members))


def _named(ranks: Sequence[int], members: Sequence[Member]) -> str:
    first = members[ranks[0]]
    by = "" if first.group == first.library else f" by {first.library}"
    return f"{first.group}: rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}{by}"


class Hierarchy(QueuedGroup):
    """The group of all ranks. ``members`` says by rank who is where, ``groups`` lists the ranks of each group."""

    def __init__(self, store: dist.Store, rank: int, members: list[Member], timeout: timedelta) -> None:
        super().__init__(BACKEND, rank, len(members), timeout)
        self.members, self.groups, self.layout = members, grouped(members), layout(members)
        self._ranks = next(ranks for ranks in self.groups if rank in ranks)
        leaders = [ranks[0] for ranks in self.groups]
        self._within_name = f"within {_named(self._ranks, members)}"
        self._across_name = f"between the first ranks of the groups (ranks {', '.join(map(str, leaders))})"

        def place(name: str, ranks: Sequence[int]) -> tuple[dist.Store, int, int]:
            return dist.PrefixStore(name, store), ranks.index(rank), len(ranks)

        backend = dist.ProcessGroupGloo(*place("flat", range(len(members))), timeout)
        self._flat = dist.ProcessGroup(store, rank, len(members))
        for kind in KINDS:
            for each in (self, self._flat):  # this one only tells torch which devices it takes
                each._register_backend(torch.device(kind), dist.ProcessGroup.BackendType.GLOO, backend)
        within = f"within {self._ranks[0]}"
        self._within: dict[str, Any] = {"cpu": dist.ProcessGroupGloo(*place(within, self._ranks), timeout)}
        if members[rank].library != "gloo":
            nccl = dist.ProcessGroupNCCL.Options()
            nccl._timeout = timeout
            self._within["cuda"] = dist.ProcessGroupNCCL(*place(f"{within} on devices", self._ranks), nccl)
        crosses = rank in leaders and len(leaders) > 1
        self._across: Any = dist.ProcessGroupGloo(*place("across", leaders), timeout) if crosses else None
        self._streams: dict[torch.device, Any] = {}

    def getBackendName(self) -> str:
        return BACKEND

    def shutdown(self) -> None:
        super().shutdown()
        for each in (*self._within.values(), self._across, self._flat):
            if each is not None:
                each.shutdown()

    def allreduce(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        """Reduce each tensor over the ranks, in place. Raises ``ValueError`` before anything is sent."""
        op = _Op.SUM if opts is None else opts.reduceOp
        lines = [flat(tensor, "tensor") for tensor in tensors]
        for line in lines:
            combination(op, line.dtype)
            if line.device.type not in self._within:
                exchanged = f"{' and '.join(self._within)} {self._within_name}"
                raise ValueError(f"a tensor on {line.device}: the ranks exchange those of {exchanged}")

        def run() -> None:
            for line in lines:
                self._reduce(line, _Op.SUM if op == _Op.AVG else op)
                if op == _Op.AVG:
                    line.div_(self.size())

        device = lines[0].device if lines else torch.device("cpu")
        return self._begin("all_reduce", opts, run, tensors, self._stream(device))

    allreduce_coalesced = allreduce

    def flat_allreduce(self, tensor: torch.Tensor, op: Any = _Op.SUM) -> dist.Work:
        """Begin to reduce a tensor over gloo alone, as if there were no groups."""
        return self._flat.allreduce([tensor], _options(dist.AllreduceOptions, op))

    def _stream(self, device: torch.device) -> Any:
        if device.type == "cpu":
            return None
        return self._streams.setdefault(device, torch.get_device_module(device).Stream(device))

    def _reduce(self, line: torch.Tensor, op: Any) -> None:
        """Reduce a line of elements. Every rank of a group asks its library for the same things in the same order."""
        within, on_device = self._within[line.device.type], line.device.type != "cpu"
        to_all, to_first = _options(dist.AllreduceOptions, op), _options(dist.ReduceOptions, op)
        if len(self.groups) == 1:
            _end(self._within_name, within.allreduce([line], to_all))
            return
        parts = [part for part in line.split(max(1, SEGMENT_BYTES // line.element_size())) if part.numel()]
        several = len(self._ranks) > 1
        reduced = [within.reduce([part], to_first) if several else None for part in parts]
        hosts, crossing = parts, list[dist.Work]()
        if self._across is not None:
            if on_device:
                hosts = [torch.empty(len(part), dtype=part.dtype, pin_memory=True) for part in parts]
            for part, host, work in zip(parts, hosts, reduced, strict=True):
                _end(self._within_name, work)
                if on_device:
                    host.copy_(part)  # waits for the device
                crossing.append(self._across.allreduce([host], to_all))
        sent = []
        for index, part in enumerate(parts):
            if self._across is None:
                _end(self._within_name, reduced[index])
            else:
                _end(self._across_name, crossing[index])
                if on_device:
                    part.copy_(hosts[index], non_blocking=True)
            if several:
                sent.append(within.broadcast([part], dist.BroadcastOptions()))
        for work in sent:
            _end(self._within_name, work)


def _options(kind: Callable[[], Any], op: Any) -> Any:
    options = kind()  # the root is rank 0
    options.reduceOp = op
    return options


def _end(where: str, work: dist.Work | None) -> None:
    try:
        if work is not None:
            work.wait()
    except RuntimeError as error:
        raise RuntimeError(f"{where}: {' '.join(str(error).split())}") from error


# torch's own way to a method that a Python group lacks calls gloo with the interpreter's lock held, while gloo's thread, in
# whose queue it waits, may need that lock to drop a tensor: all others are handed over here, whatever torch calls them.


def _over_gloo(name: str) -> Callable[..., dist.Work]:
    def method(self: Hierarchy, *arguments: Any, **options: Any) -> dist.Work:
        return getattr(self._flat, name)(*arguments, **options)  # type: ignore[no-any-return]

    return method


for _name in set(dir(dist.ProcessGroup)) - set(vars(Hierarchy)):
    if re.match("_?(all|reduce|gather|scatter|broadcast|barrier|send|recv)", _name):
        setattr(Hierarchy, _name, _over_gloo(_name))
