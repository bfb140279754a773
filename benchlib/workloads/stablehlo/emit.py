"""The writer of StableHLO text: values with their types, constants, and operations as the specification writes them.

https://openxla.org/stablehlo/spec. Shapes are static. int64 becomes i32: what is written here are token ids, positions
and masks, and accelerators have no 64-bit integers worth their time; a constant beyond 32 bits is an error.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

FLOATS = {"f64": torch.float64, "f32": torch.float32}
INTEGERS = {"i32": torch.int32, "i16": torch.int16, "i8": torch.int8, "ui8": torch.uint8, "i1": torch.bool}
ELEMENTS = {dtype: name for name, dtype in (FLOATS | INTEGERS).items()} | {torch.int64: "i32"}
_FOREIGN = re.compile(r"[^A-Za-z0-9$._-]")  # what no name in MLIR has


def element_of(dtype: torch.dtype) -> str:
    """Return StableHLO's name of an element type; raises ``ValueError`` for one that is not converted, as complex."""
    if dtype not in ELEMENTS:
        raise ValueError(f"{dtype} is not converted: use one of {', '.join(map(str, ELEMENTS))}")
    return ELEMENTS[dtype]


def type_of(shape: Sequence[int], element: str) -> str:
    """Return the type of a tensor as text: ``tensor<2x3xf32>``."""
    return f"tensor<{'x'.join([*map(str, shape), element])}>"


def fits(least: float, most: float) -> bool:
    """Whether an i32 holds whole numbers of this range."""
    return least >= -(2**31) and most < 2**31


@dataclass(frozen=True)
class Value:
    """An SSA value: its name with the percent sign, its shape, its element type; a number beside it in arithmetic stands for all."""

    writer: "Writer"
    name: str
    shape: tuple[int, ...]
    element: str

    def __add__(self, other: Any) -> "Value":
        return self.writer.op("add", self, other)

    def __sub__(self, other: Any) -> "Value":
        return self.writer.op("subtract", self, other)

    def __mul__(self, other: Any) -> "Value":
        return self.writer.op("multiply", self, other)

    def __truediv__(self, other: Any) -> "Value":
        return self.writer.op("divide", self, other)

    @property
    def type(self) -> str:
        return type_of(self.shape, self.element)

    @property
    def rank(self) -> int:
        return len(self.shape)


def _list(values: Sequence[int]) -> str:
    return f"[{', '.join(map(str, values))}]"


