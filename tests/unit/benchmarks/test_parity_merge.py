"""Merged results and their files: nothing that was not compared passes, nothing is lost, and the same results give the same
bytes."""

import json

import pytest
from click.testing import CliRunner
from make_parity import left, run_of

from benchlib.benchmarks.parity import merge
from benchlib.benchmarks.parity.merge import (
    CROSS,
    EMPTY,
    FILE,
    PAGE,
    REPORT,
    Merged,
    agreement,
    newest,
    page,
    read_run,
    standing,
)
from benchlib.cli import main
from benchlib.core.errors import UserError

START = 1_790_000_000.0


crash = left("eager", "failed", "ended by SIGSEGV")


def make(folder, members=("eager", "bf16"), change=lambda tables: None, host="node7", backend="cpu", outcome="complete",
         reason="", **config):  # fmt: skip
    """Write a made-up run."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    run_of(folder, change, () if config.get("record") else members, START, backend=backend, **config)
    if outcome == "failed":
        (folder / "result.json").unlink()
    (folder / "machine.json").write_text(json.dumps({"host": host}))
    ending = {"outcome": outcome, "reason": reason, "ranks": [], "ended_at": START}
    (folder / "status.json").write_text(json.dumps(ending))
    return folder


def test_a_row_has_what_its_run_found(tmp_path):
    eager, bf16 = read_run(make(tmp_path / "run", change=crash))
    assert (eager["outcome"], eager["max_difference"], eager["reason"]) == ("FAIL", None, "ended by SIGSEGV")
    assert (bf16["outcome"], bf16["max_difference"], bf16["limit"], bf16["latency_ms"]) == ("PASS", 8e-3, 3e-2, 10.0)
    assert bf16["quantities"]["gradients"] == [8e-3, 0.1] and bf16["machine"] == "node7"


@pytest.mark.parametrize(
    ("values", "outcome", "reason"),
    [
        ({"record": True}, "NOT COMPARED", "only the reference was recorded"),
        ({"members": ("eager",), "change": left("eager", "skipped", "no driver")}, "SKIPPED", "no driver"),
        ({"outcome": "failed", "reason": "rank 0 died"}, "FAIL", "the run broke: rank 0 died"),
        ({"members": ("native",)}, "NOT COMPARED", "no gated member was compared"),
    ],
)
def test_what_was_not_compared_never_passes(tmp_path, values, outcome, reason):
    rows = read_run(make(tmp_path / "run", **values))
    word, why, machines = standing(Merged(rows, []), "cpu")
    assert (word, machines) == (outcome, ["node7"]) and reason in why
    assert standing(Merged(rows, []), "rocm") == ("NOT COMPARED", "no result from any machine", [])


def row(member, outcome="PASS", day=1, machine="node7", backend="cpu", **cells):
    about = {"ended_at": f"2026-10-{day:02d}", "run": f"run-{day}", "reference_sha256": "ef", "precision": "fp32"}
    return EMPTY | about | {"member": member, "outcome": outcome, "machine": machine, "backend": backend} | cells


def test_the_newest_result_of_each_machine_backend_and_member_counts():
    rows = [row("eager"), row("bf16"), row("eager", "FAIL", 3), row("eager", day=2, machine="b")]
    for order in (rows, rows[::-1]):
        outcomes = [(one["backend"], one["machine"], one["member"], one["outcome"]) for one in newest(order)]
        assert outcomes == [
            ("cpu", "b", "eager", "PASS"),
            ("cpu", "node7", "eager", "FAIL"),  # members in the order of the table
            ("cpu", "node7", "bf16", "PASS"),
        ]


def test_an_older_word_on_the_whole_run_gives_way_to_results_and_a_newer_one_stands_beside_them():
    rows = [row("all", "FAIL", 1), row("eager", day=2), row("all", "NOT COMPARED", 3)]
    assert [one["member"] for one in newest(rows)] == ["eager"]
    assert [one["member"] for one in newest([*rows, row("all", "FAIL", 4)])] == ["eager", "all"]


def test_a_member_that_does_not_gate_neither_fails_nor_passes_a_backend():
    merged = Merged([row("native", "FAIL", gates=False)], [])
    assert standing(merged, "cpu")[0] == "NOT COMPARED" and "| DIFFERS |" in page(merged)
    word, why, _ = standing(Merged([*merged.rows, row("eager"), row("fp64", "SKIPPED")], []), "cpu")
    assert (word, why) == ("PASS", "1 of 2 gated results are within their limits; not compared: fp64 on node7")


def test_the_distance_between_backends_is_the_sum_of_both_to_one_reference():
    ours = [row("eager", max_difference=0.0), row("sdpa_flash", max_difference=2.0)]
    theirs = row("exact", backend="cuda", max_difference=3.0)
    (pair,) = agreement(Merged([*ours, theirs, row("bf16", precision="bf16", max_difference=9.0)], []))
    assert (pair["at_most"], pair["members"]) == (5.0, ["sdpa_flash", "exact"])
    # Other inputs; logits of the same words recorded by another processor, or by who did not say which.
    for other in ({"inputs_sha256": "00"}, {"reference_sha256": "01"}, {"reference_sha256": ""}):
        assert agreement(Merged([*ours, theirs | other], [])) == [], other


def test_damage_and_planted_faults_are_left_out_with_the_reason_and_stop_nothing(tmp_path):
    make(tmp_path / "parity-a")
    cut = make(tmp_path / "parity-b") / "result.json"
    cut.write_text(cut.read_text()[:-50])
    foreign = make(tmp_path / "parity-c") / "result.json"
    foreign.write_text(foreign.read_text().replace('"quantity"', '"quantitee"'))
    make(tmp_path / "parity-d", planted_layer=1)
    merged = merge.collect([tmp_path])
    assert {row["run"] for row in merged.rows} == {"parity-a"}
    assert [("parity-b" in text, "parity-c" in text) for text in merged.left_out] == [(True, False), (False, True)]
    (planted,) = merged.planted
    assert planted.startswith(f"{tmp_path.name}/parity-d: planted_layer=1 changed this run") and planted in page(merged)
    assert "parity-b" in page(merged) and str(tmp_path) not in page(merged)


def test_a_file_of_schema_2_has_no_percentiles_and_is_read(tmp_path):
    merge.write(Merged([row("eager", max_difference=1.0)], []), tmp_path)
    values = json.loads((tmp_path / "cpu" / FILE).read_text())
    for name in merge.ADDED:
        del values["results"][0][name]
    path = tmp_path / FILE
    path.write_text(json.dumps(values | {"schema_version": 2}))
    (old,) = merge.read_file(path)
    assert (old["max_difference"], old["latency_p99_ms"]) == (1.0, None)
    for change in ({"schema_version": 1}, {"results": [{"machine": "node7"}]}):
        path.write_text(json.dumps(values | change))
        with pytest.raises(UserError, match="not results of parity of this version"):
            merge.read_file(path)


def call(*arguments):
    return CliRunner().invoke(main, ["parity", "merge", *map(str, arguments)])


def test_merging_again_changes_no_byte_and_keeps_other_machines(tmp_path):
    here, there, to = tmp_path / "here", tmp_path / "there", tmp_path / "results"
    make(here / "parity-a")
    make(there / "parity-b", ("bf16", "eager"), backend="cuda")
    assert call(there, "--to", to, "--as", "H100 | <b> of the lab").exit_code == 0
    done = call(here, "--to", to)
    assert done.exit_code == 0, done.output

    def files():
        return {str(path.relative_to(to)): path.read_bytes() for path in sorted(to.rglob("*")) if path.is_file()}

    before = files()
    assert list(before) == sorted(
        [PAGE, CROSS, *(f"{name}/{file}" for name in ("cpu", "cuda") for file in (FILE, CROSS, REPORT))]
    )
    for sources in ((here,), (to,), (to / "cpu", to / "cuda" / FILE)):
        again = call(*sources, "--to", to)
        assert (again.exit_code, files()) == (0, before), again.output
    assert {row["machine"] for row in merge.read_file(to / "cuda" / FILE)} == {"H100 | <b> of the lab"}
    backends = json.loads((to / CROSS).read_text())["backends"]
    assert (backends["cpu"]["outcome"], backends["cuda"]["outcome"]) == ("PASS", "PASS")
    assert "<b>" not in (to / PAGE).read_text()


@pytest.mark.parametrize(("values", "code"), [({}, 0), ({"change": crash}, 1), ({"record": True}, 3)])
def test_exit_codes_are_those_of_the_kit(tmp_path, values, code):
    source = tmp_path / "runs"
    make(source / "parity-a", **values)
    assert call(source, "--to", tmp_path / "to", "--strict").exit_code == code
    assert call(source, "--to", tmp_path / "again").exit_code == 0
    assert call(source, tmp_path / "absent", "--to", tmp_path / "again").exit_code == 2
    make(source / "parity-b").joinpath("result.json").write_text("{")
    assert call(source, "--to", tmp_path / "left").exit_code == 2
