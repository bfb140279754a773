"""Where a rank is, who holds the store of the rendezvous, and the nodes of a run that others may have to look at."""

import os
import socket
from pathlib import Path
from typing import Any

import pytest
from make_run import make_run

from benchlib.commands.run import summarise
from benchlib.core.errors import UserError
from benchlib.core.files import write_json
from benchlib.judge.verdict import judge
from benchlib.launch import nodes
from benchlib.show import report


def _only(monkeypatch: pytest.MonkeyPatch, env: dict[str, Any]) -> None:
    launchers = ("SLURM_", "OMPI_", "PMI", "MPI_", "RANK", "WORLD_SIZE", "LOCAL_")
    for name in [name for name in os.environ if name.startswith(launchers)]:
        monkeypatch.delenv(name)
    for name, value in env.items():
        monkeypatch.setenv(name, str(value))


OURS = {"RANK": 3, "WORLD_SIZE": 4, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2}
# A step of 6 tasks on two nodes, as srun sets it: the step's own names win over the job's.
STEP = {"SLURM_STEP_NUM_TASKS": 6, "SLURM_STEP_TASKS_PER_NODE": "3(x2)"}
# Of MPICH's mpirun, which starts ranks that inherit the names of one task.
HYDRA = {"PMI_RANK": 5, "PMI_SIZE": 8, "MPI_LOCALRANKID": 1, "MPI_LOCALNRANKS": 4}
JOB = {"SLURM_NTASKS": 9, "SLURM_TASKS_PER_NODE": "3(x3)"}


@pytest.mark.parametrize(
    ("env", "place"),
    [
        ({"SLURM_PROCID": 4, "SLURM_LOCALID": 1, **STEP, **JOB}, (4, 6, 1, 3)),
        ({"SLURM_PROCID": 1, "SLURM_STEP_NUM_TASKS": 2, "SLURM_LOCALID": 1}, (1, 2, 1, 2)),
        ({**HYDRA, "SLURM_PROCID": 0, "SLURM_STEP_NUM_TASKS": 1}, (5, 8, 1, 4)),
        (OURS, (3, 4, 1, 2)),
        ({}, (0, 1, 0, 1)),
        ({"SLURM_PROCID": 0, "SLURM_STEP_NUM_TASKS": 2, "SLURM_STEP_TASKS_PER_NODE": "two"}, "not the place of a rank"),
        ({"SLURM_PROCID": 0, **STEP, "SLURM_STEP_TASKS_PER_NODE": "3,2,1"}, "as many on each node"),
        ({**OURS, "LOCAL_RANK": 2}, "one launcher only"),
    ],
)
def test_places(monkeypatch: pytest.MonkeyPatch, env: dict[str, Any], place: tuple[int, ...] | str) -> None:
    _only(monkeypatch, env)
    if isinstance(place, str):
        with pytest.raises(UserError, match=place):
            nodes.place()
        return
    seen = nodes.place()
    assert (seen.rank, seen.size, seen.local_rank, seen.local_size) == place


def test_the_way_to_an_address() -> None:
    assert [nodes.endpoint_host(endpoint) for endpoint in ("node1:29500", "[fe80::1]:7")] == ["node1", "fe80::1"]
    assert nodes.local_address("127.0.0.1") == "127.0.0.1"
    assert nodes.own_addresses()["127.0.0.1"] in ("lo", "lo0")
    assert nodes.local_address("no-such-host.invalid") == ""


def test_who_opens_the_rendezvous_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch decides where it can; an address of ours that our host name does not have is ours, all others are not."""
    monkeypatch.setattr(nodes, "own_addresses", lambda: {"127.0.0.1": "lo", "10.9.0.1": "eth0", "10.9.8.1": "eth1"})
    monkeypatch.setattr(socket, "gethostname", lambda: "here")
    addresses = {"here": ["10.9.0.1"], "gone": []}
    monkeypatch.setattr(nodes, "resolve", lambda host: addresses.get(host, [host]))
    hosts = ("localhost", "127.0.0.1", "here", "10.9.0.1", "gone", "10.9.8.1", "10.9.8.2")
    assert [nodes.hosts_store(host) for host in hosts] == [None, None, None, None, None, True, False]


def test_a_node_without_rank_0_says_where_the_result_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The run was complete: that is no reason to fail, not even where all gates have to be decided."""
    torchrun = {"launcher": "torchrun", "nnodes": 2, "rdzv_endpoint": "10.0.0.1:29400"}
    run_dir = make_run(tmp_path / "run", ranks=1, with_result=False, config=torchrun)
    assert "the node of rank 0" in judge(run_dir, tmp_path / "baselines").sentence
    write_json(run_dir / nodes.FILE, ["gpu1 (10.0.0.1)", "gpu2 (10.0.0.2)"])
    verdict, where = judge(run_dir, tmp_path / "baselines"), "the verdict are on gpu1 (10.0.0.1)"
    assert (verdict.exit_code(), verdict.exit_code(strict=True), verdict.broken) == (0, 0, False)
    assert where in verdict.sentence
    summarise(run_dir, verdict)
    assert "the result and the verdict are on" in " ".join(capsys.readouterr().out.split())
    page = report.render(run_dir).read_text(encoding="utf-8")
    assert where in page and "Nothing ran" not in page
