"""Encoders with a question answering head: from the kit, a folder or the hub, checked before anything is trained.

Only safetensors are read: a pickled checkpoint can run code when it is opened.
"""

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers.masking_utils import sdpa_mask
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES,
)

from benchlib.config.schema import EMBEDDED_MODEL
from benchlib.core import model_files
from benchlib.core.errors import UserError

TINY = Path(__file__).resolve().parents[1] / "assets" / "tiny"

# Families that count positions from behind the padding id, so that two of the table's rows are never used.
_OFFSET_POSITIONS = ("roberta", "camembert", "xmod", "data2vec-text", "longformer", "mpnet", "ibert")

_ATTENTION_DROPOUT = ("attention_probs_dropout_prob", "attention_dropout")
_HIDDEN_DROPOUT = ("hidden_dropout_prob", "dropout")


@dataclass(frozen=True)
class Loaded:
    """A model with its tokenizer. ``matmul_parameters`` are those of matrix products, without embeddings and norms.

    ``layers``, ``hidden`` and ``intermediate`` are the sizes of the stack for the FLOP arithmetic, None where the
    model's config does not name them. ``fresh`` are the weights that the source did not have.
    """

    model: Any
    tokenizer: Any
    parameters: int
    matmul_parameters: int
    layers: int | None
    hidden: int | None
    intermediate: int | None
    fresh: list[str]


def quiet() -> None:
    """Leave transformers' errors and drop its hints and progress bars, which would fill the logs of every rank."""
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("transformers").setLevel(logging.ERROR)


def source(name: str) -> str:
    """Return the folder or hub name that ``name`` stands for."""
    if name != EMBEDDED_MODEL:
        return name
    if not (TINY / "config.json").exists():
        raise UserError(
            f"the embedded model is missing at {TINY}: install benchlib with its assets, or give model=FOLDER"
        )
    return str(TINY)


def load(
    name: str,
    *,
    seed: int,
    init: str = "pretrained",
    attention: str = "sdpa",
    max_length: int = 0,
    attention_dropout: float | None = None,
    hidden_dropout: float | None = None,
) -> Loaded:
    """Load, check and return the encoder ``name`` with its tokenizer, on the CPU in fp32.

    ``name`` is a folder, a name of the hub or ``EMBEDDED_MODEL``. Weights that are drawn (the head, or all with
    ``init="random"``) depend on ``seed`` only. A dropout of None is left as the model's config says. Raises
    ``UserError`` where the model is not an encoder that can take a QA head, or has fewer than ``max_length`` positions.
    """
    quiet()
    where = source(name)
    model_files.check(where, weights=init != "random")
    settings = _read(name, lambda: transformers.AutoConfig.from_pretrained(where))
    check_kind(name, settings)
    tokenizer = _read(name, lambda: transformers.AutoTokenizer.from_pretrained(where, use_fast=True))
    check_fit(name, settings, tokenizer, max_length)
    _set_dropout(name, settings, attention_dropout, _ATTENTION_DROPOUT)
    _set_dropout(name, settings, hidden_dropout, _HIDDEN_DROPOUT)
    torch.manual_seed(seed)
    auto = transformers.AutoModelForQuestionAnswering
    if init == "random":
        model = _read(name, lambda: auto.from_config(settings, attn_implementation=attention))
        fresh = ["all"]
    else:
        model, info = _read(
            name,
            lambda: auto.from_pretrained(
                where,
                config=settings,
                attn_implementation=attention,
                use_safetensors=True,
                dtype=torch.float32,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # said below, with the first name
            ),
        )
        if why := model_files.misfit(info, f"{model.base_model_prefix}."):
            raise UserError(f"model = {name}: {why}: give weights and config that belong together")
        fresh = sorted(info["missing_keys"])
    linear = [module.weight.numel() for module in model.modules() if isinstance(module, torch.nn.Linear)]
    return Loaded(
        model=model,
        tokenizer=tokenizer,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        matmul_parameters=sum(linear),
        layers=_size(settings, "num_hidden_layers", "n_layers"),
        hidden=_size(settings, "hidden_size", "dim"),
        intermediate=_size(settings, "intermediate_size", "hidden_dim"),
        fresh=fresh,
    )


