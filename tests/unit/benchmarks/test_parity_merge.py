"""Merged results and their files: nothing that was not compared passes, nothing is lost, and the same results give the same
bytes."""

import json
import re

import pytest
from click.testing import CliRunner
from make_parity import run_of

from benchlib.benchmarks.parity import command, merge
from benchlib.benchmarks.parity.merge import CROSS, FILE, PAGE, agreement, collect, page, read_file, standing
from benchlib.cli import main

START, DAY = 1_790_000_000.0, 86400.0


def skipped(name, reason="onnxruntime is not installed", status="skipped"):
    """A change that leaves a member without a recording."""

    def change(tables):
        row = next(row for row in tables["members"] if row["member"] == name)
        row |= {"status": status, "reason": reason}
        tables["differences"] = [row for row in tables["differences"] if row["member"] != name]

    return change


def make(store, name, members=("eager", "bf16"), change=lambda tables: None, host="node7", backend="cpu", ended=START,
         outcome="complete", reason="", facts=None, **config):  # fmt: skip
    """Write a made-up run; ``facts`` of it are changed."""
    folder = store / f"smoke-{20260921 + int((ended - START) / DAY)}" / f"parity-{backend}-{name}"
    folder.parent.mkdir(parents=True, exist_ok=True)

    def whole(tables):
        change(tables)
        tables["run"][0] |= facts or {}
        for row in tables["members"]:
            row["backend"] = backend

    run_of(folder, whole, () if config.get("record") else members, ended, backend=backend, **config)
    path = folder / "result.json"
    path.write_text(re.sub(r'"ended_at": ?[\d.]+', f'"ended_at": {ended}', path.read_text(), count=1))
    if outcome == "failed":
        path.unlink()
    machine = {
        "host": host, "cpu": {"model": "Imaginary 3000", "usable_cores": 2}, "system": "Linux 6.0-made-up",
        "versions": {"torch": "2.13.0", "python": "3.11.7"}, "drivers": {"nvidia": "580.1"},
        "devices": {"backends": {backend: {"count": 2, "names": ["Imaginary GPU", "Imaginary GPU"]}}},
    }  # fmt: skip
    (folder / "machine.json").write_text(json.dumps(machine))
    ending = {"outcome": outcome, "reason": reason, "ranks": [], "ended_at": ended}
    (folder / "status.json").write_text(json.dumps(ending))
    return folder


def words(merged):
    return {(row["machine"], row["backend"], row["member"]): row["outcome"] for row in merged.rows}


def test_the_newest_result_of_each_machine_backend_and_member_counts(tmp_path):
    make(tmp_path, "000001-a")
    crash = skipped("eager", "ended by SIGSEGV", "failed")
    make(tmp_path, "000002-b", ("eager", "sdpa_flash"), crash, ended=START + 2 * DAY)
    make(tmp_path, "000003-c", ("eager",), host="node8", ended=START + DAY)
    merged = collect([tmp_path])
    assert words(merged) == {
        ("node7", "cpu", "eager"): "FAIL",
        ("node7", "cpu", "sdpa_flash"): "PASS",
        ("node7", "cpu", "bf16"): "PASS",
        ("node8", "cpu", "eager"): "PASS",
    }
    rows = {(row["machine"], row["member"]): row for row in merged.rows}
    assert [name for machine, name in rows if machine == "node7"] == ["eager", "sdpa_flash", "bf16"], (
        "the table's order"
    )
    assert (rows["node7", "bf16"]["max_difference"], rows["node7", "bf16"]["limit"]) == (8e-3, 3e-2)
    assert (rows["node7", "eager"]["max_difference"], rows["node7", "eager"]["reason"]) == (None, "ended by SIGSEGV")
    assert rows["node7", "bf16"]["latency_ms"] == 10.0 and rows["node7", "bf16"]["quantities"]["gradients"] == [
        8e-3,
        0.1,
    ]


