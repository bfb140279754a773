"""Nodes that know each other by address: who holds the store, who is still there, and what a run makes of a failure."""

import platform
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
from make_run import make_run

from benchlib.commands.run import summarise
from benchlib.core import events
from benchlib.core.events import EventWriter
from benchlib.judge.verdict import judge
from benchlib.launch import diagnosis, nodes
from benchlib.launch.diagnosis import RankRecord
from benchlib.launch.launchers import LAUNCHERS
from benchlib.launch.nodes import Node
from benchlib.launch.ranks import REGROUPED, Attempts, Ending
from benchlib.launch.supervise import Neighbours
from benchlib.show import report


@pytest.mark.parametrize(
    ("endpoint", "place"),
    [
        ("node1:29500", ("node1", 29500)),
        ("10.0.0.1", ("10.0.0.1", 29400)),
        ("[fe80::1]:7", ("fe80::1", 7)),
        ("fe80::1", ("fe80::1", 29400)),
    ],
)
def test_an_endpoint_in_its_parts(endpoint: str, place: tuple[str, int]) -> None:
    assert nodes.split_endpoint(endpoint) == place


def test_the_way_to_an_address() -> None:
    assert nodes.local_address("127.0.0.1") == "127.0.0.1"
    assert nodes.interface("127.0.0.1") in ("lo", "lo0")
    assert nodes.local_address("no-such-host.invalid") == ""
    assert nodes.interface("") == ""


