"""The writer of StableHLO text: values with their types, constants, and the operations in the syntax of the specification.

https://openxla.org/stablehlo/spec. Shapes are static. int64 becomes i32: what is written here are token ids, positions and masks,
and accelerators have no 64-bit integers worth their time; a constant beyond 32 bits is an error.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

ELEMENTS = {
    torch.float64: "f64", torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16", torch.int64: "i32",
    torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "ui8", torch.bool: "i1",
}  # fmt: skip
FLOATS = ("f64", "f32", "bf16", "f16")
_INFINITIES = {"f64": "0x7FF0000000000000", "f32": "0x7F800000", "bf16": "0x7F80", "f16": "0x7C00"}
_MINUS_INFINITIES = {"f64": "0xFFF0000000000000", "f32": "0xFF800000", "bf16": "0xFF80", "f16": "0xFC00"}
_NANS = {"f64": "0x7FF8000000000000", "f32": "0x7FC00000", "bf16": "0x7FC0", "f16": "0x7E00"}
_FOREIGN = re.compile(r"[^A-Za-z0-9$._-]")  # what no name in MLIR has
_INT32 = (-(2**31), 2**31 - 1)


def element_of(dtype: torch.dtype) -> str:
    """Return StableHLO's name of an element type; raises ``ValueError`` for one that is not converted, complex for one."""
    if dtype not in ELEMENTS:
        raise ValueError(f"{dtype} is not converted: use one of {', '.join(map(str, ELEMENTS))}")
    return ELEMENTS[dtype]


def type_of(shape: Sequence[int], element: str) -> str:
    """Return the type of a tensor as text: ``tensor<2x3xf32>``."""
    return f"tensor<{'x'.join([*map(str, shape), element])}>"


@dataclass(frozen=True)
class Value:
    """An SSA value: its name with the percent sign, its shape, its element type."""

    name: str
    shape: tuple[int, ...]
    element: str

    @property
    def type(self) -> str:
        """Its type as text."""
        return type_of(self.shape, self.element)

    @property
    def rank(self) -> int:
        """How many dimensions it has."""
        return len(self.shape)


def _list(values: Sequence[int]) -> str:
    return f"[{', '.join(map(str, values))}]"


