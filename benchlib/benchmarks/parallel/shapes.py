"""Shapes of transformers and of device meshes, the ways to spread one over the other, and a job: plain values and arithmetic.

h hidden, f feed-forward, L layers, V vocabulary, S tokens of a sequence, B sequences, k the width of the keys of all heads. A
multiply-add counts as two operations, a training step as three forward passes; a causal mask is not deducted and embeddings
are look-ups (PaLM, appendix B).
"""

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal


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
    def matrices(self) -> int:
        """Parameters of one layer's matrices: ``2h² + 2hk`` of attention, and those of the feed-forward part."""
        return self.hidden * (2 * self.hidden + 2 * self.kv_width + self.ffn_matrices * self.ffn)

    @property
    def norm_parameters(self) -> int:
        """Parameters of one norm."""
        return self.hidden * (2 if self.norm == "layer" else 1)

    def layer_parameters(self, tensor: int = 1) -> int:
        """Parameters of one layer on one of ``tensor`` ranks: they cut matrices and the biases of columns, the rest is whole."""
        h, f, cut, whole = self.hidden, self.ffn, self.matrices, 2 * self.norm_parameters
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

    def step_flops(self, batch: int, seq: int) -> float:
        """FLOPs of a training step on ``batch`` sequences; what checkpointing computes twice is not counted."""
        products = 2.0 * seq * (self.layers * self.matrices + self.hidden * self.outputs)
        return 3 * batch * (products + 4.0 * self.layers * seq**2 * self.hidden)

    def lacks(self, tensor: int) -> str:
        """Return the first of its sizes that ``tensor`` ranks cannot share evenly; '' where they can share all."""
        sizes = ("heads", "kv_heads", "ffn", "vocabulary")
        return next((f"{name} = {getattr(self, name):,}" for name in sizes if getattr(self, name) % tensor), "")


_LLAMA: Any = {"gated": True, "norm": "rms", "biases": False, "learned_positions": False}
_SHAPES = (  # 50,304 are the tokens of GPT-2 rounded up to a multiple of 64, which devices can share
    Shape("tiny", "decoder", 128, 4, 4, 4, 512, 128, 512),
    Shape("small", "decoder", 768, 6, 12, 12, 3072, 1024, 50304),
    Shape("medium", "decoder", 1024, 12, 16, 16, 4096, 2048, 50304),
    Shape("large", "decoder", 2048, 24, 32, 32, 8192, 4096, 50304),
    Shape("gpt2", "decoder", 768, 12, 12, 12, 3072, 1024, 50257, tied=True),
    Shape("gpt2-medium", "decoder", 1024, 24, 16, 16, 4096, 1024, 50257, tied=True),
    Shape("gpt2-large", "decoder", 1280, 36, 20, 20, 5120, 1024, 50257, tied=True),
    Shape("gpt2-xl", "decoder", 1600, 48, 25, 25, 6400, 1024, 50257, tied=True),
    Shape("llama-1b", "decoder", 2048, 16, 32, 8, 8192, 131072, 128256, tied=True, **_LLAMA),
    Shape("llama-8b", "decoder", 4096, 32, 32, 8, 14336, 131072, 128256, **_LLAMA),
    Shape("bert-base", "encoder", 768, 12, 12, 12, 3072, 512, 30522),
    Shape("bert-large", "encoder", 1024, 24, 16, 16, 4096, 512, 30522),
)
MODELS: dict[str, Shape] = {shape.name: shape for shape in _SHAPES}


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
        return " x ".join(f"{axis} {degree}" for axis, degree in vars(self).items() if degree > 1) or "one device"


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
    "hybrid_sharded": Strategy(
        ("data",), "hybrid", "FSDP2 within groups of `shard` devices, copies between them (HSDP)"
    ),
    "tensor": Strategy(("tensor",), "", "each matrix cut by columns or rows (DTensor)"),
    "sequence": Strategy(
        ("tensor",), "", "tensor parallel, and between the products each device has a part of the tokens"
    ),
    "context": Strategy(("context",), "replicate", "each device has a part of the tokens, keys and values go round"),
    "pipeline": Strategy(("pipeline",), "", "each device has some layers, micro-batches flow through"),
    "data_tensor": Strategy(("data", "tensor"), "replicate", "copies of a tensor-parallel model"),
    "sharded_tensor": Strategy(("data", "tensor"), "shard", "FSDP2 over tensor-parallel groups"),
    "data_pipeline": Strategy(("data", "pipeline"), "replicate", "copies of a pipeline"),
    "sharded_pipeline": Strategy(("data", "pipeline"), "shard", "pipelines whose stages are cut by FSDP2"),
    "data_tensor_pipeline": Strategy(("data", "pipeline", "tensor"), "replicate", "all three"),
}
# Schedules of pipelines: stages of a rank, and the class of torch.distributed.pipelining.
SCHEDULES: dict[str, tuple[int, str]] = {
    "gpipe": (1, "ScheduleGPipe"),
    "1f1b": (1, "Schedule1F1B"),
    "interleaved": (2, "ScheduleInterleaved1F1B"),
    "zero_bubble": (2, "ScheduleInterleavedZeroBubble"),
}


