"""Models too large for this machine, as shapes without data on the device: what they hold beside what the kit estimates."""

from pathlib import Path
from typing import Any

import torch
from simcuda.tensors import Here

from benchlib.benchmarks.parallel.config import ParallelConfig
from benchlib.benchmarks.parallel.estimate import memory
from benchlib.benchmarks.seq2seq.config import Seq2seqConfig
from benchlib.workloads.encdec import ENGINES
from benchlib.workloads.transformer_stack import Stack, loss


def stack(device: Any, folder: Path, model: str, batch_size: int, seq_len: int) -> dict[str, Any]:
    """Train a step of a model of ``parallel``; return its parameters and peak beside those of the estimate."""
    config = ParallelConfig(model=model, batch_size=batch_size, seq_len=seq_len)
    job = config.job()
    Here.on = torch.device("meta")
    with torch.device("cuda"):
        made = Stack(job.shape, job.seq)
        tokens = torch.zeros(batch_size, seq_len, dtype=torch.int64)
        targets = tokens[:, :2] if job.shape.kind == "encoder" else tokens
        held = step(device, made, lambda: loss(made(tokens), targets))
    return held | {"estimated_parameters": job.shape.parameters, "estimated_bytes": sum(memory(job).values())}


def encoder_decoder(device: Any, folder: Path, batch_size: int) -> dict[str, Any]:
    """Train a step of the largest model of ``seq2seq``."""
    config = Seq2seqConfig(size="xl")
    Here.on = torch.device("meta")
    with torch.device("cuda"):
        made = ENGINES["plain"](**config.shape).train()
        tokens = torch.zeros(batch_size, config.sequence, dtype=torch.int64)
        held = step(device, made, lambda: made(tokens, tokens) / tokens.numel())
    return held | {"estimated_parameters": config.parameters}


def step(device: Any, model: Any, lost: Any) -> dict[str, Any]:
    """Take a step and a second one, which has the optimizer's state in memory; return what was held at most."""
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for _ in range(2):
        lost().backward()
        optimizer.step()
        optimizer.zero_grad()
    places = {str(parameter.device) for parameter in model.parameters()}
    parameters = sum(map(torch.numel, model.parameters()))
    return {"parameters": parameters, "bytes": device.memory[0].highest, "places": sorted(places)}
