"""A model as a graph for other compilers and runtimes: exported once, for any number of rows and tokens.

Letters: B rows, S tokens.
"""

import contextlib
import importlib
import logging
import os
import shutil
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from benchlib.benchmarks.parity.config import Member
from benchlib.benchmarks.parity.executor import Inputs, Pair
from benchlib.core.errors import BackendUnavailable, UserError

_NOISY = ("torch.onnx", "torch.export", "torch._export", "torch._inductor", "torch._dynamo", "onnxscript", "onnx_ir")


def require_fp32(member: Member) -> None:
    """Raise ``UserError`` where the member asks for another precision: what was exported in fp32 would pass for it."""
    if member.precision != "fp32":
        raise UserError(
            f"member {member.name}: precision = {member.precision}, but {member.executor} takes the model in fp32: use fp32"
        )


def require_package(name: str) -> Any:
    """Import and return a package of the extra ``parity``; raise ``BackendUnavailable`` where it is lacking or broken."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise BackendUnavailable(f"{name} cannot be imported ({error}): pip install 'benchlib[parity]'") from error


def require_compiler() -> str:
    """Return the C++ compiler that Inductor takes: CXX, else the system's own. Raise ``BackendUnavailable`` without one."""
    name = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    found = shutil.which(name)
    if not found:
        raise BackendUnavailable(
            f"Inductor needs a C++ compiler and there is no {name}: install it (Debian: apt install g++; "
            "macOS: xcode-select --install), or name another one in CXX"
        )
    return found


@contextlib.contextmanager
def built() -> Iterator[None]:
    """Tell a compiler that lacks its headers apart from one that fails: the former is ``BackendUnavailable``."""
    try:
        yield
    except Exception as error:  # Inductor wraps the compiler's words in errors of several kinds
        if "Python.h" not in str(error):
            raise
        raise BackendUnavailable(
            f"the C++ compiler finds no Python.h: install the headers of Python {sys.version_info[0]}.{sys.version_info[1]} "
            "(Debian: apt install python3-dev)"
        ) from error


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep the exporters' hints and deprecations out of the logs; errors are raised as ever."""
    levels = {name: logging.getLogger(name).level for name in _NOISY}
    try:
        for name in _NOISY:
            logging.getLogger(name).setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


def trace_inputs(example: Inputs) -> dict[str, torch.Tensor]:
    """Return an input to trace with whose B and S are general: at least 2, and not equal.

    A tracer takes a size of 0 or 1 for a constant (of what broadcasts), and two sizes that are equal for one and the same.
    """
    first = {name: tensor[:1] for name, tensor in example.items()}
    if first["input_ids"].shape[1] < 2:
        first = {name: tensor.repeat(1, 2) for name, tensor in first.items()}
    rows = 3 if first["input_ids"].shape[1] == 2 else 2
    return {name: tensor.repeat(rows, 1) for name, tensor in first.items()}


def export(model: torch.nn.Module, example: Inputs, where: torch.device) -> torch.export.ExportedProgram:
    """Return the graph of a model on ``where``: from the example's arguments to (start, end), B and S free.

    Raises what ``torch.export`` raises where the model fixes B or S.
    """
    inputs = {name: tensor.to(where) for name, tensor in trace_inputs(example).items()}
    free = dict.fromkeys((0, 1), torch.export.Dim.DYNAMIC)  # DYNAMIC: an error, not a constant, where it is not free
    with torch.no_grad(), quiet():
        return torch.export.export(
            Pair(model), (), inputs, dynamic_shapes={name: dict(free) for name in inputs}, strict=False
        )
