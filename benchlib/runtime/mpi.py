"""MPI as a library of torch.distributed: a process group over mpi4py, for dense tensors on the CPU.

    mpirun -n 2 python script.py       # every rank: load(); dist.init_process_group("mpi4py", ...)

torch's wheels have no MPI. Collectives run in one thread per group, in order, and MPI's own calls do the work; messages
start at once. Groups that ``new_group`` makes get communicators of their own.

Reductions use MPI's types and operators. MPI has no 16-bit floats: they are reduced as fp32 and rounded once, at the
end. An average is a sum that is divided. What is only moved travels as whole numbers of the type's width.

Where the tensors of a call share memory, which MPI forbids, a copy is sent.
"""

import atexit
import os
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import mpi4py

mpi4py.rc.initialize = mpi4py.rc.finalize = False  # by load() and at the exit, below

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from mpi4py import MPI  # noqa: E402

from benchlib.core.errors import BackendUnavailable  # noqa: E402
from benchlib.runtime.queued import QueuedGroup, Tensors  # noqa: E402

BACKEND = "mpi4py"  # torch keeps "mpi" for a build with MPI in it
_GROUP_TAG = 711  # of the messages by which a communicator is made

Tensor = torch.Tensor

_HALVES = (torch.float16, torch.bfloat16)
_TYPES = {
    torch.float32: MPI.FLOAT,
    torch.float64: MPI.DOUBLE,
    torch.uint8: MPI.UINT8_T,
    torch.int8: MPI.INT8_T,
    torch.int16: MPI.INT16_T,
    torch.int32: MPI.INT32_T,
    torch.int64: MPI.INT64_T,
}
_BITS = {1: MPI.UINT8_T, 2: MPI.INT16_T, 4: MPI.INT32_T}  # by width; wider types are several of 8 bytes
# Pairs, because torch's reductions compare as equal but do not hash as equal.
_OPS = (
    *((dist.ReduceOp.SUM, MPI.SUM), (dist.ReduceOp.AVG, MPI.SUM), (dist.ReduceOp.PRODUCT, MPI.PROD)),
    *((dist.ReduceOp.MIN, MPI.MIN), (dist.ReduceOp.MAX, MPI.MAX)),
)


def load() -> None:
    """Start MPI in this process and register the backend with torch. Does nothing the second time.

    Raises ``BackendUnavailable`` where this MPI cannot be called from several threads.
    """
    if not MPI.Is_initialized():
        if MPI.Init_thread(MPI.THREAD_MULTIPLE) != MPI.THREAD_MULTIPLE:
            version = MPI.Get_library_version().split(",")[0].splitlines()[0].strip()
            raise BackendUnavailable(
                f"{version} has no MPI_THREAD_MULTIPLE: build it with --enable-mpi-thread-multiple"
            )
        atexit.register(_finalize)
    if BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu"])


def _finalize() -> None:
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


class Message(dist.Work):
    """A message that is being sent or received. MPI moves it on while somebody waits."""

    def __init__(self, name: str, request: MPI.Request, tensor: Tensor, timeout_s: float) -> None:
        super().__init__()
        self._name, self._request, self._timeout_s = name, request, timeout_s
        self._tensor = tensor  # lives until the message is through

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        limit_s = timeout.total_seconds() or self._timeout_s
        end = time.monotonic() + limit_s
        while not self.is_completed():
            if time.monotonic() > end:
                raise RuntimeError(f"mpi {self._name} timed out after {limit_s:g} s: the other rank did not answer")
            os.sched_yield()  # the other rank may need this core to answer
        return True

    def is_completed(self) -> bool:
        return self._request.Test()  # type: ignore[no-any-return]


def _check(name: str, *tensors: Tensor) -> None:
    """Raise ``ValueError`` for a tensor that has no single block of memory on the CPU."""
    for tensor in tensors:
        shape = f"shape {tuple(tensor.shape)}"
        if tensor.device.type != "cpu" or tensor.layout != torch.strided:
            dense = f"a dense CPU tensor is needed, got {tensor.layout} on {tensor.device}"
            raise ValueError(f"mpi {name}: {dense}: use .cpu()")
        if not tensor.is_contiguous():
            strided = f"the tensor with {shape} and strides {tensor.stride()} is not contiguous"
            raise ValueError(f"mpi {name}: {strided}: pass tensor.contiguous()")


def _check_parts(name: str, part: Tensor, whole: Tensor, ranks: int) -> None:
    """Raise ``ValueError`` where ``whole`` is not one ``part`` for each rank."""
    _check(name, part, whole)
    if part.dtype != whole.dtype or part.numel() * ranks != whole.numel():
        parts = f"{ranks} ranks x {part.numel()} of {part.dtype}"
        raise ValueError(f"mpi {name}: {whole.numel()} elements of {whole.dtype} are not {parts}")


