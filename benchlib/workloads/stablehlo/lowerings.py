"""The table of lowerings: each core ATen operation as StableHLO, by one function ``(writer, node, *arguments) -> Value``.

Arguments are those of the ATen operation: tensors are ``Value``, lists and numbers stay as they are. The result must have the shape and type
of torch's own (``out``), which ``convert`` asserts after each node. Norms, softmax and GELU of 16-bit numbers are computed
in fp32 and rounded once, as torch does.

To add an operation: a function with ``@lowers("aten.name.overload")``.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchlib.workloads.stablehlo.emit import Value, Writer, element_of

Lowering = Callable[..., Any]
LOWERINGS: dict[str, Lowering] = {}

# erf(x) = x P(x^2) / Q(x^2) for |x| <= 4, fp32: the coefficients of Eigen (generic_fast_erf_float), at most 3.1e-7 from erf.
_ERF_P = (-2.72614225801306e-10, 2.77068142495902e-08, -2.10102402082508e-06, -5.69250639462346e-05,
          -7.34990630326855e-04, -2.95459980854025e-03, -1.60960333262415e-02)  # fmt: skip
_ERF_Q = (
    -1.45660718464996e-05,
    -2.13374055278905e-04,
    -1.68282697438203e-03,
    -7.37332916720468e-03,
    -1.42647390514189e-02,
)


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
    if dims is None or (not isinstance(dims, int) and not dims):
        return list(range(x.rank))
    return [_dim(dim, x) for dim in ([dims] if isinstance(dims, int) else dims)]


# Element by element

_UNARY = {
    "neg": "negate", "exp": "exponential", "log": "log", "sin": "sine", "cos": "cosine", "rsqrt": "rsqrt", "sqrt": "sqrt",
    "sigmoid": "logistic", "tanh": "tanh", "abs": "abs",
}  # fmt: skip
_BINARY = {
    "add": "add",
    "sub": "subtract",
    "mul": "multiply",
    "div": "divide",
    "maximum": "maximum",
    "minimum": "minimum",
}
_LOGIC = {"and": "and", "or": "or", "xor": "xor"}
_COMPARE = ("eq", "ne", "lt", "le", "gt", "ge")


def _unary(kind: str) -> Lowering:
    def lower(w: Writer, node: Any, x: Value) -> Value:
        shape, element = out(node)
        return w.unary(kind, w.fit(x, shape, element))

    return lower


def _binary(kind: str) -> Lowering:
    def lower(w: Writer, node: Any, x: Any, y: Any, alpha: float = 1) -> Value:
        shape, element = out(node)
        right = w.fit(y, shape, element)
        if alpha != 1:  # add and sub: x + alpha y
            right = w.binary("multiply", right, w.splat(alpha, shape, element))
        return w.binary(kind, w.fit(x, shape, element), right)

    return lower


def _logic(kind: str, bits: bool) -> Lowering:
    def lower(w: Writer, node: Any, x: Any, y: Any) -> Value:
        shape, element = out(node)
        return w.binary(kind, *(w.fit(side, shape, element if bits else "i1") for side in (x, y)))

    return lower


def _comparison(direction: str) -> Lowering:
    def lower(w: Writer, node: Any, x: Any, y: Any) -> Value:
        shape, _ = out(node)
        metas = (arg.meta["val"] if isinstance(arg, torch.fx.Node) else arg for arg in node.args)
        element = element_of(torch.result_type(*metas))
        return w.compare(direction, w.fit(x, shape, element), w.fit(y, shape, element))

    return lower


for _name, _kind in _UNARY.items():
    lowers(f"aten.{_name}.default")(_unary(_kind))
for _name, _kind in _BINARY.items():
    lowers(f"aten.{_name}.Tensor", f"aten.{_name}.Scalar", f"aten.{_name}.default")(_binary(_kind))
for _name, _kind in _LOGIC.items():
    lowers(f"aten.bitwise_{_name}.Tensor", f"aten.bitwise_{_name}.Scalar")(_logic(_kind, bits=True))
    lowers(f"aten.logical_{_name}.default")(_logic(_kind, bits=False))
for _name in _COMPARE:
    lowers(f"aten.{_name}.Tensor", f"aten.{_name}.Scalar")(_comparison(_name.upper()))


@lowers("aten.logical_not.default", "aten.bitwise_not.default")
def _not(w: Writer, node: Any, x: Value) -> Value:
    _, element = out(node)
    return w.unary("not", w.convert(x, element))


@lowers("aten.relu.default")
def _relu(w: Writer, node: Any, x: Value) -> Value:
    return w.binary("maximum", x, w.splat(0, x.shape, x.element))


@lowers("aten.clamp.default")
def _clamp(w: Writer, node: Any, x: Value, low: Any = None, high: Any = None) -> Value:
    shape, element = out(node)
    x = w.fit(x, shape, element)
    if low is not None:
        x = w.binary("maximum", x, w.splat(low, shape, element))
    return x if high is None else w.binary("minimum", x, w.splat(high, shape, element))


@lowers("aten.pow.Tensor_Scalar")
def _power(w: Writer, node: Any, x: Value, exponent: float) -> Value:
    shape, element = out(node)
    x = w.fit(x, shape, element)
    if exponent in (2, 3):
        square = w.binary("multiply", x, x)
        return square if exponent == 2 else w.binary("multiply", square, x)
    return w.binary("power", x, w.splat(exponent, shape, element))


@lowers("aten.where.self")
def _where(w: Writer, node: Any, condition: Value, yes: Any, no: Any) -> Value:
    shape, element = out(node)
    return w.select(w.fit(condition, shape, "i1"), w.fit(yes, shape, element), w.fit(no, shape, element))


@lowers("aten.clone.default", "aten.alias.default", "aten.detach.default", "aten.lift_fresh_copy.default")
def _same(w: Writer, node: Any, x: Value, **unused: Any) -> Value:
    return x


@lowers("aten._to_copy.default")
def _to(w: Writer, node: Any, x: Value, **unused: Any) -> Value:
    return w.convert(x, out(node)[1])


@lowers("aten._assert_tensor_metadata.default")
def _asserted(w: Writer, node: Any, *unused: Any, **more: Any) -> None:
    return None  # of torch's own types, which ``convert`` asserts for every node


@lowers("aten.erf.default")
def _erf(w: Writer, node: Any, x: Value) -> Value:
    if x.element == "f64":
        raise ValueError(
            f"erf in node {node.name}: its approximation is one of fp32, not of fp64: convert the model in fp32"
        )
    wide = _wide(w, x)
    shape, element = wide.shape, wide.element
    bound = w.splat(4.0, shape, element)
    inside = w.binary("maximum", w.binary("minimum", wide, bound), w.unary("negate", bound))
    square = w.binary("multiply", inside, inside)

    def polynomial(factors: Sequence[float]) -> Value:
        total = w.splat(factors[0], shape, element)
        for factor in factors[1:]:
            total = w.binary("add", w.binary("multiply", total, square), w.splat(factor, shape, element))
        return total

    top = w.binary("multiply", inside, polynomial(_ERF_P))
    return w.convert(w.binary("divide", top, polynomial(_ERF_Q)), x.element)


@lowers("aten.gelu.default")
def _gelu(w: Writer, node: Any, x: Value, approximate: str = "none") -> Value:
    """x (1 + erf(x / sqrt 2)) / 2, or by tanh where the model asks for that."""
    wide = _wide(w, x)
    shape, element = wide.shape, wide.element
    if approximate == "tanh":
        cube = w.binary("multiply", w.binary("multiply", wide, wide), wide)
        inner = w.binary("add", wide, w.binary("multiply", cube, w.splat(0.044715, shape, element)))
        bent = w.unary("tanh", w.binary("multiply", inner, w.splat(math.sqrt(2 / math.pi), shape, element)))
    else:
        bent = _erf(w, node, w.binary("multiply", wide, w.splat(math.sqrt(0.5), shape, element)))
    half = w.binary("multiply", wide, w.splat(0.5, shape, element))
    return w.convert(w.binary("multiply", half, w.binary("add", bent, w.splat(1.0, shape, element))), x.element)


# Making tensors


@lowers("aten.full.default", "aten.scalar_tensor.default")
def _full(w: Writer, node: Any, *arguments: Any, **unused: Any) -> Value:
    return w.splat(arguments[-1], *out(node))


@lowers("aten.full_like.default")
def _full_like(w: Writer, node: Any, x: Value, value: float, **unused: Any) -> Value:
    return w.splat(value, *out(node))


@lowers("aten.arange.start_step")
def _arange(w: Writer, node: Any, start: float, end: float, step: float = 1, **unused: Any) -> Value:
    shape, element = out(node)
    count = w.iota(0, shape, element)
    if step != 1:
        count = w.binary("multiply", count, w.splat(step, shape, element))
    return w.binary("add", count, w.splat(start, shape, element)) if start else count


# Shape


@lowers("aten.view.default", "aten.reshape.default", "aten._unsafe_view.default", "aten.unsqueeze.default",
        "aten.squeeze.dims", "aten.squeeze.dim", "aten.squeeze.default")  # fmt: skip
def _reshape(w: Writer, node: Any, x: Value, *unused: Any) -> Value:
    return w.reshape(x, out(node)[0])


@lowers("aten.permute.default")
def _permute(w: Writer, node: Any, x: Value, dims: Sequence[int]) -> Value:
    return w.transpose(x, _dims(dims, x))


@lowers("aten.expand.default")
def _expand(w: Writer, node: Any, x: Value, *unused: Any, **more: Any) -> Value:
    return w.broadcast(x, out(node)[0])


def _whole(x: Value) -> list[tuple[int, int, int]]:
    return [(0, size, 1) for size in x.shape]


def _bound(value: int | None, size: int, default: int) -> int:
    if value is None:
        return default
    return min(max(value + size if value < 0 else value, 0), size)


@lowers("aten.slice.Tensor")
def _slice(
    w: Writer, node: Any, x: Value, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Value:
    bounds, dim = _whole(x), _dim(dim, x)
    size = x.shape[dim]
    first = _bound(start, size, 0)
    bounds[dim] = (first, max(first, _bound(end, size, size)), step)
    return w.slice(x, bounds)


@lowers("aten.select.int")
def _select(w: Writer, node: Any, x: Value, dim: int, index: int) -> Value:
    bounds, dim = _whole(x), _dim(dim, x)
    place = index % x.shape[dim]
    bounds[dim] = (place, place + 1, 1)
    return w.reshape(w.slice(x, bounds), out(node)[0])


@lowers("aten.slice_scatter.default")
def _slice_scatter(
    w: Writer,
    node: Any,
    x: Value,
    part: Value,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Value:
    if step != 1:
        raise ValueError(f"slice_scatter in node {node.name} with step {step}: only step 1 is converted")
    dim = _dim(dim, x)
    size = x.shape[dim]
    first = _bound(start, size, 0)
    last = first + part.shape[dim]
    before, after = _whole(x), _whole(x)
    before[dim], after[dim] = (0, first, 1), (last, size, 1)
    parts = [w.slice(x, before), part, w.slice(x, after)]
    return w.concatenate([piece for piece in parts if piece.shape[dim]], dim)


@lowers("aten.split_with_sizes.default")
def _split(w: Writer, node: Any, x: Value, sizes: Sequence[int], dim: int = 0) -> list[Value]:
    parts, begin, dim = [], 0, _dim(dim, x)
    for size in sizes:
        bounds = _whole(x)
        bounds[dim] = (begin, begin + size, 1)
        parts.append(w.slice(x, bounds))
        begin += size
    return parts


@lowers("aten.cat.default")
def _cat(w: Writer, node: Any, values: Sequence[Value], dim: int = 0) -> Value:
    _, element = out(node)
    kept = [w.convert(value, element) for value in values if value.shape != (0,)]
    return w.concatenate(kept, _dim(dim, kept[0]))


@lowers("aten.constant_pad_nd.default")
def _pad(w: Writer, node: Any, x: Value, amounts: Sequence[int], value: float = 0) -> Value:
    low, high = [0] * x.rank, [0] * x.rank
    for place in range(len(amounts) // 2):  # pairs, the last dimension first
        low[-1 - place], high[-1 - place] = amounts[2 * place], amounts[2 * place + 1]
    return w.pad(x, w.splat(value, (), x.element), low, high)


# Products


@lowers("aten.mm.default")
def _mm(w: Writer, node: Any, x: Value, y: Value) -> Value:
    return w.dot(x, y, ((), ()), ((1,), (0,)))


@lowers("aten.bmm.default")
def _bmm(w: Writer, node: Any, x: Value, y: Value) -> Value:
    return w.dot(x, y, ((0,), (0,)), ((2,), (1,)))


@lowers("aten.addmm.default")
def _addmm(w: Writer, node: Any, bias: Value, x: Value, y: Value, beta: float = 1, alpha: float = 1) -> Value:
    shape, element = out(node)
    made, offset = _mm(w, node, x, y), w.fit(bias, shape, element)
    if alpha != 1:
        made = w.binary("multiply", made, w.splat(alpha, shape, element))
    if beta != 1:
        offset = w.binary("multiply", offset, w.splat(beta, shape, element))
    return w.binary("add", made, offset)


# Reductions


@lowers("aten.sum.dim_IntList", "aten.sum.default")
def _sum(w: Writer, node: Any, x: Value, dims: Any = None, keep: bool = False, **unused: Any) -> Value:
    shape, element = out(node)
    wide = _wide(w, w.convert(x, element))
    return w.reshape(w.convert(w.reduce("add", wide, _dims(dims, x), 0), element), shape)


@lowers("aten.mean.dim", "aten.mean.default")
def _mean(w: Writer, node: Any, x: Value, dims: Any = None, keep: bool = False, **unused: Any) -> Value:
    shape, element = out(node)
    over = _dims(dims, x)
    total = w.reduce("add", _wide(w, w.convert(x, element)), over, 0)
    count = math.prod(x.shape[dim] for dim in over)
    return w.reshape(w.convert(w.binary("divide", total, w.splat(count, total.shape, total.element)), element), shape)


@lowers("aten.cumsum.default")
def _cumsum(w: Writer, node: Any, x: Value, dim: int, **unused: Any) -> Value:
    """Sum over a triangle: the square of the size in operations, for positions and masks; every compiler knows its parts."""
    _, element = out(node)
    at = _dim(dim, x)
    wide = _wide(w, w.convert(x, element))
    square = [*wide.shape[: at + 1], wide.shape[at], *wide.shape[at + 1 :]]  # result, then what is summed
    spread = w.spread(wide, square, [place for place in range(len(square)) if place != at])
    earlier = w.compare("GE", w.iota(at, square, "i32"), w.iota(at + 1, square, "i32"))
    kept = w.select(earlier, spread, w.splat(0, square, wide.element))
    return w.convert(w.reduce("add", kept, [at + 1], 0), element)


@lowers("aten.amax.default")
def _amax(w: Writer, node: Any, x: Value, dims: Any = None, keep: bool = False) -> Value:
    return w.reshape(w.reduce("maximum", x, _dims(dims, x), -math.inf), out(node)[0])


@lowers("aten.any.dim", "aten.any.default", "aten.any.dims")
def _any(w: Writer, node: Any, x: Value, dims: Any = None, keep: bool = False) -> Value:
    return w.reshape(w.reduce("or", w.convert(x, "i1"), _dims(dims, x), False), out(node)[0])


def _kept(x: Value, dims: Sequence[int]) -> list[int]:
    return [dim for dim in range(x.rank) if dim not in dims]


def _over(w: Writer, kind: str, x: Value, dims: Sequence[int], first: float) -> Value:
    """Reduce over ``dims`` and broadcast back to the shape of ``x``."""
    return w.spread(w.reduce(kind, x, dims, first), x.shape, _kept(x, dims))


def _shifted(w: Writer, x: Value, dim: int) -> Value:
    return w.binary("subtract", x, _over(w, "maximum", x, [dim], -math.inf))


@lowers("aten._softmax.default")
def _softmax(w: Writer, node: Any, x: Value, dim: int, half_to_float: bool = False) -> Value:
    wide = _wide(w, x)
    powers = w.unary("exponential", _shifted(w, wide, _dim(dim, x)))
    made = w.binary("divide", powers, _over(w, "add", powers, [_dim(dim, x)], 0))
    return w.convert(made, out(node)[1])


@lowers("aten._log_softmax.default")
def _log_softmax(w: Writer, node: Any, x: Value, dim: int, half_to_float: bool = False) -> Value:
    wide, at = _shifted(w, _wide(w, x), _dim(dim, x)), _dim(dim, x)
    total = w.unary("log", w.reduce("add", w.unary("exponential", wide), [at], 0))
    made = w.binary("subtract", wide, w.spread(total, wide.shape, _kept(wide, [at])))
    return w.convert(made, out(node)[1])


@lowers("aten.native_layer_norm.default")
def _layer_norm(
    w: Writer, node: Any, x: Value, sizes: Sequence[int], weight: Value | None, bias: Value | None, eps: float
) -> list[Value]:
    """Return the norm, and mean and 1 / deviation with the reduced sizes kept, as torch does."""
    dims = list(range(x.rank - len(sizes), x.rank))
    wide = _wide(w, x)
    count = math.prod(sizes)

    def mean(values: Value) -> Value:
        total = w.reduce("add", values, dims, 0)
        return w.binary("divide", total, w.splat(count, total.shape, total.element))

    def back(values: Value) -> Value:
        return w.spread(values, x.shape, _kept(x, dims))

    middle = mean(wide)
    centred = w.binary("subtract", wide, back(middle))
    variance = mean(w.binary("multiply", centred, centred))
    scale = w.unary("rsqrt", w.binary("add", variance, w.splat(eps, variance.shape, variance.element)))
    made = w.binary("multiply", centred, back(scale))
    for kind, factor in (("multiply", weight), ("add", bias)):
        if factor is not None:
            made = w.binary(kind, made, w.spread(w.convert(factor, wide.element), x.shape, dims))
    metas = node.meta["val"]
    ends = [
        w.reshape(w.convert(value, element_of(meta.dtype)), tuple(meta.shape))
        for value, meta in zip((made, middle, scale), metas, strict=True)
    ]
    return ends


# Places


def _places(w: Writer, x: Value, indices: Sequence[Value | None]) -> tuple[Value, list[int], list[int], int]:
    """Return the index vectors of ``x[indices]``, which dimensions they pick, where the others go, and the rank of the picked part."""
    picked = [dim for dim, index in enumerate(indices) if index is not None]
    given = [index for index in indices if index is not None]
    if any(index.element == "i1" for index in given):
        raise ValueError("an index by a bool mask gives a shape that depends on values: static shapes only")
    shape = torch.broadcast_shapes(*(index.shape for index in given))
    parts = []
    for dim, index in zip(picked, given, strict=True):
        place = w.fit(index, shape, "i32")
        negative = w.compare("LT", place, w.splat(0, shape, "i32"))
        place = w.select(negative, w.binary("add", place, w.splat(x.shape[dim], shape, "i32")), place)
        parts.append(w.reshape(place, [*shape, 1]))
    lead = picked[0] if picked == list(range(picked[0], picked[0] + len(picked))) else 0
    left = x.rank - len(picked)
    others = [place for place in range(left + len(shape)) if not lead <= place < lead + len(shape)]
    return w.concatenate(parts, len(shape)), picked, others, len(shape)


@lowers("aten.index.Tensor")
def _index(w: Writer, node: Any, x: Value, indices: Sequence[Value | None]) -> Value:
    places, picked, others, _ = _places(w, x, indices)
    return w.gather(x, places, others, picked, out(node)[0])


@lowers("aten.embedding.default")
def _embedding(w: Writer, node: Any, weight: Value, index: Value, *unused: Any) -> Value:
    return _index(w, node, weight, [index])


@lowers("aten.index_put.default")
def _index_put(
    w: Writer, node: Any, x: Value, indices: Sequence[Value | None], values: Value, accumulate: bool = False
) -> Value:
    places, picked, others, rank = _places(w, x, indices)
    shape: list[int] = [0] * (len(others) + rank)
    rest = [size for dim, size in enumerate(x.shape) if dim not in picked]
    for place, size in zip(others, rest, strict=True):
        shape[place] = size
    chosen = iter(places.shape[:-1])
    shape = [size if place in others else next(chosen) for place, size in enumerate(shape)]
    return w.scatter(x, places, w.fit(values, shape, x.element), others, picked, accumulate)


def _along(w: Writer, x: Value, dim: int, index: Value) -> Value:
    """Return index vectors (..., rank) that count in every dimension but ``dim``, where ``index`` says."""
    at = _dim(dim, x)
    parts = [w.convert(index, "i32") if place == at else w.iota(place, index.shape, "i32") for place in range(x.rank)]
    return w.concatenate([w.reshape(part, [*index.shape, 1]) for part in parts], index.rank)


@lowers("aten.gather.default")
def _gather(w: Writer, node: Any, x: Value, dim: int, index: Value, **unused: Any) -> Value:
    return w.gather(x, _along(w, x, dim, index), [], list(range(x.rank)), index.shape)


@lowers("aten.scatter.value", "aten.scatter.src", "aten.scatter_add.default")
def _scatter(w: Writer, node: Any, x: Value, dim: int, index: Value, values: Any) -> Value:
    if isinstance(values, Value) and values.shape != index.shape:
        values = w.slice(values, [(0, size, 1) for size in index.shape])
    updates = w.fit(values, index.shape, x.element)
    add = "scatter_add" in str(node.target)
    return w.scatter(x, _along(w, x, dim, index), updates, [], list(range(x.rank)), add)
