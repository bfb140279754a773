"""What each rank executes: its share of DDP's gradients; then rank 0 goes the compiled path."""

from pathlib import Path

import numpy as np
from torch.nn.parallel import DistributedDataParallel

from benchlib.benchmarks.compiled import path, programs
from benchlib.benchmarks.compiled.config import CompiledConfig
from benchlib.core.errors import BackendUnavailable
from benchlib.core.events import EventWriter, keep_alive
from benchlib.runtime.group import world
from benchlib.workloads.stablehlo import export


def run(config: CompiledConfig, run_dir: Path, events: EventWriter) -> None:
    """Compute DDP's gradients on all ranks, then everything else on rank 0, which has the machine to itself.

    Raises ``BackendUnavailable`` where a package is missing.
    """
    events.emit("phase", name="init")
    if config.backend != "cpu":
        raise BackendUnavailable(
            f"compiled simulates its replicas on a CPU and computes there: use backend cpu; for XLA on {config.backend} "
            f"run `benchlib run parity --backend {config.backend} --set members=xla`"
        )
    with world(config, run_dir) as here:
        gradients = _ddp(config, here.rank) if here.size > 1 else {}
    if here.main:
        with keep_alive(events, config.budget_s):
            path.take(config, run_dir, events, gradients)


def _ddp(config: CompiledConfig, rank: int) -> dict[str, np.ndarray]:
    """Return the gradients that DDP gives to every rank, each with rows of its own."""
    loss = export.AnswerLoss(programs.bert(config.model, config.seed))
    shared = DistributedDataParallel(loss)
    shared(**programs.rows(config, rank, loss)).backward()
    return {
        name: parameter.grad.numpy().copy() for name, parameter in loss.named_parameters() if parameter.grad is not None
    }
