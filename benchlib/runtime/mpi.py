"""MPI as a library of torch.distributed: a process group over mpi4py.

    mpirun -n 2 python script.py       # every rank: load(); dist.init_process_group("mpi4py", ...)

torch's wheels have no MPI. The group has torch's operations, names and rules, for dense tensors on the CPU; see
``mpi_buffers`` for types and sizes. Its collectives run in one thread per group, in order, and MPI's own calls do the
work; messages start at once. Groups that ``new_group`` makes get communicators of their own.

Each method takes torch's tensors and options as ``torch.distributed`` hands them over. Names with a leading underscore
are those of torch before 2.13.
"""

import atexit
import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import mpi4py
import torch
import torch.distributed as dist
from mpi4py import MPI

from benchlib.core.errors import BackendUnavailable
from benchlib.runtime import mpi_buffers as buffers
from benchlib.runtime import mpi_collectives as collectives
from benchlib.runtime.mpi_work import (
    Collective,
    Line,
    Message,
)

mpi4py.rc.initialize = mpi4py.rc.finalize = False  # by load() and at the exit, below


Tensors = list[torch.Tensor]

BACKEND = "mpi4py"  # torch keeps "mpi" for a build with MPI in it
_GROUP_TAG = 711  # of the messages by which a communicator is made


def load() -> None:
    """Start MPI in this process, and tell torch of the backend. Does nothing the second time.

    Raises ``BackendUnavailable`` where this MPI cannot be called from several threads.
    """
    if not MPI.Is_initialized():
        if MPI.Init_thread(MPI.THREAD_MULTIPLE) != MPI.THREAD_MULTIPLE:
            raise BackendUnavailable(
                f"{version()} gives no MPI_THREAD_MULTIPLE: build it with --enable-mpi-thread-multiple"
            )
        atexit.register(_leave)
    if BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu"])


def version() -> str:
    """Return the library's name and version: ``Open MPI v5.0.11``."""
    return MPI.Get_library_version().split(",")[0].splitlines()[0].strip()


def _leave() -> None:
    # After a failure the peers may never come to the end, and mpirun ends them all when it sees a rank go like this.
    if not dist.is_initialized() and not MPI.Is_finalized():
        MPI.Finalize()


def _create(options: Any, _backend_options: Any) -> "MPIGroup":
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    world = MPI.COMM_WORLD
    if max(ranks) >= world.size or world.rank != ranks[options.group_rank]:
        raise BackendUnavailable(
            f"MPI knows this process as rank {world.rank} of {world.size}, torch as rank {ranks[options.group_rank]} of "
            f"{max(ranks) + 1} or more: start the ranks with mpirun, set launcher=mpirun"
        )
    return MPIGroup(world.Create_group(world.group.Incl(ranks), tag=_GROUP_TAG), options.timeout)


_ProcessGroup: Any = dist.ProcessGroup  # torch's stubs list more forms of each method than a subclass is ever called by