class Writer:
    """Collects the operations of a function. ``begin`` and ``end`` enclose those of an FX node, whose name they get."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._used: set[str] = set()
        self._node, self._part, self._last = "", 0, ""

    # Names

    def unique(self, name: str) -> str:
        """Return ``%name`` in the letters of MLIR, with underscores behind it where it is taken."""
        name = _FOREIGN.sub("_", name)
        name = f"_{name}" if name[:1].isdigit() else name
        while name in self._used:
            name += "_"
        self._used.add(name)
        return f"%{name}"

    def begin(self, node: str) -> None:
        """Start the operations of a node: ``%node.1``, ``%node.2`` ... until the last one is named by ``end``."""
        self._node, self._part, self._last = node, 0, ""

    def end(self, value: Value) -> Value:
        """Give the node's name to its last operation where that made ``value``; else the node is another name of it."""
        if value.name != self._last:
            return value
        final = self.unique(self._node)
        self.lines[-1] = final + self.lines[-1][len(value.name) :]
        return Value(self, final, value.shape, value.element)

    def line(self, text: str, shape: Sequence[int], element: str) -> Value:
        """Write ``%name = text`` and return its value."""
        self._part += 1
        self._last = self.unique(f"{self._node}.{self._part}")
        self.lines.append(f"{self._last} = {text}")
        return Value(self, self._last, tuple(shape), element)

    def typed(self, text: str, shape: Sequence[int], element: str, *operands: Value) -> Value:
        """Write ``%name = text : (types of the operands) -> type``."""
        types = ", ".join(value.type for value in operands)
        return self.line(f"{text} : ({types}) -> {type_of(shape, element)}", shape, element)

    # Constants

    def splat(self, value: float | int | bool, shape: Sequence[int], element: str) -> Value:
        """Write a tensor whose elements are all ``value``."""
        return self._constant(literal(value, element), shape, element)

    def _constant(self, text: str, shape: Sequence[int], element: str) -> Value:
        return self.line(f"stablehlo.constant dense<{text}> : {type_of(shape, element)}", shape, element)

    def dense(self, tensor: torch.Tensor) -> Value:
        """Write a constant tensor: its bytes as hexadecimal digits, which is exact and fast."""
        element = element_of(tensor.dtype)
        tensor = tensor.detach().cpu().contiguous()
        if tensor.numel() and bool((tensor == tensor.reshape(-1)[0]).all()):
            return self.splat(tensor.reshape(-1)[0].item(), tensor.shape, element)
        if tensor.dtype is torch.bool:  # one bit each in MLIR: as bytes, compared with zero
            number = self.dense(tensor.to(torch.uint8))
            return self.compare("NE", number, self.splat(0, number.shape, number.element))
        if tensor.dtype is torch.int64:
            if tensor.numel() and not fits(int(tensor.min()), int(tensor.max())):
                raise ValueError(f"a constant of node {self._node} has values beyond 32 bits, which i32 cannot hold")
            tensor = tensor.to(torch.int32)
        digits = tensor.reshape(-1).view(torch.uint8).numpy().tobytes().hex().upper()
        return self._constant(f'"0x{digits}"' if digits else "", tensor.shape, element)

    # Operations

    def op(self, name: str, x: Value, *others: Any) -> Value:
        """Write an operation by element of tensors of one type, which its result has too; a number stands for all."""
        names = ", ".join([x.name, *(self.fit(other, x.shape, x.element).name for other in others)])
        return self.line(f"stablehlo.{name} {names} : {x.type}", x.shape, x.element)

    def compare(self, direction: str, x: Value, y: Value) -> Value:
        """Write a comparison, EQ NE LT LE GT GE; bool is compared as unsigned."""
        kind = "FLOAT" if x.element in FLOATS else "UNSIGNED" if x.element in ("i1", "ui8") else "SIGNED"
        return self.typed(f"stablehlo.compare {direction}, {x.name}, {y.name}, {kind}", x.shape, "i1", x, y)

    def select(self, condition: Value, yes: Value, no: Value) -> Value:
        """Write ``condition ? yes : no`` for each element."""
        names, types = f"{condition.name}, {yes.name}, {no.name}", f"{condition.type}, {yes.type}"
        return self.line(f"stablehlo.select {names} : {types}", yes.shape, yes.element)

    def convert(self, x: Value, element: str) -> Value:
        """Convert the elements; nothing is written where they are of the type already."""
        if x.element == element:
            return x
        if element == "i1":  # torch: whatever is not zero is true
            return self.compare("NE", x, self.splat(0, x.shape, x.element))
        return self.typed(f"stablehlo.convert {x.name}", x.shape, element, x)

    def _shaped(self, name: str, x: Value, shape: Sequence[int], options: str = "") -> Value:
        return self.typed(f"stablehlo.{name} {x.name}{options}", shape, x.element, x)

    def reshape(self, x: Value, shape: Sequence[int]) -> Value:
        """Give other sizes to the same elements in the same order."""
        return x if tuple(shape) == x.shape else self._shaped("reshape", x, shape)

    def transpose(self, x: Value, dims: Sequence[int]) -> Value:
        """Reorder dimensions: the i-th of the result is ``dims[i]`` of ``x``."""
        if list(dims) == list(range(x.rank)):
            return x
        return self._shaped("transpose", x, [x.shape[dim] for dim in dims], f", dims = {_list(dims)}")

    def spread(self, x: Value, shape: Sequence[int], dims: Sequence[int]) -> Value:
        """Broadcast; the i-th dimension of ``x`` is ``dims[i]`` of the result."""
        if tuple(shape) == x.shape and list(dims) == list(range(x.rank)):
            return x
        return self._shaped("broadcast_in_dim", x, shape, f", dims = {_list(dims)}")

    def broadcast(self, x: Value, shape: Sequence[int]) -> Value:
        """Broadcast as torch does: dimensions are aligned at the end."""
        return self.spread(x, shape, range(len(shape) - x.rank, len(shape)))

    def slice(self, x: Value, bounds: Sequence[tuple[int, int, int]]) -> Value:
        """Cut out (start, end, step) of each dimension."""
        shape = [max(0, -(-(end - start) // step)) for start, end, step in bounds]
        if tuple(shape) == x.shape and all(step == 1 for _, _, step in bounds):
            return x
        ranges = ", ".join(f"{start}:{end}" + (f":{step}" if step != 1 else "") for start, end, step in bounds)
        return self._shaped("slice", x, shape, f" [{ranges}]")

    def concatenate(self, values: Sequence[Value], dim: int) -> Value:
        """Join tensors of one element type along ``dim``."""
        if len(values) == 1:
            return values[0]
        shape = list(values[0].shape)
        shape[dim] = sum(value.shape[dim] for value in values)
        names = ", ".join(value.name for value in values)
        return self.typed(f"stablehlo.concatenate {names}, dim = {dim}", shape, values[0].element, *values)

    def iota(self, dim: int, shape: Sequence[int], element: str) -> Value:
        """Count 0, 1, 2 ... along ``dim``."""
        return self.line(f"stablehlo.iota dim = {dim} : {type_of(shape, element)}", shape, element)

    def dot(self, x: Value, y: Value, over: tuple[int, int], batch: Sequence[int] = ()) -> Value:
        """Write the sum of products over a dimension of each; the result has those of ``batch``, of ``x``, of ``y``.

        fp32 is held to fp32.
        """
        left = [size for dim, size in enumerate(x.shape) if dim not in {*batch, over[0]}]
        right = [size for dim, size in enumerate(y.shape) if dim not in {*batch, over[1]}]
        batching = f"batching_dims = {_list(batch)} x {_list(batch)}, " if batch else ""
        options = f"{batching}contracting_dims = [{over[0]}] x [{over[1]}], precision = [HIGHEST, HIGHEST]"
        shape = [*(x.shape[dim] for dim in batch), *left, *right]
        return self.typed(f"stablehlo.dot_general {x.name}, {y.name}, {options}", shape, x.element, x, y)

    def reduce(self, kind: str, x: Value, dims: Sequence[int], first: float | int | bool) -> Value:
        """Reduce over ``dims`` by ``kind`` (add, maximum, or ...), beginning with ``first``."""
        dims = sorted(dim % max(1, x.rank) for dim in dims)
        begin, shape = self.splat(first, (), x.element), [size for dim, size in enumerate(x.shape) if dim not in dims]
        how = f"init: {begin.name}) applies stablehlo.{kind} across dimensions = {_list(dims)}"
        return self.typed(f"stablehlo.reduce({x.name} {how}", shape, x.element, x, begin)

    def gather(self, x: Value, index: Value, offset: Sequence[int], dims: Sequence[int], shape: Sequence[int]) -> Value:
        """Take slices of size 1 in ``dims`` and whole in the others; the last dimension of ``index`` says where.

        ``offset`` are the places of the other dimensions in the result.
        """
        sizes = ", ".join("1" if dim in dims else str(size) for dim, size in enumerate(x.shape))
        numbers = f"offset_dims = {_list(offset)}, collapsed_slice_dims = {_list(sorted(dims))}, "
        numbers += f"start_index_map = {_list(dims)}, index_vector_dim = {index.rank - 1}"
        options = f"dimension_numbers = #stablehlo.gather<{numbers}>, slice_sizes = array<i64: {sizes}>, "
        options += "indices_are_sorted = false"
        return self.typed(f'"stablehlo.gather"({x.name}, {index.name}) <{{{options}}}>', shape, x.element, x, index)

    def scatter(
        self, x: Value, index: Value, updates: Value, window: Sequence[int], dims: Sequence[int], add: bool
    ) -> Value:
        """Put ``updates`` into ``x`` where ``index`` says, as ``gather`` takes; ``add``: on top of what is there."""
        numbers = f"update_window_dims = {_list(window)}, inserted_window_dims = {_list(sorted(dims))}, "
        numbers += f"scatter_dims_to_operand_dims = {_list(dims)}, index_vector_dim = {index.rank - 1}"
        options = f"scatter_dimension_numbers = #stablehlo.scatter<{numbers}>, "
        options += "indices_are_sorted = false, unique_indices = false"
        head = f'"stablehlo.scatter"({x.name}, {index.name}, {updates.name}) <{{{options}}}>'
        body = self._body("add" if add else "", x.element)
        return self.typed(f"{head} {body}", x.shape, x.element, x, index, updates)

    def all_reduce(self, x: Value, replicas: int) -> Value:
        """Add ``x`` over all replicas."""
        groups = f"dense<[{_list(range(replicas))}]> : tensor<1x{replicas}xi64>"
        head = f'"stablehlo.all_reduce"({x.name}) <{{replica_groups = {groups}}}>'
        return self.typed(f"{head} {self._body('add', x.element)}", x.shape, x.element, x)

    def _body(self, kind: str, element: str) -> str:
        """Return the region of an operation that combines two scalars: by ``kind``, or the second where it is empty."""
        scalar = type_of((), element)
        combine = f"%sum = stablehlo.{kind} %old, %new : {scalar} " if kind else ""
        result = f"stablehlo.return {'%sum' if kind else '%new'} : {scalar}"
        return f"({{ ^bb0(%old: {scalar}, %new: {scalar}): {combine}{result} }})"

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
    if element not in FLOATS:
        if element == "i32" and not fits(int(value), int(value)):
            raise ValueError(f"the constant {value} is beyond 32 bits, and int64 becomes i32 here: use a smaller one")
        return str(int(value))
    if math.isfinite(value):
        return f"{value:.17e}" if element == "f64" else f"{value:.9e}"
    bits = torch.tensor([value], dtype=FLOATS[element]).view(torch.uint8).tolist()
    return f"0x{bytes(reversed(bits)).hex().upper()}"
