"""MPI as a library of torch.distributed: a process group over mpi4py, for dense tensors on the CPU.

    mpirun -n 2 python script.py       # every rank: load(); dist.init_process_group("mpi4py", ...)

torch's wheels have no MPI. Collectives run in one thread per group, in order, and MPI's own calls do the work; messages
start at once. Groups that ``new_group`` makes get communicators of their own.

Reductions use MPI's types and operators. MPI has no 16-bit floats: they are reduced as fp32 and rounded once, at the
end. An average is a sum that is divided. What is only moved travels as bytes, whatever its type. MPI before version 4
counts in 32 bits: longer buffers are reduced in pieces, and moved as one item of a longer datatype.

A tensor that lies within the larger one at the rank's own place is used in place; where both share memory in another
way, which MPI forbids, a copy is sent.
"""

import atexit
import functools
import itertools
import math
import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import mpi4py

mpi4py.rc.initialize = mpi4py.rc.finalize = False  # by load() and at the exit, below

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from mpi4py import MPI  # noqa: E402

from benchlib.core.errors import BackendUnavailable  # noqa: E402
from benchlib.runtime.queued import QueuedGroup, Tensors  # noqa: E402

BACKEND = "mpi4py"  # torch keeps "mpi" for a build with MPI in it
LIMIT = 2**30  # elements or bytes in one count
_GROUP_TAG = 711  # of the messages by which a communicator is made

Tensor = torch.Tensor

_HALVES = (torch.float16, torch.bfloat16)
_TYPES = {
    torch.float32: MPI.FLOAT, torch.float64: MPI.DOUBLE,
    torch.int8: MPI.INT8_T, torch.uint8: MPI.UINT8_T,
    torch.int16: MPI.INT16_T, torch.int32: MPI.INT32_T, torch.int64: MPI.INT64_T,
}  # fmt: skip
# Pairs, because torch's reductions compare as equal but do not hash as equal.
_OPS = (
    (dist.ReduceOp.SUM, MPI.SUM), (dist.ReduceOp.AVG, MPI.SUM), (dist.ReduceOp.PRODUCT, MPI.PROD),
    (dist.ReduceOp.MIN, MPI.MIN), (dist.ReduceOp.MAX, MPI.MAX),
)  # fmt: skip


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


# What is under way


class Message(dist.Work):
    """A message that is being sent or received. MPI moves it on while somebody waits."""

    def __init__(self, name: str, request: MPI.Request, tensor: Tensor, timeout_s: float) -> None:
        super().__init__()
        self._name, self._request, self._timeout_s = name, request, timeout_s
        self._tensor = tensor  # lives until the message is through
        self._status = MPI.Status()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait until the message is through. Raises ``RuntimeError`` after the time limit."""
        limit_s = timeout.total_seconds() or self._timeout_s
        end = time.monotonic() + limit_s
        while not self.is_completed():
            if time.monotonic() > end:
                raise RuntimeError(f"mpi {self._name} timed out after {limit_s:g} s: the other rank did not answer")
            os.sched_yield()  # the other rank may need this core to answer
        return True

    def is_completed(self) -> bool:
        return self._request.Test(self._status)  # type: ignore[no-any-return]

    def source_rank(self) -> int:
        """Return who sent the message, for a receiver that took it from any rank."""
        return self._status.Get_source()  # type: ignore[no-any-return]

    _source_rank = source_rank  # what torch.distributed.recv asks


# Tensors as MPI sees them: [memory, count, datatype]


def _check(name: str, tensor: Tensor) -> None:
    """Raise ``ValueError`` for a tensor that has no single block of memory on the CPU."""
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        raise ValueError(
            f"mpi {name}: a dense CPU tensor is needed, got {tensor.layout} on {tensor.device}: use .cpu()"
        )
    if not tensor.is_contiguous():
        raise ValueError(
            f"mpi {name}: the tensor with shape {tuple(tensor.shape)} and strides {tensor.stride()} is not contiguous: "
            "pass tensor.contiguous()"
        )


def _check_parts(name: str, part: Tensor, whole: Tensor, ranks: int) -> None:
    """Raise ``ValueError`` where ``whole`` is not one ``part`` for each rank."""
    _check(name, part)
    _check(name, whole)
    if part.dtype != whole.dtype or part.numel() * ranks != whole.numel():
        raise ValueError(
            f"mpi {name}: {whole.numel()} elements of {whole.dtype} are not {ranks} ranks x {part.numel()} of {part.dtype}"
        )


def _operator(name: str, reduction: Any, tensor: Tensor) -> MPI.Op:
    """Return MPI's operator; ``ValueError`` for a reduction or a type that MPI does not have."""
    operator = next((op for supported, op in _OPS if reduction == supported), None)
    if operator is None:
        raise ValueError(f"mpi {name}: reduction {reduction} is not available: use sum, avg, product, min or max")
    _check(name, tensor)
    if tensor.dtype not in _TYPES and tensor.dtype not in _HALVES:
        raise ValueError(f"mpi {name}: MPI cannot reduce {tensor.dtype}: convert the tensor to a number type")
    return operator


