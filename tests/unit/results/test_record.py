"""One record of a run: its word is the same for all who show it, and a damaged file costs it a sentence and no reader anything."""

import copy
import csv
import json
import os
import re
import shutil

import pytest
from bounded import bounded
from hypothesis import given
from hypothesis import strategies as st
from make_run import START, _metric
from series import DAY, speed
from series import place as stored_at
from stores import CUT, command, damage, no_pictures, place, without_pictures  # noqa: F401

from benchlib.core import run_folder
from benchlib.core.files import write_json
from benchlib.judge import trends
from benchlib.judge import verdict as judge
from benchlib.results.record import load, load_all
from benchlib.results.run import Run
from benchlib.show import index, report

NO_VERDICT = {"with_verdict": False, "steps": 5}
NOTHING = NO_VERDICT | {"with_result": False, "with_status": False}
CASES = {
    **{word.lower(): ({"verdict": {"verdict": word, "sentence": "said", "checks": []}}, word)
       for word in ("PASS", "FAIL", "AMBIGUOUS", "SKIPPED", "BROKEN", "STOPPED")},
    "altered": ({}, "DAMAGED"),  # same size, both ends whole
    "cut": ({}, "DAMAGED"),
    "garbage": ({}, "DAMAGED"),
    "running": (NOTHING, "RUNNING"),
    "killed": (NOTHING, "UNFINISHED"),
    "unjudged": (NO_VERDICT, "UNFINISHED"),
    "interrupted": (NO_VERDICT | {"outcome": "stopped", "reason": "stopped by the user"}, "STOPPED"),
    "died": (NO_VERDICT | {"outcome": "failed"}, "BROKEN"),
    "left out": (NO_VERDICT | {"outcome": "skipped"}, "SKIPPED"),
}  # fmt: skip


@pytest.fixture(scope="module")
def every_state(tmp_path_factory):
    """Return a store with a run in each state and the words by name of folder; this process holds the running one."""
    out = tmp_path_factory.mktemp("out")
    runs = {
        case: place(out, f"squad-cpu-10{number:02d}00-aaaaaa", started_at=START + number, **changes)
        for number, (case, (changes, _)) in enumerate(CASES.items())
    }
    for case in ("pass", "altered", "cut", "garbage", "stopped"):
        run_folder.record_files(runs[case])
    samples = (runs["altered"] / "samples.parquet").read_bytes()
    (runs["altered"] / "samples.parquet").write_bytes(samples[:-20] + bytes([samples[-20] ^ 1]) + samples[-19:])
    events = (runs["cut"] / "events-rank0.jsonl").read_bytes()
    (runs["cut"] / "events-rank0.jsonl").write_bytes(events[: events.rfind(b"\n", 0, 5000) + 1])
    (runs["garbage"] / "verdict.json").write_text("{")
    os.close(run_folder.claim(runs["killed"]))  # its processes are gone
    held = run_folder.claim(runs["running"])
    yield out, {runs[case].name: word for case, (_, word) in CASES.items()}
    os.close(held)


@pytest.mark.usefixtures("no_pictures")
def test_a_run_has_one_word_everywhere(every_state, tmp_path):
    out, expected = every_state
    day = out / "quick-20261121"
    _, listed = command("list", "--runs", out=out)
    assert dict(re.findall(r"(squad-cpu-\S+)\s+([A-Z]+)", listed)) == expected
    assert {run.run: run.word for run in load_all(out)} == expected
    page = index.render(out).read_text()
    rows = re.findall(r'<tr role="row"><th scope="row".*?</tr>', page, re.DOTALL)[: len(expected)]
    newest_first = [run.word for run in load_all(out)][::-1]
    assert [re.findall(r"</span>([A-Z]+)<", row)[0] for row in rows] == newest_first
    for name, word in expected.items():
        assert load(day / name).word == word
        assert f">{word}</h1>" in report.html(Run(day / name))
    command("export", "--to", "csv", "-o", tmp_path / "runs.csv", out=out)
    with (tmp_path / "runs.csv").open() as handle:
        assert {row["run"]: row["verdict"] for row in csv.DictReader(handle)} == expected
    whole, altered, running = (
        f"squad-cpu-10{list(CASES).index(case):02d}00-aaaaaa" for case in ("pass", "altered", "running")
    )
    code, text = command("compare", day / whole, day / altered)
    assert (code, "samples.parquet was altered" in text) == (2, True)
    _, judged = command("report", day / altered, day / running)
    assert re.findall(r"([A-Z]+)  \S*(squad-cpu-\d+)", judged) == [("DAMAGED", altered[:16]), ("RUNNING", running[:16])]
    assert not (day / running / "verdict.json").exists()
    assert {run.run: run.word for run in load_all(out)} == expected  # judged again it stays damaged


