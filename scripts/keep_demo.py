"""Make the kit's demo store of real runs: keep of each run what the history needs, and nothing that names a machine's owner.

Takes whole runs from a folder of runs, drops host names, reports, notebooks, logs, and the texts of the worst
misses; keeps config, machine, result, verdict, rank 0's steps and at most 50 samples of the step time, as compact JSON
and Parquet. No number is changed.

    python scripts/keep_demo.py STORE          # replaces the runs in notebooks/demo-runs
    python scripts/keep_demo.py STORE --worth  # replaces those in notebooks/demo-worth: the same work on some ranks
    python scripts/keep_demo.py outputs/quick-20261129 --machine  # replaces those in notebooks/demo-machine: one quick tier
"""

import json
import shutil
from pathlib import Path

from measuring import options_of

from benchlib.core.files import home
from benchlib.core.run_folder import record_files
from benchlib.core.text import counted
from benchlib.judge import cost, trends
from benchlib.results.record import load_all
from benchlib.results.run import Run
from benchlib.show import machine_page

SAMPLES = 50
KEPT_EVENTS = ("plan", "step")


def keep(source: Path, target: Path, samples: str = "step_s") -> None:
    """Write the thinned copy of one run, with the samples of the metrics whose name begins so; '' keeps all samples."""
    target.mkdir(parents=True)
    for name in ("config.json", "machine.json", "result.json", "verdict.json"):
        content = json.loads((source / name).read_text())
        if name == "machine.json":
            content["host"] = ""
        if name == "result.json":
            content["tables"].pop("misses", None)
        (target / name).write_text(json.dumps(content, separators=(",", ":"), ensure_ascii=False) + "\n")
    events = [event for event in Run(source).events if event["source"] == "rank0" and event["kind"] in KEPT_EVENTS]
    if events:
        lines = [json.dumps(event, separators=(",", ":")) for event in events]
        (target / "events-rank0.jsonl").write_text("\n".join(lines) + "\n")
    _keep_samples(source, target, samples)
    record_files(target)


def _keep_samples(source: Path, target: Path, samples: str) -> None:
    import pandas as pd

    path = source / "samples.parquet"
    if not samples and path.exists():
        shutil.copy(path, target)
        return
    frame = pd.read_parquet(path) if path.exists() else pd.DataFrame({"metric": [], "index": []})
    frame = frame[frame["metric"].astype(str).str.startswith(samples)]
    if len(frame):
        step = max(1, len(frame) // SAMPLES)
        frame[frame["index"] % step == 0].to_parquet(target / path.name, index=False, compression="zstd")


def main() -> None:
    """Replace the demo store by the whole runs of a store."""
    parser = options_of(__doc__)
    parser.add_argument("store", type=Path)
    parser.add_argument("--worth", action="store_true", help="of the comparison by price")
    parser.add_argument("--machine", action="store_true", help="of the page of a machine")
    arguments = parser.parse_args()
    kind = cost.DEMO if arguments.worth else machine_page.DEMO if arguments.machine else trends.DEMO
    store, demo = arguments.store, home() / kind
    for day in demo.glob("*-*"):
        if day.is_dir():
            shutil.rmtree(day)
    for folder in machine_page.newest(store) if arguments.machine else []:
        keep(folder, demo / store.name / folder.name, samples="")
    for run in load_all(store) if not arguments.machine else []:
        if run.word == "PASS" and arguments.worth:
            place = demo / counted(run.ranks, "rank").replace(" ", "-") / run.run
            keep(Path(run.folder), place, "train_samples_per_s")
        elif run.word == "PASS":
            keep(Path(run.folder), demo / run.path)
    files = [path for path in demo.rglob("*") if path.is_file()]
    print(f"{len(list(demo.rglob('result.json')))} runs, {sum(path.stat().st_size for path in files):,} bytes")


if __name__ == "__main__":
    main()
