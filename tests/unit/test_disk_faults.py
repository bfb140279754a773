"""What a disk may hold or refuse: full, read-only, cut, foreign and hostile files, two at once, clocks that jump.

Each case ends in one clear sentence, harms no stored run, and leaves the list of runs readable with the damaged one marked.
"""

import contextlib
import errno
import io
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from make_run import START, make_run

from benchlib import baselines, index, judge, listing, manifest, report, results, run_lock
from benchlib.array_file import DamagedFile, read_arrays, write_arrays
from benchlib.cli import main
from benchlib.config import resolve
from benchlib.errors import StorageError, UserError
from benchlib.events import EventWriter, read_events
from benchlib.files import atomic_path, read_json, write_json
from benchlib.labels import day, duration, moment
from benchlib.results import Run, new_run_dir
from benchlib.terminal import harmless

ROOT = Path(__file__).parents[2]
EVIL = "<script>alert(1)</script>"
ANSI = "\x1b[2J\x1b]0;owned\x07\x9b31m"


def place(out, name="squad-cpu-101500-aaaaaa", **changes):
    """Make a run where runs lie."""
    return make_run(out / "quick-20261121" / name, **changes)


def command(*words, out=None, cwd=None):
    """Run the command line in this process; return the exit code and all that it printed."""
    with contextlib.chdir(cwd or Path.cwd()):
        done = CliRunner().invoke(
            main, [*map(str, words), *(["--out", str(out)] if out else [])], catch_exceptions=True
        )
    assert done.exception is None or isinstance(done.exception, SystemExit), repr(done.exception)
    return done.exit_code, done.output


@pytest.fixture
def _no_pictures(monkeypatch):
    """Reports without their pictures, which take a second each and are not what is asked here."""
    monkeypatch.setattr("benchlib.plots.FIGURES", {})
    monkeypatch.setenv("COLUMNS", "400")  # names are not folded


def files_of(folder):
    """Return the content of every file below a folder, the lists of runs left out."""
    return {
        path.relative_to(folder): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != "index.html"
    }


def leftovers(folder):
    return [path for path in Path(folder).rglob("*") if path.name.endswith(".tmp")]


