"""The same worker under torchrun: one agent with a failing rank, and two nodes that were started with different work."""

import re
from pathlib import Path

import pytest
from harness import HERE, free_port, none_left, prepare

from benchlib.launch.launch import Launch, RankFailed, execute


@pytest.fixture(autouse=True)
def _find_faulty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(HERE))


def test_failing_rank_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    run_dir = prepare(tmp_path / "run", launcher="torchrun", fault="boom")
    with pytest.raises(RankFailed) as caught:
        execute(run_dir, benchmark="faulty:collective")
    none_left(run_dir)
    assert caught.value.status["reason"] == "rank 1 raised ValueError during phase train, step 3: boom <script>"
    assert "in boom" in str(caught.value)
    assert not list((tmp_path / "temporary").glob("torchelastic_*")), "all that it leaves is in the run's folder"


def test_nodes_that_differ_end_as_a_user_error(tmp_path: Path) -> None:
    """Each node says the same sentence, and neither ends by an echo of the other's end."""
    endpoint = f"127.0.0.1:{free_port()}"
    values = {"launcher": "torchrun", "nproc": 1, "nnodes": 2, "rdzv_endpoint": endpoint, "max_restarts": 2}
    nodes = [prepare(tmp_path / str(seed), **values, seed=seed) for seed in (7, 8)]
    with Launch(nodes[0], "faulty:checksums").start() as first, Launch(nodes[1], "faulty:checksums").start() as second:
        ended = [first.wait(), second.wait()]
    for end, run_dir in zip(ended, nodes, strict=True):
        none_left(run_dir)
        assert (end["outcome"], end["restarts"], end["ranks"][0]["error"]["type"]) == ("failed", 0, "UserError")
        assert not list(run_dir.glob("seen*.json")), "nothing was done"
    assert ended[0]["reason"] == ended[1]["reason"]
    assert re.match(
        r"the nodes of this run do not do the same work: seed is (7 on .+ and 8|8 on .+ and 7) on ", ended[0]["reason"]
    )