def _size(settings: Any, *names: str) -> int | None:
    return next(
        (int(getattr(settings, name)) for name in names if isinstance(getattr(settings, name, None), int)), None
    )


def _read(name: str, read: Any) -> Any:
    try:
        return read()
    except Exception as error:  # transformers has no error of its own for a config that makes no sense
        reason = " ".join(str(error).split())[:300]
        if name == EMBEDDED_MODEL or Path(name).exists():
            raise UserError(f"model = {name}: cannot be read: {reason}") from error
        offline = " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE") else ""
        raise UserError(
            f"model = {name}: no such folder, and not in the cache of the hub nor reachable{offline}: {reason}. Download it once with "
            f"`hf download {name}` where there is a connection, or give a local folder, or model={EMBEDDED_MODEL}"
        ) from error


def check_kind(name: str, settings: Any) -> None:
    """Raise ``UserError`` unless the config is of an encoder of text that has, or can take, a QA head."""
    kind = settings.model_type
    if kind not in MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES:
        raise UserError(
            f"model = {name}: {kind} has no extractive question answering head in transformers: use an encoder of text such as BERT"
        )
    if getattr(settings, "is_encoder_decoder", False):
        raise UserError(f"model = {name}: {kind} is an encoder-decoder: use an encoder such as BERT")
    decoder_only = kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and kind not in MODEL_FOR_MASKED_LM_MAPPING_NAMES
    if decoder_only or getattr(settings, "is_decoder", False):
        raise UserError(
            f"model = {name}: {kind} is a decoder, whose tokens do not see what follows them: use an encoder such as BERT"
        )


def check_fit(name: str, settings: Any, tokenizer: Any, max_length: int) -> None:
    """Raise ``UserError`` unless the tokenizer is fast, matches the vocabulary, and positions suffice for ``max_length``."""
    if not getattr(tokenizer, "is_fast", False):
        raise UserError(
            f"model = {name}: {type(tokenizer).__name__} gives no character offsets: use a model with a fast tokenizer (tokenizer.json)"
        )
    if len(tokenizer) > settings.vocab_size:
        raise UserError(
            f"model = {name}: the tokenizer knows {len(tokenizer):,} tokens but the model has {settings.vocab_size:,}: they do not belong together"
        )
    if tokenizer.pad_token_id is None:
        raise UserError(f"model = {name}: its tokenizer has no padding token: use an encoder such as BERT")
    longest = positions(settings)
    if longest is not None and max_length > longest:
        raise UserError(
            f"max_length = {max_length}: {name} has positions for {longest} tokens: set max_length={longest} or less"
        )


def positions(settings: Any) -> int | None:
    """Return for how many tokens a model's config has positions; None where it sets no limit."""
    rows = getattr(settings, "max_position_embeddings", None)
    if not isinstance(rows, int) or rows <= 0:
        return None
    offset = any(part in settings.model_type for part in _OFFSET_POSITIONS)
    return rows - ((settings.pad_token_id or 0) + 1 if offset else 0)


def _set_dropout(name: str, settings: Any, rate: float | None, fields: tuple[str, ...]) -> None:
    if rate is None:
        return
    present = [field for field in fields if hasattr(settings, field)]
    if not present:
        raise UserError(
            f"model = {name}: {settings.model_type} has none of {', '.join(fields)}: leave the dropout at -1"
        )
    setattr(settings, present[0], rate)


# Dropout for CPUs that draws its masks four times as fast as torch does, in attention too.
#
# torch's generator gives a CPU one Bernoulli value at a time, which makes dropout a fifth of a BERT training step. Here
# SFC64, seeded by a draw from torch's generator, fills a buffer with random bits, and 16 of them decide on a value: so
# torch's random state still determines every mask, and a rate is met to within 1 / 131,072.
#
# Letters: B samples, H heads, S tokens, D values of a head.

ATTENTION = "benchlib_cpu"  # the name under which transformers finds ``attention``