class Writer:
    """Collects the operations of one function. ``begin`` and ``end`` enclose those of one FX node, whose name they get."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._used: set[str] = set()
        self._node, self._part, self._last = "", 0, ""

    # Names

    def unique(self, name: str) -> str:
        """Return ``%name`` in the letters of MLIR, with underscores behind it where it is taken."""
        name = _FOREIGN.sub("_", name)
        if name[:1].isdigit():
            name = f"_{name}"
        while name in self._used:
            name += "_"
        self._used.add(name)
        return f"%{name}"

    def begin(self, node: str) -> None:
        """Start the operations of a node: ``%node.1``, ``%node.2`` ... until the last one is named by ``end``."""
        self._node, self._part, self._last = node, 0, ""

    def end(self, value: Value) -> Value:
        """Give the node's name to its last operation, where that made ``value``; else the node is another name of ``value``."""
        if value.name != self._last:
            return value
        final = self.unique(self._node)
        self.lines[-1] = final + self.lines[-1][len(value.name) :]
        return Value(final, value.shape, value.element)

    def line(self, text: str, shape: Sequence[int], element: str) -> Value:
        """Write ``%name = text`` and return its value."""
        self._part += 1
        self._last = self.unique(f"{self._node}.{self._part}")
        self.lines.append(f"{self._last} = {text}")
        return Value(self._last, tuple(shape), element)

    # Constants

    def splat(self, value: float | int | bool, shape: Sequence[int], element: str) -> Value:
        """Write a tensor whose elements are all ``value``."""
        return self.line(
            f"stablehlo.constant dense<{literal(value, element)}> : {type_of(shape, element)}", shape, element
        )

    def dense(self, tensor: torch.Tensor) -> Value:
        """Write a constant tensor: its bytes as hexadecimal digits, which is exact and written at the speed of memory."""
        element = element_of(tensor.dtype)
        tensor = tensor.detach().cpu().contiguous()
        if tensor.numel() and bool((tensor == tensor.reshape(-1)[0]).all()):
            return self.splat(tensor.reshape(-1)[0].item(), tensor.shape, element)
        if tensor.dtype is torch.bool:  # one bit each in MLIR: as bytes, compared with zero
            number = self.dense(tensor.to(torch.uint8))
            return self.compare("NE", number, self.splat(0, number.shape, number.element))
        if tensor.dtype is torch.int64:
            if tensor.numel() and not _INT32[0] <= int(tensor.min()) <= int(tensor.max()) <= _INT32[1]:
                raise ValueError(f"a constant of node {self._node} has values beyond 32 bits, which i32 cannot hold")
            tensor = tensor.to(torch.int32)
        digits = tensor.reshape(-1).view(torch.uint8).numpy().tobytes().hex().upper()
        text = f'stablehlo.constant dense<"0x{digits}"> : {type_of(tensor.shape, element)}' if digits else (
            f"stablehlo.constant dense<> : {type_of(tensor.shape, element)}"
        )  # fmt: skip
        return self.line(text, tensor.shape, element)

    # Operations

    def unary(self, name: str, x: Value) -> Value:
        """Write an operation on each element that keeps the type."""
        return self.line(f"stablehlo.{name} {x.name} : {x.type}", x.shape, x.element)

    def binary(self, name: str, x: Value, y: Value) -> Value:
        """Write an operation on pairs of elements of two tensors of one type."""
        return self.line(f"stablehlo.{name} {x.name}, {y.name} : {x.type}", x.shape, x.element)

    def compare(self, direction: str, x: Value, y: Value) -> Value:
        """Write a comparison, EQ NE LT LE GT GE; bool is compared as unsigned."""
        kind = "FLOAT" if x.element in FLOATS else "UNSIGNED" if x.element in ("i1", "ui8") else "SIGNED"
        result = type_of(x.shape, "i1")
        return self.line(
            f"stablehlo.compare {direction}, {x.name}, {y.name}, {kind} : ({x.type}, {y.type}) -> {result}",
            x.shape,
            "i1",
        )

    def select(self, condition: Value, yes: Value, no: Value) -> Value:
        """Write ``condition ? yes : no`` for each element."""
        return self.line(
            f"stablehlo.select {condition.name}, {yes.name}, {no.name} : {condition.type}, {yes.type}",
            yes.shape,
            yes.element,
        )

    def convert(self, x: Value, element: str) -> Value:
        """Convert the elements; nothing is written where they are of the type already."""
        if x.element == element:
            return x
        if element == "i1":  # torch: whatever is not zero is true
            return self.compare("NE", x, self.splat(0, x.shape, x.element))
        return self._shaped("convert", x, x.shape, element)

    def _shaped(self, name: str, x: Value, shape: Sequence[int], element: str = "", options: str = "") -> Value:
        element = element or x.element
        return self.line(
            f"stablehlo.{name} {x.name}{options} : ({x.type}) -> {type_of(shape, element)}", shape, element
        )

    def reshape(self, x: Value, shape: Sequence[int]) -> Value:
        """Give other sizes to the same elements in the same order."""
        return x if tuple(shape) == x.shape else self._shaped("reshape", x, shape)

    def transpose(self, x: Value, dims: Sequence[int]) -> Value:
        """Reorder dimensions: the i-th of the result is ``dims[i]`` of ``x``."""
        if list(dims) == list(range(x.rank)):
            return x
        return self._shaped("transpose", x, [x.shape[dim] for dim in dims], options=f", dims = {_list(dims)}")

    def spread(self, x: Value, shape: Sequence[int], dims: Sequence[int]) -> Value:
        """Broadcast; the i-th dimension of ``x`` is ``dims[i]`` of the result."""
        if tuple(shape) == x.shape and list(dims) == list(range(x.rank)):
            return x
        return self._shaped("broadcast_in_dim", x, shape, options=f", dims = {_list(dims)}")

    def broadcast(self, x: Value, shape: Sequence[int]) -> Value:
        """Broadcast as torch does: dimensions are aligned at the end."""
        return self.spread(x, shape, range(len(shape) - x.rank, len(shape)))

    def slice(self, x: Value, bounds: Sequence[tuple[int, int, int]]) -> Value:
        """Cut out (start, end, step) of each dimension."""
        shape = [max(0, -(-(end - start) // step)) for start, end, step in bounds]
        if tuple(shape) == x.shape and all(step == 1 for _, _, step in bounds):
            return x
        ranges = ", ".join(f"{start}:{end}" + (f":{step}" if step != 1 else "") for start, end, step in bounds)
        return self._shaped("slice", x, shape, options=f" [{ranges}]")

    def concatenate(self, values: Sequence[Value], dim: int) -> Value:
        """Join tensors of one element type along ``dim``."""
        if len(values) == 1:
            return values[0]
        shape = list(values[0].shape)
        shape[dim] = sum(value.shape[dim] for value in values)
        names, types = ", ".join(value.name for value in values), ", ".join(value.type for value in values)
        element = values[0].element
        return self.line(
            f"stablehlo.concatenate {names}, dim = {dim} : ({types}) -> {type_of(shape, element)}", shape, element
        )

    def pad(self, x: Value, fill: Value, low: Sequence[int], high: Sequence[int]) -> Value:
        """Put ``fill`` around ``x``."""
        shape = [a + size + b for a, size, b in zip(low, x.shape, high, strict=True)]
        options = f"low = {_list(low)}, high = {_list(high)}, interior = {_list([0] * x.rank)}"
        return self.line(
            f"stablehlo.pad {x.name}, {fill.name}, {options} : ({x.type}, {fill.type}) -> {type_of(shape, x.element)}",
            shape,
            x.element,
        )

    def iota(self, dim: int, shape: Sequence[int], element: str) -> Value:
        """Count 0, 1, 2 ... along ``dim``."""
        return self.line(f"stablehlo.iota dim = {dim} : {type_of(shape, element)}", shape, element)

    def dot(
        self,
        x: Value,
        y: Value,
        batch: tuple[Sequence[int], Sequence[int]],
        contract: tuple[Sequence[int], Sequence[int]],
    ) -> Value:
        """Write a ``dot_general``: dimensions of batch, then what is left of ``x``, then of ``y``. fp32 is held to fp32."""
        left = [dim for dim in range(x.rank) if dim not in {*batch[0], *contract[0]}]
        right = [dim for dim in range(y.rank) if dim not in {*batch[1], *contract[1]}]
        shape = [x.shape[dim] for dim in (*batch[0], *left)] + [y.shape[dim] for dim in right]
        batching = f"batching_dims = {_list(batch[0])} x {_list(batch[1])}, " if batch[0] else ""
        options = (
            f"{batching}contracting_dims = {_list(contract[0])} x {_list(contract[1])}, precision = [HIGHEST, HIGHEST]"
        )
        return self.line(
            f"stablehlo.dot_general {x.name}, {y.name}, {options} : ({x.type}, {y.type}) -> {type_of(shape, x.element)}",
            shape, x.element,
        )  # fmt: skip

    def reduce(self, kind: str, x: Value, dims: Sequence[int], first: float | int | bool, keep: bool = False) -> Value:
        """Reduce over ``dims`` by ``kind`` (add, maximum, or ...), beginning with ``first``; ``keep`` leaves sizes of 1."""
        dims = sorted(dim % max(1, x.rank) for dim in dims)
        shape = [size for dim, size in enumerate(x.shape) if dim not in dims]
        begin = self.splat(first, (), x.element)
        made = self.line(
            f"stablehlo.reduce({x.name} init: {begin.name}) applies stablehlo.{kind} across dimensions = {_list(dims)} : "
            f"({x.type}, {begin.type}) -> {type_of(shape, x.element)}",
            shape, x.element,
        )  # fmt: skip
        return self.reshape(made, [1 if dim in dims else size for dim, size in enumerate(x.shape)]) if keep else made

    def gather(self, x: Value, index: Value, offset: Sequence[int], dims: Sequence[int], shape: Sequence[int]) -> Value:
        """Take slices of size 1 in ``dims`` and whole in the others; the last dimension of ``index`` says where.

        ``offset`` are the places of the other dimensions in the result.
        """
        sizes = [1 if dim in dims else size for dim, size in enumerate(x.shape)]
        numbers = (
            f"offset_dims = {_list(offset)}, collapsed_slice_dims = {_list(sorted(dims))}, start_index_map = {_list(dims)}, "
            f"index_vector_dim = {index.rank - 1}"
        )
        array = f"array<i64: {', '.join(map(str, sizes))}>"
        return self.line(
            f'"stablehlo.gather"({x.name}, {index.name}) <{{dimension_numbers = #stablehlo.gather<{numbers}>, '
            f"slice_sizes = {array}, indices_are_sorted = false}}> : ({x.type}, {index.type}) -> {type_of(shape, x.element)}",
            shape, x.element,
        )  # fmt: skip

    def scatter(
        self, x: Value, index: Value, updates: Value, window: Sequence[int], dims: Sequence[int], add: bool
    ) -> Value:
        """Put ``updates`` into ``x`` where ``index`` says, the counterpart of ``gather``; ``add``: on top of what is there."""
        numbers = (
            f"update_window_dims = {_list(window)}, inserted_window_dims = {_list(sorted(dims))}, "
            f"scatter_dims_to_operand_dims = {_list(dims)}, index_vector_dim = {index.rank - 1}"
        )
        body = self._body("add" if add else "", x.element)
        return self.line(
            f'"stablehlo.scatter"({x.name}, {index.name}, {updates.name}) <{{scatter_dimension_numbers = #stablehlo.scatter<{numbers}>, '
            f"indices_are_sorted = false, unique_indices = false}}> {body} : "
            f"({x.type}, {index.type}, {updates.type}) -> {x.type}",
            x.shape, x.element,
        )  # fmt: skip

    def all_reduce(self, x: Value, replicas: int) -> Value:
        """Add ``x`` over all replicas."""
        groups = f"dense<[{_list(range(replicas))}]> : tensor<1x{replicas}xi64>"
        body = self._body("add", x.element)
        return self.line(
            f'"stablehlo.all_reduce"({x.name}) <{{replica_groups = {groups}}}> {body} : ({x.type}) -> {x.type}',
            x.shape,
            x.element,
        )

    def _body(self, kind: str, element: str) -> str:
        """Return the region of an operation that combines two scalars: by ``kind``, or the second one where it is empty."""
        scalar = type_of((), element)
        combine = f"%sum = stablehlo.{kind} %old, %new : {scalar} " if kind else ""
        return f"({{ ^bb0(%old: {scalar}, %new: {scalar}): {combine}stablehlo.return {'%sum' if kind else '%new'} : {scalar} }})"

    # What lowerings need all the time

    def fit(self, x: Any, shape: Sequence[int], element: str) -> Value:
        """Return ``x``, a value or a Python number, with this element type and broadcast to this shape."""
        if isinstance(x, Value):
            return self.broadcast(self.convert(x, element), shape)
        return self.splat(x, shape, element)


def literal(value: float | int | bool, element: str) -> str:
    """Return a number as it stands in ``dense<>``: floats in as many digits as are exact, infinities and NaN in bits.

    Raises ``ValueError`` for an integer that the type cannot hold.
    """
    if element == "i1":
        return "true" if value else "false"
    if element in FLOATS:
        number = float(value)
        if math.isnan(number):
            return _NANS[element]
        if math.isinf(number):
            return (_INFINITIES if number > 0 else _MINUS_INFINITIES)[element]
        return f"{number:.17e}" if element == "f64" else f"{number:.9e}"
    whole = int(value)
    if element == "i32" and not _INT32[0] <= whole <= _INT32[1]:
        raise ValueError(f"the constant {whole} is beyond 32 bits, and int64 becomes i32 here: use a smaller one")
    return str(whole)
