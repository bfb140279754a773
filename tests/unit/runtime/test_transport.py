"""What NCCL's log says of the ways of the data. Lines as NCCL 2.27 and RCCL print them, with NCCL_DEBUG=INFO."""

from types import SimpleNamespace

import pytest

from benchlib.runtime import group, transport

OVER_IB = """\
node-a:41:41 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB eth0:10.0.0.4<0>
node-a:41:93 [0] NCCL INFO Using network IB
node-a:41:93 [0] NCCL INFO Channel 00/0 : 9[1] -> 0[0] [receive] via NET/IB/0/GDRDMA
node-a:41:93 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[1] via P2P/CUMEM/read
"""
OVER_TCP = """\
node-a:41:93 [0] NCCL INFO NET/IB : No device found.
node-a:41:93 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.4<0>
node-a:41:93 [0] NCCL INFO Using network Socket
node-a:41:93 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [receive] via NET/Socket/0
node-a:41:93 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0
node-a:41:93 [0] NCCL INFO Channel 00 : 0[0] -> 1[1] via SHM/direct/direct
"""
ONE_NODE = """\
node-a:41:93 [0] NCCL INFO Using network Socket
node-a:41:93 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM
"""


@pytest.mark.parametrize(
    ("log", "ways"),
    [
        (OVER_IB, ["NET/IB", "P2P"]),
        (OVER_TCP, ["NET/Socket", "SHM"]),
        (ONE_NODE, ["P2P"]),
        ("node-a:41:93 [0] NCCL INFO Using network AWS Libfabric\n", ["NCCL chose AWS Libfabric"]),
        ("", []),
    ],
)
def test_the_ways_are_those_of_the_channels(log, ways):
    assert transport.ways(log) == ways


def test_each_rank_writes_a_log_of_its_own_unless_the_user_asks_nccl_for_another(tmp_path, monkeypatch):
    monkeypatch.delenv("NCCL_DEBUG", raising=False)
    run_dir = tmp_path / "100%"
    (run_dir / "logs").mkdir(parents=True)
    named = transport.variables(run_dir, 3)
    assert (named["NCCL_DEBUG"], named["NCCL_DEBUG_FILE"]) == ("INFO", f"{tmp_path}/100%%/logs/nccl-rank3.log")
    (run_dir / "logs" / "nccl-rank3.log").write_text(OVER_TCP)
    assert transport.told(run_dir, 3) == ["NET/Socket", "SHM"] and transport.told(run_dir, 4) == []
    monkeypatch.setattr(group, "all_gather_objects", lambda own: [own, ["NET/IB"]])
    assert group.transports(run_dir, SimpleNamespace(collective="nccl", rank=3)) == ["NET/IB", "NET/Socket", "SHM"]
    assert group.transports(run_dir, SimpleNamespace(collective="gloo", rank=3)) == []
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    assert transport.variables(run_dir, 3) == {}
