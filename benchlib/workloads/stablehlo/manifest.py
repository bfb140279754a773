"""What stands beside a .mlir file: each argument's name, role, shape, type and hash, and what comes out.

    model.mlir         the text
    model.mlir.json    {"name", "text": hash, "replicas", "arguments": [...], "results": [...], "torch"}

Roles of arguments: parameter, buffer, input. Roles of results: output, loss, gradient (then ``name`` is the parameter's). Hashes are
XXH3 (128 bits) of the bytes in memory: against mistakes, not against intent; those of inputs are empty.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from benchlib.core.errors import UserError
from benchlib.core.files import read_object, write_json, write_text
from benchlib.workloads.stablehlo.emit import element_of, type_of

_FIELDS = {"name": str, "text": str, "replicas": int, "arguments": list, "results": list, "torch": str}


@dataclass(frozen=True)
class Item:
    """One argument or result."""

    name: str
    role: str
    shape: tuple[int, ...]
    element: str
    hash: str = ""

    @property
    def type(self) -> str:
        """Its type as text."""
        return type_of(self.shape, self.element)


@dataclass(frozen=True)
class Manifest:
    """Arguments and results of a program, in the order of its text."""

    name: str
    replicas: int
    arguments: tuple[Item, ...]
    results: tuple[Item, ...]

    def inputs(self) -> list[Item]:
        """Return the arguments that are no weights."""
        return [item for item in self.arguments if item.role == "input"]

    def weights(self) -> list[Item]:
        """Return parameters and buffers."""
        return [item for item in self.arguments if item.role != "input"]

    def hashed(self, state: Mapping[str, torch.Tensor]) -> "Manifest":
        """Return the manifest with the hashes of these weights."""
        items = tuple(
            Item(item.name, item.role, item.shape, item.element, digest(array(state[item.name], item)))
            if item.role != "input"
            else item
            for item in self.arguments
        )
        return Manifest(self.name, self.replicas, items, self.results)

    def check(self, arrays: Sequence[np.ndarray], hashes: bool = True) -> None:
        """Raise ``UserError`` where arrays, in order, are not what the program takes: number, shape, type, hash of weights.

        Two weights of one shape that change places are found by their hashes; without ``hashes`` (weights that training has
        changed) they are not.
        """
        if len(arrays) != len(self.arguments):
            raise UserError(f"{self.name} takes {len(self.arguments)} arguments, {len(arrays)} were given")
        for place, (item, given) in enumerate(zip(self.arguments, arrays, strict=True)):
            where = f"{self.name}: argument {place}, {item.role} {item.name}"
            if tuple(given.shape) != item.shape or _element(given) != item.element:
                raise UserError(f"{where}, is {item.type}; what was given is {type_of(given.shape, _element(given))}")
            if hashes and item.hash and digest(given) != item.hash:
                owner = next((other.name for other in self.arguments if other.hash == digest(given)), "")
                hint = (
                    f"these are the values of {owner}: keep the order of the manifest"
                    if owner
                    else "other values than those it was written for"
                )
                raise UserError(f"{where}: its hash does not match, {hint}")

    def write(self, path: Path, text: str) -> None:
        """Write the text and, beside it, this manifest."""
        write_text(path, text)
        write_json(beside(path), {
            "name": self.name, "text": _hash(text.encode()), "replicas": self.replicas,
            "arguments": [asdict(item) for item in self.arguments],
            "results": [asdict(item) for item in self.results], "torch": torch.__version__,
        })  # fmt: skip


def beside(path: Path) -> Path:
    """Return where the manifest of a .mlir file lies."""
    return path.with_name(path.name + ".json")


def read(path: Path) -> tuple[str, Manifest]:
    """Read a .mlir file and its manifest; raises ``UserError`` where one is missing or the text was changed."""
    if not path.is_file():
        raise UserError(f"{path}: there is no such file")
    text = path.read_text(encoding="utf-8")
    fields = read_object(beside(path), _FIELDS)
    if fields["text"] != _hash(text.encode()):
        raise UserError(f"{path} was changed after its manifest was written: convert the model again")
    arguments, results = (tuple(_item(entry, path) for entry in fields[name]) for name in ("arguments", "results"))
    return text, Manifest(fields["name"], fields["replicas"], arguments, results)


def _item(entry: Any, path: Path) -> Item:
    try:
        return Item(**{**entry, "shape": tuple(entry["shape"])})
    except (TypeError, KeyError) as error:
        raise UserError(
            f"{beside(path)}: an entry is no argument of a program ({error}): convert the model again"
        ) from None


def array(tensor: torch.Tensor, item: Item) -> np.ndarray:
    """Return a tensor as the array that the program takes; int64 becomes int32.

    Raises ``UserError`` where a value does not fit 32 bits. bf16 is seen as what ml_dtypes, which comes with jaxlib, calls bfloat16.
    """
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype is torch.int64 and item.element == "i32":
        if tensor.numel() and not -(2**31) <= int(tensor.min()) <= int(tensor.max()) < 2**31:
            raise UserError(f"{item.name} has values beyond 32 bits, which the program's i32 cannot hold")
        tensor = tensor.to(torch.int32)
    if tensor.dtype is torch.bfloat16:
        import ml_dtypes

        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def _element(given: np.ndarray) -> str:
    if str(given.dtype) == "bfloat16":
        return "bf16"
    return element_of(torch.from_numpy(np.empty(0, given.dtype)).dtype) if given.dtype != np.int64 else "i64"


def digest(given: np.ndarray) -> str:
    """Return the XXH3 hash of an array's bytes, 32 hex digits."""
    return _hash(np.ascontiguousarray(given).reshape(-1).view(np.uint8).data)


def _hash(data: Any) -> str:
    return xxhash.xxh3_128_hexdigest(data)
