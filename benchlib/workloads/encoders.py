"""Encoders with a question answering head: from the kit, a folder or the hub, checked before anything is trained.

Only safetensors are read: a pickled checkpoint can run code when it is opened.
"""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES,
)

from benchlib.config.schema import EMBEDDED_MODEL
from benchlib.core.errors import UserError
from benchlib.workloads import model_files
from benchlib.workloads.counted_flops import TrainFlops, train_flops

TINY = Path(__file__).resolve().parents[1] / "assets" / "tiny"

# Families that count positions from behind the padding id, so that two of the table's rows are never used.
_OFFSET_POSITIONS = ("roberta", "camembert", "xmod", "data2vec-text", "longformer", "mpnet", "ibert")

_DROPOUT = {
    "attention_dropout": ("attention_probs_dropout_prob", "attention_dropout"),
    "hidden_dropout": ("hidden_dropout_prob", "dropout"),
}


@dataclass(frozen=True)
class Loaded:
    """A model with its tokenizer. ``matmul_parameters`` are those of matrix products, without embeddings and norms.

    ``flops`` of training are counted if the model was loaded for a ``max_length``. ``fresh`` are the weights that the source did not have.
    """

    model: Any
    tokenizer: Any
    parameters: int
    matmul_parameters: int
    flops: TrainFlops
    fresh: list[str]


def quiet() -> None:
    """Leave transformers' errors and drop its hints and progress bars, which would fill the logs of every rank."""
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("transformers").setLevel(logging.ERROR)


def source(name: str) -> str:
    """Return the folder or hub name that ``name`` stands for."""
    return str(TINY) if name == EMBEDDED_MODEL else name


def load(
    name: str, *, seed: int, init: str = "pretrained", attention: str = "sdpa", max_length: int = 0, **dropout: float
) -> Loaded:
    """Load, check and return the encoder ``name`` with its tokenizer, on the CPU in fp32.

    ``name`` is a folder, a name of the hub or ``EMBEDDED_MODEL``. Weights that are drawn (the head, or all with
    ``init="random"``) depend on ``seed`` only. ``dropout`` has rates by the names of ``_DROPOUT``,
    -1 is left as the model's config says. Raises ``UserError`` where the model is not an encoder that can take a QA head,
    or has fewer than ``max_length`` positions.
    """
    quiet()
    where = source(name)
    model_files.check(where, weights=init != "random")
    settings = _read(name, lambda: transformers.AutoConfig.from_pretrained(where, **model_files.NO_CODE))
    check_kind(name, settings)
    tokenizer = _read(
        name, lambda: transformers.AutoTokenizer.from_pretrained(where, use_fast=True, **model_files.NO_CODE)
    )
    check_fit(name, settings, tokenizer, max_length)
    for kind in (kind for kind, rate in dropout.items() if rate >= 0):
        present = [field for field in _DROPOUT[kind] if hasattr(settings, field)]
        if not present:
            lacking = f"{settings.model_type} has none of {', '.join(_DROPOUT[kind])}"
            raise UserError(f"model = {name}: {lacking}: leave the dropout at -1")
        setattr(settings, present[0], dropout[kind])
    torch.manual_seed(seed)
    auto: Any = transformers.AutoModelForQuestionAnswering
    options: dict[str, Any] = {**model_files.NO_CODE}

    def make(attention: str) -> Any:
        if init == "random":
            return auto.from_config(settings, attn_implementation=attention, **options)
        # Other sizes are said below, with the first name.
        return auto.from_pretrained(where, ignore_mismatched_sizes=True, attn_implementation=attention, **options)

    if init == "random":
        model = _read(name, lambda: model_files.with_attention(make, attention))
        fresh = ["all"]
    else:
        options |= {"config": settings, "use_safetensors": True, "dtype": torch.float32, "output_loading_info": True}
        model, info = _read(name, lambda: model_files.with_attention(make, attention))
        if why := model_files.misfit(info, f"{model.base_model_prefix}."):
            raise UserError(f"model = {name}: {why}: give weights and config that belong together")
        fresh = sorted(info["missing_keys"])
    linear = [module.weight.numel() for module in model.modules() if isinstance(module, torch.nn.Linear)]
    return Loaded(
        model,
        tokenizer,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        matmul_parameters=sum(linear),
        flops=train_flops(model, max_length) if max_length else TrainFlops(),
        fresh=fresh,
    )


def _read(name: str, read: Any) -> Any:
    try:
        return read()
    except Exception as error:  # transformers has no error of its own for a config that makes no sense
        reason = model_files.reason(error)
        if name == EMBEDDED_MODEL or Path(name).exists():
            raise UserError(f"model = {name}: cannot be read: {reason}") from error
        raise UserError(
            f"model = {name}: no such folder, and not in the cache of the hub nor reachable: {reason}. Download it once with "
            f"`hf download {name}` where there is a connection, or give a local folder, or model={EMBEDDED_MODEL}"
        ) from error


def check_kind(name: str, settings: Any) -> None:
    """Raise ``UserError`` unless the config is of an encoder of text that has, or can take, a QA head."""
    kind, problem = settings.model_type, ""
    if kind not in MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES:
        problem = "has no extractive question answering head in transformers"
    elif getattr(settings, "is_encoder_decoder", False):
        problem = "is an encoder-decoder"
    elif getattr(settings, "is_decoder", False) or (
        kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and kind not in MODEL_FOR_MASKED_LM_MAPPING_NAMES
    ):
        problem = "is a decoder, whose tokens do not see what follows them"
    if problem:
        raise UserError(f"model = {name}: {kind} {problem}: use an encoder of text such as BERT")


def check_fit(name: str, settings: Any, tokenizer: Any, max_length: int) -> None:
    """Raise ``UserError`` unless the tokenizer is fast, matches the vocabulary, and positions suffice for ``max_length``."""
    problem, longest = "", positions(settings)
    if not getattr(tokenizer, "is_fast", False):
        problem = f"{type(tokenizer).__name__} gives no character offsets: use a model with a tokenizer.json"
    elif len(tokenizer) > settings.vocab_size:
        problem = f"the tokenizer has {len(tokenizer):,} tokens but the model has {settings.vocab_size:,}"
    elif tokenizer.pad_token_id is None:
        problem = "its tokenizer has no padding token: use an encoder such as BERT"
    elif longest is not None and max_length > longest:
        problem = f"it has positions for {longest} tokens: set max_length={longest} or less, not {max_length}"
    if problem:
        raise UserError(f"model = {name}: {problem}")


def positions(settings: Any) -> int | None:
    """Return for how many tokens a model's config has positions; None where it sets no limit."""
    rows = getattr(settings, "max_position_embeddings", None)
    if not isinstance(rows, int) or rows <= 0:
        return None
    offset = any(part in settings.model_type for part in _OFFSET_POSITIONS)
    return rows - ((settings.pad_token_id or 0) + 1 if offset else 0)
