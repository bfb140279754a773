"""The all-gather and reduce-scatter of ``direct`` for FSDP2, by the hooks that ``FSDPModule`` has for it.

    model = fully_shard(...)
    use_direct(model)

Everything else stays FSDP2's: sharding, mixed precision, gradient accumulation, and with a mesh of two dimensions (HSDP)
the all-reduce between replicas, which goes through the library as before. A gradient divide factor that is not the
number of ranks needs ``set_force_sum_reduction_for_comms(True)``: the reduction that FSDP2 takes for it otherwise is
nccl's alone, and is refused here as gloo refuses it.

torch names the interface (``AllGather``, ``ReduceScatter``) in a private module only, so the classes here have its
methods without being derived from it; FSDP2 asks for no more.
"""

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from benchlib import direct, p2p


class Buffers:
    """Allocates what is exchanged, anew for every call: the gradients of a step are views of what was reduced."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return an uninitialised tensor (the product of ``size``,)."""
        return torch.empty(math.prod(size), dtype=dtype, device=device)


class DirectAllGather(Buffers):
    """Gathers parameters. FSDP2 passes its slice of the output as the input, so nothing is copied."""

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: p2p.Group, async_op: bool = False
    ) -> dist.Work | None:
        """Gather; an asynchronous call returns the work, on which FSDP2 waits before it copies the parameters out."""
        return direct.all_gather(output_tensor, input_tensor, group, async_op)


class DirectReduceScatter(Buffers):
    """Reduces gradients."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: p2p.Group,
        op: p2p.Op,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce by ``op``: an average for fp32 and bf16, a sum for the other types, which FSDP2 divides itself."""
        return direct.reduce_scatter(output_tensor, input_tensor, op, group, async_op)


def use_direct(model: nn.Module) -> int:
    """Let all FSDP2 modules of ``model``, itself included, exchange by ``direct``; return how many there are.

    Raises ``ValueError`` where there is none, and torch's own for one whose parameters lie on several meshes.
    """
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not modules:
        raise ValueError("the model has no FSDP2 module; shard it first (torch.distributed.fsdp.fully_shard)")
    for module in modules:
        module.set_custom_all_gather(DirectAllGather())  # type: ignore[arg-type]
        module.set_custom_reduce_scatter(DirectReduceScatter())  # type: ignore[arg-type]
    return len(modules)