class MPIGroup(_ProcessGroup):  # type: ignore[misc]
    """A group of ranks with a communicator of its own. ``shutdown`` frees it."""

    def __init__(self, comm: MPI.Intracomm, timeout: timedelta) -> None:
        super().__init__(comm.rank, comm.size)
        self.comm, self._timeout_s = comm, timeout.total_seconds()
        self._talk = comm.Dup()  # for messages: whatever tag they have, no collective takes them
        for one in (self.comm, self._talk):
            one.Set_errhandler(MPI.ERRORS_RETURN)
        self._line = Line()

    def getBackendName(self) -> str:
        """Return the name that the group is registered under."""
        return BACKEND

    # torch names a group through these two; without them it has no name to unregister.
    def setGroupName(self, name: str) -> None:
        """Take the name that torch gives the group."""
        self._name = name

    def getGroupName(self) -> str:
        """Return it."""
        return self._name

    def shutdown(self) -> None:
        """Wait for what is under way and free the communicator. A collective of the group."""
        self._line.close()
        for one in (self.comm, self._talk):
            if one != MPI.COMM_NULL:
                one.Free()

    def abort(self) -> None:
        """End all ranks of the job."""
        self.comm.Abort(1)

    def _run(self, what: str, opts: Any, run: Callable[[], Any], tensors: Tensors) -> dist.Work:
        timeout = getattr(opts, "timeout", None)
        limit_s = timeout.total_seconds() if timeout and timeout > timedelta(0) else self._timeout_s
        return self._line.add(Collective(what, run, tensors, limit_s))

    # Reductions

    def allreduce(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        """Reduce each tensor over the ranks, in place."""
        ops = [buffers.operator("all_reduce", _reduction(opts), tensor) for tensor in tensors]

        def run() -> None:
            for tensor, op in zip(tensors, ops, strict=True):
                collectives.all_reduce(self.comm, tensor, op, _reduction(opts))

        return self._run("all_reduce", opts, run, tensors)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Tensors, opts: Any) -> dist.Work:
        """Reduce over the ranks into the root's tensor; those of the others are left as they are."""
        op = buffers.operator("reduce", opts.reduceOp, tensors[0])
        return self._run(
            "reduce",
            opts,
            lambda: collectives.reduce(self.comm, tensors[0], op, opts.reduceOp, opts.rootRank),
            tensors,
        )

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> dist.Work:
        """Reduce ``input`` over the ranks; each rank gets its block of the result in ``output``."""
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    _reduce_scatter_base = reduce_scatter_tensor = reduce_scatter_single

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any = None) -> dist.Work:
        """Reduce lists of tensors, one for each rank."""
        wholes = [buffers.flat(tensors, filled=True)[0] for tensors in inputs]
        return self.reduce_scatter_single_coalesced(outputs, wholes, opts)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        """Reduce and scatter each of several tensors."""
        for output, source in zip(outputs, inputs, strict=True):
            self._check_parts("reduce_scatter", output, source)
        ops = [buffers.operator("reduce_scatter", _reduction(opts), source) for source in inputs]

        def run() -> None:
            for output, source, op in zip(outputs, inputs, ops, strict=True):
                collectives.reduce_scatter(self.comm, output, source, op, _reduction(opts))

        return self._run("reduce_scatter", opts, run, outputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # Moves

    def broadcast(self, tensors: Tensors, opts: Any) -> dist.Work:
        """Send the root's tensor to all."""
        buffers.check("broadcast", tensors[0])
        run = functools.partial(collectives.broadcast, self.comm, tensors[0], opts.rootRank)
        return self._run("broadcast", opts, run, tensors)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> dist.Work:
        """Gather the ranks' tensors, one after the other, on all ranks."""
        return self.all_gather_single_coalesced([output], [input], opts)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        """Gather each of several tensors."""
        for output, source in zip(outputs, inputs, strict=True):
            self._check_parts("all_gather", source, output)

        def run() -> None:
            for output, source in zip(outputs, inputs, strict=True):
                collectives.all_gather(self.comm, output, source)

        return self._run("all_gather", opts, run, outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> dist.Work:
        """Gather the ranks' tensors into lists, on all ranks."""
        pairs = [buffers.flat(tensors, filled=False) for tensors in outputs]
        for (whole, _), source in zip(pairs, inputs, strict=True):
            self._check_parts("all_gather", source, whole)

        def run() -> None:
            for (whole, back), source in zip(pairs, inputs, strict=True):
                collectives.all_gather(self.comm, whole, source)
                back()

        return self._run("all_gather", opts, run, [one for tensors in outputs for one in tensors])

    def allgather_coalesced(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> dist.Work:
        """Gather each of several tensors; ``outputs[rank][i]`` is tensor i of that rank."""
        return self.allgather([list(tensors) for tensors in zip(*outputs, strict=True)], inputs, opts)

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> dist.Work:
        """Gather the ranks' tensors into the root's list."""
        buffers.check("gather", inputs[0])
        if self.comm.rank != opts.rootRank:
            run = functools.partial(collectives.gather, self.comm, None, inputs[0], opts.rootRank)
            return self._run("gather", opts, run, [])
        whole, back = buffers.flat(outputs[0], filled=False)
        self._check_parts("gather", inputs[0], whole)

        def run_root() -> None:
            collectives.gather(self.comm, whole, inputs[0], opts.rootRank)
            back()

        return self._run("gather", opts, run_root, outputs[0])

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> dist.Work:
        """Scatter the root's list, a tensor to each rank."""
        buffers.check("scatter", outputs[0])
        whole = None
        if self.comm.rank == opts.rootRank:
            whole, _ = buffers.flat(inputs[0], filled=True)
            self._check_parts("scatter", outputs[0], whole)
        run = functools.partial(collectives.scatter, self.comm, outputs[0], whole, opts.rootRank)
        return self._run("scatter", opts, run, outputs)

    def all_to_all_single(
        self, output: torch.Tensor, input: torch.Tensor, output_rows: list[int], input_rows: list[int], opts: Any = None
    ) -> dist.Work:
        """Send a block to each rank and receive one from each: equal ones, or of the given rows."""
        sizes = [self._block_bytes(tensor, rows) for tensor, rows in ((input, input_rows), (output, output_rows))]
        uneven = sizes if output_rows or input_rows else None
        run = functools.partial(collectives.all_to_all, self.comm, output, input, uneven)
        return self._run("all_to_all", opts, run, [output])

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        """Send ``inputs[i]`` to rank i and receive ``outputs[i]`` from it; the sizes may differ."""
        for tensor in (*outputs, *inputs):
            buffers.check("all_to_all", tensor)
        sizes = [[one.numel() * one.element_size() for one in tensors] for tensors in (inputs, outputs)]
        source = torch.cat([tensor.reshape(-1) for tensor in inputs])
        target = source.new_empty(sum(tensor.numel() for tensor in outputs))

        def run() -> None:
            collectives.all_to_all(self.comm, target, source, sizes)
            for tensor, part in zip(outputs, target.split([one.numel() for one in outputs]), strict=True):
                tensor.view(-1).copy_(part)

        return self._run("all_to_all", opts, run, outputs)

    def barrier(self, opts: Any = None) -> dist.Work:
        """Wait for all ranks."""
        return self._run("barrier", opts, self.comm.Barrier, [])

    def _check_parts(self, what: str, part: torch.Tensor, whole: torch.Tensor) -> None:
        buffers.check(what, part)
        buffers.check(what, whole)
        if part.dtype != whole.dtype or part.numel() * self.comm.size != whole.numel():
            raise ValueError(
                f"mpi {what}: {whole.numel()} elements of {whole.dtype} are not {self.comm.size} ranks x "
                f"{part.numel()} of {part.dtype}"
            )

    def _block_bytes(self, tensor: torch.Tensor, rows: list[int]) -> list[int]:
        """Return the bytes of each rank's block of a tensor; all the same where no rows are given."""
        buffers.check("all_to_all", tensor)
        size, total = self.comm.size, tensor.numel() * tensor.element_size()
        length = tensor.shape[0] if tensor.dim() else 1
        if not rows and length % size:
            raise ValueError(f"mpi all_to_all: {length} rows cannot be split over {size} ranks: give the split sizes")
        if rows and (len(rows) != size or sum(rows) != length):
            raise ValueError(f"mpi all_to_all: splits {rows} are not {length} rows over {size} ranks")
        return [count * total // max(1, length) for count in rows or [length // size] * size]

    # Messages

    def send(self, tensors: Tensors, target: int, tag: int = 0) -> dist.Work:
        """Send a tensor to a rank of the group."""
        buffers.check("send", tensors[0])
        pieces = buffers.stretches(tensors[0])
        return self._message("send", tensors, [self._talk.Isend(piece, dest=target, tag=tag) for piece in pieces])

    def recv(self, tensors: Tensors, source: int, tag: int = 0) -> dist.Work:
        """Receive a tensor from a rank of the group."""
        buffers.check("recv", tensors[0])
        pieces = buffers.stretches(tensors[0])
        if source == MPI.ANY_SOURCE and len(pieces) > 1:
            raise ValueError(f"mpi recv: a message of more than {buffers.LIMIT} bytes needs its sender named: give src")
        return self._message("recv", tensors, [self._talk.Irecv(piece, source=source, tag=tag) for piece in pieces])

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> dist.Work:
        """Receive a tensor from whichever rank sends one; ``source_rank`` of the work tells which."""
        return self.recv(tensors, MPI.ANY_SOURCE, tag)

    def _message(self, what: str, tensors: Tensors, requests: list[MPI.Request]) -> dist.Work:
        return Message(what, requests, tensors, self._timeout_s)


def _reduction(opts: Any) -> Any:
    return dist.ReduceOp.SUM if opts is None else opts.reduceOp
