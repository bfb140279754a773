"""An encoder-decoder on pairs of token sequences: torch's ``nn.Transformer`` in the usual way, and the same model tuned.

Both have the same parameters under the same names and compute the same loss. Dropout is off: its random numbers would differ
between the two. Notation: B samples, S tokens of a sequence, h width, H heads, V tokens of the vocabulary, N = B S.
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional

# The token that the decoder sees first; the vocabulary has none to spare, and a target may begin with it, too.
START = 0
# Logits that the tuned loss holds at once: on a CPU as many as stay in its caches, else enough to fill a device.
_CHUNK = {"cpu": 1 << 22}
_CHUNK_OF_DEVICES = 1 << 27
# Up to this length a CPU is faster with attention in plain products: its fused kernel takes five times as long on the way back.
_PLAIN_PRODUCTS = {"cpu": 1024}


class Plain(nn.Module):
    """The model as anyone would write it. ``forward`` returns the summed cross-entropy of a batch, a scalar."""

    mask: torch.Tensor  # (S, S), minus infinity for the places that come later

    def __init__(
        self,
        d_model: int,
        nhead: int,
        encoder_layers: int,
        decoder_layers: int,
        dim_feedforward: int,
        vocabulary: int,
        sequence: int,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, d_model)
        self.positions = nn.Embedding(sequence, d_model)
        self.transformer = nn.Transformer(
            d_model, nhead, encoder_layers, decoder_layers, dim_feedforward, dropout=0.0, batch_first=True
        )
        self.head = nn.Linear(d_model, vocabulary)
        mask = nn.Transformer.generate_square_subsequent_mask(sequence)
        self.register_buffer("mask", mask.to(self.head.weight.dtype), persistent=False)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return (B, S, h) of int64 (B, S)."""
        return self.embedding(tokens) + self.positions.weight  # type: ignore[no-any-return]

    def hidden(self, source: torch.Tensor, shifted: torch.Tensor) -> torch.Tensor:
        """Return what the decoder gives for each place of the target, (B, S, h)."""
        embedded = self.embed(source), self.embed(shifted)
        return self.transformer(*embedded, tgt_mask=self.mask, tgt_is_causal=True)  # type: ignore[no-any-return]

    def loss(self, states: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return the summed cross-entropy of (B, S, h) states against int64 (B, S)."""
        logits = self.head(states).flatten(0, 1)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return functional.cross_entropy(logits, target.flatten(), reduction="sum")

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return the summed loss of int64 (B, S) each; place t of the target is predicted from its places before t."""
        return self.loss(self.hidden(source, shifted_right(target)), target)


def shifted_right(target: torch.Tensor) -> torch.Tensor:
    """Return what the decoder sees while it is taught: the start token and all of the target but its last, int64 (B, S)."""
    return torch.cat([torch.full_like(target[:, :1], START), target[:, :-1]], dim=1)


class Tuned(Plain):
    """The same model with what a machine can do: attention without transposed copies of the states, by the kernel that is fastest there, and
    a loss that never holds all logits.
    """

    def hidden(self, source: torch.Tensor, shifted: torch.Tensor) -> torch.Tensor:
        """Return what ``Plain.hidden`` does."""
        encoder, decoder = self.transformer.encoder, self.transformer.decoder
        x = self.embed(source)
        for layer in encoder.layers:
            x = layer.norm1(x + _attend(layer.self_attn, x, x))
            x = layer.norm2(x + layer.linear2(functional.relu(layer.linear1(x))))
        memory = encoder.norm(x)
        x = self.embed(shifted)
        for layer in decoder.layers:
            x = layer.norm1(x + _attend(layer.self_attn, x, x, self.mask))
            x = layer.norm2(x + _attend(layer.multihead_attn, x, memory))
            x = layer.norm3(x + layer.linear2(functional.relu(layer.linear1(x))))
        return decoder.norm(x)  # type: ignore[no-any-return]

    def loss(self, states: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return what ``Plain.loss`` does."""
        flat = states.flatten(0, 1), self.head.weight, self.head.bias, target.flatten()
        return ChunkedLoss.apply(*flat)  # type: ignore[no-any-return, no-untyped-call]


def _attend(attention: Any, x: torch.Tensor, memory: torch.Tensor, causal: torch.Tensor | None = None) -> torch.Tensor:
    """Return (B, S, h): what an ``nn.MultiheadAttention`` gives for queries of ``x`` on ``memory``; ``causal`` is its mask."""
    width, heads = attention.embed_dim, attention.num_heads
    weight, bias = attention.in_proj_weight, attention.in_proj_bias
    if x is memory:
        q, k, v = _heads(functional.linear(x, weight, bias), 3, heads)
    else:
        (q,) = _heads(functional.linear(x, weight[:width], bias[:width]), 1, heads)
        k, v = _heads(functional.linear(memory, weight[width:], bias[width:]), 2, heads)
    if x.shape[1] <= _PLAIN_PRODUCTS.get(x.device.type, 0):
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(2, 3)
        mixed = (scores if causal is None else scores + causal).softmax(3) @ v
    else:
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=causal is not None)
    return attention.out_proj(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def _heads(states: torch.Tensor, parts: int, heads: int) -> tuple[torch.Tensor, ...]:
    """Cut (B, S, parts h) into views (B, H, S, h / H)."""
    return states.unflatten(2, (parts, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)


class ChunkedLoss(torch.autograd.Function):
    """Summed cross-entropy of an output layer, some rows at a time.

    The gradients are made on the way forward, while a chunk's logits are at hand, so that none is computed twice: the forward pass
    does the three products of output layer and its gradients, the backward pass multiplies by what comes from above.
    Products run in the type of autocast where it is on, softmax and sums at least in fp32.
    """

    @staticmethod
    def forward(
        ctx: Any, states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, target: torch.Tensor
    ) -> torch.Tensor:
        """Return the sum over N of (N, h) states, (V, h) weight, (V) bias against int64 (N)."""
        kind = states.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
        exact = torch.promote_types(weight.dtype, torch.float32)
        rows = max(1, _CHUNK.get(kind, _CHUNK_OF_DEVICES) // len(weight))
        total = torch.zeros((), dtype=exact, device=states.device)
        by_states, by_weight, by_bias = torch.empty_like(states), torch.zeros_like(weight), torch.zeros_like(bias)
        with torch.autocast(kind, enabled=False):
            own, factors, offset = states.to(dtype), weight.to(dtype), bias.to(dtype)
            for low in range(0, len(states), rows):
                part = slice(low, low + rows)
                place = target[part, None]
                logarithms = torch.addmm(offset, own[part], factors.T).to(exact).log_softmax(1)
                total -= logarithms.gather(1, place).sum()
                slopes = logarithms.exp_().scatter_add_(1, place, logarithms.new_full(place.shape, -1.0))
                by_bias += slopes.sum(0)
                slope = slopes.to(dtype)
                by_states[part] = slope @ factors
                by_weight += slope.T @ own[part]
        ctx.save_for_backward(by_states, by_weight, by_bias)
        return total

    @staticmethod
    def backward(ctx: Any, slope: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        """Return the gradients by states, weight and bias."""
        return (*(gradient * slope for gradient in ctx.saved_tensors), None)


ENGINES: dict[str, type[Plain]] = {"plain": Plain, "tuned": Tuned}