def keep_mask(shape: torch.Size | tuple[int, ...], rate: float) -> torch.Tensor:
    """Return a bool tensor that is True with probability 1 - ``rate``; torch's CPU generator determines it."""
    seed = int(torch.randint(2**62, ()))
    count = int(np.prod(shape))
    bits = np.random.SFC64(seed).random_raw(-(-count // 4)).view(np.int16)
    return torch.from_numpy(bits)[:count].view(shape) >= round(rate * 65536) - 32768


class _Drop(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, rate: float) -> torch.Tensor:
        keep = keep_mask(values.shape, rate)
        ctx.save_for_backward(keep)
        ctx.scale = 1 / (1 - rate)
        return (values * keep).mul_(ctx.scale)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (keep,) = ctx.saved_tensors
        return (gradients[0] * keep).mul_(ctx.scale), None


class Dropout(torch.nn.Dropout):
    """``torch.nn.Dropout`` with faster masks; the same in expectation."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Drop values while training."""
        if not self.training or not self.p:
            return input
        return _Drop.apply(input, self.p)  # type: ignore[no-any-return]


class _Attention(torch.autograd.Function):
    """softmax(q k' scale + bias), dropped, times v. All (B, H, S, D), the bias (B or 1, 1, S or 1, S).

    One function instead of a chain of operations: on a CPU each pass over the (B, H, S, S) weights costs about as much
    as a third of a matrix product, and most of them are saved here.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        bias: torch.Tensor | None,
        scale: float,
        rate: float,
    ) -> torch.Tensor:
        weights = torch.matmul(query * scale, key.transpose(2, 3))
        if bias is not None:
            weights += bias
        weights = torch.softmax(weights, -1)
        keep = keep_mask(weights.shape, rate)
        dropped = weights * keep
        ctx.save_for_backward(query, key, value, weights, keep, dropped)
        ctx.scale, ctx.rest = scale, 1 / (1 - rate)
        return torch.matmul(dropped, value * ctx.rest)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        query, key, value, weights, keep, dropped = ctx.saved_tensors
        gradient = gradients[0] * ctx.rest
        of_value = torch.matmul(dropped.transpose(2, 3), gradient)
        of_weights = torch.matmul(gradient, value.transpose(2, 3)).mul_(keep)
        of_scores = torch._softmax_backward_data(of_weights, weights, -1, weights.dtype)
        of_query = torch.matmul(of_scores, key).mul_(ctx.scale)
        of_key = torch.matmul(of_scores.transpose(2, 3), query).mul_(ctx.scale)
        return of_query, of_key, of_value, None, None, None


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **unused: Any,
) -> tuple[torch.Tensor, None]:
    """Attend as transformers' implementations do: (B, H, S, D) each, the mask bool, True where to look; returns (B, S, H, D)."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if module.training and dropout:
        bias = None
        if attention_mask is not None:
            bias = torch.zeros(attention_mask.shape, dtype=query.dtype).masked_fill_(
                ~attention_mask, torch.finfo(query.dtype).min
            )
        output = _Attention.apply(query, key, value, bias, scale, dropout)
    else:
        output = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=attention_mask, scale=scale
        )
    return output.transpose(1, 2).contiguous(), None


def speed_up(model: Any) -> list[str]:
    """Replace the dropout of a transformers model on a CPU; return what was replaced.

    Attention is replaced only where the model takes the implementation from transformers' table and has the dropout:
    without it torch's own kernel is faster.
    """
    replaced = []
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is torch.nn.Dropout and child.p:
                setattr(module, name, Dropout(child.p).train(child.training))
                replaced.append("dropout")
    rate = getattr(model.config, "attention_probs_dropout_prob", getattr(model.config, "attention_dropout", 0.0))
    if rate and model.config._attn_implementation == "sdpa" and model.config.model_type in _TABLE_USERS:
        transformers.AttentionInterface.register(ATTENTION, attention)
        transformers.AttentionMaskInterface.register(ATTENTION, sdpa_mask)
        model.set_attn_implementation(ATTENTION)
        replaced.append("attention")
    return sorted(set(replaced))


# Families whose attention is a plain softmax from the table, checked by a test against torch's dropout-free kernel.
_TABLE_USERS = ("bert", "roberta", "xlm-roberta", "camembert", "electra", "distilbert")
