"""Ranks on this node through torchrun's agent; the agents of several nodes meet in a c10d rendezvous."""

import sys
from pathlib import Path

from benchlib.launchers.job import HasRanks, Job, worker_command


def torchrun(config: HasRanks, run_dir: Path | str, benchmark: str = "") -> Job:
    """Start this node's ranks through torchrun's agent; the same command runs on every node.

    The rendezvous is c10d, and its store is not shared with the ranks: with a shared one a new attempt reads the
    addresses of the dead one (https://github.com/pytorch/pytorch/issues/135712).
    """
    notes = []
    if config.rdzv_endpoint:
        timeout = int(max(1, config.startup_timeout_s))
        meet = [
            "--rdzv-backend",
            "c10d",
            "--rdzv-endpoint",
            config.rdzv_endpoint,
            "--rdzv-id",
            f"benchlib-{config.benchmark}",
            "--rdzv-conf",
            f"join_timeout={timeout},last_call_timeout=1",
        ]
        notes.append(
            f"start this command on each of the {config.nnodes} nodes, each with its own copy of the config; {config.rdzv_endpoint} must be one of them. The node that rank 0 is on has the result."
        )
    else:
        meet = ["--standalone"]
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", str(config.nnodes), "--nproc-per-node", str(config.nproc),
        *meet, "--max-restarts", "0", "--monitor-interval", "0.2", *worker_command(run_dir, benchmark),
    ]  # fmt: skip
    env = {
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "TORCHELASTIC_ERROR_FILE": str(Path(run_dir) / "logs" / "agent.error.json"),
    }
    return Job("torchrun", [command], env, notes, [{}], agent=True, ranks=config.nproc)
