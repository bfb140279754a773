"""MPI under mpirun: every operation by value, the same gradients as gloo, and no process left behind."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import HERE, none_left, pid_at_step, prepare

from benchlib.launch.launch import Launch, execute
from benchlib.runtime.libraries import LIBRARIES

pytestmark = pytest.mark.skipif(bool(LIBRARIES["mpi"].missing()), reason=LIBRARIES["mpi"].missing())
COMPARED = 2 * (5 * 9 * 6 + 9 * 9)  # reductions x kinds x forms, and kinds x moves; in one group, and once more in two


@pytest.fixture(autouse=True)
def _find_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(HERE))


def test_every_operation(tmp_path: Path) -> None:
    run_dir = prepare(tmp_path / "run", collective="mpi", launcher="mpirun", nproc=4, names="gloo,mpi")
    assert execute(run_dir, benchmark="library_cases:run")["outcome"] == "complete"
    none_left(run_dir)
    for rank in range(4):
        seen = json.loads((run_dir / f"seen{rank}.json").read_text())
        assert (seen["place"], seen["compared"]) == ([rank, 4, "mpi"], COMPARED)
        words = ("is not contiguous", "elements of", "cannot reduce")
        for text, word in zip(seen["refused"], words, strict=True):
            assert word in text
        assert seen["sharded"] < 1e-12
        waited = "mpi all_reduce timed out after 0.3 s: a rank of the group did not take part"
        assert seen["late"] == ("" if rank == 1 else waited)
        gloo, mpi = seen["rows"]
        assert [gloo["status"], mpi["status"]] == ["ok", "ok"]
        assert 0 <= max(gloo["max_difference"], mpi["max_difference"]) < 1e-12


def test_a_killed_rank_is_named_and_nothing_stays(tmp_path: Path) -> None:
    run_dir = prepare(tmp_path / "run", collective="mpi", launcher="mpirun", fault="nothing")
    with Launch(run_dir, "faulty:collective").start() as launch:
        os.kill(pid_at_step(run_dir, 1), signal.SIGKILL)
        result = launch.wait()
    assert result["reason"].startswith("rank 1 was killed by SIGKILL during phase train, step ")
    none_left(run_dir)


@pytest.fixture
def shared_memory() -> Iterator[None]:
    """Remove what a killed mpirun leaves: segments that it would have removed at its end."""
    before = set(Path("/dev/shm").glob("sm_segment.*"))
    yield
    for path in set(Path("/dev/shm").glob("sm_segment.*")) - before:
        path.unlink()


@pytest.mark.usefixtures("shared_memory")
def test_supervisor_killed(tmp_path: Path) -> None:
    run_dir = prepare(tmp_path / "run", collective="mpi", launcher="mpirun", fault="nothing")
    with Launch(run_dir, "faulty:collective").start() as launch:
        pid_at_step(run_dir, 1)
        assert launch.pid is not None
        os.kill(launch.pid, signal.SIGKILL)
        none_left(run_dir)
        assert launch.wait()["outcome"] == "failed"
