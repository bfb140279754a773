"""Collectives and files of others: nccl-tests read beside a run, a run written as nccl-tests prints, impossible series."""

import itertools
import json
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner
from make_collectives import MIB, records, row, tables, time_us

from benchlib.benchmarks.collectives.judge import refuse
from benchlib.benchmarks.collectives.nccl_tests import read as series
from benchlib.cli import main
from benchlib.config.schema import build, command, parse_overrides, resolve
from benchlib.core.errors import UserError
from benchlib.judge.foreign.readers import read_claims
from benchlib.judge.impossible.own import Numbers, own_claims
from benchlib.judge.impossible.rules import judge_claims
from benchlib.judge.snapshot import Snapshot
from benchlib.launch.plan import plan
from benchlib.results.metrics import measured
from benchlib.show.exports import export

HONEST = Path(__file__).parents[2] / "fixtures" / "honest"


def snapshot(found, ranks):
    machine = {"host": "node 1", "cpu": {"model": "a made-up CPU"}}
    return Snapshot(
        run="collectives-cpu-1", benchmark="collectives", tier="smoke", backend="cpu", word="PASS", sentence="",
        machine=machine, result=records(found, ranks).result,
    )  # fmt: skip


def judged(found, ranks, metrics=(), **facts):
    result = records(found, ranks).result.model_copy(update={"facts": facts, "metrics": list(metrics)})
    return {item.rule.name: item for item in judge_claims(own_claims(Numbers.of(result)))}


def test_results_of_nccl_tests_become_rows_in_gbps():
    rows = series(HONEST / "all_reduce-8xh100-nvls.txt")
    last = rows[-1]
    assert len(rows) == 62  # 31 sizes, in place and out of place; the footer is no row
    assert (last["operation"], last["bytes"], last["placement"], last["ranks"]) == (
        "all_reduce",
        8 * 2**30,
        "in place",
        8,
    )
    assert last["busbw_gbps"] == pytest.approx(8 * 479.59)
    assert last["time_us"] == pytest.approx(31344.5)
    assert {item["provenance"] for item in rows} == {"claimed"}
    assert len(series(HONEST / "all_reduce-8xh100.json")) == 10


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("hello", "not a format .*; expected the text or JSON output of nccl-tests"),
        ("", "the file is empty"),
        ((HONEST / "all_reduce-8xh100-unnamed.txt").read_text(), "does not name its program"),
        ((HONEST / "counted.tsv").read_text(), "this is a throughput table"),
        ((HONEST / "all_reduce-8xh100.json").read_text()[:900], "may be cut"),
    ],
)
def test_files_that_cannot_stand_beside_a_run_are_told_before_it_starts(tmp_path, content, words):
    path = tmp_path / "nccl.txt"
    path.write_text(content)
    with pytest.raises(UserError, match=f"nccl_tests = .*{words}"):
        plan("collectives", "smoke", "cpu", {"nccl_tests": str(path)}, probe={})


def test_a_good_file_is_taken_and_one_that_is_not_there_is_refused(tmp_path):
    planned = plan("collectives", "smoke", "cpu", {"nccl_tests": str(HONEST / "alltoall-8xa100.txt")}, probe={})
    assert refuse(planned.config) is None
    with pytest.raises(UserError, match="no such file"):
        plan("collectives", "smoke", "cpu", {"nccl_tests": str(tmp_path / "nothing.txt")}, probe={})


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_what_is_written_as_nccl_tests_is_read_back(tmp_path, ranks):
    found = tables(ranks)
    found["series"] += [
        row("all_reduce", MIB, ranks, in_place=True, dtype="int64", reduction="product", wrong_elements=2)
    ]
    path = tmp_path / "out.txt"
    said = export([snapshot(found, ranks)], "nccl-tests", str(path))
    assert said.startswith("10 tests of 1 run")  # nine operations, and the other type
    back = {(item["operation"], item["bytes"], item["placement"]): item for item in series(path)}
    written = [item for item in found["series"] if item["variant"] == "library" and item["operation"] != "barrier"]
    assert len(back) == len(written)
    for item in written:
        place = "in place" if item["in_place"] else "out of place"
        read = back[item["operation"], item["bytes"], place]
        assert read["ranks"] == ranks
        assert read["time_us"] == pytest.approx(item["median_us"], rel=1e-5)
        assert read["busbw_gbps"] == pytest.approx(item["busbw_gbps"], rel=1e-4)
        assert read["wrong_elements"] == item["wrong_elements"]
    # The rules for files of others hold as well, but for the two elements that are wrong.
    failed = [item.rule.name for item in judge_claims(read_claims(path)[1]) if item.failures]
    assert failed == ["right results"]


def test_numbers_of_a_slow_fabric_stay_apart(tmp_path):
    found = tables(2)
    for one in found["series"]:
        one.update(median_us=4383964.1, algbw_gbps=8 * 9.3431e-4, busbw_gbps=8 * 9.3431e-4, wrong_elements=123456789)
    path = tmp_path / "table.txt"
    export([snapshot(found, 2)], "nccl-tests", str(path))
    rows = [line.split() for line in path.read_text().splitlines() if line and not line.startswith("#")]
    assert rows
    assert {len(row) for row in rows} == {13}
    assert {cell for row in rows for cell in (row[6], row[10])} <= {"0.00093431", "N/A"}


