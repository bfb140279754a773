"""Tensors as MPI sees them: addresses, counts and datatypes. torch tensors on the CPU only.

Reductions use MPI's own types and operators. MPI has no 16-bit floats: they are reduced as fp32 and rounded once, at
the end. An average is a sum that is divided. What is only moved travels as bytes, whatever its type.

MPI before version 4 counts in 32 bits: longer buffers are reduced and moved in pieces.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI

LIMIT = 2**30  # elements or bytes in one count

_TYPES = {
    torch.float32: MPI.FLOAT, torch.float64: MPI.DOUBLE,
    torch.int8: MPI.INT8_T, torch.uint8: MPI.UINT8_T,
    torch.int16: MPI.INT16_T, torch.int32: MPI.INT32_T, torch.int64: MPI.INT64_T,
}  # fmt: skip
_HALVES = (torch.float16, torch.bfloat16)
# Pairs, because torch's reductions compare as equal but do not hash as equal.
_OPS = (
    (dist.ReduceOp.SUM, MPI.SUM), (dist.ReduceOp.AVG, MPI.SUM), (dist.ReduceOp.PRODUCT, MPI.PROD),
    (dist.ReduceOp.MIN, MPI.MIN), (dist.ReduceOp.MAX, MPI.MAX),
    (dist.ReduceOp.BAND, MPI.BAND), (dist.ReduceOp.BOR, MPI.BOR), (dist.ReduceOp.BXOR, MPI.BXOR),
)  # fmt: skip


def check(what: str, tensor: torch.Tensor) -> None:
    """Raise ``ValueError`` for a tensor that has no single block of memory on the CPU."""
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        raise ValueError(
            f"mpi {what}: a dense CPU tensor is needed, got {tensor.layout} on {tensor.device}: use .cpu()"
        )
    if not tensor.is_contiguous():
        raise ValueError(
            f"mpi {what}: the tensor with shape {tuple(tensor.shape)} and strides {tensor.stride()} is not contiguous: "
            "pass tensor.contiguous()"
        )


def operator(what: str, reduction: Any, tensor: torch.Tensor) -> MPI.Op:
    """Return MPI's operator; ``ValueError`` for a reduction or a type that MPI does not have."""
    found = next((op for known, op in _OPS if reduction == known), None)
    if found is None:
        raise ValueError(f"mpi {what}: reduction {reduction} is not offered: use sum, avg, product, min or max")
    check(what, tensor)
    if tensor.dtype not in _TYPES and tensor.dtype not in _HALVES:
        raise ValueError(f"mpi {what}: MPI cannot reduce {tensor.dtype}: convert the tensor to a number type")
    return found


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor itself, or a copy in fp32 of one in 16 bits, which MPI cannot reduce."""
    return tensor.float() if tensor.dtype in _HALVES else tensor


def settle(reduction: Any, result: torch.Tensor, target: torch.Tensor, size: int) -> None:
    """Finish a reduction: divide the sum of an average (whole numbers towards zero), and round into ``target``."""
    if reduction == dist.ReduceOp.AVG:
        result.div_(size, rounding_mode=None if result.is_floating_point() else "trunc")
    if result is not target:
        target.copy_(result)


def span(tensor: torch.Tensor, start: int = 0, length: int | None = None, parts: int = 1) -> list[Any]:
    """Return MPI's description of ``length`` elements from ``start`` for a reduction; of so many for each of ``parts``."""
    length = tensor.numel() - start if length is None else length
    width = tensor.element_size()
    memory = MPI.memory.fromaddress(tensor.data_ptr() + start * width, length * parts * width)
    return [memory, length, _TYPES[tensor.dtype]]


def pieces(elements: int) -> Iterator[tuple[int, int]]:
    """Yield (start, length) of pieces that MPI can count."""
    for start in range(0, elements, LIMIT):
        yield start, min(LIMIT, elements - start)


def blocks(tensor: torch.Tensor, parts: int = 1) -> list[Any]:
    """Return MPI's description of a tensor that is moved as ``parts`` equal blocks of bytes."""
    total = tensor.numel() * tensor.element_size()
    return [MPI.memory.fromaddress(tensor.data_ptr(), total), total // parts, MPI.BYTE]


def parted(tensor: torch.Tensor, sizes: list[int]) -> list[Any]:
    """Return MPI's description of a tensor that is moved as blocks of the given bytes, one after the other."""
    return [MPI.memory.fromaddress(tensor.data_ptr(), sum(sizes)), (sizes, starts(sizes)), MPI.BYTE]


def starts(sizes: list[int]) -> list[int]:
    """Return where blocks of the given bytes begin that lie one after the other."""
    return [sum(sizes[:index]) for index in range(len(sizes))]


def stretches(tensor: torch.Tensor, start: int = 0, length: int | None = None) -> list[list[Any]]:
    """Return MPI's descriptions of ``length`` bytes of a tensor from ``start``, in pieces that it can count."""
    length = tensor.numel() * tensor.element_size() - start if length is None else length
    address = tensor.data_ptr() + start
    return [[MPI.memory.fromaddress(address + first, size), size, MPI.BYTE] for first, size in pieces(length)] or [
        [MPI.memory.fromaddress(address, 0), 0, MPI.BYTE]
    ]


def inside(part: torch.Tensor, whole: torch.Tensor, rank: int) -> bool:
    """Whether ``part`` is the block of ``rank`` within ``whole``, in memory: what MPI calls in place."""
    return part.data_ptr() == whole.data_ptr() + rank * part.numel() * part.element_size()


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors share memory, which MPI forbids."""
    first, second = one.data_ptr(), other.data_ptr()
    return first < second + other.numel() * other.element_size() and second < first + one.numel() * one.element_size()


def flat(tensors: list[torch.Tensor], filled: bool) -> tuple[torch.Tensor, Callable[[], None]]:
    """Return one tensor for a list of equal ones, and what brings its content back into the list.

    Tensors that lie side by side are used where they are; others go through a copy, ``filled`` with their content.
    """
    first = tensors[0]
    if any(tensor.numel() != first.numel() or tensor.dtype != first.dtype for tensor in tensors):
        raise ValueError(f"mpi: tensors of one size and type are needed, got {[tuple(one.shape) for one in tensors]}")
    storage = first.untyped_storage().data_ptr()
    if all(
        one.untyped_storage().data_ptr() == storage and inside(one, first, index) for index, one in enumerate(tensors)
    ):
        whole = first.as_strided((first.numel() * len(tensors),), (1,))
        return whole, lambda: None
    copy = (
        torch.cat([tensor.reshape(-1) for tensor in tensors])
        if filled
        else first.new_empty(first.numel() * len(tensors))
    )

    def back() -> None:
        for tensor, part in zip(tensors, copy.view(len(tensors), -1), strict=True):
            tensor.view(-1).copy_(part)

    return copy, back
