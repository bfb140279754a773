"""Ranks on this node through torchrun's agent; the agents of several nodes meet in a c10d rendezvous."""

import sys
from pathlib import Path

from benchlib import network
from benchlib.launchers.job import HEARTBEAT_S, HEARTBEATS, HasRanks, Job, log_dir, worker_command


def torchrun(config: HasRanks, run_dir: Path | str, benchmark: str = "") -> Job:
    """Start this node's ranks through torchrun's agent; the same command runs on every node.

    The rendezvous is c10d, and its store is not shared with the ranks: with a shared one a new attempt reads the
    addresses of the dead one (https://github.com/pytorch/pytorch/issues/135712). Who opens the store, and the address
    that this node gives the others, follow from the addresses of the machine that this is called on.
    """
    notes = []
    meet = ["--standalone"]
    if config.rdzv_endpoint:
        meet, note = _meeting(config)
        notes.append(note)
    if config.max_restarts:
        notes.append(
            f"a failure ends this attempt only: the ranks are started again up to {config.max_restarts} times and go on from the last whole checkpoint (checkpoint_every; without one, from the start)"
        )
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", str(config.nnodes), "--nproc-per-node", str(config.nproc),
        *meet, "--max-restarts", str(config.max_restarts), "--monitor-interval", "0.2",
        "--log-dir", log_dir(run_dir), *worker_command(run_dir, benchmark),
    ]  # fmt: skip
    env = {
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "TORCHELASTIC_ERROR_FILE": str(Path(run_dir) / "logs" / "agent.error.json"),
    }
    return Job("torchrun", [command], env, notes, [{}], agent=True, ranks=config.nproc, restarts=config.max_restarts)


def _meeting(config: HasRanks) -> tuple[list[str], str]:
    """Return torchrun's arguments for a meeting with other nodes, and a note for the dry run."""
    host, port = network.split_endpoint(config.rdzv_endpoint)
    timeout = int(max(1, config.startup_timeout_s))
    settings = {
        "join_timeout": timeout,
        "last_call_timeout": 1,
        "keep_alive_interval": HEARTBEAT_S,
        "keep_alive_max_attempt": HEARTBEATS,
    }
    here = network.hosts_store(host)
    if here is not None:
        settings["is_host"] = int(here)
    meet = [
        "--rdzv-backend", "c10d", "--rdzv-endpoint", config.rdzv_endpoint, "--rdzv-id", f"benchlib-{config.benchmark}",
        "--rdzv-conf", ",".join(f"{name}={value}" for name, value in settings.items()),
    ]  # fmt: skip
    if address := network.local_address(host, port):
        meet += ["--local-addr", address]
    note = (
        f"start this command on each of the {config.nnodes} nodes, each with its own copy of the config; {config.rdzv_endpoint} must be one of them, "
        "and without that node nobody can meet again. The node that rank 0 is on has the result."
    )
    return meet, note
