"""The weights that all members share: loaded or drawn once, stored with their hash, and read by every member.

In a golden folder these are ``weights.safetensors`` (one state dict, fp32, the names of the model), ``model/config.json``
and ``model/facts.json`` (name, init, sha256, parameters, description).
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForQuestionAnswering, AutoTokenizer

from benchlib.benchmarks.parity import layers
from benchlib.benchmarks.parity.config import ParityConfig
from benchlib.benchmarks.parity.golden import WEIGHTS
from benchlib.config.schema import EMBEDDED_MODEL
from benchlib.core.errors import UserError
from benchlib.core.files import atomic_path, read_object, write_json
from benchlib.runtime import checkpoint
from benchlib.workloads import encoders


def sha256(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return the SHA-256 over (name, dtype, shape, bytes) of the tensors, sorted by name; 64 hex digits."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        header = f"{name}\0{str(tensor.dtype).removeprefix('torch.')}\0{tuple(tensor.shape)}\0"
        digest.update(header.encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


BERT_BASE = "bert-base"  # the name for its config with random weights
_BASE_NAMES = (BERT_BASE, f"google-bert/{BERT_BASE}")  # what such a model's name begins with on the hub


@dataclass(frozen=True)
class Prepared:
    """A model as it goes into a golden folder, on the CPU in fp32, with the tokenizer of its inputs.

    ``init`` is what the weights are in fact, ``pretrained`` or ``random``; ``description`` says where they come from.
    """

    model: Any
    tokenizer: Any
    init: str
    description: str


def prepare(config: ParityConfig) -> Prepared:
    """Load or draw the weights that ``config`` names. Drawn ones depend on ``config.seed`` only.

    With init=auto weights that are not at hand are replaced by random ones with the model's config, or with
    BERT-base's where a bert-base of the hub cannot be reached; the description says so. Raises ``UserError`` where the
    model is no encoder that can take a question answering head, or is not there.
    """
    encoders.quiet()
    random = f"with random weights (seed {config.seed})"
    if config.model == BERT_BASE:
        if config.init == "pretrained":
            raise UserError(
                f"model = {BERT_BASE} is a config without weights: leave init=auto, or name the model of the hub, as in model=google-bert/bert-base-uncased"
            )
        return _bert_base(config.seed, f"BERT-base's config {random}")
    name = "the embedded model" if config.model == EMBEDDED_MODEL else config.model
    if config.init != "random":
        try:
            loaded = encoders.load(config.model, seed=config.seed, attention="eager")
            fresh = f"; drawn (seed {config.seed}): {', '.join(loaded.fresh)}" if loaded.fresh else ""
            return Prepared(loaded.model, loaded.tokenizer, "pretrained", f"{name}{fresh}")
        except UserError:
            if config.init == "pretrained" or _has_weights(config.model):
                raise
    try:
        drawn = encoders.load(config.model, seed=config.seed, init="random", attention="eager")
    except UserError:
        if Path(config.model).exists() or not config.model.startswith(_BASE_NAMES):
            raise
        why = f"{config.model} cannot be reached: BERT-base's config {random} and ids of the embedded tokenizer"
        return _bert_base(config.seed, why)
    chosen = "" if config.init == "random" else "no weights at hand, "
    return Prepared(drawn.model, drawn.tokenizer, "random", f"{chosen}the config of {name} {random}")


def _has_weights(name: str) -> bool:
    # Weights that are there and are refused must not be replaced in silence.
    suffixes = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")
    return Path(name).is_dir() and any(path.suffix in suffixes for path in Path(name).iterdir())


def _bert_base(seed: int, description: str) -> Prepared:
    torch.manual_seed(seed)
    model = AutoModelForQuestionAnswering.from_config(transformers.BertConfig(), attn_implementation="eager")
    tokenizer = AutoTokenizer.from_pretrained(encoders.source(EMBEDDED_MODEL), use_fast=True)
    return Prepared(model, tokenizer, "random", description)


def save(prepared: Prepared, name: str, golden: Path) -> dict[str, Any]:
    """Write weights, config and facts of the model ``name`` into the golden folder and return the facts."""
    state = _state(prepared.model)
    stored = golden / WEIGHTS
    with checkpoint.naming_storage_errors(stored), atomic_path(stored) as path:
        save_file(state, path)
    facts = {
        "name": Path(name).name if Path(name).exists() else name,
        "init": prepared.init,
        "sha256": sha256(state),
        "parameters": sum(parameter.numel() for parameter in prepared.model.parameters()),
        "description": prepared.description,
    }
    with checkpoint.naming_storage_errors(golden / "model"):
        prepared.model.config.save_pretrained(golden / "model")
    write_json(golden / "model" / "facts.json", facts)
    return facts


def facts(golden: Path) -> dict[str, Any]:
    """Return what the golden folder says of its model: name, init, sha256, parameters, description."""
    names = {"name": str, "init": str, "sha256": str, "parameters": int, "description": str}
    return read_object(golden / "model" / "facts.json", names)


def require_layer(golden: Path, layer: int) -> None:
    """Raise ``UserError`` for a layer to plant a fault in that the golden folder's model does not have; loads no weights."""
    if layer >= 0:
        encoders.quiet()
        with torch.device("meta"):
            layers.require_layer(AutoModelForQuestionAnswering.from_config(_settings(golden)), layer)


