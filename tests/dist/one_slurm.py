"""A SLURM of one's own for a test: munged, slurmctld and a slurmd for each of two nodes, all on this machine."""

import contextlib
import os
import platform
import shutil
import subprocess

from harness import free_port
from waiting import until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "sinfo")
INSTALL = "as root: apt-get install --no-install-recommends munge slurmctld slurmd slurm-client"

_CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ctld_port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
MinJobAge=5  # sbatch --wait then looks every 2 s, not up to 32 s apart
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[0]} CPUs=2 RealMemory=1000
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 RealMemory=1000
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=60 State=UP
"""


def missing():
    """Return why there can be no SLURM here; '' where there can."""
    if os.getuid():
        return "SLURM's daemons need root"
    lacking = [name for name in PROGRAMS if not shutil.which(name)]
    return f"{', '.join(lacking)} not installed; {INSTALL}" if lacking else ""


@contextlib.contextmanager
def running(folder):
    """Run the daemons; yield the configuration file, for ``SLURM_CONF``."""
    for name in ("state", "spool-n1", "spool-n2"):
        (folder / name).mkdir(parents=True)
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    conf = folder / "slurm.conf"
    ports = [free_port() for _ in range(3)]
    conf.write_text(
        _CONF.format(host=platform.node().split(".")[0], folder=folder, ctld_port=ports[0], ports=ports[1:])
    )
    munge = ["munged", "--foreground", "--force", f"--socket={folder}/munge.socket", f"--key-file={key}"]
    munge += [f"--{name}-file={folder}/munge.{name}" for name in ("pid", "log", "seed")]
    daemons = []
    try:
        for command in (
            munge,
            ["slurmctld", "-D", "-c", "-f", conf],
            *(["slurmd", "-D", "-N", node, "-f", conf] for node in ("n1", "n2")),
        ):
            with (folder / "daemons.log").open("ab") as log:
                daemons.append(
                    subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True)
                )
            if command is munge:
                until(lambda: (folder / "munge.socket").exists())
        until(lambda: _idle(conf))
        yield conf
    finally:
        for daemon in daemons:
            daemon.kill()
            daemon.wait()


def _idle(conf):
    command = ["sinfo", "--noheader", "--format=%D %t"]
    done = subprocess.run(
        command, env={**os.environ, "SLURM_CONF": str(conf)}, capture_output=True, text=True, check=False
    )
    return done.stdout.split() == ["2", "idle"]
