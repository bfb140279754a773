"""The torchrun command that every node of a cluster runs, whoever starts it there."""

from benchlib.launchers.job import HEARTBEAT_S, HEARTBEATS, HasRanks, log_dir, worker_command

# What every agent has in its environment: with a store shared with the ranks, a new attempt reads the addresses of the
# dead one (https://github.com/pytorch/pytorch/issues/135712).
ENV = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def agent_command(
    config: HasRanks,
    python: str,
    endpoint: str,
    identity: str,
    host: str,
    run_dir: str,
    benchmark: str,
    meet_s: float = 0.0,
) -> list[str]:
    """Return torchrun's command for a node of a run; ``run_dir`` is the run's folder there.

    ``endpoint`` is HOST:PORT of the first node and ``identity`` is the run's alone. ``host`` is what the node replaces
    by 1 on the first node and by 0 elsewhere: a node does not always know its own name. ``meet_s`` is how long the nodes
    wait for each other (0: the start-up limit). One node needs no meeting.
    """
    settings = {
        "is_host": host,
        "join_timeout": max(1, int(meet_s or config.startup_timeout_s)),
        "last_call_timeout": 1,
        "keep_alive_interval": HEARTBEAT_S,
        "keep_alive_max_attempt": HEARTBEATS,
    }
    meet = [
        "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", identity,
        "--rdzv-conf", ",".join(f"{name}={value}" for name, value in settings.items()),
    ]  # fmt: skip
    return [
        python, "-m", "torch.distributed.run", "--nnodes", str(config.nnodes), "--nproc-per-node", str(config.nproc),
        *(meet if config.nnodes > 1 else ["--standalone"]),
        "--max-restarts", str(config.max_restarts), "--monitor-interval", "0.2", "--log-dir", log_dir(run_dir),
        *worker_command(run_dir, benchmark),
    ]  # fmt: skip