# Full and read-only disks, real ones: a small tmpfs in a mount namespace of its own


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
        import json, numpy, torch
        from benchlib import checkpoint, manifest
        from benchlib.array_file import write_arrays
        from benchlib.checks import Verdict, save_verdict
        from benchlib.config import resolve, save_config
        from benchlib.errors import StorageError
        from benchlib.events import EventWriter
        from benchlib.files import write_json, write_text
        from benchlib.metrics import measured
        from benchlib.results import Result, new_run_dir, save_result

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
            "cache.bin": lambda n: write_arrays(disk / "cache.bin", {"a": numpy.arange(n)}, {}),
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
        from benchlib.session import Plan, prepare
        from benchlib.config import Resolved
        try:
            prepare(Plan(Resolved(config, {}), {}), disk / "out")
        except StorageError as error:
            print("prepare |", error.errno, "|", error, "|", list((disk / "out").glob("*")))
        """,
    )
    lines = said.splitlines()
    assert [line.split(" | ")[0] for line in lines[:7]] == [
        "result.json", "samples.parquet", "verdict.json", "index.html", "cache.bin", "step-00000001", "events-rank0.jsonl",
    ]  # fmt: skip
    for line in lines[:7]:
        name, number, sentence = line.split(" | ")
        assert int(number) == errno.ENOSPC
        assert re.fullmatch(
            rf"/\S*{re.escape(name)} cannot be written: no space left on device; free some space on this disk, or .*",
            sentence,
        )
    assert lines[7] == "events whole True True"
    assert re.search(r"(config|machine)\.json cannot be written: no space left", lines[8])
    assert lines[8].endswith("| []")
    assert len(lines) == 9


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
        # The made-up run lacks facts that the checks need, and that is still said.
        assert "BROKEN" in part and "does not hold what the checks of squad need" in part
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


# Cut and foreign files

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
    "files.json": lambda run: manifest.faults(run.path),
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
    manifest.write(run)
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


@pytest.mark.usefixtures("_no_pictures")
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
    assert all(verdict["broken"] and "result.json" in verdict["sentence"] for verdict in said)
    assert "whole0" in (out / "index.html").read_text()
    assert leftovers(out) == []
    for run in damaged[::2]:
        with pytest.raises(UserError, match="bad000"):
            baselines.accept(Run(run), "x", [], root=tmp_path / "baselines")
    assert not (tmp_path / "baselines").exists()


@pytest.mark.usefixtures("_no_pictures")
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
    assert manifest.faults(run) is None  # older runs have no list
    manifest.write(run)
    assert manifest.faults(run) == []
    with (run / "events-supervisor.jsonl").open("a") as handle:
        handle.write('{"t": 1, "source": "supervisor", "kind": "late"}\n')
    assert manifest.faults(run) == []
    events = (run / "events-rank0.jsonl").read_bytes()
    (run / "events-rank0.jsonl").write_bytes(events[: events.rfind(b"\n", 0, 5000) + 1])  # whole lines, fewer
    (run / "predictions.json").write_text('{"a": "one", "b": "2nd"}')
    (run / "machine.json").unlink()
    first, missing, altered = manifest.faults(run)
    assert re.fullmatch(r"events-rank0\.jsonl was cut: [\d,]+ of [\d,]+ bytes are left", first)
    assert (missing, altered) == ("machine.json is missing", "predictions.json was altered after the run")
    write_json(run / "files.json", {"files": {"../../etc/passwd": {"bytes": 1, "sha256": ""}}})
    with pytest.raises(UserError, match=r"not a list of a run's files: '\.\./\.\./etc/passwd'"):
        manifest.faults(run)


def test_a_damaged_baseline_fails_the_gate_and_names_itself(tmp_path, monkeypatch):
    monkeypatch.setattr("benchlib.squad.checks.checks", lambda run, comparison: [])
    run = place(tmp_path / "out")
    root = tmp_path / "baselines"
    for kind in ("deep", "later", "pipe", "list", 0.0):
        shutil.rmtree(root, ignore_errors=True)
        (root / "squad" / "quick").mkdir(parents=True)
        damage(root / "squad" / "quick" / "0123456789ab.json", kind)
        verdict = judge.judged(Run(run), root)
        assert (verdict.verdict, verdict.broken, verdict.exit_code()) == ("FAIL", False, 1)
        assert "0123456789ab.json" in verdict.checks[-1].reason
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
    for place_ in (whole.index(b'"at": 0'), whole.index(b'"note"'), whole.index(b"<i8"), len(whole) - 70):
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


# Two at once


def test_runs_of_one_second_get_folders_of_their_own(tmp_path):
    config = resolve("squad").config
    with multiprocessing.get_context("fork").Pool(4) as pool:
        made = pool.starmap(new_run_dir, [(config, tmp_path, START)] * 40)
    assert len(set(made)) == 40
    assert len({path.name[:16] for path in made}) == 1


def test_a_run_folder_is_claimed_once_and_free_after_a_kill(tmp_path):
    assert run_lock.taken(tmp_path) is None
    code = f"from benchlib import run_lock; import time; run_lock.take({str(tmp_path)!r}); print('held', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT) as holder:
        assert holder.stdout.readline() == "held\n"
        assert run_lock.taken(tmp_path) is True
        with pytest.raises(UserError, match="is in use: another process works on this run"):
            run_lock.take(tmp_path)
        holder.kill()
    assert run_lock.taken(tmp_path) is False
    os.close(run_lock.take(tmp_path))


def _write_often(path, text):
    for _ in range(150):
        write_json(path, {"text": text * 4000})


def test_writers_of_one_file_never_show_a_half(tmp_path):
    path = tmp_path / "index.json"
    write_json(path, {"text": "a" * 4000})
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write_often, args=(path, sign)) for sign in "ab"]
    for writer in writers:
        writer.start()
    seen = set()
    while any(writer.is_alive() for writer in writers):
        text = read_json(path)["text"]
        assert len(text) == 4000 and len(set(text)) == 1
        seen.add(text[0])
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert [item.name for item in tmp_path.iterdir()] == ["index.json"]


# Clocks


@pytest.mark.usefixtures("_no_pictures")
@pytest.mark.parametrize("started", [-1e20, -1.0, 1e20, 4e11, 10**200])
def test_times_that_no_calendar_has(tmp_path, started):
    out = tmp_path / "out"
    run = place(out, started_at=started)
    other = place(out, "squad-cpu-101501-bbbbbb")
    assert moment(started) and day(started) and duration(started)
    assert "made up for a test" in report.html(Run(run))
    assert index.render(out).read_text().count("squad-cpu-1015") or other
    code, said = command("list", "--runs", out=out)
    assert (code, said.count("PASS"), said.count("DAMAGED")) == (0, 1, 1)


def test_events_of_one_writer_keep_their_order_when_the_clock_is_set_back(tmp_path, monkeypatch):
    now = iter([1000.0, 1001.0, 400.0, 401.0, 500.0])
    writer, other = EventWriter(tmp_path, "rank0"), EventWriter(tmp_path, "rank1")
    monkeypatch.setattr(time, "time", lambda: next(now))
    for step in range(4):
        writer.emit("step", step=step)
    other.emit("step", step=9)
    assert [event["step"] for event in read_events(tmp_path) if event["source"] == "rank0"] == [0, 1, 2, 3]
    writer.close()
    other.close()


def test_spans_are_written_in_their_unit():
    assert [duration(value) for value in (-30, 0.25, 59.4, 59.7, 3599.9, 7260)] == [
        "-30 s", "0.25 s", "59.4 s", "1 min 0 s", "1 h 0 min", "2 h 1 min",
    ]  # fmt: skip
    assert moment(float("nan")) == moment(1e18) == "an unknown time"


# Names


@pytest.mark.usefixtures("_no_pictures")
@pytest.mark.parametrize(
    "name",
    [
        f"squad-cpu-101500-{EVIL.replace('/', '')}",
        "squad-cpu-101500-a\nPASS  all\tfine",
        "squad-cpu-101500-[red]x[bold]",
        f"squad-cpu-101500-{ANSI}",
        "-x",
        "sp ace ünï 漢",
    ],
)
def test_names_of_folders_are_harmless_everywhere(tmp_path, name, monkeypatch):
    monkeypatch.setattr(listing.console, "width", 400)  # no name is folded into its neighbours' column
    out = tmp_path / f"out {name}"
    run = place(out, name)
    (run / "report.html").write_text("x")
    code, said = command("list", "--runs", out=out)
    assert code == 0
    assert re.sub(r"\s", "", harmless(name)) in re.sub(r"\s", "", said)
    code, told = command("report", "--", run)
    for text in (said, told):
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", text)
    assert not re.search(r"^PASS", told, re.MULTILINE)
    assert "<script>alert" not in index.render(out).read_text()
    page = report.html(Run(run))
    assert "<script>alert" not in page
    assert "\x1b" not in page


@pytest.mark.usefixtures("_no_pictures")
def test_stored_words_cannot_steer_the_terminal(tmp_path):
    run = place(tmp_path, verdict={"sentence": f"fine{ANSI} [bold]x[/bold]\u202e {EVIL}"})
    code, said = command("list", "--runs", out=tmp_path)
    assert code == 0
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", said)
    assert "[bold]x[/bold]" in " ".join(said.split())
    assert (run / "verdict.json").exists()


@pytest.mark.usefixtures("_no_pictures")
def test_folders_that_are_no_runs_are_left_alone(tmp_path):
    foreign = tmp_path / "model"
    foreign.mkdir()
    (foreign / "config.json").write_text('{"architectures": ["BertModel"]}')
    before = files_of(tmp_path)
    for path in (foreign, tmp_path, Path("../../../../etc"), tmp_path / "missing"):
        code, said = command("report", path, cwd=tmp_path)
        assert code == 2
        assert "error" in said
    assert files_of(tmp_path) == before
    assert not (tmp_path / "index.html").exists()
    copied = make_run(tmp_path / "here" / "squad-cpu-101500-aaaaaa")
    command("report", copied)
    assert (copied / "report.html").exists()
    assert not (tmp_path / "index.html").exists()  # a copy outside a store belongs to no list


@pytest.mark.usefixtures("_no_pictures")
@pytest.mark.parametrize("field", ["benchmark", "tier"])
@pytest.mark.parametrize("value", ["../x", "a/b", "*", "", "..", EVIL, "x\ny"])
def test_a_stored_config_leads_nowhere_else(tmp_path, field, value):
    run = place(tmp_path / "out", config={field: value})
    with pytest.raises(UserError, match=r"unknown benchmark|tier = "):
        baselines.accept(Run(run), "x", [], root=tmp_path / "baselines" / "deep")
    assert not (tmp_path / "baselines").exists()
    assert judge.judged(Run(run)).broken
    assert io.StringIO(report.html(Run(run))).read().count("<script>alert") == 0
