"""MPI's collectives on torch's tensors: each call returns when the operation is done. See ``mpi_buffers`` for the types.

Every rank of the communicator calls the same function with tensors of the same sizes, checked before. A part that lies
within the whole at the rank's own place is used in place; any other overlap, which MPI forbids, goes through a copy.
"""

from typing import Any

import torch
from mpi4py import MPI

from benchlib.runtime import mpi_buffers as buffers

Tensors = list[torch.Tensor]
Part = tuple[int, int]  # first element and length
Block = tuple[int, int, int]  # rank, first byte and bytes


def all_reduce(comm: MPI.Intracomm, tensor: torch.Tensor, op: MPI.Op, reduction: Any) -> None:
    """Reduce a tensor over the ranks, in place."""
    data = buffers.wide(tensor)
    for piece in buffers.pieces(data.numel()):
        comm.Allreduce(MPI.IN_PLACE, buffers.span(data, *piece), op=op)
    buffers.settle(reduction, data, tensor, comm.size)


def reduce(comm: MPI.Intracomm, tensor: torch.Tensor, op: MPI.Op, reduction: Any, root: int) -> None:
    """Reduce over the ranks into the root's tensor."""
    data = buffers.wide(tensor)
    for piece in buffers.pieces(data.numel()):
        _reduce(comm, data, data, piece, piece, op, root)
    if comm.rank == root:
        buffers.settle(reduction, data, tensor, comm.size)


def _reduce(
    comm: MPI.Intracomm, source: torch.Tensor, target: torch.Tensor, part: Part, into: Part, op: MPI.Op, root: int
) -> None:
    if comm.rank != root:
        comm.Reduce(buffers.span(source, *part), None, op=op, root=root)
    elif source is target:
        comm.Reduce(MPI.IN_PLACE, buffers.span(target, *into), op=op, root=root)
    else:
        comm.Reduce(buffers.span(source, *part), buffers.span(target, *into), op=op, root=root)


def reduce_scatter(comm: MPI.Intracomm, output: torch.Tensor, source: torch.Tensor, op: MPI.Op, reduction: Any) -> None:
    """Reduce ``source`` over the ranks and leave each rank its block in ``output``."""
    data, result = buffers.wide(source), output
    if data.dtype != output.dtype or buffers.overlap(output, source):
        result = torch.empty(output.shape, dtype=data.dtype)
    part = result.numel()
    if part <= buffers.LIMIT:
        comm.Reduce_scatter_block(buffers.span(data, 0, part, comm.size), buffers.span(result), op=op)
    else:
        for root in range(comm.size):
            for start, length in buffers.pieces(part):
                _reduce(comm, data, result, (root * part + start, length), (start, length), op, root)
    buffers.settle(reduction, result, output, comm.size)


def broadcast(comm: MPI.Intracomm, tensor: torch.Tensor, root: int) -> None:
    """Send the root's tensor to all."""
    for piece in buffers.stretches(tensor):
        comm.Bcast(piece, root=root)


def all_gather(comm: MPI.Intracomm, output: torch.Tensor, source: torch.Tensor) -> None:
    """Gather the ranks' tensors, one after the other, in ``output`` of all ranks."""
    here = buffers.inside(source, output, comm.rank)
    sent = source.clone() if buffers.overlap(source, output) and not here else source
    size = _bytes(source)
    if size <= buffers.LIMIT:
        comm.Allgather(MPI.IN_PLACE if here else buffers.blocks(sent), buffers.blocks(output, comm.size))
    else:
        places = [(rank, rank * size, size) for rank in range(comm.size)]
        _exchange(comm, sent, [(rank, 0, size) for rank in range(comm.size)], output, places)


def gather(comm: MPI.Intracomm, output: torch.Tensor | None, source: torch.Tensor, root: int) -> None:
    """Gather the ranks' tensors in the root's ``output``; the others give None."""
    size = _bytes(source)
    if size > buffers.LIMIT:
        sent = source.clone() if output is not None and buffers.overlap(source, output) else source
        places = [(rank, rank * size, size) for rank in range(comm.size)] if output is not None else []
        _exchange(comm, sent, [(root, 0, size)], output, places)
    elif output is None:
        comm.Gather(buffers.blocks(source), None, root=root)
    else:
        here = buffers.inside(source, output, root)
        sent = source.clone() if buffers.overlap(source, output) and not here else source
        comm.Gather(MPI.IN_PLACE if here else buffers.blocks(sent), buffers.blocks(output, comm.size), root=root)


def scatter(comm: MPI.Intracomm, output: torch.Tensor, source: torch.Tensor | None, root: int) -> None:
    """Scatter the blocks of the root's ``source``; the others give None."""
    size = _bytes(output)
    if size > buffers.LIMIT:
        sent = source.clone() if source is not None and buffers.overlap(source, output) else source
        places = [(rank, rank * size, size) for rank in range(comm.size)] if source is not None else []
        _exchange(comm, sent, places, output, [(root, 0, size)])
    elif source is None:
        comm.Scatter(None, buffers.blocks(output), root=root)
    else:
        here = buffers.inside(output, source, root)
        sent = source.clone() if buffers.overlap(output, source) and not here else source
        comm.Scatter(buffers.blocks(sent, comm.size), MPI.IN_PLACE if here else buffers.blocks(output), root=root)


def all_to_all(
    comm: MPI.Intracomm, output: torch.Tensor, source: torch.Tensor, sizes: list[list[int]] | None = None
) -> None:
    """Send a block to each rank and receive one from each.

    ``sizes``: bytes of the blocks sent and received; equal blocks without it. All ranks give sizes or none does.
    """
    if buffers.overlap(source, output):
        source = source.clone()
    longest = max(_bytes(source), _bytes(output))
    # Blocks of different sizes may be long on one rank only: all have to know before they choose the way.
    if sizes is not None:
        longest = comm.allreduce(longest, op=MPI.MAX)
    if longest > buffers.LIMIT:
        sent, received = sizes or [[_bytes(one) // comm.size] * comm.size for one in (source, output)]
        sends = list(zip(range(comm.size), buffers.starts(sent), sent, strict=True))
        _exchange(
            comm, source, sends, output, list(zip(range(comm.size), buffers.starts(received), received, strict=True))
        )
    elif sizes is None:
        comm.Alltoall(buffers.blocks(source, comm.size), buffers.blocks(output, comm.size))
    else:
        comm.Alltoallv(buffers.parted(source, sizes[0]), buffers.parted(output, sizes[1]))


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _exchange(
    comm: MPI.Intracomm,
    source: torch.Tensor | None,
    sends: list[Block],
    target: torch.Tensor | None,
    receives: list[Block],
) -> None:
    """Send and receive blocks (rank, first byte, bytes) in pieces: for buffers that one count cannot tell."""
    requests = [
        comm.Irecv(piece, source=rank)
        for rank, start, length in receives
        if target is not None
        for piece in buffers.stretches(target, start, length)
    ]
    requests += [
        comm.Isend(piece, dest=rank)
        for rank, start, length in sends
        if source is not None
        for piece in buffers.stretches(source, start, length)
    ]
    MPI.Request.Waitall(requests)