@dataclass(frozen=True)
class Job:
    """One model spread in one way, and the work of its steps: what is estimated, proved and measured.

    ``batch`` is of all ranks. ``scaling`` is empty for a row of its own, else strong or weak. ``shard`` ranks share a copy in
    ``hybrid_sharded``. ``weights`` is their type. ``repeats`` exchanges are planted beside each of DDP's.
    """

    shape: Shape
    strategy: str = "single"
    layout: Layout = Layout()
    schedule: str = ""
    batch: int = 8
    seq: int = 64
    micro_batches: int = 4
    precision: str = "fp32"
    checkpointing: bool = False
    compile: bool = False
    dropout: float = 0.0
    learning_rate: float = 1e-3
    seed: int = 0
    shard: int = 2
    scaling: str = ""
    weights: Literal["fp32", "fp64"] = "fp32"
    repeats: int = 0

    @property
    def key(self) -> str:
        """The name of its row."""
        words = [self.shape.name, self.strategy, self.schedule, self.scaling, str(self.layout) if self.scaling else ""]
        return " ".join(word for word in words if word)

    @property
    def copies(self) -> str:
        """How copies of the model are kept alike, see ``Strategy.copies``."""
        return STRATEGIES[self.strategy].copies

    @property
    def cut(self) -> bool:
        """Whether FSDP2 cuts weights, gradients and optimizer."""
        return self.copies in ("shard", "direct", "hybrid")

    @property
    def parts(self) -> int:
        """Micro-batches of a step; 1 without a pipeline."""
        return self.micro_batches if self.layout.pipeline > 1 else 1

    @property
    def rank_stages(self) -> int:
        """Stages of a rank."""
        return SCHEDULES[self.schedule][0] if self.schedule else 1

    @property
    def stages(self) -> int:
        """Stages of a copy."""
        return self.layout.pipeline * self.rank_stages

    @property
    def layers(self) -> int:
        """Layers of the fullest rank."""
        return -(-self.shape.layers // self.layout.pipeline)

    @property
    def tokens(self) -> float:
        """Tokens of a step that a rank works on."""
        return self.batch / self.layout.data * self.seq / self.layout.context

    @property
    def flops(self) -> float:
        """FLOPs of a step, all ranks, as MFU counts them."""
        return self.shape.step_flops(self.batch, self.seq)

    def alone(self, **changes: Any) -> "Job":
        """Return the same work on one device, with changes."""
        return replace(self, **{"strategy": "single", "layout": Layout(), "schedule": "", **changes})

    def narrow(self) -> "Job":
        """Return a job of the same kind whose model is so narrow that it is proved in no time and has hardly any products."""
        shape, layout = self.shape, self.layout
        heads = 2 * layout.tensor
        own = replace(shape, hidden=8 * heads, ffn=16 * heads, heads=heads, vocabulary=24 * layout.tensor)
        positions = 8 * max(layout.tensor, layout.context)
        groups = heads if shape.kv_heads == shape.heads else layout.tensor
        own = replace(own, kv_heads=groups, layers=2 * layout.pipeline, positions=positions)
        return replace(self, shape=own, batch=layout.data * self.micro_batches, seq=positions)

    def row(self) -> dict[str, Any]:
        """Return the part of its row that is known before anything runs."""
        names = ("key", "strategy", "schedule", "scaling", "precision", "checkpointing", "compile", "flops")
        micro = self.micro_batches if self.schedule else 1
        known = {"batch_size": self.batch, "seq_len": self.seq, "micro_batches": micro, "obstacle": ""}
        known |= {"model": self.shape.name, "parameters": self.shape.parameters, "world": self.layout.world}
        return {name: getattr(self, name) for name in names} | known | asdict(self.layout)
