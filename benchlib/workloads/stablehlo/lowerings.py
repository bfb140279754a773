"""The table of lowerings: each core ATen operation as StableHLO, by a function ``(writer, node, *arguments) -> Value``.

Arguments are those of the ATen operation: tensors are ``Value``, lists and numbers stay as they are. The result must
have the shape and type of torch's own (``out``), which ``convert`` asserts after each node. Norms, softmax and GELU are
plain operations by then, see ``export.PLAIN``.

To add an operation: a row of ``_TABLE``, or a function with ``@lowers("aten.name.overload")``.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchlib.workloads.stablehlo.emit import Value, Writer, element_of

Lowering = Callable[..., Any]
LOWERINGS: dict[str, Lowering] = {}

# erf(x) = x P(x^2) / Q(x^2) for |x| <= 4, fp32: the coefficients of Eigen (generic_fast_erf_float), within 3.1e-7.
_ERF_P = [-2.72614225801306e-10, 2.77068142495902e-08, -2.10102402082508e-06, -5.69250639462346e-05]
_ERF_P += [-7.34990630326855e-04, -2.95459980854025e-03, -1.60960333262415e-02]
_ERF_Q = [-1.45660718464996e-05, -2.13374055278905e-04, -1.68282697438203e-03, -7.37332916720468e-03]
_ERF_Q += [-1.42647390514189e-02]


def lowers(*names: str) -> Callable[[Lowering], Lowering]:
    """Enter a function into the table under the names of the operations that it lowers."""

    def enter(function: Lowering) -> Lowering:
        LOWERINGS.update(dict.fromkeys(names, function))
        return function

    return enter


def out(node: torch.fx.Node) -> tuple[tuple[int, ...], str]:
    """Return shape and element type that torch gives to the result of a node."""
    value = node.meta["val"]
    return tuple(value.shape), element_of(value.dtype)


def _wide(w: Writer, x: Value) -> Value:
    return w.convert(x, "f32") if x.element in ("bf16", "f16") else x


def _dim(dim: int, x: Value) -> int:
    return dim % max(1, x.rank)


def _dims(dims: int | Sequence[int] | None, x: Value) -> list[int]:
    dims = [dims] if isinstance(dims, int) else dims or range(x.rank)
    return [_dim(dim, x) for dim in dims]


# Element by element

_UNARY = {"neg": "negate", "exp": "exponential", "sin": "sine", "cos": "cosine", "sigmoid": "logistic"}
_UNARY |= {name: name for name in ("log", "rsqrt", "sqrt", "tanh", "abs")}
_UNARY |= {"logical_not": "not", "bitwise_not": "not"}
_OVERLOADS = (("aten", "Tensor"), ("aten", "Scalar"), ("aten", "default"), ("prims", "default"))
_BINARY = {"add": "add", "sub": "subtract", "mul": "multiply", "div": "divide"}
_BINARY |= {name: name for name in ("maximum", "minimum")}
_BINARY |= {f"{way}_{name}": name for name in ("and", "or", "xor") for way in ("bitwise", "logical")}


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


_TABLE: dict[str, Lowering] = {
    "pow.Tensor_Scalar": lambda w, node, x, exponent: w.op("power", w.fit(x, *out(node)), exponent),
    "relu.default": lambda w, node, x: w.op("maximum", x, 0),
    "clone.default alias.default detach.default lift_fresh_copy.default": lambda w, node, x, **_: x,
    "_assert_tensor_metadata.default": lambda *_, **__: None,  # ``convert`` asserts torch's types for every node
    "full.default scalar_tensor.default": lambda w, node, *args, **_: w.splat(args[-1], *out(node)),
    "full_like.default": lambda w, node, x, value, **_: w.splat(value, *out(node)),
    "view.default unsqueeze.default squeeze.dims": lambda w, node, x, *_: w.reshape(x, out(node)[0]),
    "permute.default": lambda w, node, x, dims: w.transpose(x, _dims(dims, x)),
    "expand.default": lambda w, node, x, *_, **__: w.broadcast(x, out(node)[0]),
    "mm.default": lambda w, node, x, y: w.dot(x, y, (1, 0)),
    "bmm.default": lambda w, node, x, y: w.dot(x, y, (2, 1), batch=[0]),
    "amax.default": lambda w, node, x, dims=None, *_: w.reshape(
        w.reduce("maximum", x, _dims(dims, x), -math.inf), out(node)[0]
    ),
}
for _names, _lowering in _TABLE.items():
    lowers(*(f"aten.{_name}" for _name in _names.split()))(_lowering)
lowers("prims.broadcast_in_dim.default")(lambda w, node, x, shape, dims: w.spread(x, shape, dims))
lowers("aten._to_copy.default", "prims.convert_element_type.default")(
    lambda w, node, x, *_, **__: w.convert(x, out(node)[1])
)
for _name, _kind in _UNARY.items():
    lowers(f"aten.{_name}.default")(_unary(_kind))
for _name, _kind in _BINARY.items():
    lowers(*(f"{_of}.{_name}.{_way}" for _of, _way in _OVERLOADS))(_binary(_kind))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    lowers(f"aten.{_name}.Tensor", f"aten.{_name}.Scalar")(_comparison(_name.upper()))


@lowers("aten.where.self")
def _where(w: Writer, node: Any, condition: Value, yes: Any, no: Any) -> Value:
    shape, element = out(node)
    return w.select(w.fit(condition, shape, "i1"), w.fit(yes, shape, element), w.fit(no, shape, element))


@lowers("aten.erf.default")
def _erf(w: Writer, node: Any, x: Value) -> Value:
    if x.element == "f64":
        raise ValueError(f"erf in node {node.name} is approximated for fp32, not for fp64: convert the model in fp32")
    wide = _wide(w, x)
    bound = w.splat(4.0, wide.shape, wide.element)
    inside = w.op("maximum", w.op("minimum", wide, bound), w.op("negate", bound))

    def polynomial(factors: Sequence[float]) -> Value:
        total = w.splat(factors[0], wide.shape, wide.element)
        for factor in factors[1:]:
            total = total * square + factor
        return total

    square = inside * inside
    return w.convert(inside * polynomial(_ERF_P) / polynomial(_ERF_Q), x.element)


# Making tensors


@lowers("aten.arange.start_step")
def _arange(w: Writer, node: Any, start: float, end: float, step: float = 1, **unused: Any) -> Value:
    shape, element = out(node)
    count = w.iota(0, shape, element)
    count = count if step == 1 else count * step
    return count + start if start else count


# Shape


def _cut(w: Writer, x: Value, dim: int, first: int, last: int, step: int = 1) -> Value:
    bounds = [(0, size, 1) for size in x.shape]
    bounds[_dim(dim, x)] = (first, last, step)
    return w.slice(x, bounds)


@lowers("aten.slice.Tensor")
def _slice(w: Writer, node: Any, x: Value, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Value:
    first, last, _ = slice(start, end).indices(x.shape[_dim(dim, x)])
    return _cut(w, x, dim, first, max(first, last), step)


@lowers("aten.cat.default")
def _cat(w: Writer, node: Any, values: Sequence[Value], dim: int = 0) -> Value:
    _, element = out(node)
    kept = [w.convert(value, element) for value in values if value.shape != (0,)]
    return w.concatenate(kept, _dim(dim, kept[0]))


# Reductions


@lowers("aten.sum.dim_IntList", "prims.sum.default")
def _sum(w: Writer, node: Any, x: Value, dims: Any = None, keep: bool = False, **unused: Any) -> Value:
    shape, element = out(node)
    total = w.reduce("add", _wide(w, w.convert(x, element)), _dims(dims, x), 0)
    return w.reshape(w.convert(total, element), shape)


# Places


def _places(w: Writer, x: Value, indices: Sequence[Value | None]) -> tuple[Value, list[int], list[int]]:
    """Return the index vectors of ``x[indices]``, which dimensions they pick, and where the others go."""
    picked = [dim for dim, index in enumerate(indices) if index is not None]
    given = [index for index in indices if index is not None]
    if any(index.element == "i1" for index in given):
        raise ValueError("an index by a bool mask gives a shape that depends on values: static shapes only")
    shape = torch.broadcast_shapes(*(index.shape for index in given))
    parts = []
    for dim, index in zip(picked, given, strict=True):
        place = w.fit(index, shape, "i32")
        negative = w.compare("LT", place, w.splat(0, shape, "i32"))
        place = w.select(negative, place + x.shape[dim], place)
        parts.append(w.reshape(place, [*shape, 1]))
    lead = picked[0] if picked == list(range(picked[0], picked[0] + len(picked))) else 0
    places = range(x.rank - len(picked) + len(shape))
    others = [place for place in places if not lead <= place < lead + len(shape)]
    return w.concatenate(parts, len(shape)), picked, others


@lowers("aten.index.Tensor")
def _index(w: Writer, node: Any, x: Value, indices: Sequence[Value | None]) -> Value:
    places, picked, others = _places(w, x, indices)
    return w.gather(x, places, others, picked, out(node)[0])


@lowers("aten.index_put.default")
def _index_put(
    w: Writer, node: Any, x: Value, indices: Sequence[Value | None], values: Value, accumulate: bool = False
) -> Value:
    places, picked, others = _places(w, x, indices)
    rest, chosen = iter([size for dim, size in enumerate(x.shape) if dim not in picked]), iter(places.shape)
    shape = [next(rest if place in others else chosen) for place in range(len(others) + places.rank - 1)]
    return w.scatter(x, places, w.fit(values, shape, x.element), others, picked, accumulate)
