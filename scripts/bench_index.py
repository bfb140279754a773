"""How long the list of runs takes: ``outputs/index.html`` with trends, bands, changes and lanes of thousands of runs.

Question: is the page of 10,000 stored runs there in less than 2.5 s, and what do their summaries save?
Method: two real runs of the demo store are the pattern of made-up ones in a temporary folder: their numbers are multiplied
by noise, the versions go up with time, four machines take part, one run in a hundred breaks, fails or is damaged. A new
process renders the page from the files of the runs, then from their summaries; each figure is the median of several, as time on the wall
and as processor time (the machine may be busy with other things).

    python scripts/bench_index.py [--runs 10000] [--repeat 3] [--keep FOLDER]
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchlib.core.files import home
from benchlib.results import store as history

DEMO = home() / "notebooks" / "demo-runs"
MACHINES = ("node1", "node2", "node3", "node4")
SPREADS = {"node1": 0.015, "node2": 0.015, "node3": 0.046, "node4": 0.015}
RENDER = "import sys, time; t = time.time(); from benchlib.show import index; index.render(sys.argv[1]); print(time.time() - t, time.process_time())"


def patterns() -> list[dict[str, Any]]:
    """Return the newest whole run of each benchmark in the demo store, as file name to content."""
    newest = {run.benchmark: run for run in history.read(DEMO) if run.word == "PASS"}
    names = ("config.json", "machine.json", "result.json", "verdict.json")
    return [{name: json.loads((DEMO / run.path / name).read_text()) for name in names} for run in newest.values()]


def make_store(store: Path, runs: int, seed: int = 5) -> None:
    """Write made-up runs into ``store``, the last of them from the beginning of 2026."""
    random.seed(seed)
    known = patterns()
    step_s = 400 * 86_400 / runs
    for number in range(runs):
        pattern, host = random.choice(known), random.choice(MACHINES)
        started = 1_767_225_600.0 - (runs - number) * step_s
        age = number / runs
        parts = {name: json.loads(json.dumps(content)) for name, content in pattern.items()}
        parts["machine.json"]["host"] = host
        parts["machine.json"]["versions"]["torch"] = f"2.{9 + int(5 * age)}.0"
        parts["result.json"] |= {"started_at": started, "ended_at": started + 60}
        slower = 1.12 if 0.6 < age < 0.8 else 1.0
        for metric in parts["result.json"]["metrics"]:
            if metric["value"] is not None:
                noise = random.lognormvariate(0, SPREADS[host])
                metric["value"] *= noise * (slower if metric["direction"] == "lower" else 1 / slower)
        _spoil(parts, random.random())
        stamp = time.strftime("%Y%m%d %H%M%S", time.localtime(started)).split()
        config = parts["config.json"]
        folder = store / f"{config['tier']}-{stamp[0]}" / f"{config['benchmark']}-cpu-{stamp[1]}-{number:06x}"
        folder.mkdir(parents=True)
        for name, content in parts.items():
            (folder / name).write_text(content if isinstance(content, str) else json.dumps(content, indent=2))


def _spoil(parts: dict[str, Any], chance: float) -> None:
    if chance < 0.01:
        parts["verdict.json"] |= {"verdict": "FAIL", "broken": True, "sentence": "Rank 1 raised OSError"}
    elif chance < 0.02:
        failed = {"name": "total_s vs baseline", "kind": "regression", "status": "FAIL", "reason": "ratio 1.31"}
        parts["verdict.json"] |= {"verdict": "FAIL", "sentence": "1 check failed.", "checks": [failed]}
    elif chance < 0.025:
        parts["result.json"] = '{"cut'


def main() -> None:
    """Make the runs, render them and print the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--keep", type=Path, help="make the runs in this new folder and leave them there")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="benchlib-index-") as temporary:
        store = arguments.keep or Path(temporary) / "runs"
        if not store.exists():
            make_store(store, arguments.runs)
        for word in ("without summaries", "with summaries"):
            taken = []
            for folder in history.run_folders(store):
                (Path(folder) / history.SUMMARY).unlink(missing_ok=True)
                if word == "with summaries":
                    history.summarize(folder)
            for _ in range(arguments.repeat):
                done = subprocess.run(
                    [sys.executable, "-c", RENDER, str(store)], capture_output=True, text=True, check=True
                )
                taken.append([float(value) for value in done.stdout.split()])
            wall, processor = (statistics.median(column) for column in zip(*taken, strict=True))
            print(f"{arguments.runs:,} runs, {word}: {wall:.2f} s on the wall, {processor:.2f} s of processor")
        page = store / "index.html"
        print(f"{page.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