def _numbers(tensor: Tensor) -> list[Any]:
    """Describe a tensor for a reduction, which does not keep it; MPI's binding counts the elements, also of each rank's block."""
    return [MPI.memory.fromaddress(tensor.data_ptr(), tensor.nbytes), _TYPES[tensor.dtype]]


def _bits(tensor: Tensor, *counts: list[int]) -> list[Any]:
    """Describe a tensor that is moved, which does not keep it, with the ``counts`` of blocks that are not equal."""
    item = _BITS.get(tensor.element_size(), MPI.INT64_T)
    return [MPI.memory.fromaddress(tensor.data_ptr(), tensor.nbytes), *counts, item]


def _wide(tensor: Tensor) -> Tensor:
    """Return the tensor itself, or a copy in fp32 of one in 16 bits, which MPI cannot reduce."""
    return tensor.float() if tensor.dtype in _HALVES else tensor


def _apart(source: Tensor, target: Tensor) -> Tensor:
    """Return what is sent: a copy where it shares memory with what is received."""
    shared = source.untyped_storage().data_ptr() == target.untyped_storage().data_ptr()
    return source.clone() if shared else source


def _joined(tensors: Tensors) -> Tensor:
    if len({(tensor.numel(), tensor.dtype) for tensor in tensors}) > 1:
        shapes = [tuple(entry.shape) for entry in tensors]
        raise ValueError(f"mpi: tensors of one size and type are needed, got {shapes}")
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


