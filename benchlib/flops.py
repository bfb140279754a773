"""Floating point operations by the shapes. L layers, h hidden, f intermediate, S tokens of a sequence, B sequences.

Source: PaLM appendix B and the arithmetic of a transformer's matrix products; a multiply-add counts as two.
"""

from collections.abc import Iterable


def encoder_forward_flops(layers: int, hidden: int, intermediate: int, length: int) -> float:
    """Return the FLOPs of one sequence of S tokens through an encoder: ``L [2S(4h² + 2hf) + 4S²h]``.

    Embeddings are look-ups and the QA head (2 outputs) is negligible; both are left out.
    """
    products = 2 * length * (4 * hidden**2 + 2 * hidden * intermediate)
    attention = 4 * length**2 * hidden
    return float(layers * (products + attention))


def encoder_train_flops(layers: int, hidden: int, intermediate: int, shapes: Iterable[tuple[int, int]]) -> float:
    """Return the FLOPs of training (three times the forward pass) on batches of ``shapes`` (B, S) as processed.

    Padding is counted: it is work that the device does.
    """
    return 3 * sum(batch * encoder_forward_flops(layers, hidden, intermediate, length) for batch, length in shapes)


def token_flops(parameters: float, *, training: bool) -> float:
    """Return the least FLOPs of one token through ``parameters`` of matrix products: 2N forward, 6N with the backward pass.

    Attention adds to it with the length; for the question whether a rate is possible at all, less is on the safe side.
    """
    return (6 if training else 2) * parameters
