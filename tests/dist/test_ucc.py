"""UCC where its headers are (``UCC_HOME``, or the system's): every operation by value, the same gradients as gloo."""

import json
from pathlib import Path

import pytest
from harness import HERE, none_left, prepare
from test_mpi import PER_GROUP

from benchlib.runtime.libraries import LIBRARIES
from benchlib.launch.launch import execute

pytestmark = pytest.mark.skipif(bool(LIBRARIES["ucc"].missing()), reason=LIBRARIES["ucc"].missing())


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    LIBRARIES["ucc"].register()  # here and not in the ranks, which have to show a sign of life in between


@pytest.mark.timeout(400)  # with the compiler
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_operation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    run_dir = prepare(tmp_path / "run", collective="ucc", nproc=ranks, names="gloo,ucc")
    assert execute(run_dir, benchmark="library_cases:run")["outcome"] == "complete"
    none_left(run_dir, 0.5)
    for rank in range(ranks):
        found = json.loads((run_dir / f"seen{rank}.json").read_text())
        assert found["place"] == [rank, ranks, "ucc"]
        assert found["checked"] == PER_GROUP * (2 if ranks == 4 else 1)
        assert [text.split(":")[0] for text in found["refused"]] == ["ucc all_reduce", "ucc all_gather", "ucc"]
        assert ranks == 4 or found["sharded"] < 1e-12
        gloo, ucc = found["rows"]
        assert [gloo["status"], ucc["status"]] == ["compared", "compared"]
        assert 0 <= max(gloo["max_difference"], ucc["max_difference"], ucc["gloo_difference"]) < 1e-12
