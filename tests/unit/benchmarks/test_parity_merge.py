"""The merged matrix and its files: nothing that was not compared passes, nothing is lost, and the same results give the
same bytes."""

import json
import re

import make_parity
import pandas as pd
import pytest
from click.testing import CliRunner

from benchlib.benchmarks.parity import command_verbs, matrix, pictures, tables
from benchlib.benchmarks.parity import publish as export
from benchlib.benchmarks.parity.matrix import FILE, read_file, read_run
from benchlib.cli import main
from benchlib.config.schema import build, save_config
from benchlib.core.errors import UserError
from benchlib.results.run import Result, Run, save_result
from benchlib.show.report import html

START = 1_790_000_000.0
DAY = 86400.0


def make(
    store, name, *, tables=None, facts=None, host="node7", backend="cpu", ended=START, status="complete", outcome="complete",
    reason="", **config,
):  # fmt: skip
    """Write a made-up run of parity, as far as the matrix reads it."""
    folder = store / f"smoke-{20260921 + int((ended - START) / DAY)}" / f"parity-{backend}-{name}"
    folder.mkdir(parents=True)
    built = build("parity", {"benchmark": "parity", "backend": backend, **config})
    (folder / "config.json").write_text(json.dumps(built.model_dump(mode="json")))
    machine = {
        "host": host, "cpu": {"model": "Imaginary 3000", "usable_cores": 2}, "system": "Linux 6.0-made-up",
        "versions": {"torch": "2.13.0", "python": "3.11.7"}, "drivers": {"nvidia": "580.1"},
        "devices": {"backends": {backend: {"count": 2, "names": ["Imaginary GPU", "Imaginary GPU"]}}},
    }  # fmt: skip
    (folder / "machine.json").write_text(json.dumps(machine))
    ending = {"outcome": outcome, "reason": reason, "ranks": [], "ended_at": ended}
    (folder / "status.json").write_text(json.dumps(ending))
    if status:
        save_result(
            folder,
            Result.of(
                built, status=status, reason=reason, started_at=ended - 20, ended_at=ended,
                tables=make_parity.tables(["eager", "bf16"]) if tables is None else tables,
                facts=make_parity.facts() if facts is None else facts,
            ),
        )  # fmt: skip
    return folder


def cells(frame):
    return {(row.machine, row.backend, row.member): row.word for row in frame.itertuples()}


def test_the_newest_result_of_each_machine_backend_and_member_counts(tmp_path):
    make(tmp_path, "000001-a", tables=make_parity.tables(["eager", "bf16"]))
    make(
        tmp_path,
        "000002-b",
        tables=make_parity.tables(["eager", "sdpa_math"], crashed=["eager"]),
        ended=START + 2 * DAY,
    )
    make(tmp_path, "000003-c", tables=make_parity.tables(["eager"]), host="node8", ended=START + DAY)
    frame = matrix.frame(matrix.collect([tmp_path]), now=START + 4 * DAY)
    assert cells(frame) == {
        ("node7", "cpu", "eager"): "FAIL",
        ("node7", "cpu", "sdpa_math"): "PASS",
        ("node7", "cpu", "bf16"): "PASS",
        ("node8", "cpu", "eager"): "PASS",
    }
    rows = frame.set_index(["machine", "member"])
    assert list(rows.loc["node7"].index) == ["eager", "sdpa_math", "bf16"]  # the order of the members' table
    assert rows.loc[("node7", "bf16"), "age_days"] == 4 and rows.loc[("node7", "eager"), "age_days"] == 2
    assert rows.loc[("node7", "bf16"), "max_difference"] == 8e-3 and rows.loc[("node7", "bf16"), "limit"] == 3e-2
    assert pd.isna(rows.loc[("node7", "eager"), "max_difference"])
    assert rows.loc[("node7", "bf16"), "versions"] == "torch 2.13.0, driver nvidia 580.1"
    assert tuple(frame.columns) == matrix.COLUMNS