FILES = ("config.json", "machine.json", "result.json", "verdict.json", "status.json", "samples.parquet", "files.json")


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_named_in_one_sentence(tmp_path, name):
    """Also where no list of files says that it changed; a machine or a status of which nothing is known is no damage.

    A list of runs does not look into samples that were never listed.
    """
    run = place(tmp_path, steps=5)
    if name == "files.json":
        run_folder.record_files(run)
    whole = (run / name).read_bytes()
    for kind in CUT:
        damage(run / name, kind)
        for whole_run in (True,) if name == "samples.parquet" else (True, False):
            record = load(run, whole_run)
            if not (name == "machine.json" and kind in ("empty object", "number too large")):
                assert record.word == "DAMAGED", kind
                assert [problem.startswith(name) for problem in record.problems] == [True], record.problems
                assert "\n" not in record.sentence and str(tmp_path) not in record.sentence
        shutil.rmtree(run / name) if kind == "folder" else (run / name).unlink()
        (run / name).write_bytes(whole)
    assert load(run).word == "PASS"


@pytest.fixture(scope="module")
def listed_run(tmp_path_factory):
    """Return a run with a list of its files, another one to compare with, and the content of its JSON files."""
    out = tmp_path_factory.mktemp("mutated")
    run, other = place(out, steps=8), place(out, "squad-cpu-101600-bbbbbb", steps=8)
    run_folder.record_files(run)
    names = ("config.json", "machine.json", "result.json", "verdict.json", "status.json", "files.json")
    return run, other, {name: json.loads((run / name).read_bytes()) for name in names}


plain = st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats(allow_nan=False) | st.text(max_size=9)
anything = st.recursive(
    plain, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3), max_leaves=6
)


def altered(draw, whole):
    """Return a JSON value with one part of it replaced, dropped or doubled."""
    value = copy.deepcopy(whole)
    parent, key, here = None, None, value
    while isinstance(here, (dict, list)) and here and (parent is None or draw(st.booleans())):
        key = draw(st.sampled_from(sorted(here))) if isinstance(here, dict) else draw(st.integers(0, len(here) - 1))
        parent, here = here, here[key]
    kind = draw(st.sampled_from(["replace", "drop", "add"]))
    if kind == "drop":
        del parent[key]
    elif kind == "add" and isinstance(parent, dict):
        parent[draw(st.text())] = draw(anything)
    else:
        parent[key] = draw(anything)
    return value


@bounded(20)
@given(data=st.data(), listed=st.booleans())
def test_no_reader_raises_for_a_run_with_one_part_altered(listed_run, data, listed):
    """Whether its list of files tells of it, or was made to agree."""
    run, other, whole = listed_run
    name = data.draw(st.sampled_from(sorted(whole)))
    content = altered(data.draw, whole[name])
    with pytest.MonkeyPatch.context() as patch:
        without_pictures(patch)
        try:
            (run / name).write_text(json.dumps(content))
            if not listed and name != "files.json":
                run_folder.record_files(run)
            record = load(run)
            if listed and content != whole[name] and name != "files.json":
                assert record.word == "DAMAGED" and name in record.sentence
            assert load(run, whole=False).word == record.word
            for words in (["list", "--runs"], ["export", "--to", "junit"]):
                code, said = command(*words, out=run.parents[1])
                assert code == 0 and run.name in said
            assert command("compare", other, run)[0] in (0, 1, 2)
            assert judge.judged(Run(run), run / "no-baselines").exit_code() in (0, 1, 2, 130)
            assert f">{record.word}</h1>" in report.html(Run(run))
            assert "aaaaaa" in index.render(run.parents[1]).read_text()
        finally:
            (run / name).write_text(json.dumps(whole[name]))
            write_json(run / "files.json", whole["files.json"])


def test_a_copy_of_a_run_counts_once(tmp_path):
    """Also of one with a number that is none, and equal to nothing."""
    nan = _metric("loss", "NaN", "", "lower", 1)
    original, *_ = [stored_at(tmp_path, START - age * DAY, metrics=[*speed(60.0 + age), nan]) for age in range(4)]
    for name in (f"{original.name}-copy", f"Copy of {original.name}"):
        shutil.copytree(original, original.parent / name)
    runs = load_all(tmp_path)
    copies = {run.run: run.copy_of for run in runs if run.copy_of}
    assert copies == {f"{original.name}-copy": original.name, f"Copy of {original.name}": original.name}
    (members,) = trends.series(runs).values()
    assert trends.trend("train_samples_per_s_minisquad_tiny", members).values == [63.0, 62.0, 61.0, 60.0]
    assert index.render(tmp_path).read_text().count(f"Copy of {original.name}: excluded") == 2
    assert " ".join(command("list", "--runs", out=tmp_path)[1].split()).count("copy of squad") == 2
    shutil.rmtree(original)  # now the copies are the run, and one of them counts
    assert [run.copy_of for run in load_all(tmp_path)].count("") == 4