def test_the_counts_are_those_of_nccl_tests(tmp_path):
    path = tmp_path / "out.txt"
    export([snapshot(tables(4), 4)], "nccl-tests", str(path))
    lines = [line.split() for line in path.read_text().splitlines() if line.strip()[:1].isdigit()]
    of = {(cells[1], cells[4]) for cells in lines if cells[0] == str(MIB)}
    # 1 MiB of 4-byte elements is 262,144 in a buffer and 65,536 in the part of one of four ranks; -1 has no root.
    assert of == {("262144", "-1"), ("262144", "0"), ("65536", "-1"), ("65536", "0")}


def test_a_run_without_collectives_is_no_table_of_nccl_tests():
    with pytest.raises(UserError, match="name a run of collectives"):
        export([snapshot({}, 2)], "nccl-tests", "-")


def test_honest_series_are_possible():
    assert [name for name, item in judged(tables(4), 4, collective="gloo").items() if item.failures] == []


def test_a_bandwidth_above_the_claimed_link_is_impossible():
    found = tables(2)
    fast = row("broadcast", MIB, 2)
    # 110 Gbps where the links carry 100: a tenth of the time was not waited for. All numbers agree with each other.
    us = 8e-3 * MIB / 110
    found["series"].append(
        fast | {"median_us": us, "p95_us": us, "p99_us": us, "algbw_gbps": 110.0, "busbw_gbps": 110.0}
    )
    failures = judged(found, 2, collective="gloo")["busbw below the links"].failures
    assert len(failures) == 1
    assert "broadcast library fp32, 1 MiB" in failures[0]
    assert "claimed: profile of the machines" in failures[0]


@pytest.mark.parametrize(("rate", "possible"), [(99.0, True), (119.0, False)])
def test_gradients_do_not_move_faster_than_the_links(rate, possible):
    metrics = [
        measured("gradient_allreduce_gbps", rate, "Gbps", "higher"),
        measured("allreduce_socket_share", 0.9, "ratio", "higher"),
    ]
    found = judged(tables(2), 2, metrics, collective="gloo")
    failures = found["busbw below the links"].failures
    assert [failure.split(":")[0] for failure in failures] == ([] if possible else ["buckets of gradients"])


def test_only_a_switch_that_adds_lets_an_all_reduce_exceed_its_link():
    found = {"series": [], "bounds": [{"bound": "claimed link", "gbps": 3600.0, "provenance": "claimed"}]}
    # 8 x H100 with NVLS: busbw 480 GB/s over links of 450 GB/s; the wire carries algbw x (n+1)/n = 309 GB/s.
    size, bus = 2**30, 8 * 480.0
    us = 1e6 * size * 8e-9 / (bus / 1.75)
    fast = row("all_reduce", size, 8) | {
        "median_us": us,
        "p95_us": us,
        "p99_us": us,
        "algbw_gbps": bus / 1.75,
        "busbw_gbps": bus,
    }
    found["series"] = [fast]
    assert not judged(found, 8, collective="nccl")["busbw below the links"].failures
    assert judged(found, 8, collective="gloo")["busbw below the links"].failures
    found["series"] = [fast | {"variant": "ring"}]
    assert judged(found, 8, collective="nccl")["busbw below the links"].failures


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"wrong_elements": 1}, "right results"),
        ({"algbw_gbps": 2 * 8e-3 * MIB / time_us("all_gather", MIB, 4)}, "algbw is S/t"),
        ({"busbw_gbps": 8e-3 * MIB / time_us("all_gather", MIB, 4)}, "busbw factor"),
        ({"p95_us": 1.0}, "percentiles in order"),
        ({"median_us": -5.0}, "no time below zero"),
    ],
)
def test_a_planted_number_in_a_series_is_found(change, rule):
    found = tables(4)
    place = next(
        i for i, item in enumerate(found["series"]) if item["operation"] == "all_gather" and item["bytes"] == MIB
    )
    found["series"][place] |= change
    item = judged(found, 4)[rule]
    assert len(item.failures) == 1
    assert "all_gather" in item.failures[0]


@pytest.mark.parametrize(
    "change",
    [
        {"median_us": None},
        {"bytes": None},
        {"bytes": "big"},
        {"busbw_gbps": "fast"},
        {"operation": ["x"]},
        {"p95_us": {}},
    ],
    ids=str,
)
def test_a_series_of_another_kind_gives_findings_or_a_sentence(tmp_path, change):
    content = json.loads(records(tables(2)).result.model_dump_json())
    content["tables"]["series"][0] |= change
    path = tmp_path / "result.json"
    path.write_text(json.dumps(content))
    done = CliRunner().invoke(main, ["judge", str(path)])
    assert done.exit_code in (0, 2), done.exception


def test_the_command_judges_the_result_of_a_run(tmp_path):
    result = records(tables(2)).result
    path = tmp_path / "result.json"
    path.write_text(result.model_dump_json())
    assert CliRunner().invoke(main, ["judge", str(path)]).exit_code == 0
    content = json.loads(path.read_text())
    content["tables"]["series"][0]["wrong_elements"] = 7
    path.write_text(json.dumps(content))
    done = CliRunner().invoke(main, ["judge", str(path)])
    assert done.exit_code == 1
    assert "7 wrong elements" in done.output


def test_the_command_of_a_report_makes_the_same_config_again():
    chosen = {"dtypes": ["fp32", "int64"], "operations": ["all_reduce"], "bucket_bytes": [4096], "sizes": "1KiB,1MiB"}
    config = build("collectives", {"benchmark": "collectives", "tier": "smoke", "nproc": 3} | chosen)
    words = shlex.split(command(config))
    pairs = [word for flag, word in itertools.pairwise(words) if flag == "--set"]
    assert resolve("collectives", "smoke", "cpu", parse_overrides(pairs)).config == config