@pytest.mark.parametrize(
    ("values", "outcome", "reason"),
    [
        ({"record": True}, "NOT COMPARED", "only the reference was recorded"),
        ({"members": ("eager",), "change": skipped("eager", "no driver")}, "SKIPPED", "no driver"),
        ({"outcome": "failed", "reason": "rank 0 died"}, "FAIL", "the run broke: rank 0 died"),
        ({"members": ("native",)}, "NOT COMPARED", "no gated member was compared"),
    ],
)
def test_what_was_not_compared_never_passes(tmp_path, values, outcome, reason):
    make(tmp_path, "000001-a", **values)
    word, why, machines = standing(collect([tmp_path]), "cpu")
    assert (word, machines) == (outcome, ["node7"]) and reason in why
    assert standing(collect([tmp_path]), "rocm") == ("NOT COMPARED", "no result from any machine", [])


def test_a_member_that_does_not_gate_neither_fails_nor_passes_a_backend(tmp_path):
    make(tmp_path, "000001-a", ("native",), skipped("native", "ended by SIGSEGV", "failed"))
    found = collect([tmp_path])
    assert standing(found, "cpu")[0] == "NOT COMPARED" and "| DIFFERS |" in page(found)
    make(tmp_path, "000002-b", ("eager", "fp64"), skipped("fp64"), ended=START + DAY)
    word, why, _ = standing(collect([tmp_path]), "cpu")
    assert (word, why) == ("PASS", "1 of 2 gated results are within their limits; not compared: fp64 on node7")


def test_an_older_word_on_the_whole_run_gives_way_to_results_and_a_newer_one_stands_beside_them(tmp_path):
    make(tmp_path, "000001-a", outcome="failed", reason="no driver")
    make(tmp_path, "000002-b", ended=START + DAY)
    make(tmp_path, "000003-c", ended=START + 2 * DAY, record=True)
    assert {member for _, _, member in words(collect([tmp_path]))} == {"eager", "bf16"}
    make(tmp_path, "000004-d", outcome="failed", reason="rank 0 died", ended=START + 3 * DAY)
    assert words(collect([tmp_path]))["node7", "cpu", "all"] == "FAIL"


def test_damage_and_planted_faults_are_left_out_with_the_reason_and_stop_nothing(tmp_path):
    make(tmp_path, "000001-a")
    cut = make(tmp_path, "000002-b", ended=START + DAY) / "result.json"
    cut.write_text(cut.read_text()[:-50])
    foreign = make(tmp_path, "000003-c", ended=START + DAY) / "result.json"
    foreign.write_text(foreign.read_text().replace('"quantity"', '"quantitee"'))
    planted = make(tmp_path, "000004-d", ended=START + DAY, planted_layer=1)
    found = collect([tmp_path])
    assert {row["run"] for row in found.rows} == {"parity-cpu-000001-a"}
    assert [("000002-b" in text, "000003-c" in text) for text in found.left_out] == [(True, False), (False, True)]
    assert "the file may be cut" in found.left_out[0] and "not a result of parity" in found.left_out[1]
    assert [planted.name in text for text in found.uncounted] == [True]
    assert "parity-cpu-000002-b" in page(found) and "on purpose" not in page(found) and str(tmp_path) not in page(found)


def call(*arguments):
    return CliRunner().invoke(main, ["parity", "merge", *map(str, arguments)])


def test_merging_again_changes_no_byte_and_keeps_other_machines(tmp_path):
    here, there, to = tmp_path / "here", tmp_path / "there", tmp_path / "results"
    make(here, "000001-a")
    make(there, "000002-b", ("bf16", "eager"), host="node8", backend="cuda", ended=START + 40 * DAY)
    assert call(there, "--to", to, "--as", "H100 of the lab").exit_code == 0
    done = call(here, "--to", to)
    assert done.exit_code == 0, done.output

    def files():
        return {str(path.relative_to(to)): path.read_bytes() for path in sorted(to.rglob("*")) if path.is_file()}

    before = files()
    assert list(before) == sorted([PAGE, f"cpu/{FILE}", CROSS, f"cuda/{FILE}"])
    for sources in ((here,), (to,), (to / "cpu", to / "cuda" / FILE)):
        again = call(*sources, "--to", to)
        assert (again.exit_code, files()) == (0, before), again.output
    assert {row["machine"] for row in read_file(to / "cuda" / FILE)} == {"H100 of the lab"}
    cross = json.loads((to / CROSS).read_text())
    assert {name: one["outcome"] for name, one in cross["backends"].items() if one["machines"]} == dict.fromkeys(
        ("cpu", "cuda"), "PASS"
    )
    assert [(pair["backends"], pair["at_most"]) for pair in cross["agreement"]] == [(["cpu", "cuda"], 0.0)]


