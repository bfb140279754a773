"""What a pod sends is material to judge: nothing of it steers the run here, and no piece lands where none was before."""

import base64
import hashlib

import pytest

from benchlib.launch.agents.intake import Intake, NotTaken


def piece(path, data, offset=0, **more):
    return {"path": path, "offset": offset, "data": base64.b64encode(data).decode(), **more}


def whole(path, data):
    return piece(path, b"", len(data), size=len(data), sha256=hashlib.sha256(data).hexdigest())


@pytest.mark.parametrize(
    "name",
    [
        "manifest.yaml", "job.json", "config.json", "config-amd.json", "status.json", "verdict.json", ".lock",
        "events-supervisor.jsonl", "store.json", "files.json", "notebook.ipynb", "report.html", "cluster.yaml",
        "../x.json", "/x.json", "logs/../job.json", "./job.json", "logs//../job.json", ".hidden/x.json", "logs/supervisor.log",
        "linked/x.json", "x.py", "logs/x.sh", "logs/a\nb.log", "",
    ],
)  # fmt: skip
def test_a_pod_writes_nothing_that_is_written_here(tmp_path, name):
    run_dir, other = tmp_path / "run", tmp_path / "other"
    (run_dir / "logs").mkdir(parents=True)
    other.mkdir()
    (run_dir / "linked").symlink_to(other)
    (run_dir / "logs" / "supervisor.log").write_text("ours")
    before = sorted(tmp_path.rglob("*"))
    intake = Intake(run_dir)
    for line in (piece(name, b"theirs"), whole(name, b"")):
        with pytest.raises(NotTaken):
            intake.take(line, "p0")
    assert sorted(tmp_path.rglob("*")) == before
    assert (run_dir / "logs" / "supervisor.log").read_text() == "ours"


@pytest.mark.parametrize(
    "name",
    [
        "result.json", "samples.parquet", "ledger.parquet", "predictions.json", "machine.json", "seen0.json",
        "logs/rank0.err", "logs/attempt-1/rank0.error.json",
    ],
)  # fmt: skip
def test_what_was_measured_comes_home_as_it_was(tmp_path, name):
    (tmp_path / "machine.json").write_text("of who submitted")
    intake = Intake(tmp_path)
    for line in (piece(name, b"one"), piece(name, b"two", 3), whole(name, b"onetwo")):
        intake.take(line, "p0")
    assert (tmp_path / name).read_bytes() == b"onetwo"
    assert not list(tmp_path.rglob(".*"))
    intake.take(piece(name, b"broken"), "p0")  # sent again over a new connection
    with pytest.raises(ValueError, match="arrived damaged"):
        intake.take(whole(name, b"others"), "p0")
    assert (tmp_path / name).read_bytes() == b"onetwo"


def test_pieces_continue_what_is_there(tmp_path):
    intake, name = Intake(tmp_path), "events-rank3.jsonl"
    intake.take(piece(name, b"{}\n"), "p0")
    for offset in (10**13, 4, -1):
        with pytest.raises(ValueError, match="does not continue the 3"):
            intake.take(piece(name, b"{}\n", offset), "p0")
    intake.take(piece(name, b"{}\n[]\n"), "p0")  # from the start, over a new connection
    assert (tmp_path / name).read_bytes() == b"{}\n[]\n"
    with pytest.raises(ValueError, match="does not continue the 0"):
        intake.take(piece("result.json", b"", 10**13, size=10**13, sha256=""), "p0")


def test_no_file_grows_beyond_its_limit(tmp_path, monkeypatch):
    from benchlib.launch.agents import intake as module

    monkeypatch.setattr(module, "LARGEST_BYTES", 4)
    intake = Intake(tmp_path)
    intake.take(piece("result.json", b"abcd"), "p0")
    with pytest.raises(ValueError, match="more than 4 bytes"):
        intake.take(piece("result.json", b"e", 4), "p0")
