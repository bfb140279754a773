"""Groups of unlike nodes, from a cluster profile: one command starts torchrun's agent on each host of each group.

The hosts need benchlib and a way in (ssh), and no folder that they share: each gets the config, and gives back what its ranks leave.
"""

import json
import shlex
import sys
from pathlib import Path

from benchlib.config import cluster as clusters
from benchlib.config.schema import BaseConfig
from benchlib.core.errors import UserError
from benchlib.launch.jobs import TORCHRUN_ENV, Job, job_name, torchrun_command

NODES = "nodes.json"
NEEDED = "it is the command of a group in the cluster's profile: install it, or name another one"


def groups(config: BaseConfig, run_dir: Path | str, benchmark: str = "") -> Job:
    """Describe the run as a command for each host, with the files that the agent writes there first.

    Raises ``UserError`` for a profile whose hosts are not those of the config, and for words that need quotes.
    """
    profile, name = clusters.load(config.cluster), job_name(run_dir)
    hosts = [(group, host) for group in profile.groups for host in group.hosts]
    if (len(hosts), config.nproc) != (config.nnodes, hosts[0][0].devices if hosts else 0):
        raise UserError(
            f"launcher = groups with cluster = {config.cluster!r}, nnodes = {config.nnodes} and nproc = {config.nproc}: the "
            f"profile has groups of {len(hosts)} hosts in all; name a profile with groups and leave nnodes and nproc to it"
        )
    nodes = []
    for index, (group, host) in enumerate(hosts):
        python, folder = group.python or sys.executable, f"{group.folder}/{name}-{index}"
        env = {"JOB_COMPLETION_INDEX": index, "PYTHONUNBUFFERED": 1, **TORCHRUN_ENV, **group.env}
        words = ["env", *(f"{key}={value}" for key, value in env.items())]
        words += [python, "-m", "benchlib.launch.agents.pod", folder, "--config", "-"]
        words += ["--meet", f"{hosts[0][1]}:{profile.port}", "--meet-s", f"{config.startup_timeout_s:.0f}", "--"]
        words += torchrun_command(config, python, folder, benchmark, name, "--local-addr", host)
        # ssh hands its words to a shell there, another command does not: what both read alike needs no quotes.
        if unsafe := [word for word in words if shlex.quote(word) != word]:
            raise UserError(f"a group of {config.cluster} has {unsafe[0]!r}: use words without blanks, quotes and $")
        own = config.model_copy(update={"backend": group.backend, "cluster": f"{folder}/cluster.yaml"})
        files = {"config.json": own.model_dump(mode="json"), "cluster.yaml": profile.model_dump(mode="json")}
        command = [*shlex.split(group.command.replace("{host}", host)), *words]
        nodes.append({"name": f"node{index} ({host})", "command": command, "files": files})
    needs = {shlex.split(group.command)[0]: NEEDED for group in profile.groups if group.command}
    command = [sys.executable, "-m", "benchlib.launch.agents.groups", str(run_dir)]
    return Job.of(config, "groups", command, profile, files={NODES: json.dumps(nodes, indent=1)}, needs=needs)
