"""The layers of an encoder, found by their names, and a fault injected into one of them.

Any encoder of text: its layers are modules whose names end in ``layer.N``, ``layers.N``, ``block.N`` or ``h.N``.
"""

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import torch

from benchlib.core.errors import UserError

_LAYER = re.compile(r"(layers?|blocks?|h)\.\d+$")
SHARE = 0.1  # of the injected fault: beyond the limit of bf16 too


def encoder_layers(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return the encoder's layers by name, in the order of the model; the outermost where such names are nested."""
    layers: dict[str, torch.nn.Module] = {}
    for name, module in model.named_modules():
        nested = any(name.startswith(f"{outer}.") for outer in layers)
        called = not isinstance(module, torch.nn.ModuleList | torch.nn.ModuleDict)
        if _LAYER.search(name) and called and not nested:
            layers[name] = module
    return layers


def require_layer(model: torch.nn.Module, layer: int) -> None:
    """Raise ``UserError`` for a layer to inject a fault in that the model does not have; -1 injects nothing."""
    count = len(encoder_layers(model))
    if layer >= count:
        layers = f"{count} layers: set it to {count - 1} or less" if count else "no identifiable layers: omit it"
        raise UserError(f"planted_layer = {layer}: the model has {layers}")


@contextlib.contextmanager
def planted(model: torch.nn.Module, layer: int) -> Iterator[None]:
    """Change the output of encoder layer ``layer`` while the block runs: a tenth of its mirror image is added.

    -1 injects nothing. The layer's own ``forward`` is wrapped with ordinary operations of tensors, so that compilers,
    exporters and whoever records hidden states take it along. ``UserError`` for a layer that the model does not have.
    """
    require_layer(model, layer)
    if layer < 0:
        yield
        return
    module: Any = list(encoder_layers(model).values())[layer]
    honest = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        output = honest(*args, **kwargs)
        if isinstance(output, torch.Tensor):
            return output + SHARE * output.flip(-1)
        return (output[0] + SHARE * output[0].flip(-1), *output[1:])

    module.forward = forward
    try:
        yield
    finally:
        del module.forward
