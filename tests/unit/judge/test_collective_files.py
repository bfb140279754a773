"""Collectives and files of others: nccl-tests read beside a run, a run written as nccl-tests prints, impossible series."""

from pathlib import Path
from statistics import median

import pytest
from make_collectives import MIB, result, row, stored, tables

from benchlib.benchmarks.collectives.foreign import read as series
from benchlib.benchmarks.collectives.run import _here
from benchlib.benchmarks.collectives.spec import SPEC
from benchlib.core.definitions import BUS_FACTORS
from benchlib.core.errors import UserError
from benchlib.judge.foreign.readers import read_claims
from benchlib.judge.impossible.rules import judge_claims
from benchlib.launch.plan import plan
from benchlib.results.record import Record
from benchlib.show.exports import export

HONEST = Path(__file__).parents[2] / "fixtures" / "honest"


@pytest.fixture
def record(tmp_path):
    """Return the record of a run of some tables."""

    def make(data, ranks):
        own = result(tmp_path / "stored", data, ranks)
        machine = {"host": "node 1", "cpu": {"model": "a made-up CPU"}}
        return Record(
            run="collectives-cpu-1", benchmark="collectives", tier="smoke", backend="cpu", machine=machine, result=own
        )

    return make


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("hello", "not a format .*; expected the output of nccl-tests"),
        ("", "the file is empty"),
        ((HONEST / "all_reduce-8xh100-unnamed.txt").read_text(), "does not name its program"),
        ((HONEST / "loadgen-server.txt").read_text(), "this is a LoadGen"),
    ],
)
def test_files_that_cannot_stand_beside_a_run_are_told_before_it_starts(tmp_path, content, words):
    path = tmp_path / "nccl.txt"
    path.write_text(content)
    with pytest.raises(UserError, match=f"nccl_tests = .*{words}"):
        plan("collectives", "smoke", "cpu", {"nccl_tests": str(path)}, probe={})


def test_a_ratio_to_nccl_tests_is_of_the_same_placement_and_of_times_that_show_the_network(tmp_path):
    data, claimed = tables(8), {"ranks": 8, "wrong_elements": 0, "algbw_gbps": 8.0, "source": "nccl.txt"}
    for place, size, time_us in (
        ("out of place", MIB, 199.0),
        ("out of place", 64 * MIB, 2e5),
        ("in place", 64 * MIB, 2e5),
        ("out of place", 7, 1e3),
    ):
        stated = {
            "operation": "all_reduce",
            "placement": place,
            "bytes": size,
            "time_us": time_us,
            "busbw_gbps": 9.0,
            "why": {},
        }
        data["nccl_tests"].append(stated | claimed | _here(stated, data["series"], 8))
    table = SPEC.frames(stored(tmp_path / "run", data, 8))["Results of nccl-tests beside it"]()
    # 60 us and 18 Gbps of the bus: 64 MiB × 1.75 take 52,261 us, of which 17.98 Gbps are left, twice what is claimed.
    assert [row["here / claimed"] for row in table] == ["–", "2", "–", "–"]
    assert [row["why"].get("ratio", "") for row in data["nccl_tests"]] == [
        "an operation takes less than 200 us",
        "",
        "",
        "",
    ]
    assert [row["why"].get("here_gbps", "")[:8] for row in data["nccl_tests"]] == ["", "", "measured", "not meas"]


@pytest.mark.parametrize("ranks", [2, 3])
def test_what_is_written_as_nccl_tests_is_read_back(tmp_path, record, ranks):
    data = tables(ranks)
    more = {"in_place": True, "dtype": "int64", "reduction": "product", "wrong_elements": 2}
    data["series"] += [row("all_reduce", MIB, ranks, **more)]
    path = tmp_path / "out.txt"
    sentence = export([record(data, ranks)], "nccl-tests", str(path))
    assert "single operations, from the host, of the slowest rank" in path.read_text()
    assert sentence.startswith("10 tests of 1 run")  # nine operations, and the other type
    back = {(item["operation"], item["bytes"], item["placement"]): item for item in series(path)}
    written = [item for item in data["series"] if item["variant"] == "library" and item["operation"] != "barrier"]
    assert len(back) == len(written)
    for item in written:
        place = "in place" if item["in_place"] else "out of place"
        read, time_us = back[item["operation"], item["bytes"], place], median(item["times_us"])
        assert read["ranks"] == ranks
        assert read["time_us"] == pytest.approx(time_us, rel=1e-5)
        factor = BUS_FACTORS[item["operation"]](ranks)
        assert read["busbw_gbps"] == pytest.approx(factor * 8e-3 * item["bytes"] / time_us, rel=1e-4)
        assert read["wrong_elements"] == item["wrong_elements"]
    # The rules for files of others hold as well, but for the two elements that are wrong.
    failed = [item.rule.name for item in judge_claims(read_claims(path)[1]) if item.failures]
    assert failed == ["right results"]


def test_the_counts_are_those_of_nccl_tests(tmp_path, record):
    path = tmp_path / "out.txt"
    export([record(tables(4), 4)], "nccl-tests", str(path))
    lines = [line.split() for line in path.read_text().splitlines() if line.strip()[:1].isdigit()]
    of = {(cells[1], cells[4]) for cells in lines if cells[0] == str(MIB)}
    # 1 MiB of 4-byte elements is 262,144 in a buffer and 65,536 in the part of one of four ranks; -1 has no root.
    assert of == {("262144", "-1"), ("262144", "0"), ("65536", "-1"), ("65536", "0")}
