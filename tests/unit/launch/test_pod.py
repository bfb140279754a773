"""Pods: whose config counts where the folder is shared, how a pod ends, and what is taken of what it hands over."""

import json
import os
import signal
import subprocess
import sys
import tarfile
import time

import pytest

from benchlib.config import cluster
from benchlib.core.files import home
from benchlib.launch.agents import kubernetes, pod
from benchlib.launch.agents.kubernetes import RunFolder


def packed(run_dir, folder):
    """Return the archive of a pod's run folder."""
    archive = folder / "results.tar.gz"
    pod.pack(run_dir, archive)
    return archive


def names_in(archive):
    with tarfile.open(archive) as tar:
        return sorted(tar.getnames())


def archive_of(folder, *files):
    """Return an archive with files as somebody else might write it: (name, content) and a time of change."""
    archive, source = folder / "theirs.tar.gz", folder / "source"
    with tarfile.open(archive, "w:gz") as tar:
        for name, content, *changed in files:
            source.write_bytes(content)
            member = tar.gettarinfo(source)
            member.name, member.mtime = name, changed[0] if changed else time.time() + 1
            with source.open("rb") as file:
                tar.addfile(member, file)
    source.unlink()
    return archive


def test_each_kind_of_node_keeps_its_own_config_on_a_shared_folder(tmp_path):
    mounted, shared = tmp_path / "etc", tmp_path / "outputs" / "run"
    mounted.mkdir()
    shared.mkdir(parents=True)
    submitted = {"backend": "cuda", "cluster": "/home/me/own.yaml"}
    (shared / "config.json").write_text(json.dumps(submitted))
    (mounted / "cluster.yaml").write_text("links: {inter_node_gbps: 100, inter_node_source: a sheet}\n")
    for name, backend in (("nvidia", "cuda"), ("amd", "rocm")):
        (mounted / f"{name}.json").write_text(json.dumps({"backend": backend, "cluster": "cluster.yaml"}))
    configs = [json.loads(pod.prepare(shared, mounted / f"{name}.json").read_text()) for name in ("nvidia", "amd")]
    assert [config["backend"] for config in configs] == ["cuda", "rocm"]
    for config in configs:
        assert cluster.load(config["cluster"]).links.inter_node_gbps == 100, "the profile is the one that travelled"
    assert json.loads((shared / "config.json").read_text()) == submitted, "who submitted the run keeps its own"
    assert names_in(packed(shared, tmp_path)) == []


def test_a_rank_reads_the_config_of_its_pod(tmp_path):
    """The second of two pods that share a folder: its rank reads its own file."""
    shared, config = tmp_path / "run", tmp_path / "amd.json"
    shared.mkdir()
    (shared / "config.json").write_text('{"backend": "cuda", "text": "of another kind"}')
    config.write_text('{"backend": "rocm", "text": "of its own"}')
    (tmp_path / "own.py").write_text(
        "from pathlib import Path\n\ndef run(config, run_dir, events):\n"
        "    Path(run_dir, 'seen.txt').write_text(f'{config.backend} {config.text}')\n"
    )
    worker = [sys.executable, "-m", "benchlib.runtime.worker", str(shared), "--benchmark", "own:run"]
    command = [sys.executable, "-m", "benchlib.launch.agents.pod", str(shared), "--config", str(config), "--", *worker]
    path = os.pathsep.join([str(home()), str(tmp_path)])
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, timeout=60, check=False)
    assert done.returncode == 0
    assert (shared / "seen.txt").read_text() == "rocm of its own"


@pytest.mark.parametrize(
    ("options", "command", "code"),
    [
        (["--hold", "100"], ["sh", "-c", "exit 3"], 3),
        ([], ["sleep", "100"], 143),
        (["--meet", "127.0.0.1:9", "--meet-s", "100"], ["sh", "-c", "exit 3"], 143),
    ],
    ids=["while its results are fetched", "while its ranks run", "before they start"],
)
def test_a_pod_ends_on_sigterm(tmp_path, options, command, code):
    config = tmp_path / "node.json"
    config.write_text("{}")
    head = [sys.executable, "-m", "benchlib.launch.agents.pod", str(tmp_path / "run"), "--config", str(config)]
    with subprocess.Popen([*head, *options, "--", *command], stdout=subprocess.PIPE) as process:
        if "--hold" in options:
            assert b'"returncode": 3' in process.stdout.readline()
        else:
            while not (tmp_path / "run" / "config-node.json").exists():
                time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(90) == code


def test_a_pod_hands_over_what_was_measured_and_logged(tmp_path, monkeypatch):
    """Not what is large, hidden or of the pod itself; events are never too large."""
    monkeypatch.setattr(pod, "LARGEST_BYTES", 4)
    run_dir = tmp_path / "run"
    names = ["result.json", "logs/rank0.err", "logs/attempt-1/rank0.error.json", "events-rank0.jsonl"]
    for name in [
        *names,
        "config.json",
        "config-amd.json",
        "cluster.yaml",
        "checkpoints/model.json",
        ".lock",
        "large.json",
    ]:
        (run_dir / name).parent.mkdir(parents=True, exist_ok=True)
        (run_dir / name).write_text("12345" if name in ("large.json", "events-rank0.jsonl") else "1234")
    (run_dir / "linked.json").symlink_to(run_dir / "result.json")
    assert names_in(packed(run_dir, tmp_path)) == sorted(names)


