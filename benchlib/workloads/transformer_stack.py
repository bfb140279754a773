"""One transformer for every way of spreading it: GPT-like and Llama-like decoders and the BERT encoder.

Notation: B sequences, S tokens, h width, H heads, d width of a head, V tokens of the vocabulary.
A tensor-parallel rank holds a share of the heads, so that views take their number from what arrives.
"""

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

ROTARY_BASE = 10000.0
INIT_STD = 0.02  # of weights, as GPT-2 and BERT start


class Embed(nn.Module):
    """Tokens to hidden states (B, S, h): with places, where they are learned, and for the encoder types and a norm."""

    def __init__(self, form: Any) -> None:
        super().__init__()
        self.tokens = _padded(nn.Embedding(form.rows, form.hidden), form)
        self.places = nn.Embedding(form.positions, form.hidden) if form.learned_positions else None
        encoder = form.kind == "encoder"
        self.types = nn.Embedding(2, form.hidden) if encoder else None
        self.norm: Any = _norm(form) if encoder else None

    def forward(self, tokens: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Return (B, S, h) of int64 (B, S) at the int64 (S) places. All tokens are of the first type."""
        x = self.tokens(tokens)
        if self.places is not None:
            x = x + self.places(places)
        if self.types is not None:
            x = self.norm(x + self.types(torch.zeros_like(tokens)))
        return x  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Multi-head attention; fewer heads of keys and values than of queries are shared between these."""

    def __init__(self, form: Any) -> None:
        super().__init__()
        self.width, self.causal = form.hidden // form.heads, form.kind == "decoder"
        sizes = (form.hidden, form.kv_width, form.kv_width, form.hidden)
        self.query, self.key, self.value, self.output = (nn.Linear(form.hidden, n, form.biases) for n in sizes)

    def forward(self, x: torch.Tensor, turns: torch.Tensor | None = None) -> torch.Tensor:
        """Return (B, S, h); ``turns`` are the angles (S, d / 2) of rotary places."""
        layers = (self.query, self.key, self.value)
        q, k, v = (layer(x).unflatten(2, (-1, self.width)).transpose(1, 2) for layer in layers)
        if turns is not None:
            q, k = _turned(q, turns), _turned(k, turns)
        if k.shape[1] != q.shape[1]:
            k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], dim=1) for part in (k, v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.output(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    """Two products around a GELU, or three around a gated SiLU: (B, S, h) to the same."""

    def __init__(self, form: Any) -> None:
        super().__init__()
        self.up = nn.Linear(form.hidden, form.ffn, form.biases)
        self.gate = nn.Linear(form.hidden, form.ffn, form.biases) if form.gated else None
        self.down = nn.Linear(form.ffn, form.hidden, form.biases)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up = self.up(x)
        inner = functional.gelu(up) if self.gate is None else functional.silu(self.gate(x)) * up
        return self.down(inner)  # type: ignore[no-any-return]


class Block(nn.Module):
    """A layer, (B, S, h) to the same: norms before the parts in a decoder, after the sums in the encoder."""

    def __init__(self, form: Any) -> None:
        super().__init__()
        self.first = form.kind == "decoder"
        self.norm1, self.attention = _norm(form), Attention(form)
        self.norm2, self.ffn = _norm(form), FeedForward(form)

    def forward(self, x: torch.Tensor, turns: torch.Tensor | None = None) -> torch.Tensor:
        if self.first:
            x = x + self.attention(self.norm1(x), turns)
            return x + self.ffn(self.norm2(x))  # type: ignore[no-any-return]
        x = self.norm1(x + self.attention(x, turns))
        return self.norm2(x + self.ffn(x))  # type: ignore[no-any-return]


class Stack(nn.Module):
    """The whole model, or a pipeline's stage, under the same names: ``embed``, ``blocks.K``, ``norm``, ``head``.

    ``form`` has the fields of a shape: kind (decoder, encoder), hidden, layers, heads, kv_width, ffn, positions,
    vocabulary, rows (with those that pad it), gated, norm (layer, rms), biases, learned_positions, tied.
    """

    places: torch.Tensor  # (S,)

    def __init__(self, form: Any, length: int, checkpointing: bool = False) -> None:
        super().__init__()
        self.kind, self.tied, self.checkpointing = form.kind, form.tied, checkpointing
        self.turn_width = 0 if form.learned_positions else form.hidden // form.heads
        encoder = form.kind == "encoder"
        self.embed: Embed | None = Embed(form)
        self.blocks = nn.ModuleDict({str(layer): Block(form) for layer in range(form.layers)})
        self.norm: nn.Module | None = None if encoder else _norm(form)
        self.outputs = form.outputs
        head = nn.Linear(form.hidden, 2) if encoder else _padded(nn.Linear(form.hidden, form.rows, bias=False), form)
        self.head: nn.Module | None = head
        self.register_buffer("places", torch.arange(length), persistent=False)
        self._tie()

    def _tie(self) -> None:
        if self.tied and self.head is not None and self.embed is not None:
            self.head.weight = self.embed.tokens.weight

    def fill(self, device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, nn.Module]]:
        """Give a model that was made on the device "meta" its weights; yield the name of each piece and itself.

        Who cuts or drops a piece before the next one comes never holds the whole model. Weights are drawn in the same
        order for everybody, so that one seed gives one model however it is spread.
        """
        blocks = {f"blocks.{name}": block for name, block in self.blocks.items()}
        for name, piece in {"embed": self.embed, **blocks, "norm": self.norm, "head": self.head}.items():
            if piece is not None:
                yield name, piece.to_empty(device=device).apply(_start).to(dtype)
        self._tie()

    def part(self, number: int, stages: int) -> "Stack":
        """Return a stage, which shares this model's weights: its part of the layers, embedding and head at the ends."""
        stage, layers = copy.copy(self), len(self.blocks)
        stage._modules, stage._buffers = dict(self._modules), dict(self._buffers)
        begin, end = layers * number // stages, layers * (number + 1) // stages
        stage.blocks = nn.ModuleDict({str(layer): self.blocks[str(layer)] for layer in range(begin, end)})
        if number > 0:
            stage.embed = None
        if number < stages - 1:
            stage.norm = stage.head = None
        return stage

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits of int64 (B, S): (B, S, V), of the encoder (B, S, 2). A stage takes and returns (B, S, h)."""
        if self.embed is not None:
            x = self.embed(x, self.places)
        turns = _angles(self.places, self.turn_width) if self.turn_width else None
        for block in self.blocks.values():
            if self.checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, turns, use_reentrant=False)
            else:
                x = block(x, turns)
        if self.norm is not None:
            x = self.norm(x)
        if self.head is None:
            return x
        logits: torch.Tensor = self.head(x)
        # Outputs of the padding are cut off: they are in no loss, and its rows get no gradient.
        return logits if logits.shape[2] == self.outputs else logits[..., : self.outputs]


def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy: of the next tokens, int64 (B, S), or an answer's start and end, int64 (B, 2)."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if logits.shape[2] == 2 and targets.shape[1] == 2:
        return functional.cross_entropy(logits, targets)
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _norm(form: Any) -> nn.Module:
    return nn.LayerNorm(form.hidden) if form.norm == "layer" else nn.RMSNorm(form.hidden, eps=1e-5)


def _padded(module: Any, form: Any) -> Any:
    module.vocabulary = form.vocabulary
    return module


def _start(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        weight, drawn = module.weight.detach(), getattr(module, "vocabulary", None)
        nn.init.zeros_(weight)[:drawn].normal_(std=INIT_STD)  # padding draws nothing: the others start as without it
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        module.reset_parameters()


def _angles(places: torch.Tensor, width: int) -> torch.Tensor:
    """Return the angles (S, d / 2) of rotary places (Su et al., "RoFormer", 2021)."""
    powers = torch.arange(0, width, 2, device=places.device, dtype=torch.float32) / width
    return places.float()[:, None] * ROTARY_BASE**-powers


def _turned(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """Turn (B, H, S, d): the halves of a head are the parts of complex numbers, as in Llama at Hugging Face."""
    cos, sin = turns.cos().to(x.dtype), turns.sin().to(x.dtype)
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)
