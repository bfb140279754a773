"""Shapes of transformers and of device meshes, the ways to spread one over the other, and a job: plain arithmetic.

h hidden, f feed-forward, k the width of all keys. A multiply-add counts as two operations, a training step as three
forward passes; a causal mask is not deducted and embeddings are look-ups (PaLM, appendix B).
"""

import functools
import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from benchlib.core.errors import UserError, explained, nearest
from benchlib.core.files import read_yaml


@dataclass(frozen=True)
class Shape:
    """A transformer. ``gated``: three feed-forward matrices instead of two; ``tied``: the head is the embedding.

    ``padding`` rows follow those of the vocabulary in embedding and head, so that ranks can share them.
    """

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
    padding: int = 0

    @property
    def kv_width(self) -> int:
        return self.hidden // self.heads * self.kv_heads

    @property
    def ffn_inputs(self) -> int:
        """Width of all that the feed-forward part makes of hidden states: f, or 2f of a gated one."""
        return self.ffn * (2 if self.gated else 1)

    @property
    def matrices(self) -> int:
        """Parameters of one layer's matrices: ``2h² + 2hk`` of attention, and those of the feed-forward part."""
        return self.hidden * (2 * self.hidden + 2 * self.kv_width + self.ffn_inputs + self.ffn)

    @property
    def norm_parameters(self) -> int:
        return self.hidden * (2 if self.norm == "layer" else 1)

    @property
    def rows(self) -> int:
        return self.vocabulary + self.padding

    def padded(self, tensor: int) -> "Shape":
        """Fill a vocabulary that ``tensor`` ranks cannot share up to a multiple of 64 that they can, as Megatron-LM does."""
        return replace(self, padding=-self.vocabulary % math.lcm(64, tensor) if self.vocabulary % tensor else 0)

    @property
    def outputs(self) -> int:
        """Numbers that the head gives for a token: of an encoder the scores of a span's start and end."""
        return 2 if self.kind == "encoder" else self.vocabulary

    def layer_parameters(self, tensor: int = 1) -> int:
        """Parameters of a layer on one of ``tensor`` ranks, which cut matrices and the biases of columns."""
        cut, whole = self.matrices, 2 * self.norm_parameters
        if self.biases:
            cut, whole = (cut + self.hidden + 2 * self.kv_width + self.ffn_inputs, whole + 2 * self.hidden)
        return cut // tensor + whole

    def embedding_parameters(self, tensor: int = 1) -> int:
        """Parameters in front of the layers; an encoder has two segments and a norm there."""
        rows = self.rows // tensor + (self.positions if self.learned_positions else 0)
        return self.hidden * rows + (2 * self.hidden + self.norm_parameters if self.kind == "encoder" else 0)

    def head_parameters(self, tensor: int = 1) -> int:
        """Parameters behind the layers: a norm and the vocabulary's matrix, of an encoder two outputs with biases."""
        if self.kind == "encoder":
            return 2 * self.hidden + 2
        return self.norm_parameters + (0 if self.tied else self.hidden * self.rows // tensor)

    @property
    def parameters(self) -> int:
        return self.embedding_parameters() + self.layers * self.layer_parameters() + self.head_parameters()

    def step_flops(self, batch: int, seq: int) -> float:
        """FLOPs of a training step on ``batch`` sequences; what checkpointing computes twice is not counted."""
        products = 2.0 * seq * (self.layers * self.matrices + self.hidden * self.outputs)
        return 3 * batch * (products + 4.0 * self.layers * seq**2 * self.hidden)

    def uneven(self, tensor: int) -> str:
        """Return the first of its sizes that ``tensor`` ranks cannot share evenly; '' where they can share all."""
        sizes = ("heads", "kv_heads", "ffn")
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


# Fields of a config.json of transformers by fields of a shape, and what its architecture fixes.
_COMMON = {
    "hidden": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "vocabulary": "vocab_size",
}
_COMMON |= {"ffn": "intermediate_size", "positions": "max_position_embeddings"}
_GPT2 = {"hidden": "n_embd", "layers": "n_layer", "heads": "n_head", "ffn": "n_inner", "positions": "n_positions"}
TRANSFORMERS: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "gpt2": (_GPT2 | {"vocabulary": "vocab_size"}, {"kind": "decoder", "tied": True}),
    "llama": (_COMMON | {"kv_heads": "num_key_value_heads"}, {"kind": "decoder", **_LLAMA}),
    "bert": (_COMMON, {"kind": "encoder"}),
}