@pytest.mark.parametrize(
    ("tables", "more", "outcome", "reason"),
    [
        ({}, {"record": True}, "NOT COMPARED", "only the reference was recorded"),
        ({"members": [{"member": "reference", "outcome": "PASS"}]}, {}, "NOT COMPARED", "only the reference was recorded"),
        ({"members": [{"member": "eager", "outcome": "PASS"}]}, {}, "NOT COMPARED", "none of its quantities was compared"),
        ({}, {"status": "skipped", "reason": "no driver"}, "SKIPPED", "no driver"),
        ({}, {"status": "", "outcome": "failed", "reason": "rank 0 died"}, "FAIL", "the run broke: rank 0 died"),
    ],
)  # fmt: skip
def test_what_was_not_compared_never_passes(tmp_path, tables, more, outcome, reason):
    make(tmp_path, "000001-a", tables=tables, **more)
    found = matrix.collect([tmp_path])
    ((_, row),) = found.rows
    assert (row.outcome, row.reason) == (outcome, reason)
    standing = matrix.standing(found, "cpu")
    assert standing.outcome == outcome and reason in standing.reason
    assert matrix.standing(found, "rocm").outcome == "NOT COMPARED"


def test_a_member_that_does_not_gate_neither_fails_nor_passes_a_backend(tmp_path):
    make(tmp_path, "000001-a", tables=make_parity.tables(["native"], crashed=["native"]))
    found = matrix.collect([tmp_path])
    assert matrix.standing(found, "cpu").outcome == "NOT COMPARED"
    assert "≈ DIFFERS" in export.page(found) and "✗ FAIL" not in export.page(found)
    make(tmp_path, "000002-b", tables=make_parity.tables(["eager"]), ended=START + DAY)
    standing = matrix.standing(matrix.collect([tmp_path]), "cpu")
    assert standing.outcome == "PASS" and standing.reason.startswith("1 of 1 gated")
    make(tmp_path, "000003-c", tables=make_parity.tables(["eager", "onnxruntime"]), ended=START + 2 * DAY)
    standing = matrix.standing(matrix.collect([tmp_path]), "cpu")
    assert standing.outcome == "PASS" and standing.reason.endswith("; not compared: onnxruntime on node7")


def test_an_older_word_on_the_whole_run_gives_way_to_results_and_a_newer_one_stands_beside_them(tmp_path):
    make(tmp_path, "000001-a", tables={}, status="skipped", reason="no driver")
    make(tmp_path, "000002-b", ended=START + DAY)
    assert {member for _, _, member in cells(matrix.frame(matrix.collect([tmp_path])))} == {"eager", "bf16"}
    make(tmp_path, "000003-c", tables={}, status="", outcome="failed", reason="rank 0 died", ended=START + 2 * DAY)
    assert cells(matrix.frame(matrix.collect([tmp_path])))[("node7", "cpu", "all")] == "FAIL"


def test_a_recording_stands_beside_no_results_of_its_machine(tmp_path):
    make(tmp_path, "000002-b", tables={"members": []}, ended=START + DAY, record=True)
    assert set(cells(matrix.frame(matrix.collect([tmp_path]))).values()) == {"NOT COMPARED"}
    make(tmp_path, "000001-a")
    assert {member for _, _, member in cells(matrix.frame(matrix.collect([tmp_path])))} == {"eager", "bf16"}


def test_damage_and_planted_faults_are_left_out_with_the_reason_and_stop_nothing(tmp_path):
    make(tmp_path, "000001-a")
    cut = make(tmp_path, "000002-b", ended=START + DAY) / "result.json"
    cut.write_text(cut.read_text()[:-50])
    foreign = make(tmp_path, "000003-c", tables={"members": [{"name": "eager"}]}, ended=START + DAY)
    planted = make(tmp_path, "000004-d", ended=START + DAY, planted_layer=1)
    found = matrix.collect([tmp_path])
    assert [run.run for run in found.results] == ["parity-cpu-000001-a"]
    assert sum("the file may be cut" in sentence for sentence in found.left_out) == 1
    assert any("tables of parity" in sentence and foreign.name in sentence for sentence in found.left_out)
    assert [planted.name in sentence for sentence in found.uncounted] == [True]
    page = export.page(found)
    assert "parity-cpu-000002-b" in page and "planted" not in page and str(tmp_path) not in page


def test_a_run_is_always_in_its_own_picture(tmp_path):
    run = Run(make(tmp_path, "000001-a", tables=make_parity.tables(["eager"], crashed=["eager"]), planted_layer=2))
    make(tmp_path, "000002-b", ended=START + DAY)
    assert cells(matrix.around(run))[("node7", "cpu", "eager")] == "FAIL"
    assert cells(matrix.around(run))[("node7", "cpu", "bf16")] == "PASS"
    alone = matrix.around(make_parity.records(make_parity.tables(["eager"])))
    assert ("this machine", "cpu", "eager") in cells(alone)


