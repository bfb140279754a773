"""By which ways NCCL moved the data, as it says itself: between the devices of a node, and between nodes.

NCCL tells it at the level INFO, which goes to a file for each rank (NCCL_DEBUG, NCCL_DEBUG_SUBSYS and NCCL_DEBUG_FILE in its
manual of environment variables). RCCL has the same variables and lines. Who sets NCCL_DEBUG keeps what it says, and nothing is read.
"""

import os
import re
from pathlib import Path

SOCKET = "NET/Socket"
# "Channel 00/0 : 0[0] -> 8[0] [send] via NET/IB/3/GDRDMA", "... via P2P/CUMEM/read", "... via SHM/direct/direct"
_CHANNEL = re.compile(r"NCCL INFO Channel .* via (NET/[^/\s]+|\w+)")
_NETWORK = re.compile(r"NCCL INFO Using network (.+?)\s*$")
CHOSEN = "NCCL chose "


def variables(run_dir: Path, rank: int) -> dict[str, str]:
    """Return what makes NCCL write down its ways; {} if the environment has a level already."""
    if "NCCL_DEBUG" in os.environ:
        return {}
    path = str(_log(run_dir, rank)).replace("%", "%%")  # %h and %p are the host and the process there
    return {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET", "NCCL_DEBUG_FILE": path}


def _log(run_dir: Path, rank: int) -> Path:
    return run_dir / "logs" / f"nccl-rank{rank}.log"


def ways(text: str) -> list[str]:
    """Return the ways of a log, sorted: P2P (NVLink, PCIe), SHM (memory of the host), NET/IB, NET/Socket or a plug-in's.

    A network that was chosen counts if no channel says which is used: a run of one node chooses one, too, and uses none.
    """
    lines = text.splitlines()
    found = {match[1] for line in lines if (match := _CHANNEL.search(line))}
    chosen = {f"{CHOSEN}{match[1]}" for line in lines if (match := _NETWORK.search(line))}
    return sorted(found or chosen)


def told(run_dir: Path, rank: int) -> list[str]:
    """Return the ways of a rank's log, [] without one."""
    path = _log(run_dir, rank)
    return ways(path.read_text(errors="replace")) if path.exists() else []
