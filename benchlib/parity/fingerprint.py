"""One hash for many tensors: the same names, types, shapes and bytes give the same one on every machine."""

import hashlib
from collections.abc import Mapping

import torch


def sha256(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return the SHA-256 over (name, dtype, shape, bytes) of the tensors, sorted by name; 64 hex digits."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        header = f"{name}\0{str(tensor.dtype).removeprefix('torch.')}\0{tuple(tensor.shape)}\0"
        digest.update(header.encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
