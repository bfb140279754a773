"""StableHLO text read by the bindings that jaxlib has: parsed, type-checked, counted, and evaluated by the reference interpreter.

The bindings are jax.extend.mlir; no device is opened and torch is not needed. FLOPs are those of dots: 2 x elements of the result x
contracted elements. Temporaries are counted in the order of the text, each from its operation to its last use: what a program
needs that fuses nothing and reuses memory at once.
"""

import functools
import importlib
import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchlib.core.errors import BackendUnavailable, UserError

INSTALL = "pip install -e '.[xla]'"
# jax of this range has what is called here and in benchlib/workloads/stablehlo/pjrt.py; tried with 0.10.2.
OLDEST, BEFORE = (0, 8), (0, 11)
BEFORE_LAYERS = "inputs"  # operations that depend on no weight
DEEPEST = 256  # the parser recurses by nesting and has no limit of its own: deeper text ends the process
LARGEST = 1 << 63  # bytes of a tensor
_TOKENS = re.compile(r'"[^"\\\n]*(?:\\.[^"\\\n]*)*"|//[^\n]*|->|[][(){}<>]')
_PLACE = re.compile(r'"(?:[^"]*)":(\d+):(\d+)')
_LAYER = re.compile(r"^(.*?\.\d+)\.")


class Refused(UserError):
    """Text that is no program: ``line`` and ``column`` from 1, ``reason`` in the parser's words."""

    def __init__(self, name: str, line: int, column: int, reason: str) -> None:
        self.line, self.column, self.reason = line, column, reason
        super().__init__(f"{name}:{line}:{column}: {reason}")


def jax() -> Any:
    """Import jax. Raises ``BackendUnavailable`` where it is lacking or of a version that the kit was not written for."""
    try:
        module = importlib.import_module("jax")
    except ImportError as error:
        raise BackendUnavailable(f"jax cannot be imported ({error}): {INSTALL}") from error
    version = tuple(int(part) for part in module.__version__.split(".")[:2])
    if not OLDEST <= version < BEFORE:
        supported = f"{'.'.join(map(str, OLDEST))} to below {'.'.join(map(str, BEFORE))}"
        raise BackendUnavailable(
            f"jax {module.__version__} is not among the versions that are known here, {supported}: {INSTALL}"
        )
    return module


@functools.cache
def _bindings() -> tuple[Any, Any, Any]:
    """Return (ir, the dialect, a context with the dialects of jax); asking jax for one is the public way to it."""
    context = jax().jit(lambda: 0).lower().compiler_ir("stablehlo").context
    return (
        importlib.import_module("jax.extend.mlir.ir"),
        importlib.import_module("jax.extend.mlir.dialects.stablehlo"),
        context,
    )


def parse(text: str, name: str = "text") -> Any:
    """Return the module of a text after checking all types; raises ``Refused`` with line and column."""
    _refuse_nesting(text, name)
    ir, _, context = _bindings()
    try:
        with context:
            module = ir.Module.parse(text)
            module.operation.verify()
    except ir.MLIRError as error:
        diagnostics = error.error_diagnostics
        where = _PLACE.search(str(diagnostics[0].location)) if diagnostics else None
        line, column = (int(where[1]), int(where[2])) if where else (1, 1)
        reason = diagnostics[0].message if diagnostics else str(error)
        raise Refused(name, line, column, " ".join(reason.split())) from None
    return module


def _refuse_nesting(text: str, name: str) -> None:
    depth = 0
    for token in _TOKENS.finditer(text):
        depth += (token[0] in "([{<") - (token[0] in ")]}>")
        if depth > DEEPEST:
            line = text.count("\n", 0, token.start()) + 1
            raise Refused(name, line, 1, f"nested deeper than {DEEPEST} levels")


@dataclass
class Layer:
    """What a program does for one layer of the model."""

    operations: int = 0
    dot_flops: int = 0
    weight_bytes: int = 0


@dataclass
class Inspection:
    """What a program consists of. ``layers`` need the arguments' names."""

    operations: Counter[str] = field(default_factory=Counter)
    dot_flops: int = 0
    argument_bytes: int = 0
    result_bytes: int = 0
    temporary_bytes: int = 0
    layers: dict[str, Layer] = field(default_factory=dict)


def layer_of(name: str) -> str:
    """Return the layer that a parameter belongs to: its name up to the first number, else its first two parts."""
    name = name.removeprefix("model.")
    match = _LAYER.match(name)
    return match[1] if match else ".".join(name.split(".")[:-1][:2]) or name