def _numbers(tensor: Tensor, start: int = 0, length: int | None = None, parts: int = 1) -> list[Any]:
    """Describe ``length`` elements from ``start`` for a reduction; of so many for each of ``parts``."""
    length = tensor.numel() - start if length is None else length
    width = tensor.element_size()
    memory = MPI.memory.fromaddress(tensor.data_ptr() + start * width, length * parts * width)
    return [memory, length, _TYPES[tensor.dtype]]


def _pieces(elements: int) -> list[tuple[int, int]]:
    """Return (start, length) of pieces that MPI can count."""
    return [(start, min(LIMIT, elements - start)) for start in range(0, elements, LIMIT)]


def _bytes(tensor: Tensor, parts: int = 1) -> list[Any]:
    """Describe a tensor that is moved as ``parts`` equal blocks."""
    total = tensor.numel() * tensor.element_size()
    size = total // parts
    count, item = (size, MPI.BYTE) if size <= LIMIT else (1, _item(size))
    return [MPI.memory.fromaddress(tensor.data_ptr(), total), count, item]


def _blocks(tensor: Tensor, sizes: list[int]) -> list[Any]:
    """Describe a tensor that is moved as blocks of ``sizes`` bytes, one after the other."""
    total = sum(sizes)
    unit, item = (1, MPI.BYTE) if total <= LIMIT else (math.gcd(*sizes), _item(math.gcd(*sizes)))
    counts = [size // unit for size in sizes]
    starts = [0, *itertools.accumulate(counts[:-1])]
    return [MPI.memory.fromaddress(tensor.data_ptr(), total), (counts, starts), item]


@functools.cache
def _item(size: int) -> MPI.Datatype:
    """Return a datatype of ``size`` bytes, which may be more than one count can hold."""
    pieces, rest = divmod(size, LIMIT)
    piece = MPI.BYTE.Create_contiguous(LIMIT)
    return MPI.Datatype.Create_struct([pieces, rest], [0, pieces * LIMIT], [piece, MPI.BYTE]).Commit()


def _shared(entry: Tensor, other: Tensor) -> bool:
    return entry.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _own_block(part: Tensor, whole: Tensor, rank: int) -> bool:
    """Whether ``part`` is the block of ``rank`` within ``whole``, in memory: what MPI calls in place."""
    return part.data_ptr() == whole.data_ptr() + rank * part.numel() * part.element_size()


def _joined(tensors: Tensors, filled: bool) -> tuple[Tensor, Callable[[], None]]:
    """Return one tensor for a list of equal ones, and what brings its content back into the list.

    Tensors that lie side by side are used where they are; others go through a copy, ``filled`` with their content.
    """
    first = tensors[0]
    if any(tensor.numel() != first.numel() or tensor.dtype != first.dtype for tensor in tensors):
        raise ValueError(
            f"mpi: tensors of one size and type are needed, got {[tuple(entry.shape) for entry in tensors]}"
        )
    if all(_shared(entry, first) and _own_block(entry, first, index) for index, entry in enumerate(tensors)):
        return first.as_strided((first.numel() * len(tensors),), (1,)), lambda: None
    if filled:
        copy = torch.cat([tensor.reshape(-1) for tensor in tensors])
    else:
        copy = first.new_empty(first.numel() * len(tensors))

    def back() -> None:
        for tensor, part in zip(tensors, copy.view(len(tensors), -1), strict=True):
            tensor.view(-1).copy_(part)

    return copy, back


# The group


class MPIGroup(QueuedGroup):
    """A group of ranks with a communicator of its own. ``shutdown`` frees it.

    Each method takes tensors and options as ``torch.distributed`` hands them over; lists have one member except in the
    coalesced forms, through which torch's functional collectives come. Names with a leading underscore, and
    ``alltoall_base``, are those of torch before 2.13.
    """

    def __init__(self, comm: MPI.Intracomm, timeout: timedelta) -> None:
        super().__init__("mpi", comm.rank, comm.size, timeout)
        self.comm = comm
        self._talk = comm.Dup()  # for messages: whatever tag they have, no collective takes them
        for each in (self.comm, self._talk):
            each.Set_errhandler(MPI.ERRORS_RETURN)

    def getBackendName(self) -> str:
        return BACKEND

    def shutdown(self) -> None:
        """Wait for what is under way and free the communicators. A collective of the group."""
        super().shutdown()
        for each in (self.comm, self._talk):
            if each != MPI.COMM_NULL:
                each.Free()

    # Reductions

    def allreduce(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        """Reduce each tensor over the ranks, in place."""
        reduction = _reduction(opts)
        ops = [_operator("all_reduce", reduction, tensor) for tensor in tensors]

        def run() -> None:
            for tensor, op in zip(tensors, ops, strict=True):
                data = _wide(tensor)
                for piece in _pieces(data.numel()):
                    self.comm.Allreduce(MPI.IN_PLACE, _numbers(data, *piece), op=op)
                self._settle(reduction, data, tensor)

        return self._begin("all_reduce", opts, run, tensors)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Tensors, opts: Any) -> dist.Work:
        """Reduce over the ranks into the root's tensor; those of the others are left as they are."""
        (tensor,), op = tensors, _operator("reduce", opts.reduceOp, tensors[0])

        def run() -> None:
            data = _wide(tensor)
            for piece in _pieces(data.numel()):
                numbers = _numbers(data, *piece)
                self._reduce(numbers, numbers, op, opts.rootRank)
            if self.comm.rank == opts.rootRank:
                self._settle(opts.reduceOp, data, tensor)

        return self._begin("reduce", opts, run, tensors)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        """Reduce each of ``inputs`` over the ranks; each rank gets its block of the result in ``outputs``."""
        reduction = _reduction(opts)
        for output, source in zip(outputs, inputs, strict=True):
            _check_parts("reduce_scatter", output, source, self.comm.size)
        ops = [_operator("reduce_scatter", reduction, source) for source in inputs]

        def run() -> None:
            for output, source, op in zip(outputs, inputs, ops, strict=True):
                data = _wide(source)
                aside = data is not source or _shared(output, source)
                result = torch.empty_like(output, dtype=data.dtype) if aside else output
                self._reduce_scatter(data, result, op)
                self._settle(reduction, result, output)

        return self._begin("reduce_scatter", opts, run, outputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        """Reduce ``input`` over the ranks; each rank gets its block of the result in ``output``."""
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any = None) -> dist.Work:
        """Reduce a list of tensors, one for each rank."""
        return self.reduce_scatter_single_coalesced(outputs, [_joined(inputs[0], filled=True)[0]], opts)

    def _reduce_scatter(self, data: Tensor, result: Tensor, op: MPI.Op) -> None:
        length = result.numel()
        if length <= LIMIT:
            self.comm.Reduce_scatter_block(_numbers(data, 0, length, self.comm.size), _numbers(result), op=op)
            return
        for root in range(self.comm.size):
            for start, size in _pieces(length):
                given = _numbers(data, root * length + start, size)
                self._reduce(given, _numbers(result, start, size), op, root)

    def _reduce(self, given: list[Any], result: list[Any], op: MPI.Op, root: int) -> None:
        if self.comm.rank == root:
            self.comm.Reduce(MPI.IN_PLACE if given is result else given, result, op=op, root=root)
        else:
            self.comm.Reduce(given, None, op=op, root=root)

    def _settle(self, reduction: Any, result: Tensor, target: Tensor) -> None:
        """Finish a reduction: divide the sum of an average (whole numbers towards zero), and round into ``target``."""
        if reduction == dist.ReduceOp.AVG:
            result.div_(self.comm.size, rounding_mode=None if result.is_floating_point() else "trunc")
        if result is not target:
            target.copy_(result)

    # Moves

    def broadcast(self, tensors: Tensors, opts: Any) -> dist.Work:
        """Send the root's tensor to all."""
        _check("broadcast", tensors[0])
        data = tensors[0].view(-1).view(torch.uint8)

        def run() -> None:
            for start, length in _pieces(data.numel()):
                self.comm.Bcast(_bytes(data[start : start + length]), root=opts.rootRank)

        return self._begin("broadcast", opts, run, tensors)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        """Gather each of ``inputs`` over the ranks, one after the other, in ``outputs`` on all ranks."""
        return self._all_gather(outputs, inputs, opts, outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        """Gather the ranks' tensors, one after the other, on all ranks."""
        return self._all_gather([output], [input], opts, [output])

    _allgather_base = all_gather_single

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> dist.Work:
        """Gather the ranks' tensors into a list, on all ranks."""
        whole, back = _joined(outputs[0], filled=False)
        return self._all_gather([whole], inputs, opts, outputs[0], back)

    def _all_gather(
        self, wholes: Tensors, parts: Tensors, opts: Any, written: Tensors, back: Callable[[], None] = lambda: None
    ) -> dist.Work:
        for whole, part in zip(wholes, parts, strict=True):
            _check_parts("all_gather", part, whole, self.comm.size)

        def run() -> None:
            for whole, part in zip(wholes, parts, strict=True):
                self.comm.Allgather(self._beside(part, whole), _bytes(whole, self.comm.size))
            back()

        return self._begin("all_gather", opts, run, written)

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> dist.Work:
        """Gather the ranks' tensors into the root's list."""
        (part,), root = inputs, opts.rootRank
        _check("gather", part)
        if self.comm.rank != root:
            return self._begin("gather", opts, lambda: self.comm.Gather(_bytes(part), None, root=root), [])
        whole, back = _joined(outputs[0], filled=False)
        _check_parts("gather", part, whole, self.comm.size)

        def run() -> None:
            self.comm.Gather(self._beside(part, whole), _bytes(whole, self.comm.size), root=root)
            back()

        return self._begin("gather", opts, run, outputs[0])

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> dist.Work:
        """Scatter the root's list, a tensor to each rank."""
        (part,), root = outputs, opts.rootRank
        _check("scatter", part)
        if self.comm.rank != root:
            return self._begin("scatter", opts, lambda: self.comm.Scatter(None, _bytes(part), root=root), outputs)
        whole, _ = _joined(inputs[0], filled=True)
        _check_parts("scatter", part, whole, self.comm.size)

        def run() -> None:
            here = _own_block(part, whole, root)
            given = whole.clone() if _shared(part, whole) and not here else whole
            self.comm.Scatter(_bytes(given, self.comm.size), MPI.IN_PLACE if here else _bytes(part), root=root)

        return self._begin("scatter", opts, run, outputs)

    def _beside(self, part: Tensor, whole: Tensor) -> Any:
        """Describe the part that this rank sends into ``whole``."""
        if _own_block(part, whole, self.comm.rank):
            return MPI.IN_PLACE
        return _bytes(part.clone() if _shared(part, whole) else part)

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_rows: list[int], input_rows: list[int], opts: Any = None
    ) -> dist.Work:
        """Send a block to each rank and receive one from each: equal ones, or of the given rows."""
        sent, received = self._block_bytes(input, input_rows), self._block_bytes(output, output_rows)
        even = not output_rows and not input_rows

        def run() -> None:
            source = input.clone() if _shared(input, output) else input
            if even:
                self.comm.Alltoall(_bytes(source, self.comm.size), _bytes(output, self.comm.size))
            else:
                self.comm.Alltoallv(_blocks(source, sent), _blocks(output, received))

        return self._begin("all_to_all", opts, run, [output])

    alltoall_base = all_to_all_single

    def _block_bytes(self, tensor: Tensor, rows: list[int]) -> list[int]:
        """Return the bytes of each rank's block of a tensor; all the same where no rows are given."""
        _check("all_to_all", tensor)
        size, total = self.comm.size, tensor.numel() * tensor.element_size()
        length = tensor.shape[0] if tensor.dim() else 1
        if not rows and length % size:
            raise ValueError(f"mpi all_to_all: {length} rows cannot be split over {size} ranks: give the split sizes")
        if rows and (len(rows) != size or sum(rows) != length):
            raise ValueError(f"mpi all_to_all: splits {rows} are not {length} rows over {size} ranks")
        return [count * total // max(1, length) for count in rows or [length // size] * size]

    def barrier(self, opts: Any = None) -> dist.Work:
        return self._begin("barrier", opts, self.comm.Barrier, [])

    # Messages

    def send(self, tensors: Tensors, target: int, tag: int = 0) -> dist.Work:
        """Send a tensor to a rank of the group."""
        _check("send", tensors[0])
        request = self._talk.Isend(_bytes(tensors[0]), dest=target, tag=tag)
        return Message("send", request, tensors[0], self._timeout_s)

    def recv(self, tensors: Tensors, source: int, tag: int = 0) -> dist.Work:
        """Receive a tensor from a rank of the group."""
        _check("recv", tensors[0])
        request = self._talk.Irecv(_bytes(tensors[0]), source=source, tag=tag)
        return Message("recv", request, tensors[0], self._timeout_s)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> dist.Work:
        """Receive a tensor from whichever rank sends one; ``source_rank`` of the work names it."""
        return self.recv(tensors, MPI.ANY_SOURCE, tag)


def _reduction(opts: Any) -> Any:
    return dist.ReduceOp.SUM if opts is None else opts.reduceOp


def _wide(tensor: Tensor) -> Tensor:
    """Return the tensor itself, or a copy in fp32 of one in 16 bits, which MPI cannot reduce."""
    return tensor.float() if tensor.dtype in _HALVES else tensor
