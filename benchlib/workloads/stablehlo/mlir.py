"""StableHLO text read by the bindings that jaxlib has: parsed, type-checked, and evaluated by the reference interpreter.

The bindings are jax.extend.mlir; no device is opened and torch is not needed. ``inspection.py`` counts what a program consists of.
"""

import functools
import importlib
import os
from collections.abc import Sequence
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
def bindings() -> tuple[Any, Any, Any]:
    """Return (ir, the dialect, a context with the dialects of jax); asking jax for one is the public way to it."""
    context = jax().jit(lambda: 0).lower().compiler_ir("stablehlo").context
    return (
        importlib.import_module("jax.extend.mlir.ir"),
        importlib.import_module("jax.extend.mlir.dialects.stablehlo"),
        context,
    )


def parse(text: str, name: str = "text") -> Any:
    """Return the module of a text after checking all types; raises ``UserError`` with line and column."""
    ir, _, context = bindings()
    try:
        with context:
            module = ir.Module.parse(text)
            module.operation.verify()
    except ir.MLIRError as error:
        raise UserError(" ".join(str(error).split()).replace('"-"', name)) from None
    return module


def main(module: Any, name: str = "text") -> Any:
    """Return the function that a program is entered by: @main, else the first public one. Raises ``UserError`` for a text without any."""
    bodies = [op for op in module.body.operations if op.operation.name == "func.func" and op.regions[0].blocks]
    public = [op for op in bodies if str(op.attributes.get("sym_visibility", "")) != '"private"']
    named = [op for op in bodies if op.attributes["sym_name"].value == "main"]
    if not (entries := named or public):
        raise UserError(f"{name} has no public function with a body: a program has one, @main")
    return entries[0]


def evaluate(module: Any, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Compute a parsed module's results by the reference interpreter."""
    ir, dialect, context = bindings()
    with context:
        kinds = [argument.type for argument in main(module).arguments]
        inputs = [ir.DenseElementsAttr.get(array, type=kind) for array, kind in zip(arrays, kinds, strict=True)]
        outputs = [ir.DenseElementsAttr(value) for value in dialect.eval_module(module, inputs)]
        return [np.array(value).reshape(ir.RankedTensorType(value.type).shape) for value in outputs]