@functools.cache
def shape_of(model: str) -> Shape:
    """Return the shape of a model: one of ``MODELS``, a JSON or YAML file with the fields of ``Shape``, or a folder with the
    config.json of a GPT-2, Llama or BERT of transformers.

    Raises ``UserError`` for another name, and for fields that are missing, unknown or do not fit together.
    """
    path = Path(model).expanduser()
    if model in MODELS:
        return MODELS[model]
    if not path.exists():
        raise UserError(f"{model!r}: {nearest(model, MODELS)} Or give a file of a shape or a folder with config.json")
    values = read_yaml(path / "config.json" if path.is_dir() else path)
    if path.is_dir():
        kind = values.get("model_type") if isinstance(values, dict) else None
        if kind not in TRANSFORMERS:
            raise UserError(
                f"{path}: model_type = {kind!r} is not one of {', '.join(TRANSFORMERS)}: write a file of its shape"
            )
        names, fixed = TRANSFORMERS[kind]
        tied = (
            {"tied": bool(values["tie_word_embeddings"])} if "tie_word_embeddings" in values and kind != "bert" else {}
        )
        values = fixed | {name: values[of] for name, of in names.items() if values.get(of)} | tied
    if not isinstance(values, dict):
        raise UserError(f"{path}: expected the fields of a shape by name, as in hidden: 256")
    usual = {
        "name": re.sub(r"\W+", "-", path.stem),
        "kv_heads": values.get("heads"),
        "ffn": 4 * int(values.get("hidden") or 0),
    }
    try:
        shape = TypeAdapter(Shape).validate_python(usual | values)
    except ValidationError as error:
        raise UserError(f"{path}: {explained(error)}; a shape has {', '.join(Shape.__dataclass_fields__)}") from None
    sizes = ("hidden", "layers", "heads", "kv_heads", "ffn", "positions", "vocabulary")
    for name in (name for name in sizes if getattr(shape, name) < 1):
        raise UserError(f"{path}: {name} = {getattr(shape, name)} has to be 1 or more")
    for whole, parts in (("hidden", "heads"), ("heads", "kv_heads")):
        if getattr(shape, whole) % getattr(shape, parts):
            raise UserError(
                f"{path}: {parts} = {getattr(shape, parts)} does not divide {whole} = {getattr(shape, whole)}"
            )
    return shape


@dataclass(frozen=True)
class Layout:
    """Degrees of a device mesh, the outermost first: copies, ranks that share one by FSDP2, and so on."""

    data: int = 1
    shard: int = 1
    pipeline: int = 1
    tensor: int = 1
    context: int = 1

    @property
    def world(self) -> int:
        return math.prod(vars(self).values())

    @property
    def feeds(self) -> int:
        """Among how many a batch is divided: copies, and the ranks that share one."""
        return self.data * self.shard

    def __str__(self) -> str:
        return " x ".join(f"{axis} {degree}" for axis, degree in vars(self).items() if degree > 1) or "one device"