class MPIGroup(QueuedGroup):
    """A group of ranks with a communicator of its own. ``shutdown`` frees it.

    Each method takes tensors and options as ``torch.distributed`` hands them over; lists have one member except in the
    coalesced forms, through which torch's functional collectives come. Names with a leading underscore, ``alltoall_base`` and
    the coalesced forms with "tensor" are those of torch before 2.13.
    """

    def __init__(self, comm: MPI.Intracomm, timeout: timedelta) -> None:
        super().__init__("mpi", comm.rank, comm.size, timeout)
        self.comm = comm
        self._talk = comm.Dup()  # for messages: whatever tag they have, no collective takes them

    def getBackendName(self) -> str:
        return BACKEND

    def shutdown(self) -> None:
        super().shutdown()
        for each in (self.comm, self._talk):
            if each != MPI.COMM_NULL:
                each.Free()

    # Reductions

    def _reduction(self, name: str, opts: Any, tensors: Tensors) -> tuple[MPI.Op, Callable[[Tensor, Tensor], None]]:
        """Return MPI's operator, and what finishes a result: it divides the sum of an average and rounds into the target.

        Raises ``ValueError`` for a reduction or a type that MPI does not have.
        """
        reduction = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        operator = next((op for supported, op in _OPS if reduction == supported), None)
        if operator is None:
            raise ValueError(f"mpi {name}: reduction {reduction} is not available: use sum, avg, product, min or max")
        _check(name, *tensors)
        if missing := [tensor.dtype for tensor in tensors if tensor.dtype not in (*_TYPES, *_HALVES)]:
            raise ValueError(f"mpi {name}: MPI cannot reduce {missing[0]}: convert the tensor to a number type")

        def finish(result: Tensor, target: Tensor) -> None:
            if reduction == dist.ReduceOp.AVG:  # whole numbers towards zero
                result.div_(self.comm.size, rounding_mode=None if result.is_floating_point() else "trunc")
            if result is not target:
                target.copy_(result)

        return operator, finish

    def allreduce(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        op, finish = self._reduction("all_reduce", opts, tensors)

        def run() -> None:
            for tensor in tensors:
                data = _wide(tensor)
                self.comm.Allreduce(MPI.IN_PLACE, _numbers(data), op)
                finish(data, tensor)

        return self._begin("all_reduce", opts, run, tensors)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Tensors, opts: Any) -> dist.Work:
        """Reduce over the ranks into the root's tensor; those of the others are left as they are."""
        op, finish = self._reduction("reduce", opts, tensors)

        def run() -> None:
            data = _wide(tensors[0])
            if self.comm.rank == opts.rootRank:
                self.comm.Reduce(MPI.IN_PLACE, _numbers(data), op, opts.rootRank)
                finish(data, tensors[0])
            else:
                self.comm.Reduce(_numbers(data), None, op, opts.rootRank)

        return self._begin("reduce", opts, run, tensors)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        """Reduce each of ``inputs`` over the ranks; each rank gets its block of the result in ``outputs``."""
        for output, source in zip(outputs, inputs, strict=True):
            _check_parts("reduce_scatter", output, source, self.comm.size)
        op, finish = self._reduction("reduce_scatter", opts, inputs)

        def run() -> None:
            for output, source in zip(outputs, inputs, strict=True):
                data = _wide(_apart(source, output))
                result = torch.empty_like(output, dtype=data.dtype) if data.dtype != output.dtype else output
                self.comm.Reduce_scatter_block(_numbers(data), _numbers(result), op)
                finish(result, output)

        return self._begin("reduce_scatter", opts, run, outputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any = None) -> dist.Work:
        return self.reduce_scatter_single_coalesced(outputs, [_joined(inputs[0])], opts)

    # Moves

    def broadcast(self, tensors: Tensors, opts: Any) -> dist.Work:
        _check("broadcast", tensors[0])
        return self._begin("broadcast", opts, lambda: self.comm.Bcast(_bits(tensors[0]), opts.rootRank), tensors)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        """Gather each of ``inputs`` over the ranks, one after the other, in ``outputs`` on all ranks."""
        for whole, part in zip(outputs, inputs, strict=True):
            _check_parts("all_gather", part, whole, self.comm.size)

        def run() -> None:
            for whole, part in zip(outputs, inputs, strict=True):
                source = _apart(part, whole)  # which the description does not keep
                self.comm.Allgather(_bits(source), _bits(whole))

        return self._begin("all_gather", opts, run, outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        return self.all_gather_single_coalesced([output], [input], opts)

    _allgather_base = all_gather_single

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> dist.Work:
        return self._collect("all_gather", self.comm.Allgather, outputs[0], inputs[0], opts)

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> dist.Work:
        (part,), root = inputs, opts.rootRank
        if self.comm.rank == root:
            return self._collect("gather", partial(self.comm.Gather, root=root), outputs[0], part, opts)
        _check("gather", part)
        return self._begin("gather", opts, lambda: self.comm.Gather(_bits(part), None, root), [])

    def _collect(self, name: str, gather: Callable[..., Any], outputs: Tensors, part: Tensor, opts: Any) -> dist.Work:
        whole = _joined(outputs)
        _check_parts(name, part, whole, self.comm.size)

        def run() -> None:
            gather(_bits(part), _bits(whole))
            for tensor, own in zip(outputs, whole.view(len(outputs), -1), strict=True):
                tensor.view(-1).copy_(own)

        return self._begin(name, opts, run, outputs)

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> dist.Work:
        (part,), root = outputs, opts.rootRank
        _check("scatter", part)
        whole = _joined(inputs[0]) if self.comm.rank == root else None
        if whole is not None:
            _check_parts("scatter", part, whole, self.comm.size)

        def run() -> None:
            self.comm.Scatter(None if whole is None else _bits(whole), _bits(part), root)

        return self._begin("scatter", opts, run, outputs)

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_rows: list[int], input_rows: list[int], opts: Any = None
    ) -> dist.Work:
        """Send a block to each rank and receive one from each: equal ones, or of the given rows."""
        sent, received = self._counts(input, input_rows), self._counts(output, output_rows)

        def run() -> None:
            source = _apart(input, output)
            if output_rows or input_rows:
                self.comm.Alltoallv(_bits(source, sent), _bits(output, received))
            else:
                self.comm.Alltoall(_bits(source), _bits(output))

        return self._begin("all_to_all", opts, run, [output])

    alltoall_base = all_to_all_single

    def _counts(self, tensor: Tensor, rows: list[int]) -> list[int]:
        """Return the elements (of ``_bits``) of each rank's block of a tensor; all the same where no rows are given."""
        _check("all_to_all", tensor)
        size, length = self.comm.size, tensor.shape[0] if tensor.dim() else 1
        if not rows and length % size:
            raise ValueError(f"mpi all_to_all: {length} rows cannot be split over {size} ranks: give the split sizes")
        if rows and (len(rows) != size or sum(rows) != length):
            raise ValueError(f"mpi all_to_all: splits {rows} are not {length} rows over {size} ranks")
        total = tensor.nbytes // min(tensor.element_size(), 8)
        return [count * total // max(1, length) for count in rows or [length // size] * size]

    def barrier(self, opts: Any = None) -> dist.Work:
        return self._begin("barrier", opts, self.comm.Barrier, [])

    # Messages

    def send(self, tensors: Tensors, target: int, tag: int = 0) -> dist.Work:
        _check("send", tensors[0])
        return Message("send", self._talk.Isend(_bits(tensors[0]), target, tag), tensors[0], self._timeout_s)

    def recv(self, tensors: Tensors, source: int, tag: int = 0) -> dist.Work:
        _check("recv", tensors[0])
        return Message("recv", self._talk.Irecv(_bits(tensors[0]), source, tag), tensors[0], self._timeout_s)