def test_the_title_is_about_this_run_alone_and_others_stand_apart(tmp_path):
    names = ["eager", "sdpa_math"]
    run = Run(make(tmp_path, "000001-a", tables=make_parity.tables(names, crashed=names)))
    alone = pictures.matrix(run)
    assert alone.alt.startswith("0 of 2 match the reference; eager and sdpa_math fail")
    assert pictures.OTHERS not in [text.get_text() for text in alone.axes[0].texts]
    every = ["eager", "sdpa_math", "sdpa_flash", "fp64", "bf16", "native"]
    make(tmp_path, "000002-b", tables=make_parity.tables(every), ended=START + DAY)
    make(tmp_path, "000003-c", tables=make_parity.tables(["eager", "compile"]), host="node8")
    planted = make(tmp_path, "000004-d", tables=make_parity.tables(["aotinductor"]), host="node9", planted_layer=1)
    figure = pictures.matrix(run)
    assert figure.get_suptitle() == alone.get_suptitle()
    words = {text.get_text(): text.get_position()[0] for text in figure.axes[0].texts}
    assert words["This run"] < words[pictures.OTHERS]
    own, others = figure.alt.split(f"{pictures.OTHERS}: ")
    assert "eager on node7 (cpu): FAIL" in own and "node8" not in own and "fp64" not in own
    assert "fp64 on node7 (cpu): PASS" in others and "compile on node8 (cpu): PASS" in others
    assert "node9" not in figure.alt and "aotinductor" not in figure.alt
    table = tables.matrix_table(run)
    assert {"fp64", "compile"} <= set(table.index) and "node9" not in set(table["machine"])
    assert not ((table["machine"] == "node7") & table.index.isin(names)).any()  # these are this run's own
    # Seen from the planted run itself, its own result is there, and the title is about it.
    assert pictures.matrix(Run(planted)).alt.startswith("1 of 1 match the reference")


def test_a_report_of_another_benchmark_has_no_picture_of_parity(tmp_path):
    make(tmp_path, "000001-a")
    folder = tmp_path / "smoke-20260921" / "squad-cpu-000002-b"
    folder.mkdir()
    config = build("squad", {"benchmark": "squad", "tier": "smoke"})
    save_config(config, folder)
    save_result(folder, Result.of(config, status="skipped", reason="no driver", started_at=START, ended_at=START))
    page = html(Run(folder))
    assert "No driver" in page and "match the reference" not in page and "backend-matrix" not in page


def merge(*arguments):
    return CliRunner().invoke(main, ["parity", "merge", *map(str, arguments)])


def test_merging_again_changes_no_byte_and_keeps_other_machines(tmp_path):
    here, there, to = tmp_path / "here", tmp_path / "there", tmp_path / "results"
    make(here, "000001-a")
    make(
        there,
        "000002-b",
        host="node8",
        backend="cuda",
        ended=START + 40 * DAY,
        tables=make_parity.tables(["bf16", "eager"]),
    )
    assert merge(there, "--to", to, "--as", "H100 of the lab").exit_code == 0
    done = merge(here, "--to", to)
    assert done.exit_code == 0, done.output
    before = {path.relative_to(to): path.read_bytes() for path in sorted(to.rglob("*")) if path.is_file()}
    assert sorted(map(str, before)) == ["PARITY.md", "cpu/" + FILE, export.CROSS, "cuda/" + FILE]
    for again in (merge(here, "--to", to), merge(to, "--to", to), merge(to / "cpu", to / "cuda" / FILE, "--to", to)):
        assert again.exit_code == 0, again.output
        assert {path.relative_to(to): path.read_bytes() for path in sorted(to.rglob("*")) if path.is_file()} == before
    assert merge(here, there, "--to", tmp_path / "both", "--as", "x").exit_code == 0
    assert [run.machine for run in read_file(to / "cuda" / FILE)] == ["H100 of the lab"]
    assert "40 days older than the newest" in (to / "PARITY.md").read_text()
    cross = json.loads((to / export.CROSS).read_text())
    assert {name: one["outcome"] for name, one in cross["backends"].items() if one["machines"]} == {
        "cpu": "PASS",
        "cuda": "PASS",
    }
    (pair,) = cross["agreement"]
    assert pair["backends"] == ["cpu", "cuda"] and pair["at_most"] == 0.0


