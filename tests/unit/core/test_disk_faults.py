"""Full and read-only disks, real ones: a small tmpfs in a mount namespace of its own.

Each case ends in one clear sentence and harms no stored run.
"""

import errno
import os
import re
import shutil
import subprocess
import sys
import textwrap

import pytest
from stores import ROOT, command, leftovers, place

from benchlib.config.schema import resolve
from benchlib.core.errors import StorageError
from benchlib.core.files import atomic_path, write_json
from benchlib.results import run as results
from benchlib.results.run import new_run_dir


def mounted(folder, code, *, size="48k", read_only_after=""):
    """Run ``code`` with ``disk`` as the path of a small tmpfs, in a process that alone sees it; return its output.

    ``read_only_after`` runs first; then the file system becomes read-only.
    """
    if sys.platform != "linux" or shutil.which("unshare") is None:
        pytest.skip("mount namespaces are Linux's")
    program = f"""
        import os, subprocess, sys
        from pathlib import Path
        sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests/fixtures")!r}, {str(ROOT / "tests/unit")!r}]
        disk = Path({str(folder)!r})
        made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size={size}", "benchlib-test", disk], capture_output=True, text=True)
        if made.returncode:
            print("NO MOUNT", made.stderr)
            sys.exit(0)
    """
    parts = [textwrap.dedent(program), textwrap.dedent(read_only_after)]
    if read_only_after:
        parts.append('subprocess.run(["mount", "-o", "remount,ro", disk], check=True)')
    parts.append(textwrap.dedent(code))
    user = [] if os.geteuid() == 0 else ["--map-root-user"]
    done = subprocess.run(
        ["unshare", "--mount", *user, sys.executable, "-W", "error", "-c", "\n".join(parts)],
        capture_output=True,
        text=True,
        timeout=100,
    )
    if "NO MOUNT" in done.stdout or "unshare failed" in done.stderr:
        pytest.skip(f"nothing can be mounted here: {done.stdout}{done.stderr}")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_writer_says_that_the_disk_is_full_and_leaves_what_was_there(tmp_path):
    said = mounted(
        tmp_path,
        """
        import json, torch
        from benchlib.runtime import checkpoint
        from benchlib.judge.checks import Verdict, save_verdict
        from benchlib.config.schema import resolve, save_config
        from benchlib.core.errors import StorageError
        from benchlib.core.events import EventWriter
        from benchlib.core.files import write_json, write_text
        from benchlib.results.metrics import measured
        from benchlib.results.run import Result, new_run_dir, save_result

        config = resolve("squad").config
        small, large = [1.0, 2.0], [float(n) ** 0.5 for n in range(30_000)]
        def result(samples):
            return Result.of(config, metrics=[measured("a", samples, "s")])
        def tensors(n):
            return {"model": {"w": torch.arange(float(n))}}
        def text(n):
            return "".join(str(i) for i in range(n))
        writers = {
            "result.json": lambda n: save_result(disk, Result.of(config, notes=[text(n)])),
            "samples.parquet": lambda n: save_result(disk, result(small if n < 9 else large)),
            "verdict.json": lambda n: save_verdict(disk, Verdict(verdict="PASS", sentence=text(n), checks=[])),
            "index.html": lambda n: write_text(disk / "index.html", text(n)),
            "step-00000001": lambda n: checkpoint.save(disk / "c", 1, tensors(n), {}),
            "events-rank0.jsonl": lambda n: events.emit("log", text=text(n)),
        }
        events = EventWriter(disk, "rank0")
        for name, write in writers.items():
            write(2)
        def snapshot():
            return {path: path.read_bytes() for path in disk.rglob("*") if path.is_file()}
        before = snapshot()
        for name, write in writers.items():
            try:
                write(40_000)
                print(name, "WAS WRITTEN")
            except StorageError as error:
                print(name, "|", error.errno, "|", error)
            for path, content in snapshot().items():
                if before.get(path) != content:
                    print(name, "CHANGED", path)
        # The last bytes of the disk: a torn line, and a folder that is made but cannot be filled.
        with open(disk / "filler", "wb", buffering=0) as filler:
            try:
                while filler.write(bytes(4096)):
                    pass
            except OSError:
                pass
        whole = 0
        try:
            while True:
                events.emit("log", number=whole)
                whole += 1
        except StorageError:
            lines = (disk / "events-rank0.jsonl").read_bytes().split(b"\\n")
            print("events whole", lines[-1] == b"", all(json.loads(line) for line in lines[:-1]))
        from benchlib.launch.plan import Plan, prepare
        from benchlib.config.schema import Resolved
        try:
            prepare(Plan(Resolved(config, {}), {}), disk / "out")
        except StorageError as error:
            print("prepare |", error.errno, "|", error, "|", list((disk / "out").glob("*")))
        """,
    )
    lines = said.splitlines()
    assert [line.split(" | ")[0] for line in lines[:6]] == [
        "result.json", "samples.parquet", "verdict.json", "index.html", "step-00000001", "events-rank0.jsonl",
    ]  # fmt: skip
    for line in lines[:6]:
        name, number, sentence = line.split(" | ")
        assert int(number) == errno.ENOSPC
        assert re.fullmatch(
            rf"/\S*{re.escape(name)} cannot be written: no space left on device; free some space on this disk, or .*",
            sentence,
        )
    assert lines[6] == "events whole True True"
    assert re.search(r"(config|machine)\.json cannot be written: no space left", lines[7])
    assert lines[7].endswith("| []")
    assert len(lines) == 8


