"""Cut and foreign files: each case ends in one clear sentence, and lists of runs stay readable with the damaged one marked."""

import json
import os
import re
import shutil
import time

import pandas
import pytest
from stores import command, files_of, leftovers, no_pictures, place  # noqa: F401

from benchlib.core import run_folder
from benchlib.core.errors import UserError
from benchlib.core.files import write_json
from benchlib.judge import baselines
from benchlib.judge import verdict as judge
from benchlib.results import store
from benchlib.results.run import Run, fingerprint_key, load_samples
from benchlib.show import index, report
from benchlib.workloads.features import DamagedFile, read_arrays, write_arrays

CUT = {
    "empty": b"", "list": b"[]", "number": b"3", "null": b"null", "text": b'"x"', "empty object": b"{}",
    "NaN": b'{"a": NaN}', "too large": b'{"a": 1e999}', "digits": b'{"a": ' + b"9" * 5000 + b"}", "deep": b"[" * 200_000,
    "not UTF-8": b"\xff\xfe\x00", "half a character": b'{"sentence": "\\ud800"}', "later": b'{"schema_version": 99}',
    "of another program": b'{"name": "x", "benchmark": "squad", "verdict": "BANANA", "broken": 0, "outcome": 7, "checks": [1]}',
}  # fmt: skip
READERS = {
    "result.json": lambda run: run.result,
    "verdict.json": lambda run: run.verdict,
    "config.json": lambda run: run.config,
    "status.json": lambda run: run.status,
    "machine.json": lambda run: run.machine,
    "samples.parquet": lambda run: run.samples,
    "files.json": lambda run: run_folder.file_faults(run.path),
}


def damage(path, kind):
    """Put something else in the place of a file."""
    whole = path.read_bytes() if path.is_file() else b""
    path.unlink(missing_ok=True)
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "dangling link":
        path.symlink_to("nowhere")
    elif isinstance(kind, float):
        path.write_bytes(whole[: int(kind * len(whole))])
    else:
        path.write_bytes(CUT[kind])


@pytest.mark.parametrize("name", READERS)
def test_a_damaged_part_is_a_user_error_with_its_path(tmp_path, name):
    run = place(tmp_path)
    run_folder.record_files(run)
    whole = (run / name).read_bytes()
    for kind in [*CUT, "folder", "pipe", 0.0, 0.3, 0.99]:
        damage(run / name, kind)
        if name == "machine.json" and kind in ("empty object", "of another program"):
            assert "cpu" not in Run(run).machine  # a machine of which nothing is known
        else:
            with pytest.raises(UserError, match=re.escape(str(run / name))) as caught:
                READERS[name](Run(run))
            assert "\n" not in str(caught.value)
        shutil.rmtree(run / name) if (run / name).is_dir() else (run / name).unlink()
        (run / name).write_bytes(whole)
    assert Run(run).result is not None


def test_a_later_schema_is_called_so(tmp_path):
    run = place(tmp_path)
    write_json(run / "result.json", {"schema_version": 2, "anything": "new"})
    with pytest.raises(UserError, match=r"later benchlib \(schema 2, this one reads up to 1\): update"):
        Run(run).result  # noqa: B018