_FSDP = "weights, gradients and optimizer cut over the ranks (FSDP2)"
_COPIES = "copies of what the other axes spread"
# By name the axes of the mesh that a strategy takes, the outermost first, and what it is.
_STRATEGIES: dict[str, tuple[tuple[str, ...], str]] = {
    "single": ((), "one device"),
    "data": (("data",), "a copy on each rank, gradients averaged (DDP)"),
    "sharded": (("shard",), _FSDP),
    "sharded_direct": (("shard",), f"{_FSDP}, with benchlib's own all-gather and reduce-scatter"),
    "hybrid_sharded": (("data", "shard"), "copies, each cut over some ranks (HSDP)"),
    "tensor": (("tensor",), "each matrix cut by columns or rows (DTensor)"),
    "sequence": (("tensor",), "tensor, and between the products each rank has a part of the tokens"),
    "context": (("context",), "each rank has a part of the tokens, keys and values go round"),
    "pipeline": (("pipeline",), "each rank has some layers, micro-batches flow through"),
    "data_tensor": (("data", "tensor"), f"tensor, and {_COPIES}"),
    "sharded_tensor": (("shard", "tensor"), "tensor, and each part cut over some ranks (FSDP2)"),
    "data_pipeline": (("data", "pipeline"), f"pipeline, and {_COPIES}"),
    "sharded_pipeline": (("shard", "pipeline"), "pipeline, and each stage cut over some ranks (FSDP2)"),
    "data_tensor_pipeline": (("data", "pipeline", "tensor"), f"pipeline of tensor, and {_COPIES}"),
}
STRATEGIES = {name: axes for name, (axes, _) in _STRATEGIES.items()}
STRATEGY_WORDS = {name: words for name, (_, words) in _STRATEGIES.items()}
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

    ``batch`` is of all ranks; ``schedule`` and ``micro_batches`` are of a pipeline. ``scaling`` is empty for a row of
    its own, else strong or weak. ``weights`` is their type. ``repeats`` exchanges are injected beside each of DDP's.
    """

    shape: Shape
    strategy: str = "single"
    layout: Layout = Layout()
    schedule: str = ""
    batch: int = 8
    seq: int = 64
    micro_batches: int = 1
    precision: str = "fp32"
    checkpointing: bool = False
    compile: bool = False
    fused_loss: bool = False
    learning_rate: float = 1e-3
    seed: int = 0
    scaling: str = ""
    weights: Literal["fp32", "fp64"] = "fp32"
    repeats: int = 0

    @property
    def key(self) -> str:
        words = [self.shape.name, self.strategy, self.schedule, self.scaling, str(self.layout) if self.scaling else ""]
        return " ".join(word for word in words if word)

    @property
    def width_bytes(self) -> int:
        return 2 if self.precision == "bf16" else 4

    @property
    def rank_stages(self) -> int:
        return SCHEDULES[self.schedule][0] if self.schedule else 1

    @property
    def stages(self) -> int:
        return self.layout.pipeline * self.rank_stages

    @property
    def layers(self) -> int:
        return -(-self.shape.layers // self.layout.pipeline)

    @property
    def tokens(self) -> float:
        return self.batch / self.layout.feeds * self.seq / self.layout.context

    @property
    def flops(self) -> float:
        """FLOPs of a step, all ranks, as MFU counts them."""
        return self.shape.step_flops(self.batch, self.seq)

    def alone(self, **changes: Any) -> "Job":
        single: dict[str, Any] = {"strategy": "single", "layout": Layout(), "schedule": "", "micro_batches": 1}
        return replace(self, shape=self.shape.padded(1), **single | changes)

    def narrow(self) -> "Job":
        """Return a job of the same kind whose model is so narrow that it has hardly any products and is soon proved."""
        shape, layout, t = self.shape, self.layout, self.layout.tensor
        seq, kv_heads = 8 * max(t, layout.context), 2 * t if shape.kv_heads == shape.heads else t
        widths = {"hidden": 16 * t, "ffn": 32 * t, "heads": 2 * t, "kv_heads": kv_heads}
        widths |= {"padding": int(shape.padding > 0), "vocabulary": 24 * t - (shape.padding > 0)}
        own = replace(shape, layers=2 * layout.pipeline, positions=seq, **widths)  # type: ignore[arg-type]
        samples = self.micro_batches if self.schedule else 4
        return replace(self, shape=own, batch=layout.feeds * samples, seq=seq)

    def row(self) -> dict[str, Any]:
        """Return the part of its row that is known before anything runs."""
        names = "key strategy schedule scaling micro_batches precision checkpointing compile flops"
        row = {name: getattr(self, name) for name in names.split()} | vars(self.layout)
        row |= {"model": self.shape.name, "parameters": self.shape.parameters, "padding": self.shape.padding}
        row |= {"world": self.layout.world, "batch_size": self.batch, "seq_len": self.seq}
        return row | {"status": "ok", "obstacle": "", "why": {}}