def test_a_read_only_store_is_judged_and_listed_but_not_written(tmp_path):
    said = mounted(
        tmp_path,
        """
        from click.testing import CliRunner
        from benchlib.cli import main
        for words in (["report"], ["list", "--runs"], ["run", "squad"], ["report", run]):
            done = CliRunner().invoke(main, [*map(str, words), *(["--out", str(disk / "out")] if run not in words else [])])
            print(">>", words[0], done.exit_code, type(done.exception).__name__)
            print(done.output)
        """,
        size="4m",
        read_only_after="""
        from make_run import make_run
        run = make_run(disk / "out" / "quick-20261121" / "squad-cpu-101500-aaaaaa")
        """,
    )
    parts = re.split(r"^>> ", said, flags=re.MULTILINE)[1:]
    first, listed, started, named = (" ".join(part.split()) for part in parts)
    for part in (first, named):
        assert part.startswith("report 2 SystemExit")
        assert "verdict.json cannot be written: read-only file system; make it writable" in part
        # The made-up run lacks numbers that the checks need, and that is still said.
        assert "FAIL" in part
    assert "index.html cannot be written: read-only file system" in first
    assert listed.startswith("list 0") and "PASS" in listed
    assert started.startswith("run 2 SystemExit error:")
    assert "out cannot be written: read-only file system" in started
    assert "ranks" not in started


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission(tmp_path):
    run = place(tmp_path)
    run.chmod(0o555)
    try:
        code, said = command("report", run)
    finally:
        run.chmod(0o755)
    assert code == 2
    assert "permission denied; make it writable" in said


def test_places_that_cannot_hold_runs(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageError, match="a part of its path is a file and no folder"):
        results.check_place(tmp_path / "file" / "out")
    with pytest.raises(StorageError, match="a part of its path is a file and no folder"):
        new_run_dir(resolve("squad").config, tmp_path / "file")
    (tmp_path / "a.json").mkdir()
    with pytest.raises(StorageError, match=r"a\.json cannot be written: a folder has its name"):
        write_json(tmp_path / "a.json", 1)
    assert leftovers(tmp_path) == []


def test_an_error_that_is_not_the_disks_stays_what_it_was(tmp_path):
    with pytest.raises(PermissionError) as caught, atomic_path(tmp_path / "x"):
        raise PermissionError(errno.EACCES, "somebody else's file", "/elsewhere")
    assert not isinstance(caught.value, StorageError)
