"""The models that are converted, their inputs, and how far two results are apart.

Notation: B rows, S tokens.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import transformers

from benchlib.benchmarks.compiled.config import CompiledConfig
from benchlib.config.schema import EMBEDDED_MODEL
from benchlib.core.definitions import encoder_forward_flops
from benchlib.workloads import encdec, encoders
from benchlib.workloads.llm import decoders
from benchlib.workloads.numerics import max_abs, one_minus_cosine, relative_l2, together
from benchlib.workloads.stablehlo import export

Inputs = dict[str, torch.Tensor]
MIN_VOCABULARY = 128  # ids below it every model has
SMALL: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}


class Logits(torch.nn.Module):
    """An encoder-decoder as a function of tensors: logits (B, S, V) of two int64 (B, S)."""

    def __init__(self, model: encdec.Plain) -> None:
        super().__init__()
        self.model = model

    def forward(self, source: torch.Tensor, shifted: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        logits: torch.Tensor = self.model.head(self.model.hidden(source, shifted))
        return logits


def tokens(batch: int, length: int, vocabulary: int, seed: int) -> torch.Tensor:
    """Return int64 (B, S) of ids from 5 on; the smallest ones are special."""
    return torch.randint(5, vocabulary, (batch, length), generator=torch.Generator().manual_seed(seed))


def question(batch: int, length: int, vocabulary: int, seed: int) -> Inputs:
    """Return inputs of a BERT for question answering; of several rows the last one is padded to a half."""
    ids = tokens(batch, length, vocabulary, seed)
    mask = torch.ones_like(ids)
    if batch > 1:
        mask[-1, length // 2 :] = 0
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": torch.zeros_like(ids)}


def labelled(config: CompiledConfig, number: int, model: Any) -> Inputs:
    """Return the rows of a rank, or of a training step, with labels start and end, int64 (B,), outside of the padding."""
    seed, most = config.seed + 1000 * number, max(1, config.length // 2)
    generator = torch.Generator().manual_seed(seed + 1)
    start, end = (torch.randint(0, most, (config.batch,), generator=generator) for _ in range(2))
    return {"start": start, "end": end, **question(config.batch, config.length, model.config.vocab_size, seed)}


def bert(name: str, seed: int, attention: str = "eager") -> Any:
    """Return the embedded BERT for question answering, or one with random weights: bert-base, or one layer of width 32."""
    if name == "tiny":
        return encoders.load(EMBEDDED_MODEL, seed=seed, attention=attention).model.eval()
    torch.manual_seed(seed)
    config = transformers.BertConfig(**(SMALL | {"vocab_size": MIN_VOCABULARY} if name == "small" else {}))
    return transformers.AutoModelForQuestionAnswering.from_config(config, attn_implementation=attention).eval()


def bert_flops(model: Any, batch: int, length: int) -> float:
    """Return the FLOPs of the dots of a forward pass, with those of the two logits of a token."""
    sizes = model.config
    encoder = encoder_forward_flops(sizes.num_hidden_layers, sizes.hidden_size, sizes.intermediate_size, length)
    return batch * (encoder + 4 * sizes.hidden_size * length)


def model(name: str, config: CompiledConfig) -> tuple[torch.nn.Module, Inputs]:
    """Return a model as a function of tensors, and an input."""
    batch, length, seed = config.batch, config.length, config.seed
    if name == "bert":
        own = bert(config.model, seed)
        return export.Answers(own), question(batch, length, own.config.vocab_size, seed)
    if name == "encdec":
        torch.manual_seed(seed)
        source, shifted = (tokens(batch, length, 1024, number) for number in (seed, seed + 1))
        return Logits(encdec.Plain(128, 4, 2, 2, 256, 1024, length)), {"source": source, "shifted": shifted}
    decoder = decoders.load(decoders.EMBEDDED).model
    return export.NextToken(decoder), {"input_ids": tokens(batch, length, decoder.config.vocab_size, seed)}


def eager(module: torch.nn.Module, inputs: Inputs) -> list[np.ndarray]:
    """Return torch's own results."""
    with torch.no_grad():
        outputs = module(**inputs)
    return [side.numpy() for side in (outputs if isinstance(outputs, tuple) else (outputs,))]


def doubled(module: torch.nn.Module) -> torch.nn.Module:
    """Return a copy that computes in double precision."""
    return copy.deepcopy(module).double()


def apart(outputs: Sequence[np.ndarray], reference: Sequence[np.ndarray]) -> dict[str, float]:
    """Return the largest absolute difference, and 1 - cosine of all numbers together."""
    a, b = together(outputs), together(reference)
    return {"max_abs": max_abs(a, b), "one_minus_cos": one_minus_cosine(a, b)}


def relative(outputs: Mapping[str, Any], reference: Mapping[str, Any]) -> float:
    """Return the relative L2 distance of gradients by name over all; raises ``KeyError`` where one is missing."""
    return relative_l2(together([outputs[name] for name in reference]), together(list(reference.values())))


def gradients(loss: torch.nn.Module, inputs: Inputs, wrapped: Any = None) -> dict[str, np.ndarray]:
    """Return the gradients of a loss by autograd; ``wrapped``: of all ranks, by what calls it there."""
    loss.zero_grad()
    (wrapped or loss)(**inputs).backward()
    gradients = {name: parameter.grad for name, parameter in loss.named_parameters() if parameter.grad is not None}
    loss.zero_grad()
    return {name: gradient.numpy() for name, gradient in gradients.items()}
