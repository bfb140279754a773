"""How long the list of runs takes: ``outputs/index.html`` with trends, bands and changes of a thousand runs.

Question: are 1,000 stored runs listed in about 2 s, all their files read and their checksums compared?
Method: real runs are the pattern of made-up ones in a temporary folder: their numbers are multiplied by noise, the versions
go up with time, four machines take part, one run in a hundred breaks, fails or is damaged. A new process renders the page;
each figure is the median of several, as time on the wall and as processor time (the machine may be busy with other things).

    python scripts/bench_index.py [--runs 1000] [--repeat 3] [--like STORE] [--keep FOLDER]
"""

import argparse
import json
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchlib.core.run_folder import record_files
from benchlib.judge.trends import demo_store
from benchlib.results.record import Record, load_all

MACHINES = ("node1", "node2", "node3", "node4")
SPREADS = {"node1": 0.015, "node2": 0.015, "node3": 0.046, "node4": 0.015}
RENDER = "import sys, time; t = time.time(); from benchlib.show import index; index.render(sys.argv[1]); print(time.time() - t, time.process_time())"
CHANGED = ("machine.json", "result.json", "verdict.json")


def make_store(store: Path, like: Path, runs: int, seed: int = 5) -> None:
    """Write made-up runs into ``store``, the last of them from the beginning of 2026, like the newest of each benchmark."""
    random.seed(seed)
    known: list[Record] = list({run.benchmark: run for run in load_all(like) if run.word == "PASS"}.values())
    step_s = 400 * 86_400 / runs
    for number in range(runs):
        pattern, host = random.choice(known), random.choice(MACHINES)
        started = 1_767_225_600.0 - (runs - number) * step_s
        age = number / runs
        stamp = time.strftime("%Y%m%d %H%M%S", time.localtime(started)).split()
        folder = store / f"{pattern.tier}-{stamp[0]}" / f"{pattern.benchmark}-cpu-{stamp[1]}-{number:06x}"
        folder.mkdir(parents=True)
        for path in Path(pattern.folder).iterdir():
            if path.is_file() and path.name not in CHANGED:
                shutil.copy(path, folder)
        parts = {name: json.loads((Path(pattern.folder) / name).read_text()) for name in CHANGED}
        parts["machine.json"]["host"] = host
        parts["machine.json"]["versions"]["torch"] = f"2.{9 + int(5 * age)}.0"
        parts["result.json"] |= {"started_at": started, "ended_at": started + 60}
        slower = 1.12 if 0.6 < age < 0.8 else 1.0
        for metric in parts["result.json"]["metrics"]:
            if isinstance(metric["value"], (int, float)):
                noise = random.lognormvariate(0, SPREADS[host])
                metric["value"] *= noise * (slower if metric["direction"] == "lower" else 1 / slower)
        chance = random.random()
        _spoil(parts, chance)
        for name, content in parts.items():
            (folder / name).write_text(json.dumps(content, indent=2))
        record_files(folder)
        if 0.02 < chance < 0.025:
            (folder / "result.json").write_text('{"cut')


def _spoil(parts: dict[str, Any], chance: float) -> None:
    if chance < 0.01:
        parts["verdict.json"] |= {"verdict": "BROKEN", "sentence": "Rank 1 raised OSError"}
    elif chance < 0.02:
        failed = {
            "name": "total_s vs baseline",
            "kind": "regression",
            "question": "?",
            "status": "FAIL",
            "reason": "1.31",
        }
        parts["verdict.json"] |= {"verdict": "FAIL", "sentence": "1 check failed.", "checks": [failed]}


def main() -> None:
    """Make the runs, render them and print the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument(
        "--like", type=Path, default=demo_store(), help="a store of real runs, the demo store by default"
    )
    parser.add_argument("--keep", type=Path, help="make the runs in this new folder and leave them there")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="benchlib-index-") as temporary:
        store = arguments.keep or Path(temporary) / "runs"
        if not store.exists():
            make_store(store, arguments.like, arguments.runs)
        taken = []
        for _ in range(arguments.repeat):
            done = subprocess.run(
                [sys.executable, "-c", RENDER, str(store)], capture_output=True, text=True, check=True
            )
            taken.append([float(value) for value in done.stdout.split()])
        wall, processor = (statistics.median(column) for column in zip(*taken, strict=True))
        print(f"{arguments.runs:,} runs: {wall:.2f} s on the wall, {processor:.2f} s of processor")
        print(f"{(store / 'index.html').stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