def _state(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().float().contiguous() for name, tensor in model.state_dict().items()}


def loaded(config: ParityConfig, golden: Path, attention: str) -> tuple[Any, str]:
    """Return the model with the golden weights (eval mode, fp32, on the CPU, dropout without effect) and their SHA-256.

    Where the weights were left out of the folder they are loaded by the model's name, and must have the same hash.
    Raises ``UserError`` for other or damaged weights.
    """
    encoders.quiet()
    stored = golden / WEIGHTS
    settings = _settings(golden)
    model: Any = AutoModelForQuestionAnswering.from_config(settings, attn_implementation=attention, dtype=torch.float32)
    try:
        state = load_file(stored) if stored.exists() else _state(prepare(_named(config, golden)).model)
        model.load_state_dict(state)
    except (SafetensorError, RuntimeError, OSError) as error:
        reason = " ".join(str(error).split())[:300]
        source = stored if stored.exists() else f"model = {config.model}"
        raise UserError(f"{source}: these weights do not fit {golden / 'model' / 'config.json'}: {reason}") from error
    digest = sha256(_state(model))
    _require_same(golden, stored, digest)
    return model.float().eval(), digest


def _settings(golden: Path) -> Any:
    """Return the config of the golden folder's model."""
    settings = AutoConfig.from_pretrained(str(golden / "model"))
    encoders.check_kind(str(golden), settings)
    return settings


def require_left_out(config: ParityConfig, golden: Path) -> None:
    """Raise ``UserError`` where a folder was recorded without weights and the model found here is not the recorded one."""
    if not (golden / WEIGHTS).exists():
        loaded(config, golden, "eager")


def _named(config: ParityConfig, golden: Path) -> ParityConfig:
    """Return the config that loads what the folder names; a model given by hand says where it lies on this machine."""
    recorded = facts(golden)
    name = recorded["name"] if config.model == EMBEDDED_MODEL else config.model
    return config.model_copy(update={"model": name, "init": "auto" if name == BERT_BASE else recorded["init"]})


def _require_same(golden: Path, stored: Path, digest: str) -> None:
    recorded = facts(golden)
    if digest == recorded["sha256"]:
        return
    if stored.exists():
        raise UserError(
            f"{stored}: its weights have the SHA-256 {digest[:16]}…, the folder says {recorded['sha256'][:16]}…: the file was changed, copy the golden folder again"
        )
    raise UserError(
        f"{golden} was recorded without weights, and those of {recorded['name']} digest here have the SHA-256 {digest[:16]}… instead of {recorded['sha256'][:16]}…: "
        "give the same version of the model (model=FOLDER), or record with weights"
    )