def test_the_distance_between_backends_is_the_sum_of_both_to_one_reference(tmp_path):
    make(tmp_path, "000001-a", tables=make_parity.tables(["sdpa_math", "bf16"]))
    make(tmp_path, "000002-b", backend="cuda", tables=make_parity.tables(["one_thread", "native"]))
    (pair,) = export.agreement(matrix.collect([tmp_path]))
    assert pair["at_most"] == pytest.approx(1.2e-7 + 2.4e-7) and pair["members"] == ["sdpa_math", "one_thread"]
    inputs = {"inputs_sha256": "00" * 32}
    # Of the same words, recorded by another processor, or by a version that did not record which logits they were.
    recorded = [
        {"reference": make_parity.facts()["reference"] | {"outputs_sha256": digest}} for digest in ("01" * 32, "")
    ]
    for day, other in enumerate([inputs, *recorded], start=1):
        facts, tables = make_parity.facts() | other, make_parity.tables(["one_thread"])
        make(tmp_path, f"00001{day}-c", backend="cuda", tables=tables, facts=facts, ended=START + day * DAY)
        assert export.agreement(matrix.collect([tmp_path])) == [], other


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda text: text[:-40], "may be cut"),
        (lambda text: text.replace('"backend": "cpu"', '"backend": "cuda"', 1), "a result of cpu in a file of cuda"),
        (lambda text: text.replace('"outcome": "FAIL"', '"outcome": "PASS"'), "is PASS although"),
        (lambda text: text.replace('"max_difference": 0.008', '"max_difference": 0.8'), "above 0.03"),
        (lambda text: text.replace('"schema_version": 1', '"schema_version": 2'), "later benchlib"),
        (lambda text: text.replace('"member": "bf16"', '"member": "eager"'), "listed twice"),
        (lambda text: text.replace("benchlib.parity.results", "something.else"), "kind"),
    ],
)
def test_a_file_that_was_altered_or_is_of_another_kind_is_listed_and_left_as_it_is(tmp_path, change, says):
    to = tmp_path / "results"
    tables = make_parity.tables(["eager", "bf16", "sdpa_math"])
    row = next(one for one in tables["quantities"] if one["member"] == "sdpa_math" and one["quantity"] == "gradients")
    member = next(one for one in tables["members"] if one["member"] == "sdpa_math")
    row["status"], member["outcome"], member["reason"] = "FAIL", "FAIL", "gradients beyond their tolerance"
    make(tmp_path / "cpu", "000001-a", tables=tables)
    make(tmp_path / "cuda", "000002-b", backend="cuda")
    assert merge(tmp_path / "cpu", "--to", to).exit_code == 0
    path = to / "cpu" / FILE
    changed = change(path.read_text())
    assert changed != path.read_text()
    path.write_text(changed)
    with pytest.raises(UserError, match=says):
        read_file(path)
    done = merge(tmp_path / "cuda", "--to", to)
    assert done.exit_code == 2, done.output
    assert path.read_text() == changed and "not written" in done.output
    assert says in (to / "PARITY.md").read_text()
    assert [run.backend for run in read_file(to / "cuda" / FILE)] == ["cuda"]


def test_exit_codes_are_those_of_the_kit(tmp_path):
    make(tmp_path / "good", "000001-a")
    make(tmp_path / "bad", "000002-b", tables=make_parity.tables(["eager"], crashed=["eager"]))
    make(tmp_path / "none", "000003-c", tables={}, record=True)
    codes = {
        name: merge(tmp_path / name, "--to", tmp_path / f"to-{name}", "--strict").exit_code
        for name in ("good", "bad", "none")
    }
    assert codes == {"good": 0, "bad": 1, "none": 3}
    assert merge(tmp_path / "bad", "--to", tmp_path / "again").exit_code == 0
    cut = make(tmp_path / "good", "000004-d", ended=START + DAY) / "result.json"
    cut.write_text(cut.read_text()[:-50])
    make(tmp_path / "bad", "000005-e", ended=START + DAY).joinpath("result.json").write_text("{")
    left = merge(tmp_path / "good", "--to", tmp_path / "left")
    assert left.exit_code == 2 and "## Left out" in left.output and (tmp_path / "left" / "cpu" / FILE).exists()
    assert merge(tmp_path / "good", "--to", tmp_path / "left", "--strict").exit_code == 2
    assert merge(tmp_path / "bad", "--to", tmp_path / "worse", "--strict").exit_code == 1
    assert merge(tmp_path / "absent", "--to", tmp_path / "again").exit_code == 2


