"""The models that are converted, their inputs, and how far two results are apart.

Letters: B rows, S tokens.
"""

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import transformers

from benchlib.benchmarks.compiled.config import CompiledConfig
from benchlib.config.schema import EMBEDDED_MODEL
from benchlib.workloads import encdec, encoders, numerics
from benchlib.workloads.llm import decoders
from benchlib.workloads.stablehlo import export

Inputs = dict[str, torch.Tensor]
SMALLEST = 128  # tokens of the smallest vocabulary, which every model has


class Logits(torch.nn.Module):
    """An encoder-decoder as a function of tensors: logits (B, S, V) of two int64 (B, S)."""

    def __init__(self, model: encdec.Plain) -> None:
        super().__init__()
        self.model = model

    def forward(self, source: torch.Tensor, shifted: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        made: torch.Tensor = self.model.head(self.model.hidden(source, shifted))
        return made


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


def labelled(batch: int, length: int, vocabulary: int, seed: int) -> Inputs:
    """Return the same with labels start and end, int64 (B,), outside of the padding."""
    generator = torch.Generator().manual_seed(seed + 1)
    start, end = (torch.randint(0, max(1, length // 2), (batch,), generator=generator) for _ in range(2))
    return {"start": start, "end": end, **question(batch, length, vocabulary, seed)}


def rows(config: CompiledConfig, number: int, loss: export.AnswerLoss) -> Inputs:
    """Return the labelled rows of a rank, or of a training step."""
    vocabulary = loss.model.config.vocab_size  # type: ignore[union-attr]
    return labelled(config.batch, config.length, vocabulary, config.seed + 1000 * number)  # type: ignore[arg-type]


def bert(name: str = "tiny", seed: int = 0, attention: str = "eager") -> Any:
    """Return the embedded BERT for question answering, or ``bert-base``, or ``small`` (a layer of width 32), both with random weights."""
    if name == "tiny":
        return encoders.load(EMBEDDED_MODEL, seed=seed, attention=attention).model.eval()
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "vocab_size": SMALLEST,
    }
    config = transformers.BertConfig(**(sizes if name == "small" else {}))
    return transformers.AutoModelForQuestionAnswering.from_config(config, attn_implementation=attention).eval()


def model(name: str, batch: int, length: int, seed: int, kind: str = "tiny") -> tuple[torch.nn.Module, Inputs]:
    """Return a model as a function of tensors, and an input; ``kind`` is which BERT."""
    if name == "bert":
        own = bert(kind, seed)
        return export.Answers(own), question(batch, length, own.config.vocab_size, seed)
    if name == "encdec":
        torch.manual_seed(seed)
        plain = encdec.Plain(128, 4, 2, 2, 256, 1024, length)
        return Logits(plain), {
            "source": tokens(batch, length, 1024, seed),
            "shifted": tokens(batch, length, 1024, seed + 1),
        }
    decoder = decoders.load(decoders.EMBEDDED).model
    return export.NextToken(decoder), {"input_ids": tokens(batch, length, decoder.config.vocab_size, seed)}


def eager(module: torch.nn.Module, inputs: Inputs) -> list[np.ndarray]:
    """Return torch's own results."""
    with torch.no_grad():
        made = module(**inputs)
    return [side.numpy() for side in (made if isinstance(made, tuple) else (made,))]


def truth(module: torch.nn.Module, inputs: Inputs) -> list[np.ndarray]:
    """Return the results in double precision."""
    return eager(copy.deepcopy(module).double(), inputs)


def apart(made: Sequence[np.ndarray], reference: Sequence[np.ndarray]) -> tuple[float, float]:
    """Return the largest absolute difference, and 1 - cosine of all numbers together."""
    a, b = _flat(made), _flat(reference)
    return numerics.max_abs(a, b), numerics.one_minus_cosine(a, b)


def _flat(parts: Iterable[Any]) -> np.ndarray:
    return np.concatenate([np.asarray(part, dtype=np.float64).reshape(-1) for part in parts])


def relative(made: Mapping[str, Any], reference: Mapping[str, Any]) -> float:
    """Return the relative L2 distance of gradients by name over all; raises ``KeyError`` where one is missing."""
    return numerics.relative_l2(_flat(made[name] for name in reference), _flat(reference.values()))


def gradients(loss: torch.nn.Module, inputs: Inputs) -> dict[str, np.ndarray]:
    """Return the gradients of a loss by autograd."""
    loss.zero_grad()
    loss(**inputs).backward()
    made = {
        name: parameter.grad.numpy().copy() for name, parameter in loss.named_parameters() if parameter.grad is not None
    }
    loss.zero_grad()
    return made