def test_who_opens_the_rendezvous_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch decides where it can; an address of ours that our host name does not have is ours, all others are not."""
    monkeypatch.setattr(nodes, "own_addresses", lambda: {"127.0.0.1": "lo", "10.9.0.1": "eth0", "10.9.8.1": "eth1"})
    monkeypatch.setattr(socket, "gethostname", lambda: "here")
    addresses = {"here": ["10.9.0.1"], "gone": []}
    monkeypatch.setattr(nodes, "resolve", lambda host: addresses.get(host, [host]))
    hosts = ("localhost", "127.0.0.1", "here", "10.9.0.1", "gone", "10.9.8.1", "10.9.8.2")
    assert [nodes.hosts_store(host) for host in hosts] == [None, None, None, None, None, True, False]


def test_torchrun_gets_addresses_and_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "hosts_store", lambda host: host == "10.9.8.1")
    monkeypatch.setattr(nodes, "local_address", lambda host, port: "10.9.8.2")
    config = SimpleNamespace(nproc=2, nnodes=2, rdzv_endpoint="10.9.8.1:29500", max_restarts=3, startup_timeout_s=90.5, benchmark="squad")  # fmt: skip
    job = LAUNCHERS["torchrun"](config, "/run")  # type: ignore[arg-type]
    words = job.commands[0]
    options = {
        name: words[words.index(name) + 1] for name in ("--local-addr", "--max-restarts", "--rdzv-conf", "--nnodes")
    }
    settings = dict(pair.split("=") for pair in options.pop("--rdzv-conf").split(","))
    assert options == {"--local-addr": "10.9.8.2", "--max-restarts": "3", "--nnodes": "2"}
    assert (settings["is_host"], settings["join_timeout"]) == ("1", "90")
    assert job.restarts == 3
    assert job.env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    alone = LAUNCHERS["torchrun"](SimpleNamespace(**{**vars(config), "rdzv_endpoint": "", "nnodes": 1}), "/run")  # type: ignore[arg-type]
    assert "--standalone" in alone.commands[0]
    for command in (words, alone.commands[0]):
        assert command[command.index("--log-dir") + 1] == "/run/logs/torchrun"


def test_ranks_are_grouped_by_launch_and_not_by_host_name() -> None:
    rows = [(0, "vm", "aa 10.0.0.1 7"), (1, "vm", "aa 10.0.0.1 7"), (2, "vm", "bb 10.0.0.2 8"), (3, "gpu", "cc")]
    members = nodes.group_ranks(rows)
    assert [(node.launch, node.address, node.port, node.ranks) for node in members] == [
        ("aa", "10.0.0.1", 7, (0, 1)),
        ("bb", "10.0.0.2", 8, (2,)),
        ("cc", "", 0, (3,)),
    ]
    assert nodes.rank_hosts(members) == ("10.0.0.1", "10.0.0.1", "10.0.0.2", "gpu")
    assert nodes.group_ranks([(0, "vm", "")])[0] == Node("", "vm", "", 0, (0,))


def test_a_sign_of_life(tmp_path: Path) -> None:
    """Who listens is there though it says nothing; who stopped is gone; who never listened is unknown."""
    here, other = nodes.listen("127.0.0.1"), nodes.listen("127.0.0.1")
    members = [
        Node(name, "vm", "127.0.0.1", port, (rank,))
        for rank, (name, port) in enumerate((("a", here.getsockname()[1]), ("b", other.getsockname()[1]), ("c", 0)))
    ]
    assert [nodes.probe(node) for node in members] == ["there", "there", "unknown"]
    other.close()
    assert [(lost.node.launch, lost.how) for lost in nodes.lost_nodes(members)] == [("b", "gone")]
    nodes.write(tmp_path, members)
    assert nodes.read(tmp_path) == members
    assert nodes.read(tmp_path / "nothing") == []
    here.close()


def test_a_node_is_there_however_often_it_is_asked() -> None:
    """Linux answers one call more than the queue holds, and leaves all later ones without an answer."""
    listening = nodes.listen("127.0.0.1")
    nodes.hang_up(listening)  # nobody called: it does not wait
    node = Node("a", "vm", "127.0.0.1", listening.getsockname()[1], (0,))
    try:
        for _ in range(3):
            assert {nodes.probe(node, 30.0) for _ in range(100)} == {"there"}
            nodes.hang_up(listening)
    finally:
        listening.close()


def test_lost_nodes_take_the_blame(tmp_path: Path) -> None:
    there = nodes.listen("127.0.0.1")
    port = there.getsockname()[1]
    nodes.write(tmp_path, [Node("me", "vm", "127.0.0.1", 1, (0,)), Node("you", "vm", "127.0.0.1", port, (1, 2))])
    seen = Neighbours(tmp_path, "me", "127.0.0.1:29400")
    echo = Ending("failed", "rank 0 raised RuntimeError: Connection closed by peer", 0)
    assert seen.blame(echo).culprit == 0
    assert "may lie on another node, see the status of node vm (127.0.0.1) with ranks 1, 2" in seen.blame(echo).reason
    there.close()
    blamed = seen.blame(echo)
    assert (blamed.culprit, blamed.lost[0]["ranks"]) == (1, [1, 2])
    assert blamed.reason == f"node vm (127.0.0.1) with ranks 1, 2 was lost (its processes are gone); {echo.reason}"
    seen.close()
    assert Neighbours(tmp_path, "me", "").blame(echo) == echo, "a run of one node has no others"


@pytest.mark.parametrize(("known", "where"), [(True, "node gpu1 (10.0.0.1), which has rank 0"), (False, "the node of rank 0")])  # fmt: skip
def test_a_node_without_rank_0_says_where_the_result_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], known: bool, where: str
) -> None:
    """The run was complete: that is no reason to fail, not even where all gates have to be decided."""
    torchrun = {"launcher": "torchrun", "nnodes": 2, "rdzv_endpoint": "10.0.0.1:29400"}
    run_dir = make_run(tmp_path / "run", ranks=1, with_result=False, config=torchrun)
    if known:
        nodes.write(run_dir, [Node("a", "gpu1", "10.0.0.1", 7, (0,)), Node("b", "gpu2", "10.0.0.2", 8, (1,))])
    verdict = judge(run_dir, tmp_path / "baselines")
    assert (verdict.exit_code(), verdict.exit_code(strict=True), verdict.broken) == (0, 0, False)
    assert verdict.sentence == f"All ranks of this node exited normally; the result and the verdict are on {where}."
    summarise(run_dir, verdict, None)
    assert "the result and the verdict are on" in " ".join(capsys.readouterr().out.split())
    page = report.render(run_dir).read_text(encoding="utf-8")
    assert where in page
    assert "Nothing ran" not in page


def _start(pid: int, attempt: str = "0 h 1") -> dict[str, object]:
    return {"kind": "start", "pid": pid, "attempt": attempt}


def test_attempts() -> None:
    """A new meeting place is a new attempt, and so is a second start of a rank; only failures use up restarts."""
    attempts = Attempts(restarts=1)
    first = RankRecord(0, pid=10)
    assert not attempts.begins(_start(10), None)
    assert not attempts.begins(_start(11), None)
    assert attempts.begins(_start(12, "0 h 2"), None)
    row = attempts.close({0: first})
    assert (row["attempt"], row["outcome"], attempts.left) == (1, REGROUPED, True)
    assert row["ranks"][0]["ended_by_supervisor"]
    assert attempts.begins(_start(13, "0 h 2"), RankRecord(0, pid=12)), "the same port again"
    attempts.fail(Ending("failed", "rank 0 was killed", 0))
    row = attempts.close({})
    assert (row["attempt"], row["reason"], attempts.left, attempts.ending) == (2, "rank 0 was killed", False, None)
    assert attempts.used_up(Ending("failed")) == "; the 1 restart was used", "a regrouping uses none"
    assert attempts.used_up(Ending("complete")) == Attempts(restarts=0).used_up(Ending("failed")) == ""
    assert Attempts(restarts=1).used_up(Ending("failed")) == "", "wrong input ends a run that has restarts left"


def test_attempts_are_counted_from_the_events(tmp_path: Path) -> None:
    assert events.restarts(tmp_path) == 0
    for rank in range(2):
        writer = EventWriter(tmp_path, f"rank{rank}")
        for attempt in ("0 h 1", "1 h 2"):
            writer.emit("start", pid=1, host=platform.node(), attempt=attempt)
        writer.close()
    assert events.restarts(tmp_path) == 1


TAKEN = """torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. port: 29533, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "c10d_rendezvous_backend.py", line 180, in _create_tcp_store
    raise RendezvousConnectionError(
torch.distributed.elastic.rendezvous.api.RendezvousConnectionError: The connection to the C10d store has failed."""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x\ntorch...api.RendezvousTimeoutError", "did not all meet within 30 s"),
        ("...RendezvousConnectionError: The connection", "store at h:1 does not answer"),
        ("RendezvousTimeoutError\nlater\nRendezvousClosedError", "was closed"),
        ("SignalException", ""),
        (TAKEN, "port 29533 is in use on this host: choose another rdzv_endpoint"),
        (
            TAKEN.partition("The above")[0] + "\nit joined\nx.RendezvousConnectionError: gone",
            "store at h:1 does not answer",
        ),
    ],
)
def test_why_the_agent_gave_up(text: str, expected: str) -> None:
    reason = diagnosis.agent_reason(text, "h:1", 30)
    assert expected in reason
    assert bool(expected) == bool(reason)


def test_what_the_agent_saw() -> None:
    line = "E1122 api.py:1002] failed (exitcode: {}) local_rank: {} (pid: {}) of binary: /usr/bin/python\n"
    assert diagnosis.agent_exits(line.format(-9, 1, 77) + "other\n" + line.format(1, 0, 78)) == [(77, -9), (78, 1)]


@pytest.mark.parametrize(
    ("kind", "final"), [("UserError", True), ("BackendUnavailable", True), ("RuntimeError", False), ("", False)]
)
def test_what_another_attempt_would_not_mend(kind: str, final: bool) -> None:
    assert diagnosis.no_restart_helps({"type": kind} if kind else None) is final