def test_the_page_is_a_table_in_a_terminal_and_on_a_forge(tmp_path):
    make(tmp_path, "000001-a", host="node|7 `x` <b>", tables=make_parity.tables(crashed=["eager"]))
    page = export.page(matrix.collect([tmp_path]))
    blocks = [block.splitlines() for block in page.split("\n\n") if block.startswith("|")]
    assert len(blocks) == 4
    for lines in blocks:
        assert len({len(line) for line in lines}) == 1, "columns are aligned"
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in lines}) == 1, "a name adds no column"
    assert "<b>" not in page and "ended by signal 11" in page
    assert "SKIPPED" in page and "onnxruntime is not installed" in page


def test_differences_name_what_both_machines_tell():
    there = {"torch": "2.12.0", "numpy": "2.3", "seaborn": "0.1", "processor": "A", "threads": 8}
    here = {"versions": {"torch": "2.13.0", "numpy": "2.3", "seaborn": "0.2"}, "cpu": {"model": "B"}, "host": "x"}
    assert command_verbs.differences(there, here) == [("processor", "A", "B"), ("torch", "2.12.0", "2.13.0")]


def test_a_run_of_another_benchmark_is_no_result(tmp_path):
    run = Run(make(tmp_path, "000001-a"))
    run.config, run.result.benchmark = build("machine", {"benchmark": "machine"}), "machine"
    with pytest.raises(UserError, match="a run of machine"):
        read_run(run)


def test_strict_wants_every_gated_member_and_optional_ones_where_they_are_named(tmp_path):
    def compared(folder, named=""):
        return command_verbs._compared([row for _, row in matrix.collect([folder]).rows], [named])

    whole = make(
        tmp_path, "000001-a", tables=make_parity.tables(["eager", "onnxruntime", "native"], crashed=["native"])
    )
    assert compared(whole) and not compared(whole, "onnxruntime")
    tables = make_parity.tables(["eager", "sdpa_math"])
    tables["members"][1] |= {"outcome": "SKIPPED", "reason": "no time in the budget"}
    assert not compared(make(tmp_path, "000002-b", tables=tables))
    assert not compared(make(tmp_path, "000003-c", tables={}, status="skipped", reason="no driver"))


def of_quantity(name, **values):
    def change(run):
        entry = [entry for entry in run["members"][0]["quantities"] if entry["quantity"] == name][-1]
        entry.update(values)

    return change


FORGED = {
    "a value beyond its limit": (of_quantity("logits max difference", value=2e-5), "is beyond its limit"),
    "no value": (of_quantity("logits max difference", value=None), "or one is missing"),
    "few spans": (of_quantity("span agreement", value=0.97), "span agreement is beyond its limit"),
    "a loose limit": (of_quantity("logits max difference", value=2e-4, limit=0.5), "looser than the table's"),
    "a loose share": (of_quantity("span agreement", value=0.97, limit=0.9), "looser than the table's >= 1"),
    "a tolerance for NaN": (of_quantity("finite", value=3.0, limit=5.0), "judged by finite <= 5"),
    "an unknown quantity": (of_quantity("logits max difference", quantity="harmony"), "no tolerance of 'harmony'"),
    "the future": (lambda run: run.update(ended_at="2999-01-01T00:00:00Z"), "2999-01-01, which is in the future"),
}  # fmt: skip


@pytest.mark.parametrize("case", FORGED)
def test_a_pass_is_recomputed_from_value_and_limit_and_the_limit_from_the_table(tmp_path, case):
    change, words = FORGED[case]
    make(tmp_path / "outputs", "000001-a", tables=make_parity.tables(["eager"]))
    to = tmp_path / "results"
    assert merge(tmp_path / "outputs", "--to", to, "--strict").exit_code == 0
    path = to / "cpu" / FILE
    values = json.loads(path.read_text())
    (member,) = values["results"][0]["members"]
    for name, value, limit in (("span agreement", 1.0, 1.0), ("finite", 0.0, 0.0)):
        member["quantities"].append({"quantity": name, "value": value, "limit": limit, "status": "PASS"})
    path.write_text(json.dumps(values))
    assert merge(to, "--to", tmp_path / "same", "--strict").exit_code == 0
    change(values["results"][0])
    path.write_text(json.dumps(values))
    with pytest.raises(UserError, match=words):
        read_file(path)
    answer = merge(to, "--to", tmp_path / "again", "--strict")
    assert answer.exit_code == 2 and "## Left out" in answer.output