@pytest.mark.parametrize(
    "name",
    [
        "manifest.yaml", "job.json", "config.json", "status.json", "verdict.json", ".lock", "events-supervisor.jsonl",
        "store.json", "files.json", "notebook.ipynb", "report.html", "../x.json", "/x.json", "logs/../job.json",
        "./job.json", "logs//../job.json", ".hidden/x.json", "logs/supervisor.log", "linked/x.json", "x.py", "logs/x.sh",
        "logs/a\nb.log",
    ],
)  # fmt: skip
def test_a_pod_writes_nothing_that_is_written_here(tmp_path, name):
    run_dir, other = tmp_path / "run", tmp_path / "other"
    (run_dir / "logs").mkdir(parents=True)
    other.mkdir()
    (run_dir / "linked").symlink_to(other)
    for own in ("job.json", "config.json", "events-supervisor.jsonl", "logs/supervisor.log"):
        (run_dir / own).write_text("ours")
    archive = archive_of(tmp_path, (name, b"theirs"))
    before = {path: path.is_file() and path.read_bytes() for path in sorted(tmp_path.rglob("*"))}
    assert RunFolder(run_dir).unpack(archive) == [name]
    assert {path: path.is_file() and path.read_bytes() for path in sorted(tmp_path.rglob("*"))} == before


@pytest.mark.parametrize(("limit", "most"), [("MOST_FILES", 2), ("MOST_BYTES", 11)])
def test_a_pod_fills_no_disk(tmp_path, monkeypatch, limit, most):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    archive = archive_of(tmp_path, *((name, b"12345") for name in ("events-rank0.jsonl", "result.json", "logs/a.err")))
    monkeypatch.setattr(kubernetes, limit, most)
    with pytest.raises(kubernetes.Failed, match=r"theirs\.tar\.gz holds more than"):
        RunFolder(run_dir).unpack(archive)
    assert sorted(path.name for path in run_dir.rglob("*")) == ["events-rank0.jsonl", "result.json"]


def test_a_file_that_no_pod_packs_is_not_taken(tmp_path, monkeypatch):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    monkeypatch.setattr(kubernetes, "LARGEST_BYTES", 4)
    archive = archive_of(tmp_path, ("result.json", b"12345"), ("logs/a.err", b"1234"), ("events-rank0.jsonl", b"12345"))
    assert RunFolder(run_dir).unpack(archive) == ["result.json"]


def test_links_are_not_taken(tmp_path):
    run_dir, archive = tmp_path / "run", tmp_path / "theirs.tar.gz"
    run_dir.mkdir()
    with tarfile.open(archive, "w:gz") as tar:
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE):
            member = tarfile.TarInfo("result.json")
            member.type, member.linkname = kind, "/etc/passwd"
            tar.addfile(member)
    assert RunFolder(run_dir).unpack(archive) == ["result.json"] * 3
    assert not list(run_dir.iterdir())


def test_what_was_measured_arrives_as_it_was(tmp_path):
    """Two pods that share a volume pack the same file: the newer one counts, in whatever order they arrive."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "machine.json").write_text("of who submitted")
    folder = RunFolder(run_dir)
    assert folder.unpack(archive_of(tmp_path, ("machine.json", b"rank 0", 5), ("logs/rank0.err", b"late", 20))) == []
    assert folder.unpack(archive_of(tmp_path, ("result.json", b"result"), ("logs/rank0.err", b"early", 10))) == []
    contents = {path.name: path.read_text() for path in run_dir.rglob("*") if path.is_file()}
    assert contents == {"machine.json": "rank 0", "result.json": "result", "rank0.err": "late"}


def test_a_damaged_archive_is_an_error(tmp_path):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    archive = archive_of(tmp_path, ("result.json", os.urandom(100_000)))
    archive.write_bytes(archive.read_bytes()[:50_000])
    with pytest.raises((EOFError, tarfile.TarError, OSError)):
        RunFolder(run_dir).unpack(archive)


def test_events_continue_what_is_there(tmp_path):
    """A log is read from its start again, may have lost its beginning, and the archive has what it did not carry."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    folder, name = RunFolder(run_dir), "events-rank3.jsonl"
    for offset, data in ((0, b"{}\n"), (0, b"{}\n"), (6, b"[]\n"), (3, b"()\n")):
        folder.add_events(name, offset, data)
    assert (run_dir / name).read_bytes() == b"{}\n()\n"
    folder.unpack(archive_of(tmp_path, (name, b"{}\n()\n[]\n")))
    assert (run_dir / name).read_bytes() == b"{}\n()\n[]\n"
    with pytest.raises(ValueError, match="not a file of a rank's events"):
        folder.add_events("events-supervisor.jsonl", 0, b"{}\n")
