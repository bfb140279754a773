"""The table of lowerings: each core ATen operation as StableHLO, by a function ``(writer, node, *arguments) -> Value``.

Arguments are those of the ATen operation: tensors are ``Value``, lists and numbers stay as they are. The result must
have the shape and type of torch's own (``out``), which ``convert`` asserts after each node. Norms, softmax and GELU are
plain operations by then, see ``export.PLAIN``; a GELU that was kept whole becomes a custom_call.

To add an operation: a row of ``LOWERINGS``, for all of its overloads.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchlib.workloads.stablehlo.emit import Value, Writer, element_of

Lowering = Callable[..., Any]


def out(node: torch.fx.Node) -> tuple[tuple[int, ...], str]:
    """Return shape and element type that torch gives to the result of a node."""
    value = node.meta["val"]
    return tuple(value.shape), element_of(value.dtype)


def _dim(dim: int, x: Value) -> int:
    return dim % max(1, x.rank)


def _dims(dims: Sequence[int] | None, x: Value) -> list[int]:
    return [_dim(dim, x) for dim in dims or range(x.rank)]


def _unary(kind: str) -> Lowering:
    return lambda w, node, x: w.op(kind, w.fit(x, *out(node)))


def _binary(kind: str) -> Lowering:
    def lower(w: Writer, node: Any, x: Any, y: Any, alpha: float = 1) -> Value:
        left, right = (w.fit(side, *out(node)) for side in (x, y))
        return w.op(kind, left, right if alpha == 1 else right * alpha)  # add and sub: x + alpha y

    return lower


def _comparison(direction: str) -> Lowering:
    def lower(w: Writer, node: Any, x: Any, y: Any) -> Value:
        metas = (arg.meta["val"] if isinstance(arg, torch.fx.Node) else arg for arg in node.args)
        fitted = out(node)[0], element_of(torch.result_type(*metas))
        return w.compare(direction, w.fit(x, *fitted), w.fit(y, *fitted))

    return lower


def _where(w: Writer, node: Any, condition: Value, yes: Any, no: Any) -> Value:
    shape, element = out(node)
    return w.select(w.fit(condition, shape, "i1"), w.fit(yes, shape, element), w.fit(no, shape, element))


def _arange(w: Writer, node: Any, start: float, end: float, step: float = 1, **unused: Any) -> Value:
    shape, element = out(node)
    count = w.iota(0, shape, element)
    count = count if step == 1 else count * step
    return count + start if start else count


def _slice(w: Writer, node: Any, x: Value, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Value:
    first, last, _ = slice(start, end).indices(x.shape[_dim(dim, x)])
    bounds = [(0, size, 1) for size in x.shape]
    bounds[_dim(dim, x)] = (first, max(first, last), step)
    return w.slice(x, bounds)


def _cat(w: Writer, node: Any, values: Sequence[Value], dim: int = 0) -> Value:
    _, element = out(node)
    parts = [w.convert(value, element) for value in values if value.shape != (0,)]
    return w.concatenate(parts, _dim(dim, parts[0]))


def _sum(w: Writer, node: Any, x: Value, dims: Any = None, keep: bool = False, **unused: Any) -> Value:
    shape, element = out(node)
    return w.reshape(w.reduce("add", w.convert(x, element), _dims(dims, x), 0), shape)


def _places(w: Writer, x: Value, indices: Sequence[Value | None]) -> tuple[Value, list[int], list[int]]:
    """Return the index vectors of ``x[indices]``, which dimensions they pick, and where the others go."""
    picked = [dim for dim, index in enumerate(indices) if index is not None]
    present = [index for index in indices if index is not None]
    if any(index.element == "i1" for index in present):
        raise ValueError("an index by a bool mask gives a shape that depends on values: static shapes only")
    shape = torch.broadcast_shapes(*(index.shape for index in present))
    parts = []
    for dim, index in zip(picked, present, strict=True):
        place = w.fit(index, shape, "i32")
        negative = w.compare("LT", place, w.splat(0, shape, "i32"))
        place = w.select(negative, place + x.shape[dim], place)
        parts.append(w.reshape(place, [*shape, 1]))
    lead = picked[0] if picked == list(range(picked[0], picked[0] + len(picked))) else 0
    places = range(x.rank - len(picked) + len(shape))
    others = [place for place in places if not lead <= place < lead + len(shape)]
    return w.concatenate(parts, len(shape)), picked, others


def _index(w: Writer, node: Any, x: Value, indices: Sequence[Value | None]) -> Value:
    places, picked, others = _places(w, x, indices)
    return w.gather(x, places, others, picked, out(node)[0])


def _index_put(
    w: Writer, node: Any, x: Value, indices: Sequence[Value | None], values: Value, accumulate: bool = False
) -> Value:
    places, picked, others = _places(w, x, indices)
    rest, chosen = iter([size for dim, size in enumerate(x.shape) if dim not in picked]), iter(places.shape)
    shape = [next(rest if place in others else chosen) for place in range(len(others) + places.rank - 1)]
    return w.scatter(x, places, w.fit(values, shape, x.element), others, picked, accumulate)


def _gelu(w: Writer, node: Any, x: Value, approximate: str = "none") -> Value:
    text = f'stablehlo.custom_call @gelu({x.name}) {{backend_config = "approximate = {approximate}"}}'
    return w.typed(text, x.shape, x.element, x)


def _amax(w: Writer, node: Any, x: Value, dims: Any = None, keep: bool = False) -> Value:
    return w.reshape(w.reduce("maximum", x, _dims(dims, x), -math.inf), out(node)[0])


_UNARY = {"neg": "negate", "exp": "exponential", "sin": "sine", "cos": "cosine", "sigmoid": "logistic"}
_UNARY |= {name: name for name in ("log", "rsqrt", "sqrt", "tanh", "abs")}
_UNARY |= {"logical_not": "not", "bitwise_not": "not"}
_BINARY = {"add": "add", "sub": "subtract", "mul": "multiply", "div": "divide", "pow": "power"}
_BINARY |= {name: name for name in ("maximum", "minimum")}
_BINARY |= {f"{way}_{name}": name for name in ("and", "or", "xor") for way in ("bitwise", "logical")}
# By operation, whatever the overload; names with blanks between them share a lowering.
_TABLE: dict[str, Lowering] = {
    **{f"aten.{name}": _unary(kind) for name, kind in _UNARY.items()},
    **{f"aten.{name} prims.{name}": _binary(kind) for name, kind in _BINARY.items()},
    **{f"aten.{name}": _comparison(name.upper()) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    "aten.relu": lambda w, node, x: w.op("maximum", x, 0),
    "aten.clone aten.alias aten.detach aten.lift_fresh_copy": lambda w, node, x, **_: x,
    "aten._to_copy prims.convert_element_type": lambda w, node, x, *_, **__: w.convert(x, out(node)[1]),
    "aten._assert_tensor_metadata": lambda *_, **__: None,  # ``convert`` asserts torch's types for every node
    "aten.full aten.scalar_tensor": lambda w, node, *args, **_: w.splat(args[-1], *out(node)),
    "aten.full_like": lambda w, node, x, value, **_: w.splat(value, *out(node)),
    "aten.arange": _arange,
    "aten.view aten.unsqueeze aten.squeeze": lambda w, node, x, *_: w.reshape(x, out(node)[0]),
    "aten.permute": lambda w, node, x, dims: w.transpose(x, _dims(dims, x)),
    "aten.expand": lambda w, node, x, *_, **__: w.broadcast(x, out(node)[0]),
    "prims.broadcast_in_dim": lambda w, node, x, shape, dims: w.spread(x, shape, dims),
    "aten.slice": _slice,
    "aten.cat": _cat,
    "aten.where": _where,
    "aten.mm": lambda w, node, x, y: w.dot(x, y, (1, 0)),
    "aten.bmm": lambda w, node, x, y: w.dot(x, y, (2, 1), batch=[0]),
    "aten.amax": _amax,
    "aten.gelu": _gelu,
    "aten.sum prims.sum": _sum,
    "aten.index": _index,
    "aten.index_put": _index_put,
}
LOWERINGS = {name: lowering for names, lowering in _TABLE.items() for name in names.split()}