@pytest.mark.usefixtures("no_pictures")
def test_commands_go_on_past_damaged_runs(tmp_path):
    out = tmp_path / "out"
    whole = place(out, "squad-cpu-100000-whole0")
    kinds = ["list", "deep", "later", "pipe", "folder", 0.5]
    damaged = [
        place(out, f"squad-cpu-1100{number:02d}-bad000", with_samples=False, steps=5)
        for number in range(2 * len(kinds))
    ]
    for number, run in enumerate(damaged):
        damage(run / ("result.json", "verdict.json")[number % 2], kinds[number // 2])
    before = files_of(whole)
    code, listed = command("list", "--runs", out=out)
    assert code == 0
    assert listed.count("DAMAGED") == len(damaged)
    assert listed.count("PASS") == 1
    assert files_of(whole) == before
    page = index.render(out).read_text()
    assert page.count("bad000") >= len(damaged)
    code, told = command("report", *damaged)
    assert code == 2  # for the one whose verdict.json is a folder
    assert "cannot be written: a folder has its name" in told
    said = [Run(run).verdict for run in damaged[::2]]
    assert all(verdict["verdict"] == "BROKEN" and "result.json" in verdict["sentence"] for verdict in said)
    assert "whole0" in (out / "index.html").read_text()
    assert leftovers(out) == []
    for run in damaged[::2]:
        with pytest.raises(UserError, match="bad000"):
            baselines.accept(Run(run), "x", [], root=tmp_path / "baselines")
    assert not (tmp_path / "baselines").exists()


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize(
    "name", ["config.json", "events-rank0.jsonl", "samples.parquet", "notebook.ipynb", "logs/notebook.error.json"]
)
def test_a_report_survives_what_is_no_file(tmp_path, name):
    run = place(tmp_path, notebook="made up", steps=5)
    for kind in ("pipe", "folder", "dangling link", "of another program"):
        damage(run / name, kind)
        assert "made up for a test" in report.html(Run(run))
        judge.judged(Run(run), tmp_path / "baselines")
        shutil.rmtree(run / name) if (run / name).is_dir() else (run / name).unlink()


def test_files_that_are_cut_later_are_noticed(tmp_path):
    run = place(tmp_path)
    (run / "predictions.json").write_text('{"a": "one", "b": "two"}')
    assert run_folder.file_faults(run) is None  # older runs have no list
    run_folder.record_files(run)
    assert run_folder.file_faults(run) == []
    with (run / "events-supervisor.jsonl").open("a") as handle:
        handle.write('{"t": 1, "source": "supervisor", "kind": "late"}\n')
    assert run_folder.file_faults(run) == []
    events = (run / "events-rank0.jsonl").read_bytes()
    (run / "events-rank0.jsonl").write_bytes(events[: events.rfind(b"\n", 0, 5000) + 1])  # whole lines, fewer
    (run / "predictions.json").write_text('{"a": "one", "b": "2nd"}')
    (run / "machine.json").unlink()
    first, missing, altered = run_folder.file_faults(run)
    assert re.fullmatch(r"events-rank0\.jsonl was cut: [\d,]+ of [\d,]+ bytes are left", first)
    assert (missing, altered) == ("machine.json is missing", "predictions.json was altered after the run")
    write_json(run / "files.json", {"files": {"../../etc/passwd": {"bytes": 1, "sha256": ""}}})
    with pytest.raises(UserError, match=r"not a list of a run's files: '\.\./\.\./etc/passwd'"):
        run_folder.file_faults(run)


STATES = ("PASS", "DAMAGED", "DAMAGED", "RUNNING", "UNFINISHED", "STOPPED", "BROKEN")


@pytest.fixture(scope="module")
def every_state(tmp_path_factory):
    """A store with a run in each state of ``STATES``, as names of folders; the running one is held by this process."""
    out = tmp_path_factory.mktemp("out")
    nothing = {"with_result": False, "with_status": False, "with_verdict": False, "steps": 5}
    changes = [
        {},
        {},
        {},
        nothing,
        nothing,
        {"outcome": "stopped", "reason": "stopped by the user"},
        {"outcome": "failed"},
    ]
    runs = [place(out, f"squad-cpu-10150{n}-aaaaaa", **change) for n, change in enumerate(changes)]
    for run in runs[:3]:
        run_folder.record_files(run)
        store.summarize(run)
    samples = (runs[1] / "samples.parquet").read_bytes()  # same size, both ends whole
    (runs[1] / "samples.parquet").write_bytes(samples[:-20] + bytes([samples[-20] ^ 1]) + samples[-19:])
    events = (runs[2] / "events-rank0.jsonl").read_bytes()
    (runs[2] / "events-rank0.jsonl").write_bytes(events[: events.rfind(b"\n", 0, 5000) + 1])
    os.close(run_folder.claim(runs[4]))  # its processes are gone
    held = run_folder.claim(runs[3])
    yield out, {run.name: word for run, word in zip(runs, STATES, strict=True)}
    os.close(held)


@pytest.mark.usefixtures("no_pictures")
def test_a_run_has_one_word_everywhere(every_state, tmp_path):
    out, expected = every_state
    _, listed = command("list", "--runs", out=out)
    assert dict(re.findall(r"(squad-cpu-\S+)\s+([A-Z]+)", listed)) == expected
    assert {run.name: run.word for run in store.read(out)} == expected
    page = index.render(out).read_text()
    assert all(page.count(f"</span>{word}<") >= list(expected.values()).count(word) for word in set(STATES))
    day = out / "quick-20261121"
    for name, word in expected.items():
        assert f">{word}</h1>" in report.html(Run(day / name))
    command("export", "--to", "csv", "-o", tmp_path / "runs.csv", out=out)
    rows = pandas.read_csv(tmp_path / "runs.csv")
    assert dict(zip(rows["run"], rows["verdict"], strict=True)) == expected
    whole, altered, _, running, *_ = expected
    _, judged = command("report", *(day / name for name in (altered, running)))
    assert re.findall(r"([A-Z]+)  \S*(squad-cpu-\d+)", judged) == [("DAMAGED", altered[:16]), ("RUNNING", running[:16])]
    assert not (day / running / "verdict.json").exists()
    assert {run.name: run.word for run in store.read(out)} == expected  # judged again it stays damaged
    code, text = command("compare", day / whole, day / altered)
    assert (code, "samples.parquet was altered" in text) == (2, True)


def test_without_locks_events_tell_that_a_run_goes_on(tmp_path, monkeypatch):
    run = place(tmp_path, with_result=False, with_status=False, with_verdict=False)
    monkeypatch.setattr(run_folder, "claimed", lambda *_: None)
    assert store.state(Run(run))[0] == "UNFINISHED"  # the last event is of long ago
    (run / "events-supervisor.jsonl").write_text(
        f'{{"t": {time.time() - 2}, "source": "supervisor", "kind": "sensor"}}\n'
    )
    assert store.state(Run(run))[0] == "RUNNING"
    assert store.read(tmp_path)[0].word == "RUNNING"


def test_the_front_of_a_run_holds_its_folder_after_the_ranks(tmp_path):
    run = place(tmp_path, with_verdict=False)
    with run_folder.attended(run):
        assert store.state(Run(run))[0] == "RUNNING"
        assert not run_folder.is_running(run)
        os.close(run_folder.claim(run))  # the ranks have a lock of their own
    assert store.state(Run(run))[0] == "UNFINISHED"


def test_a_damaged_baseline_fails_the_gate_of_its_runs_and_names_itself(tmp_path, monkeypatch):
    monkeypatch.setattr("benchlib.benchmarks.squad.judge.checks", lambda run, comparison: [])
    run = place(tmp_path / "out")
    root = tmp_path / "baselines"
    own = f"{fingerprint_key(baselines.run_fingerprint(Run(run)))}.json"
    for kind in ("deep", "later", "pipe", "list", 0.0):
        for name in (own, "0123456789ab.json"):
            shutil.rmtree(root, ignore_errors=True)
            (root / "squad" / "quick").mkdir(parents=True)
            damage(root / "squad" / "quick" / name, kind)
            verdict = judge.judged(Run(run), root)
            faults = [check.reason for check in verdict.checks if check.name == "baseline readable"]
            # That of another machine or of other work costs nothing here, and is named by the list.
            assert (verdict.verdict == "FAIL", bool(faults)) == (name == own, name == own), (kind, name)
            assert not verdict.broken and all(own in fault for fault in faults)
    monkeypatch.setattr(baselines, "folder", lambda: root)
    code, said = command("baseline", "list")
    assert code == 2
    assert "0123456789ab.json" in said.replace("\n", "")


def test_a_feature_cache_is_whole_or_refused(tmp_path):
    import numpy as np

    path = tmp_path / "cache.bin"
    write_arrays(path, {"a": np.arange(100), "b": np.zeros((2, 3), np.float32)}, {"note": "x"})
    whole = path.read_bytes()
    arrays, meta = read_arrays(path)
    assert arrays["a"].tolist() == list(range(100))
    assert meta == {"note": "x"}
    for place_ in (whole.index(b'"data_offsets"'), whole.index(b"note"), whole.index(b"I64"), len(whole) - 70):
        path.write_bytes(whole[: place_ + 2] + bytes([whole[place_ + 2] ^ 1]) + whole[place_ + 3 :])
        with pytest.raises(DamagedFile, match=r"cache\.bin"):
            read_arrays(path)
    for kind in [*CUT, "folder", "pipe", 0.5]:
        path.unlink(missing_ok=True)
        path.write_bytes(whole)
        damage(path, kind)
        with pytest.raises(DamagedFile, match=r"cache\.bin"):
            read_arrays(path)
        if kind == "folder":
            path.rmdir()


def test_a_cut_file_of_samples_is_named_once_in_plain_words(tmp_path):
    run = place(tmp_path, steps=5)
    run_folder.record_files(run)
    path = run / "samples.parquet"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(UserError, match=r"samples\.parquet: not a Parquet file, or cut$"):
        load_samples(run)
    path.write_bytes(b"PAR1 and nothing that pyarrow could read, but with both ends PAR1")
    with pytest.raises(UserError, match="no table of samples can be read") as error:
        load_samples(run)
    assert "Buffer" not in str(error.value)
    word, sentence, _ = store.state(Run(run))
    assert (word, sentence.count("samples.parquet")) == ("DAMAGED", 1)


def test_a_verdict_of_another_run_and_files_that_are_not_listed_are_noticed(tmp_path):
    run, killed = place(tmp_path / "a"), place(tmp_path / "b")
    (killed / "verdict.json").unlink(missing_ok=True)
    for path in (run, killed):
        run_folder.record_files(path)
    judge.judge(run, tmp_path / "baselines")
    assert run_folder.file_faults(run) == []
    stored = (run / "verdict.json").read_text()
    word = Run(run).verdict["verdict"]
    (run / "verdict.json").write_text(stored.replace(f'"verdict": "{word}"', '"verdict": "SKIPPED"'))
    assert run_folder.file_faults(run)[0].startswith("verdict.json was ")
    assert store.state(Run(run))[0] == "DAMAGED"
    assert run_folder.file_faults(run, verdict=False) == []
    judge.judge(run, tmp_path / "baselines")  # judged again it is whole again
    assert run_folder.file_faults(run) == []
    shutil.copy(run / "verdict.json", killed / "verdict.json")
    assert run_folder.file_faults(killed) == ["verdict.json is not in files.json"]
    assert store.state(Run(killed))[0] == "DAMAGED"
    listed = json.loads((run / "files.json").read_text())
    del listed["files"]["events-rank0.jsonl"]
    (run / "events-rank0.jsonl").unlink()
    write_json(run / "files.json", listed)
    assert run_folder.file_faults(run) == ["events-rank0.jsonl is not in files.json"]
    write_json(run / "files.json", {"schema_version": 2, "files": {}})
    assert run_folder.file_faults(run) == ["files.json lists no file"]
    (run / "files.json").unlink()
    # The verdict was given on a list: without it an edited result would look whole.
    assert run_folder.file_faults(run, verdict=False) == ["files.json is missing"]
    assert store.state(Run(run))[0] == "DAMAGED"