def test_the_distance_between_backends_is_the_sum_of_both_to_one_reference(tmp_path):
    make(tmp_path, "000001-a", ("sdpa_flash", "bf16"))
    make(tmp_path, "000002-b", ("sdpa_flash", "native"), backend="cuda")
    (pair,) = agreement(collect([tmp_path]))
    assert pair["at_most"] == pytest.approx(2 * 1.8e-7) and pair["members"] == ["sdpa_flash", "sdpa_flash"]
    # Other inputs; logits of the same words recorded by another processor, or by who did not say which.
    for day, other in enumerate([{"cases_sha256": "00"}, {"outputs_sha256": "01"}, {"outputs_sha256": ""}], start=1):
        make(tmp_path, f"00001{day}-c", ("sdpa_flash",), backend="cuda", facts=other, ended=START + day * DAY)
        assert agreement(collect([tmp_path])) == [], other


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('"reason"', "", "may be cut"),
        ('"tier"', '"colour"', "not results of parity of this version"),
        ('"schema_version": 2', '"schema_version": 3', "later benchlib"),
        ('"schema_version": 2', '"schema_version": 1', "not results of parity of this version"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_and_left_as_it_is(tmp_path, old, new, says):
    to = tmp_path / "results"
    make(tmp_path / "cpu", "000001-a")
    make(tmp_path / "cuda", "000002-b", backend="cuda")
    assert call(tmp_path / "cpu", "--to", to).exit_code == 0
    path = to / "cpu" / FILE
    changed = path.read_text().replace(old, new, 1)
    assert changed != path.read_text()
    path.write_text(changed)
    refused = call(tmp_path / "cuda", "--to", to)
    assert refused.exit_code == 2 and says in refused.output and path.read_text() == changed, refused.output
    assert not (to / "cuda").exists()
    left = call(tmp_path / "cuda", path, "--to", tmp_path / "other")
    assert left.exit_code == 2 and says in left.output, "a source that is damaged is left out"
    assert {row["backend"] for row in read_file(tmp_path / "other" / "cuda" / FILE)} == {"cuda"}


def test_exit_codes_are_those_of_the_kit(tmp_path):
    make(tmp_path / "good", "000001-a")
    make(tmp_path / "bad", "000002-b", ("eager",), skipped("eager", "ended by SIGSEGV", "failed"))
    make(tmp_path / "none", "000003-c", record=True)
    codes = {
        name: call(tmp_path / name, "--to", tmp_path / f"to-{name}", "--strict").exit_code
        for name in ("good", "bad", "none")
    }
    assert codes == {"good": 0, "bad": 1, "none": 3}
    assert call(tmp_path / "bad", "--to", tmp_path / "again").exit_code == 0
    for name in ("good", "bad"):
        make(tmp_path / name, "000004-d", ended=START + DAY).joinpath("result.json").write_text("{")
    left = call(tmp_path / "good", "--to", tmp_path / "left")
    assert left.exit_code == 2 and "## Left out" in left.output and (tmp_path / "left" / "cpu" / FILE).exists()
    assert call(tmp_path / "bad", "--to", tmp_path / "worse", "--strict").exit_code == 1
    (tmp_path / "empty").mkdir()
    for name in ("absent", "empty"):
        assert call(tmp_path / "good", tmp_path / name, "--to", tmp_path / "again").exit_code == 2


def test_strict_wants_every_gated_member_and_optional_ones_where_they_are_named():
    def compared(*rows, named=()):
        fields = ("member", "gates", "outcome")
        return command._compared([dict(zip(fields, row, strict=True)) for row in rows], named)

    eager, native = ("eager", True, "PASS"), ("native", False, "FAIL")
    assert compared(eager, native, ("onnxruntime", True, "SKIPPED"))
    assert not compared(eager, ("onnxruntime", True, "SKIPPED"), named=["onnxruntime"])
    assert not compared(eager, ("sdpa_math", True, "SKIPPED")) and not compared((merge.WHOLE, True, "SKIPPED"))
