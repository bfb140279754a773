"""Shapes of transformers and of device meshes, and the ways to spread one over the other: plain values and arithmetic.

h hidden, f feed-forward, L layers, V vocabulary, S tokens of a sequence, B sequences, k the width of the keys of all heads. A
multiply-add counts as two operations, a training step as three forward passes; a causal mask is not deducted and embeddings
are look-ups (PaLM, appendix B).
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Shape:
    """A transformer. ``gated``: three feed-forward matrices instead of two; ``tied``: the head is the embedding."""

    name: str
    kind: Literal["decoder", "encoder"]
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    positions: int
    vocabulary: int
    gated: bool = False
    norm: Literal["layer", "rms"] = "layer"
    biases: bool = True
    learned_positions: bool = True
    tied: bool = False

    @property
    def kv_width(self) -> int:
        """Width of the keys (and of the values) of all their heads."""
        return self.hidden // self.heads * self.kv_heads

    @property
    def ffn_matrices(self) -> int:
        """Matrices of a feed-forward part."""
        return 3 if self.gated else 2

    @property
    def attention_matrices(self) -> int:
        """Parameters of one layer's attention without biases: ``2h² + 2hk``."""
        return 2 * self.hidden**2 + 2 * self.hidden * self.kv_width

    @property
    def norm_parameters(self) -> int:
        """Parameters of one norm."""
        return self.hidden * (2 if self.norm == "layer" else 1)

    def layer_parameters(self, tensor: int = 1) -> int:
        """Parameters of one layer on one of ``tensor`` ranks: they cut matrices and the biases of columns, the rest is whole."""
        h, f = self.hidden, self.ffn
        cut, whole = self.attention_matrices + self.ffn_matrices * h * f, 2 * self.norm_parameters
        if self.biases:
            cut, whole = cut + h + 2 * self.kv_width + (self.ffn_matrices - 1) * f, whole + 2 * h
        return cut // tensor + whole

    def embedding_parameters(self, tensor: int = 1) -> int:
        """Parameters in front of the layers; an encoder has two segments and a norm there."""
        rows = self.vocabulary // tensor + (self.positions if self.learned_positions else 0)
        return self.hidden * rows + (2 * self.hidden + self.norm_parameters if self.kind == "encoder" else 0)

    def head_parameters(self, tensor: int = 1) -> int:
        """Parameters behind the layers: a norm and the vocabulary's matrix, of an encoder two outputs for a span."""
        if self.kind == "encoder":
            return 2 * self.hidden + 2
        return self.norm_parameters + (0 if self.tied else self.hidden * self.vocabulary // tensor)

    @property
    def parameters(self) -> int:
        """All parameters, a tied matrix once."""
        return self.embedding_parameters() + self.layers * self.layer_parameters() + self.head_parameters()

    @property
    def outputs(self) -> int:
        """Numbers that the head gives for a token."""
        return 2 if self.kind == "encoder" else self.vocabulary

    @property
    def matrix_parameters(self) -> int:
        """Parameters that matrix products read for a token: no embeddings, a tied head counts."""
        layer = self.attention_matrices + self.ffn_matrices * self.hidden * self.ffn
        return self.layers * layer + self.hidden * self.outputs

    def attention_flops(self, seq: int) -> float:
        """FLOPs of queries times keys and weights times values of one sequence, forward: ``4 L S² h``."""
        return 4.0 * self.layers * seq**2 * self.hidden

    def forward_flops(self, seq: int) -> float:
        """FLOPs of the forward pass of one sequence."""
        return 2.0 * seq * self.matrix_parameters + self.attention_flops(seq)

    def step_flops(self, batch: int, seq: int) -> float:
        """FLOPs of a training step on ``batch`` sequences; what checkpointing computes twice is not counted."""
        return 3 * batch * self.forward_flops(seq)


def _gpt2(name: str, hidden: int, layers: int, heads: int) -> Shape:
    return Shape(name, "decoder", hidden, layers, heads, heads, 4 * hidden, 1024, 50257, tied=True)


def _decoder(
    name: str, hidden: int, layers: int, heads: int, ffn: int, positions: int, vocabulary: int = 50257
) -> Shape:
    return Shape(name, "decoder", hidden, layers, heads, heads, ffn, positions, vocabulary)


def _llama(name: str, hidden: int, layers: int, ffn: int, tied: bool) -> Shape:
    return Shape(
        name, "decoder", hidden, layers, 32, 8, ffn, 131072, 128256,
        gated=True, norm="rms", biases=False, learned_positions=False, tied=tied,
    )  # fmt: skip


MODELS: dict[str, Shape] = {
    shape.name: shape
    for shape in (
        _decoder("tiny", 128, 4, 4, 512, 128, 512),
        _decoder("small", 768, 6, 12, 3072, 1024),
        _decoder("medium", 1024, 12, 16, 4096, 2048),
        _decoder("large", 2048, 24, 32, 8192, 4096),
        _gpt2("gpt2", 768, 12, 12),
        _gpt2("gpt2-medium", 1024, 24, 16),
        _gpt2("gpt2-large", 1280, 36, 20),
        _gpt2("gpt2-xl", 1600, 48, 25),
        _llama("llama-1b", 2048, 16, 8192, tied=True),
        _llama("llama-8b", 4096, 32, 14336, tied=False),
        Shape("bert-base", "encoder", 768, 12, 12, 12, 3072, 512, 30522),
        Shape("bert-large", "encoder", 1024, 24, 16, 16, 4096, 512, 30522),
    )
}


@dataclass(frozen=True)
class Layout:
    """Degrees of a device mesh."""

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1

    @property
    def world(self) -> int:
        """Ranks: the product of the degrees."""
        return self.data * self.tensor * self.pipeline * self.context

    def __str__(self) -> str:
        degrees = {"data": self.data, "tensor": self.tensor, "pipeline": self.pipeline, "context": self.context}
        return " x ".join(f"{name} {degree}" for name, degree in degrees.items() if degree > 1) or "one device"


STAGES_PER_RANK = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zero_bubble": 2}


@dataclass(frozen=True)
class Strategy:
    """``axes`` of the mesh it takes, outermost first; how it treats copies of the model (``copies``), and what it is."""

    axes: tuple[str, ...]
    copies: Literal["", "ddp", "replicate", "shard", "direct", "hybrid"]
    about: str


STRATEGIES: dict[str, Strategy] = {
    "single": Strategy((), "", "one device"),
    "data": Strategy(("data",), "ddp", "a copy on each device, gradients averaged (DDP)"),
    "sharded": Strategy(("data",), "shard", "weights, gradients and optimizer cut over the devices (FSDP2)"),
    "sharded_direct": Strategy(("data",), "direct", "FSDP2 with the kit's own all-gather and reduce-scatter"),
    "hybrid_sharded": Strategy(("data",), "hybrid", "FSDP2 within groups of `shard` devices, copies between them (HSDP)"),
    "tensor": Strategy(("tensor",), "", "each matrix cut by columns or rows (DTensor)"),
    "sequence": Strategy(("tensor",), "", "tensor parallel, and between the products each device has a part of the tokens"),
    "context": Strategy(("context",), "replicate", "each device has a part of the tokens, keys and values go round"),
    "pipeline": Strategy(("pipeline",), "", "each device has some layers, micro-batches flow through"),
    "data_tensor": Strategy(("data", "tensor"), "replicate", "copies of a tensor-parallel model"),
    "sharded_tensor": Strategy(("data", "tensor"), "shard", "FSDP2 over tensor-parallel groups"),
    "data_pipeline": Strategy(("data", "pipeline"), "replicate", "copies of a pipeline"),
    "sharded_pipeline": Strategy(("data", "pipeline"), "shard", "pipelines whose stages are cut by FSDP2"),
    "data_tensor_pipeline": Strategy(("data", "pipeline", "tensor"), "replicate", "all three"),
}  # fmt: skip
