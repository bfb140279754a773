"""StableHLO text read by the bindings that jaxlib has: parsed, type-checked, counted, and evaluated by the reference interpreter.

The bindings are jax.extend.mlir; no device is opened and torch is not needed. FLOPs are those of dots: 2 x elements of the result x
contracted elements. Temporaries are counted in the order of the text, each from its operation to its last use: what a program
needs that fuses nothing and reuses memory at once.
"""

import functools
import importlib
import math
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchlib.core.errors import BackendUnavailable, UserError

INSTALL = "pip install -e '.[xla]'"
# jax of this range has what is called here and in benchlib/workloads/stablehlo/pjrt.py; tried with 0.10.2.
OLDEST, BEFORE = (0, 8), (0, 11)


def jax() -> Any:
    """Import jax. Raises ``BackendUnavailable`` where it is lacking or of a version that the kit was not written for."""
    # On a GPU jax would take three quarters of the memory at once, and torch is beside it.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
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
    """Return the module of a text after checking all types; raises ``UserError`` with line and column."""
    ir, _, context = _bindings()
    try:
        with context:
            module = ir.Module.parse(text)
            module.operation.verify()
    except ir.MLIRError as error:
        raise UserError(" ".join(str(error).split()).replace('"-"', name)) from None
    return module


@dataclass
class Inspection:
    """What a program consists of."""

    operations: Counter[str]
    dot_flops: int
    argument_bytes: int
    result_bytes: int
    temporary_bytes: int


def inspect(text: str, name: str = "text") -> Inspection:
    """Count what a program consists of. Raises ``UserError`` for a text that is none."""
    module = parse(text, name)
    functions = [op for op in module.body.operations if op.operation.name == "func.func"]
    if not functions or not functions[0].regions[0].blocks:
        raise UserError(f"{name} has no function with a body: a program has one, @main")
    block = functions[0].regions[0].blocks[0]
    *operations, end = block.operations
    kinds = [op.operation.name.removeprefix("stablehlo.") for op in operations]
    return Inspection(
        operations=Counter(kinds),
        dot_flops=sum(_dot_flops(op) for kind, op in zip(kinds, operations, strict=True) if kind == "dot_general"),
        argument_bytes=sum(_bytes(value.type) for value in block.arguments),
        result_bytes=sum(_bytes(value.type) for value in end.operands),
        temporary_bytes=_peak([*operations, end]),
    )


def _bytes(kind: Any) -> int:
    ir, _, _ = _bindings()
    try:
        shaped = ir.RankedTensorType(kind)
        return int(math.prod(shaped.shape) * max(1, shaped.element_type.width // 8))
    except (ValueError, AttributeError, RuntimeError):  # no tensor, one of complex numbers, or without fixed sizes
        raise UserError(f"{kind} cannot be counted: expected a tensor of real numbers with a fixed shape") from None


def _dot_flops(op: Any) -> int:
    ir, dialect, _ = _bindings()
    numbers = dialect.DotDimensionNumbers(op.attributes["dot_dimension_numbers"])
    left = ir.RankedTensorType(op.operands[0].type).shape
    result = ir.RankedTensorType(op.results[0].type).shape
    return 2 * math.prod(result) * math.prod(left[dim] for dim in numbers.lhs_contracting_dimensions)


def _peak(operations: Sequence[Any]) -> int:
    """Return the most bytes of temporaries alive at once; constants that are splats take none."""
    last = {value: place for place, op in enumerate(operations) for value in op.operands}
    ends, alive, most = Counter[int](), 0, 0
    for place, op in enumerate(operations):
        for value in op.results if op.operation.name != "stablehlo.constant" else ():
            size = _bytes(value.type)
            alive += size
            ends[last.get(value, place)] += size
        most = max(most, alive)
        alive -= ends[place]
    return most


def evaluate(module: Any, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Compute a parsed module's results by the reference interpreter."""
    ir, dialect, context = _bindings()
    with context:
        kinds = [argument.type for argument in module.body.operations[0].arguments]
        inputs = [ir.DenseElementsAttr.get(array, type=kind) for array, kind in zip(arrays, kinds, strict=True)]
        outputs = [ir.DenseElementsAttr(value) for value in dialect.eval_module(module, inputs)]
        return [np.array(value).reshape(ir.RankedTensorType(value.type).shape) for value in outputs]