def inspect(text: str, names: Sequence[str] = (), roles: Sequence[str] = (), name: str = "text") -> Inspection:
    """Count what a program consists of.

    ``names`` and ``roles`` are those of its arguments, from its manifest: an operation belongs to the layer of its parameter,
    else to the latest layer that its operands come from. Raises ``Refused`` for a text that is no program, ``UserError`` for
    a manifest of another one.
    """
    module = parse(text, name)
    result = Inspection()
    functions = [op for op in module.body.operations if op.operation.name == "func.func"]
    if not functions or not functions[0].regions[0].blocks:
        raise UserError(f"{name} has no function with a body: a program has one, @main")
    block = functions[0].regions[0].blocks[0]
    result.argument_bytes = sum(_bytes(argument.type) for argument in block.arguments)
    if names and len(names) != len(block.arguments):
        raise UserError(
            f"{name} takes {len(block.arguments)} arguments and its manifest has {len(names)}: convert the model again"
        )
    order, at = {BEFORE_LAYERS: 0}, {}
    for argument, label, role in zip(block.arguments, names, roles, strict=False):
        layer = layer_of(label)
        if role == "parameter":
            order.setdefault(layer, len(order))
            result.layers.setdefault(layer, Layer()).weight_bytes += _bytes(argument.type)
        at[argument] = layer if layer in order else BEFORE_LAYERS
    for op in block.operations:
        kind = op.operation.name
        if kind == "func.return":
            result.result_bytes = sum(_bytes(value.type) for value in op.operands)
            continue
        result.operations[kind.removeprefix("stablehlo.")] += 1
        flops = _dot_flops(op) if kind == "stablehlo.dot_general" else 0
        result.dot_flops += flops
        sources = [at.get(value, BEFORE_LAYERS) for value in op.operands]
        layer = max(sources, key=order.__getitem__, default=BEFORE_LAYERS)
        at.update(dict.fromkeys(op.results, layer))
        entry = result.layers.setdefault(layer, Layer())
        entry.operations += 1
        entry.dot_flops += flops
    result.layers = dict(sorted(result.layers.items(), key=lambda item: order[item[0]]))
    result.temporary_bytes = _peak(block)
    return result


def _bytes(kind: Any) -> int:
    ir, _, _ = _bindings()
    try:
        shaped = ir.RankedTensorType(kind)
        size = math.prod(shaped.shape) * max(1, shaped.element_type.width // 8) if shaped.has_static_shape else -1
    except (ValueError, AttributeError):  # no tensor, or one of complex numbers, of indices
        size = -1
    if not 0 <= size < LARGEST:
        raise UserError(
            f"{str(kind)[:80]} cannot be counted: expected a tensor of real numbers with a fixed, possible shape"
        )
    return size


def _dot_flops(op: Any) -> int:
    ir, dialect, _ = _bindings()
    numbers = dialect.DotDimensionNumbers(op.attributes["dot_dimension_numbers"])
    left = ir.RankedTensorType(op.operands[0].type).shape
    result = ir.RankedTensorType(op.results[0].type).shape
    return 2 * math.prod(result) * math.prod(left[dim] for dim in numbers.lhs_contracting_dimensions)


def _peak(block: Any) -> int:
    """Return the most bytes of temporaries alive at once; constants that are splats take none."""
    operations = list(block.operations)
    last: dict[Any, int] = {}
    for place, op in enumerate(operations):
        for value in op.operands:
            last[value] = place
    ends: dict[int, list[int]] = defaultdict(list)
    alive = most = 0
    for place, op in enumerate(operations):
        if op.operation.name != "stablehlo.constant":
            for value in op.results:
                size = _bytes(value.type)
                alive += size
                ends[last.get(value, place)].append(size)
        most = max(most, alive)
        alive -= sum(ends[place])
    return most


def evaluate(module: Any, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Compute a parsed module's results by the reference interpreter."""
    ir, dialect, context = _bindings()
    with context:
        inputs = [
            ir.DenseElementsAttr.get(np.ascontiguousarray(array), type=_element_type(array), shape=array.shape)
            for array in arrays
        ]
        outputs = dialect.eval_module(module, inputs)
        return [
            np.array(ir.DenseElementsAttr(value)).reshape(ir.RankedTensorType(value.type).shape) for value in outputs
        ]


def _element_type(array: np.ndarray) -> Any:
    ir, _, _ = _bindings()
    types = {"float32": ir.F32Type, "float64": ir.F64Type, "float16": ir.F16Type, "bfloat16": ir.BF16Type}
    name = str(array.dtype)
    if name in types:
        return types[name].get()
    return ir.IntegerType.get_signless(1 if name == "bool" else array.dtype.itemsize * 8)
