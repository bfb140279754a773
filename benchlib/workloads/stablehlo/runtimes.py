"""Executors of a .mlir file and its manifest, nothing else: XLA through PJRT, IREE, StableHLO's reference interpreter.

Each is a row of ``RUNTIMES``: a class that is loaded from (text, manifest, platform). Its instances keep weights where
they compute and return numpy arrays in the order of the results. What is not installed raises ``BackendUnavailable``
with what to install.
"""

import importlib
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from benchlib.core.errors import BackendUnavailable, UserError
from benchlib.workloads.stablehlo import manifest, mlir
from benchlib.workloads.stablehlo.inspection import inspect
from benchlib.workloads.stablehlo.manifest import Item, Manifest
from benchlib.workloads.stablehlo.pjrt import Xla

IREE_INSTALL = "pip install -e '.[compiled]'"
# Cross-compiled without the hardware: target, its flags. sm_89: for sm_90 IREE 3.13 says that the target is missing.
TARGETS: dict[str, list[str]] = {"cuda": ["--iree-cuda-target=sm_89"], "rocm": ["--iree-rocm-target=gfx942"]}
TARGETS |= {"vulkan-spirv": [], "metal-spirv": []}
MAX_INTERPRETED = (
    50_000_000  # FLOPs of dots above which the interpreter, a million FLOPs per second, would take minutes
)


class Runtime(Protocol):
    """A loaded program. ``compile_s`` is what compiling took, ``description`` says what runs, in plain JSON values."""

    manifest: Manifest
    compile_s: float
    description: dict[str, Any]

    def place(self, arrays: Sequence[np.ndarray]) -> Sequence[Any]:
        """Put arguments, in order, where they are computed with."""

    def run(self, placed: Sequence[Any]) -> Sequence[Any]:
        """Compute and wait; return the results, of which ``np.asarray`` makes arrays."""


class Iree:
    """IREE on the CPU (llvm-cpu), through its virtual machine; threads as many as it finds cores."""

    def __init__(self, text: str, program: Manifest, platform: str = "cpu") -> None:
        self.manifest = program
        runtime = iree("runtime")
        began = time.perf_counter()
        module = iree_compiled(text, "llvm-cpu", ("--iree-llvmcpu-target-cpu=host", "--iree-opt-data-tiling"))
        self.compile_s = time.perf_counter() - began
        self._context = runtime.SystemContext(config=runtime.Config("local-task"))
        self._context.add_vm_module(runtime.VmModule.copy_buffer(self._context.instance, module))
        self._main = next(part for name, part in self._context.modules.items() if name != "hal")["main"]
        self._device, self._runtime = self._context.config.device, runtime
        self.description = {"runtime": f"IREE {metadata.version('iree-base-compiler')}", "module_bytes": len(module)}

    def place(self, arrays: Sequence[np.ndarray]) -> Sequence[Any]:
        """See ``Runtime``."""
        return [self._runtime.asdevicearray(self._device, array) for array in arrays]

    def run(self, placed: Sequence[Any]) -> Sequence[Any]:
        """See ``Runtime``."""
        results = self._main(*placed)
        return [value.to_host() for value in (results if isinstance(results, list | tuple) else [results])]


class Interpreter:
    """StableHLO's reference interpreter: what the specification says, a million times slower than a compiler."""

    def __init__(self, text: str, program: Manifest, platform: str = "cpu") -> None:
        inspected = inspect(text)
        flops = inspected.dot_flops
        if calls := inspected.operations["custom_call"]:  # the interpreter would end the whole process
            refused = (
                f"{program.name} has {calls} custom_call, which StableHLO's reference interpreter does not compute"
            )
            raise UserError(f"{refused}: convert the model with plain operations")
        if flops is None or flops > MAX_INTERPRETED:
            most = f"the interpreter is for {MAX_INTERPRETED:,} at most: use a smaller input"
            many = "an unknown number of" if flops is None else f"{flops:,}"
            raise UserError(f"{program.name} has {many} FLOPs of dots, and {most}")
        self.manifest, self.compile_s, self._module = program, 0.0, mlir.parse(text)
        self.description = {"runtime": f"StableHLO reference interpreter of jaxlib {metadata.version('jaxlib')}"}

    def place(self, arrays: Sequence[np.ndarray]) -> Sequence[Any]:
        """See ``Runtime``."""
        return list(arrays)

    def run(self, placed: Sequence[Any]) -> Sequence[Any]:
        """See ``Runtime``."""
        return mlir.evaluate(self._module, placed)


RUNTIMES: dict[str, Callable[[str, Manifest, str], Runtime]] = {"xla": Xla, "iree": Iree, "interpreter": Interpreter}


def load(name: str, path: Path) -> Runtime:
    """Load a .mlir file and the manifest beside it into one of ``RUNTIMES``.

    Raises ``UserError`` for a changed or ill-typed file, ``BackendUnavailable`` where the runtime is not installed.
    """
    return RUNTIMES[name](*manifest.read(path), "cpu")


def arguments(
    program: Manifest, weights: Mapping[str, torch.Tensor], inputs: Mapping[str, torch.Tensor]
) -> list[np.ndarray]:
    """Return the arrays of a program in its order. Raises ``UserError`` that names what is missing."""
    tensors = {**weights, **inputs}
    if missing := [item.name for item in program.arguments if item.name not in tensors]:
        raise UserError(f"{program.name} needs {', '.join(missing)}")
    return [manifest.array(tensors[item.name], item) for item in program.arguments]


def computed(
    runtime: Runtime, weights: Mapping[str, torch.Tensor], inputs: Mapping[str, torch.Tensor]
) -> list[tuple[Item, np.ndarray]]:
    """Return what a loaded program gives: each result with its array."""
    values = runtime.run(runtime.place(arguments(runtime.manifest, weights, inputs)))
    return [(item, np.array(value)) for item, value in zip(runtime.manifest.results, values, strict=True)]


def state(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers and parameters of a module by name, tied ones by each of theirs."""
    return {**dict(module.named_buffers()), **dict(module.named_parameters(remove_duplicate=False))}


def iree_compiled(text: str, target: str, flags: Sequence[str] = ()) -> bytes:
    """Return IREE's module for a target, whose hardware need not be here; ``UserError`` with what its compiler says."""
    compiler = iree("compiler")
    try:
        options = {"input_type": "stablehlo", "extra_args": list(flags)}
        module: bytes = compiler.compile_str(text, target_backends=[target], **options)
    except compiler.CompilerToolError as error:
        reason = next((line for line in str(error).splitlines() if "error:" in line), str(error).splitlines()[0])
        raise UserError(f"IREE does not compile for {target}: {reason[:300]}") from error
    return module


def iree(part: str) -> Any:
    """Import IREE's ``compiler`` or ``runtime``; raise ``BackendUnavailable`` where it is lacking."""
    try:
        return importlib.import_module(f"iree.{part}")
    except ImportError as error:
        raise BackendUnavailable(f"iree.{part} cannot be imported ({error}): {IREE_INSTALL}") from error
