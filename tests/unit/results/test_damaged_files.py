"""Cut and foreign files: each case ends in one clear sentence, and lists of runs stay readable with the damaged one marked."""

import re
import shutil

import pytest
from stores import command, damage, place

from benchlib.core import run_folder
from benchlib.core.errors import UserError
from benchlib.core.files import write_json
from benchlib.judge import baselines
from benchlib.judge import verdict as judge
from benchlib.results.record import load
from benchlib.results.run import Run, fingerprint_key


def test_files_that_are_cut_later_are_noticed(tmp_path):
    run = place(tmp_path)
    assert run_folder.file_faults(run) is None  # of a run that was killed
    run_folder.record_files(run)
    with (run / "events-supervisor.jsonl").open("a") as handle:
        handle.write('{"t": 1, "source": "supervisor", "kind": "late"}\n')
    assert run_folder.file_faults(run) == []
    events = (run / "events-rank0.jsonl").read_bytes()
    (run / "events-rank0.jsonl").write_bytes(events[: events.rfind(b"\n", 0, 5000) + 1])  # whole lines, fewer
    (run / "machine.json").unlink()
    first, missing = run_folder.file_faults(run)
    assert re.fullmatch(r"events-rank0\.jsonl was cut or altered: [\d,]+ bytes of [\d,]+", first)
    assert missing == "machine.json is missing"
    write_json(run / "files.json", {"files": {"../../etc/passwd": {"bytes": 1, "sha256": ""}}})
    with pytest.raises(UserError, match=r"not a list of a run's files: '\.\./\.\./etc/passwd'"):
        run_folder.file_faults(run)


def test_a_damaged_baseline_fails_the_gate_of_its_runs_and_names_itself(tmp_path, monkeypatch):
    monkeypatch.setattr("benchlib.spec.spec.Spec.judge", lambda own, run, comparison: [])
    run = place(tmp_path / "out")
    root = tmp_path / "baselines"
    own = f"{fingerprint_key(Run(run).fingerprint)}.json"
    for kind in ("deep", "later", "pipe", "list", "empty"):
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


def test_a_verdict_of_another_run_and_files_that_are_not_listed_are_noticed(tmp_path):
    run, killed = place(tmp_path / "a"), place(tmp_path / "b")
    (killed / "verdict.json").unlink(missing_ok=True)
    for path in (run, killed):
        run_folder.record_files(path)
    judge.judge(run, tmp_path / "baselines")
    assert run_folder.file_faults(run) == []
    stored = (run / "verdict.json").read_text()
    word = Run(run).verdict.verdict
    (run / "verdict.json").write_text(stored.replace(f'"verdict": "{word}"', '"verdict": "SKIPPED"'))
    assert run_folder.file_faults(run)[0].startswith("verdict.json was ")
    assert load(run).word == "DAMAGED"
    assert run_folder.file_faults(run, verdict=False) == []
    judge.judge(run, tmp_path / "baselines")  # judged again it is whole again
    assert run_folder.file_faults(run) == []
    shutil.copy(run / "verdict.json", killed / "verdict.json")
    assert run_folder.file_faults(killed) == ["verdict.json is not in files.json"]
    assert load(killed).word == "DAMAGED"
