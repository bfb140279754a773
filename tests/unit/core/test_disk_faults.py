"""A full disk: each case ends in one clear sentence and harms no stored run."""

import errno
import re

from small_disk import on_small_disk


def test_every_writer_says_that_the_disk_is_full_and_leaves_what_was_there(tmp_path):
    said = on_small_disk(
        tmp_path,
        "48k",
        """
        import contextlib, torch
        from benchlib.runtime import checkpoint
        from benchlib.judge.checks import Verdict, save_verdict
        from benchlib.config.schema import resolve, save_config
        from benchlib.core.errors import StorageError
        from benchlib.core.events import EventWriter
        from benchlib.core.files import write_json, write_text
        from benchlib.results.metrics import measured
        from benchlib.results.run import Result, new_run_dir, save_result

        config = resolve("squad").config
        def text(n):
            return "".join(str(i) for i in range(n))
        def samples(n):
            return [float(i) ** 0.5 for i in range(n)]
        writers = {
            "result.json": lambda n: save_result(disk, Result.of(config, notes=[text(n)])),
            "samples.parquet": lambda n: save_result(disk, Result.of(config, metrics=[measured("a", samples(n), "s")])),
            "verdict.json": lambda n: save_verdict(disk, Verdict(verdict="PASS", sentence=text(n), checks=[])),
            "index.html": lambda n: write_text(disk / "index.html", text(n)),
            "step-00000001": lambda n: checkpoint.save(disk / "c", 1, {"model": {"w": torch.arange(float(n))}}, {}),
            "events-rank0.jsonl": lambda n: events.emit("log", text=text(n)),
        }
        events = EventWriter(disk, "rank0")
        for write in writers.values():
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
                if not content.startswith(before.get(path, b"new")):
                    print(name, "CHANGED", path)
        # The last bytes of the disk: a folder that is made but cannot be filled.
        with open(disk / "filler", "wb", buffering=0) as filler:
            with contextlib.suppress(OSError):
                while filler.write(bytes(4096)):
                    pass
        from benchlib.launch.plan import Plan, prepare
        from benchlib.config.schema import Resolved
        try:
            prepare(Plan(Resolved(config, {}), {}), disk / "out")
        except StorageError as error:
            print("prepare |", error.errno, "|", error, "|", list((disk / "out").glob("*")))
        """,
    )
    *lines, prepared = said.splitlines()
    names = ("result.json", "samples.parquet", "verdict.json", "index.html", "step-00000001", "events-rank0.jsonl")
    for name, line in zip(names, lines, strict=True):
        words = rf"{name} \| {errno.ENOSPC} \| /\S*{name} cannot be written: no space left on device; free some space"
        assert re.match(words, line)
    assert re.search(r"(config|machine)\.json cannot be written: no space left.*\| \[\]$", prepared)
