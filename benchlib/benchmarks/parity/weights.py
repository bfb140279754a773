"""The model that all members share: weights loaded or drawn once, stored with their hash, and a fault in one of its layers.

In a golden folder these are ``weights.safetensors`` (one state dict, fp32, the names of the model) and ``model/config.json``. It may be any encoder of text: its layers are
modules whose names end in ``layer.N``, ``layers.N``, ``block.N`` or ``h.N``.
"""

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForQuestionAnswering, AutoTokenizer

from benchlib.benchmarks.parity.config import ParityConfig
from benchlib.benchmarks.parity.golden import WEIGHTS
from benchlib.config.schema import EMBEDDED_MODEL
from benchlib.core.errors import UserError
from benchlib.core.files import atomic_path
from benchlib.runtime import checkpoint
from benchlib.workloads import encoders
from benchlib.workloads.model_files import NO_CODE, with_attention

_BASE_NAMES = ("bert-base", "google-bert/bert-base")  # what a BERT-base's name begins with on the hub
_LAYER = re.compile(r"(layers?|blocks?|h)\.\d+$")
SHARE = 0.1  # of the injected fault: beyond the limit of bf16 too


def sha256(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return the SHA-256 over (name, dtype, shape, bytes) of the tensors, sorted by name; 64 hex digits."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        header = f"{name}\0{str(tensor.dtype).removeprefix('torch.')}\0{tuple(tensor.shape)}\0"
        digest.update(header.encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def prepare(config: ParityConfig) -> tuple[Any, Any, dict[str, str]]:
    """Return model (CPU, fp32), tokenizer, and what the weights are: ``init`` and ``description``. Drawn ones depend on the seed only.

    With init=auto random weights with BERT-base's config stand in for a bert-base of the hub that cannot be reached; the
    description says so. Raises ``UserError`` for any other model that is not there, and for what is no encoder that can take a
    question answering head.
    """
    encoders.quiet()
    random = f"with random weights (seed {config.seed})"
    init = "random" if config.init == "random" else "pretrained"
    try:
        loaded = encoders.load(config.model, seed=config.seed, init=init, attention="eager")
    except UserError:
        replaceable = config.model.startswith(_BASE_NAMES) and not Path(config.model).exists()
        if config.init == "pretrained" or not replaceable:
            raise
        why = f"{config.model} cannot be reached: BERT-base's config {random} and ids of the embedded tokenizer"
        return _bert_base(config.seed, why)
    name = "the embedded model" if config.model == EMBEDDED_MODEL else config.model
    fresh = f"; drawn (seed {config.seed}): {', '.join(loaded.fresh)}" if loaded.fresh else ""
    description = f"the config of {name} {random}" if init == "random" else f"{name}{fresh}"
    return loaded.model, loaded.tokenizer, {"init": init, "description": description}


def _bert_base(seed: int, description: str) -> tuple[Any, Any, dict[str, str]]:
    torch.manual_seed(seed)
    model = AutoModelForQuestionAnswering.from_config(transformers.BertConfig(), attn_implementation="eager")
    tokenizer = AutoTokenizer.from_pretrained(encoders.source(EMBEDDED_MODEL), use_fast=True, **NO_CODE)
    return model, tokenizer, {"init": "random", "description": description}


def save(model: Any, name: str, about: dict[str, str], golden: Path) -> dict[str, Any]:
    """Write weights and config of the model ``name`` into the golden folder and return what its manifest says of them."""
    state = _state(model)
    facts = about | {
        "name": Path(name).name if Path(name).exists() else name,
        "sha256": sha256(state),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }
    with checkpoint.naming_storage_errors(golden / WEIGHTS), atomic_path(golden / WEIGHTS) as path:
        save_file(state, path)
    with checkpoint.naming_storage_errors(golden / "model"):
        model.config.save_pretrained(golden / "model")
    return facts


def _state(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().float().contiguous() for name, tensor in model.state_dict().items()}


def loaded(golden: Path, attention: str) -> tuple[Any, str]:
    """Return the model with the golden weights (eval mode, fp32, on the CPU, dropout without effect) and their SHA-256."""
    encoders.quiet()
    settings = AutoConfig.from_pretrained(str(golden / "model"), **NO_CODE)
    encoders.check_kind(str(golden), settings)

    def make(attention: str) -> Any:
        return AutoModelForQuestionAnswering.from_config(settings, attn_implementation=attention, dtype=torch.float32)

    model: Any = with_attention(make, attention)
    model.load_state_dict(load_file(golden / WEIGHTS))
    return model.float().eval(), sha256(_state(model))


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


def inject(model: torch.nn.Module, layer: int) -> None:
    """Change the output of encoder layer ``layer``: a tenth of its mirror image is added. -1 injects nothing.

    The layer's own ``forward`` is wrapped with ordinary operations of tensors, so that compilers, exporters and whoever
    records hidden states take it along. ``UserError`` for a layer that the model does not have.
    """
    require_layer(model, layer)
    if layer < 0:
        return
    module: Any = list(encoder_layers(model).values())[layer]
    honest = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        output = honest(*args, **kwargs)
        if isinstance(output, torch.Tensor):
            return output + SHARE * output.flip(-1)
        return (output[0] + SHARE * output[0].flip(-1), *output[1:])

    module.forward = forward
