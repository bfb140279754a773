"""How ranks meet: place, threads, checksums of weights, checkpoints; under MPI and under a launcher that is not ours."""

import re
from functools import partial

import pytest
import torch
from harness import flip, free_port, none_left, prepare, seen
from worlds import in_world

from benchlib.launch.launch import Launch, execute
from benchlib.runtime import checkpoint
from benchlib.runtime.libraries import LIBRARIES

COMPARED = 2 * (5 * 9 * 6 + 9 * 9)  # reductions x kinds x forms, and kinds x moves; in one group, and once more in two


def test_two_ranks_and_their_checksums(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")  # what the environment says does not count
    run_dir = prepare(tmp_path / "run", threads=1)
    assert execute(run_dir, benchmark="faulty:checksums")["outcome"] == "complete"
    none_left(run_dir)
    for rank, saw in enumerate(seen(run_dir)):
        assert saw["place"] == [rank, 2, rank, "cpu", "gloo"]
        assert (saw["threads"], saw["omp"]) == (1, "1")
        assert saw["same"] == saw["wrapped"] and saw["same"][1] is True
        assert saw["other"][1] is False
        assert saw["other"][0][0] == saw["same"][0][0] != saw["other"][0][1]


def test_nodes_that_differ_end_as_a_user_error(tmp_path):
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
    differ = r"the nodes of this run do not do the same work: seed is (7 on .+ and 8|8 on .+ and 7) on "
    assert re.match(differ, ended[0]["reason"])


@pytest.mark.skipif(bool(LIBRARIES["mpi"].missing()), reason=LIBRARIES["mpi"].missing())
def test_every_operation_over_mpi(tmp_path):
    patience = {"stall_timeout_s": 600, "budget_s": 600}
    run_dir = prepare(tmp_path / "run", collective="mpi", launcher="mpirun", nproc=4, names="gloo,mpi", **patience)
    assert execute(run_dir, benchmark="library_cases:run")["outcome"] == "complete"
    none_left(run_dir)
    for rank, saw in enumerate(seen(run_dir, 4)):
        assert (saw["place"], saw["compared"]) == ([rank, 4, "mpi"], COMPARED)
        for text, word in zip(saw["refused"], ("is not contiguous", "elements of", "cannot reduce"), strict=True):
            assert word in text
        waited = "mpi all_reduce timed out after 0.3 s: a rank of the group did not take part"
        assert saw["late"] == ("" if rank == 1 else waited)
        assert [row["status"] for row in saw["rows"]] == ["ok", "ok"]
        assert all(0 <= row["max_difference"] < 1e-12 for row in saw["rows"])


def checkpoints(root, rank, size):
    """Each rank is a node without the other's disk. Rank 0 has checkpoints 4 and 12, the latter damaged; rank 1 has 8."""
    folder, cpu = root / f"node{rank}", torch.device("cpu")

    def newest(below=99):
        return checkpoint.newest_shared(folder, True, cpu, lambda candidate: candidate.step < below)

    def steps():
        return sorted(int(path.name.removeprefix("step-")) for path in folder.iterdir())

    assert newest() == (None, [])
    for step in ((4, 12), (8,))[rank]:
        checkpoint.save(folder, step, {"model": {"weight": torch.full((70_001,), float(step))}}, {"step": step})
    if rank == 0:
        flip(folder / "step-00000012/model.safetensors")
    start, faults = newest()
    assert (start.step, start.tensors("model")["weight"].unique().tolist()) == (8, [8.0])
    altered = "model.safetensors was altered (its SHA-256 is not the one in manifest.json)"
    assert faults == [f"step-00000012: {altered}"]
    assert checkpoint.damage(folder / "step-00000008") == "", "verified again where it arrived"
    usable, _ = newest(below=8)
    assert usable.step == 4
    assert steps() == [[4, 8, 12], [4, 8]][rank]


def test_two_nodes_agree_on_their_newest_whole_checkpoint(tmp_path):
    in_world(2, tmp_path, partial(checkpoints, tmp_path))
