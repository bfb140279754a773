"""Whether the memory of this machine holds the largest input, asked before anything is made: a killed process says nothing."""

from pathlib import Path
from typing import Any

import psutil

from benchlib.errors import UserError
from benchlib.parity.config import ParityConfig

GIB = 2**30
DOUBLE = 8  # bytes: the truth is computed in fp64, on the CPU
CONTAINER = Path(
    "/sys/fs/cgroup/memory.max"
)  # beyond it a container's processes are killed; absent or "max" without a limit


def require(config: ParityConfig, settings: Any, available: int | None = None) -> None:
    """Raise ``UserError`` where the attention weights alone of the largest input do not fit the memory.

    A lower bound: eager attention holds B x heads x S x S scores and their softmax at once, and for gradients one of
    these of every layer. ``available`` in bytes; None asks the system.
    """
    heads, layers = (
        _size(settings, *names) for names in (("num_attention_heads", "n_heads"), ("num_hidden_layers", "n_layers"))
    )
    left = _available() if available is None else available
    asked = [
        ("batch_sizes", max(config.batch_sizes), "lengths", max(config.lengths), 2),
        ("train_batch", config.train_batch, "train_length", config.train_length, max(2, layers)),
    ]
    for batch_name, batch, length_name, length, copies in asked:
        needed = batch * heads * length**2 * DOUBLE * copies
        if needed > left:
            raise UserError(
                f"{batch_name} = {batch} with {length_name} = {length}: the attention weights of such an input take "
                f"{needed / GIB:,.2f} GiB in double precision, of memory {left / GIB:,.2f} GiB are available: "
                f"lower {batch_name} or {length_name}"
            )


def _available() -> int:
    try:
        limit = CONTAINER.read_text().strip()
    except OSError:
        limit = ""
    left = psutil.virtual_memory().available
    return min(left, int(limit)) if limit.isdigit() else left


def _size(settings: Any, *names: str) -> int:
    """Return the first of these fields that a model's config has; 1 where it has none."""
    return next((int(found) for name in names if isinstance(found := getattr(settings, name, None), int)), 1)
