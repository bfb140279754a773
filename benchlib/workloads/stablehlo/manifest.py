"""What stands beside a .mlir file: each argument's name, role, shape and type, and what comes out.

    model.mlir         the text
    model.mlir.json    {"name", "replicas", "arguments": [...], "results": [...]}

Roles of arguments: parameter, buffer, input. Roles of results: output, loss, gradient (of the parameter ``name``).
"""

from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from pydantic.dataclasses import dataclass

from benchlib.core.errors import UserError
from benchlib.core.files import read_object, read_text, write_json, write_text
from benchlib.workloads.stablehlo.emit import element_of, fits, type_of


@dataclass(frozen=True)
class Item:
    """One argument or result."""

    name: str
    role: str
    shape: tuple[int, ...]
    element: str


@dataclass(frozen=True)
class Manifest:
    """Arguments and results of a program, in the order of its text."""

    name: str
    replicas: int
    arguments: tuple[Item, ...]
    results: tuple[Item, ...]

    def write(self, path: Path, text: str) -> None:
        """Write the text and, beside it, this manifest."""
        write_text(path, text)
        write_json(_beside(path), asdict(self))


def _beside(path: Path) -> Path:
    return path.with_name(path.name + ".json")


def read(path: Path) -> tuple[str, Manifest]:
    """Read a .mlir file and its manifest; raises ``UserError`` where one is missing."""
    return read_text(path), Manifest(**read_object(_beside(path), {}))


def array(tensor: torch.Tensor, item: Item) -> np.ndarray:
    """Return a tensor as the array that the program takes; int64 becomes int32.

    Raises ``UserError`` where it is of another shape or type, or a value does not fit 32 bits.
    """
    tensor = tensor.detach().cpu().contiguous()
    if (tuple(tensor.shape), element_of(tensor.dtype)) != (item.shape, item.element):
        actual = type_of(tensor.shape, element_of(tensor.dtype))
        raise UserError(f"{item.role} {item.name} is {type_of(item.shape, item.element)}; what was given is {actual}")
    if tensor.dtype is torch.int64:
        if tensor.numel() and not fits(int(tensor.min()), int(tensor.max())):
            raise UserError(f"{item.name} has values beyond 32 bits, which the program's i32 cannot hold")
        tensor = tensor.to(torch.int32)
    return tensor.numpy()
