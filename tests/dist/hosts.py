"""Two hosts on one machine: network namespaces joined by a virtual cable, which can be given a speed and be cut.

    with two_hosts(rate="1gbit") as (first, second):
        first.run("iperf3", "-s", "-1")

Needs root and iproute2 (Linux); ``why_not`` says what is missing. Namespaces have the machine's host name and file system
and nothing else of its network.
"""

import contextlib
import itertools
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchlib.config.schema import resolve, save_config
from benchlib.core.files import read_json
from benchlib.results.run import Result, Run

REPOSITORY = Path(__file__).parents[2]
BURST, LATENCY = "256k", "50ms"  # of the token bucket that gives the cable its speed
PORT = 29517  # of the rendezvous, on the first host
END_S = 600.0  # of a run
# All-reduce only, of fp32 sums, at the sizes that are set: what is left of the benchmark `collectives`.
ALL_REDUCE: dict[str, Any] = {
    "operations": ["all_reduce", "barrier"], "dtypes": ["fp32"], "reductions": ["sum"], "variants": ["library"],
    "pairs": False, "compare_gradients": [], "bucket_bytes": [4096], "share_sizes": "4KiB",
}  # fmt: skip
_SUBNET = itertools.count(os.getpid() % 200)


@dataclass(frozen=True)
class Host:
    """A network namespace with one end of the cable."""

    name: str
    device: str
    address: str
    processes: list[subprocess.Popen[str]] = field(default_factory=list, compare=False)

    def command(self, *words: str) -> list[str]:
        """Return the command line that runs ``words`` on this host."""
        return ["ip", "netns", "exec", self.name, *words]

    def start(self, *words: str, **options: Any) -> subprocess.Popen[str]:
        """Start a command on this host."""
        self.processes.append(subprocess.Popen(self.command(*words), text=True, **options))
        return self.processes[-1]

    def execute(self, run_dir: Path, benchmark: str = "") -> subprocess.Popen[str]:
        """Start the ranks of a prepared run folder on this host, as ``benchlib run`` does, and return the process."""
        code = f"from benchlib.launch.launch import execute; execute({str(run_dir)!r}, benchmark={benchmark!r})"
        path = os.pathsep.join([str(REPOSITORY), str(Path(__file__).parent)])
        # An interface or an address of the machine itself means nothing on this host.
        ours = ("GLOO_", "NCCL_", "MASTER_")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        return self.start(sys.executable, "-c", code, stderr=subprocess.PIPE, env={**environment, "PYTHONPATH": path})

    def nodes(self) -> dict[str, Any]:
        """Return the parameters of a run with one rank on each of two hosts that meet on this one."""
        endpoint = f"{self.address}:{PORT}"
        return {"launcher": "torchrun", "nproc": 1, "nnodes": 2, "rdzv_endpoint": endpoint, "threads": 1}

    def cut(self) -> None:
        """Pull this end of the cable."""
        _ip("-n", self.name, "link", "set", self.device, "down")


def measured(hosts: tuple[Host, Host], folder: Path, benchmark: str, function: str = "", **values: Any) -> Result:
    """Run a benchmark with a rank on each host, below ``folder``, and return the result, which one of the nodes has."""
    run_dirs = [folder / name for name in "ab"]
    for run_dir in run_dirs:
        run_dir.mkdir(parents=True)
        save_config(resolve(benchmark, overrides={**values, **hosts[0].nodes()}).config, run_dir)
    for process in [host.execute(path, function) for host, path in zip(hosts, run_dirs, strict=True)]:
        process.communicate(timeout=END_S)
    for run_dir in run_dirs:
        if (status := read_json(run_dir / "status.json"))["outcome"] != "complete":
            raise RuntimeError(f"{run_dir}: {status['reason']}")
    (result,) = [result for path in run_dirs if (result := Run(path).result)]
    return result


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=20)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(words)}: {done.stderr.strip()}")


@contextlib.contextmanager
def two_hosts(rate: str = "") -> Iterator[tuple[Host, Host]]:
    """Make two hosts, joined by a cable of ``rate`` (``1gbit``; '' for as fast as it goes), and remove them at the end.

    Processes that still run in them are killed.
    """
    token, net = uuid.uuid4().hex[:8], next(_SUBNET) % 200 + 20
    hosts = tuple(Host(f"bl-{token}-{end}", f"bl{token}{end}", f"10.231.{net}.{end}") for end in (1, 2))
    ready = []
    try:
        for host in hosts:
            _ip("netns", "add", host.name)
            ready.append(host)
        first, second = hosts
        _ip("link", "add", first.device, "netns", first.name, "type", "veth", "peer", "name", second.device, "netns", second.name)  # fmt: skip
        for host in hosts:
            _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", host.device)
            _ip("-n", host.name, "link", "set", "lo", "up")
            _ip("-n", host.name, "link", "set", host.device, "up")
            if rate:
                bucket = ["root", "tbf", "rate", rate, "burst", BURST, "latency", LATENCY]
                shape = ["tc", "qdisc", "add", "dev", host.device, *bucket]
                subprocess.run(host.command(*shape), check=True, capture_output=True, timeout=20)
        yield first, second
    finally:
        for host in ready:
            with contextlib.suppress(RuntimeError, subprocess.SubprocessError):
                _remove(host)


def _remove(host: Host) -> None:
    """Kill what runs in a namespace, then remove it: a process would keep it, and with it its cable, in being."""
    for _ in range(20):
        pids = subprocess.run(["ip", "netns", "pids", host.name], capture_output=True, text=True, timeout=20).stdout
        if not pids.split():
            break
        subprocess.run(["kill", "-9", *pids.split()], capture_output=True, timeout=20)
    for process in host.processes:
        process.kill()
        process.wait(20)
        if process.stderr:
            process.stderr.close()
    _ip("netns", "del", host.name)


def why_not(*programs: str) -> str:
    """Return why two hosts cannot be made here, or '': a missing program, or not permitted."""
    if missing := [name for name in ("ip", "tc", *programs) if not shutil.which(name)]:
        return f"{missing[0]} is missing: on Linux, apt-get install iproute2 iperf3"
    try:
        with two_hosts():
            return ""
    except RuntimeError as error:
        return f"namespaces or virtual cables are not permitted here: run the tests as root ({error})"
