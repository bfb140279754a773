"""The parts of an encoder, found by their names, what they put out, and a fault planted in one of them.

Any encoder of text: its layers are modules whose names end in ``layer.N``, ``layers.N``, ``block.N`` or ``h.N``; inside
each, attention and feed-forward are the children with such names.
"""

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchlib.core.errors import UserError

_LAYER = re.compile(r"(layers?|blocks?|h)\.\d+$")
_ATTENTION = re.compile(r"^(?!.*norm).*att(entio)?n", re.IGNORECASE)
_FEED_FORWARD = re.compile(r"^(intermediate|mlp|ffn|ff|feed_?forward)$", re.IGNORECASE)
PLANTED = 0.1  # share of the planted fault: beyond the tolerance of bf16 too


@dataclass(frozen=True)
class Part:
    """A module whose output is kept. ``kind`` is embeddings, attention, feed-forward, layer or head."""

    name: str
    kind: str
    module: torch.nn.Module


def encoder_layers(model: torch.nn.Module) -> list[Part]:
    """Return the encoder's layers in the order of the model; the outermost where such names are nested."""
    layers: list[Part] = []
    for name, module in model.named_modules():
        inside = layers and name.startswith(layers[-1].name + ".")
        if _LAYER.search(name) and not inside and not _is_list(module):
            layers.append(Part(name, "layer", module))
    return layers


def _is_list(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.ModuleList | torch.nn.ModuleDict)  # these are never called


def parts(model: torch.nn.Module) -> list[Part]:
    """Return the embeddings, every layer with its attention and feed-forward, and the head.

    Raises ``UserError`` for a model without recognisable layers.
    """
    layers = encoder_layers(model)
    if not layers:
        raise UserError(
            f"{type(model).__name__} has no modules named layer.N, layers.N, block.N or h.N: its layers cannot be identified"
        )
    parts = []
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in ("embeddings", "embedding") and not any(
            name.startswith(layer.name) for layer in layers
        ):
            parts.append(Part(name, "embeddings", module))
            break
    for layer in layers:
        for kind, pattern in (("attention", _ATTENTION), ("feed-forward", _FEED_FORWARD)):
            for name, module in layer.module.named_children():
                if pattern.search(name) and not _is_list(module):
                    parts.append(Part(f"{layer.name}.{name}", kind, module))
                    break
        parts.append(layer)
    return parts + _head(model, layers[-1].name)


def _head(model: torch.nn.Module, last_layer: str) -> list[Part]:
    """Return what the model applies behind its encoder: its own children, without those that only drop."""
    children = list(model.named_children())
    names = [name for name, _ in children]
    behind = children[names.index(last_layer.partition(".")[0]) + 1 :]
    return [Part(name, "head", module) for name, module in behind if not isinstance(module, torch.nn.Dropout)]


def first_tensor(output: Any) -> torch.Tensor | None:
    """Return the tensor that a module puts out: itself, or the first of a tuple or record; None where there is none."""
    if isinstance(output, torch.Tensor):
        return output
    values = output.values() if hasattr(output, "values") else output if isinstance(output, tuple | list) else ()
    return next((value for value in values if isinstance(value, torch.Tensor)), None)


@dataclass
class Kept:
    """What the hooked modules put out, in the order in which they ended, named ``000|bert.embeddings``."""

    arrays: dict[str, np.ndarray]
    kinds: dict[str, str]


@contextlib.contextmanager
def kept(model: torch.nn.Module) -> Iterator[Kept]:
    """Keep the outputs of the model's parts while the block runs: float32 or float64, on the CPU.

    A module that is called several times (shared weights) is kept each time, as ``NAME@2`` and so on. The hooks are
    removed whatever happens.
    """
    outputs = Kept({}, {})
    calls: dict[str, int] = {}
    with contextlib.ExitStack() as stack:
        for part in parts(model):

            def keep(_module: Any, _inputs: Any, output: Any, part: Part = part) -> None:
                tensor = first_tensor(output)
                if tensor is None:
                    return
                calls[part.name] = calls.get(part.name, 0) + 1
                name = part.name + (f"@{calls[part.name]}" if calls[part.name] > 1 else "")
                plain = tensor.detach().cpu()
                plain = plain if plain.dtype == torch.float64 else plain.float()
                outputs.arrays[f"{len(outputs.arrays):03d}|{name}"] = plain.numpy().copy()
                outputs.kinds[name] = part.kind

            stack.callback(part.module.register_forward_hook(keep).remove)
        yield outputs


def require_layer(model: torch.nn.Module, layer: int) -> None:
    """Raise ``UserError`` for a layer to plant a fault in that the model does not have; -1 plants nothing."""
    count = len(encoder_layers(model)) if layer >= 0 else 0
    if layer >= 0 and not count:
        raise UserError(f"planted_layer = {layer}: {type(model).__name__} has no identifiable layers: omit it")
    if layer >= count > 0:
        raise UserError(
            f"planted_layer = {layer}: the model has {count} layers: set it to {count - 1} or less, -1 for none"
        )


@contextlib.contextmanager
def planted(model: torch.nn.Module, layer: int) -> Iterator[None]:
    """Change the output of encoder layer ``layer`` while the block runs: a tenth of its mirror image is added.

    -1 plants nothing. The change is an ordinary operation of tensors, so that compilers and exporters take it along.
    Raises ``UserError`` for a layer that the model does not have.
    """
    if layer < 0:
        yield
        return
    require_layer(model, layer)
    layers = encoder_layers(model)

    def change(_module: Any, _inputs: Any, output: Any) -> Any:
        if isinstance(output, torch.Tensor):
            return output + PLANTED * output.flip(-1)
        return (output[0] + PLANTED * output[0].flip(-1), *output[1:])

    handle = layers[layer].module.register_forward_hook(change)
    try:
        yield
    finally:
        handle.remove()
