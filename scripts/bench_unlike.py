"""How close does a planned split of unlike ranks come to the best one, how soon is a drift answered, and what does it cost?

Question: with one of two ranks three times slower, how long does a balanced epoch take beside the best split found by trying, and
beside an even one? After how many steps does a drift lead to another split? Which share of a quick run is calibration?

Method: two processes of one thread; rank 1 does its work three times (planted_work). Both stay, and train one variant after the
other on the same questions from the same weights, `--rounds` times in turns, so that a busy neighbour slows all of them: even
shares, balance=auto, and plans of fixed shares around the harmonic one. An epoch's time is that of the training loop; ratios are
formed within a round, and the median of the rounds counts. For the drift the slow rank changes in the middle. The cost is that
of a run of the benchmark itself on the quick tier (`python -m benchlib.runtime.worker`), from its launch to its result.

    python scripts/bench_unlike.py
    python scripts/bench_unlike.py --parts splits --rounds 5
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchlib.benchmarks.squad import shares
from benchlib.benchmarks.squad.config import SquadConfig
from benchlib.config.schema import resolve, save_config
from benchlib.core.events import EventWriter
from benchlib.core.files import read_json, write_json
from benchlib.core.machine import cpu_model, usable_cores
from benchlib.results.run import load_result

Config = SquadConfig
RANKS = 2
COMMON: dict[str, Any] = {
    "nproc": RANKS, "threads": 1, "checkpoint_every": -1, "budget_s": 3000, "stall_timeout_s": 600, "planted_work": [1, 3],
}  # fmt: skip
AROUND = 2  # samples that the tried splits lie away from the harmonic one at most
MOST_OVER_BEST, LEAST_EVEN, MOST_STEPS, MOST_SHARE = 1.1, 1.5, 20, 0.03


def variants(config: SquadConfig, folder: Path) -> dict[str, dict[str, Any]]:
    """Return the splits that are compared, as changes of the config; plans of fixed shares need the one in ``folder``."""
    plan, total = shares.load(folder), config.global_batch
    changes: dict[str, dict[str, Any]] = {"auto": {"balance": "auto"}, "even": {"balance": "off"}}
    for first in range(3 * total // 4 - AROUND, 3 * total // 4 + AROUND + 1):
        path = folder / f"{first}.json"
        if not path.exists():
            write_json(path, plan.giving([first, total - first], from_step=0).model_dump(mode="json"))
        changes[f"{first}+{total - first}"] = {"balance": str(path)}
    return changes


def measure(config: SquadConfig, run_dir: Path, events: EventWriter) -> None:
    """Train all variants in turns; rank 0 leaves seconds and plans in measured.json. What every rank executes."""
    from benchlib.benchmarks.squad import steps, train
    from benchlib.runtime.group import barrier, world
    from benchlib.workloads import features

    options = read_json(run_dir / "options.json")
    measured: list[dict[str, Any]] = []
    with world(config, run_dir) as here:
        split, loaded = steps.load_data(config), steps.load_model(config)
        made = features.build(split.train, loaded.tokenizer, config.max_length, config.doc_stride, True, None)

        def once(name: str, number: int, **changes: Any) -> None:
            changed = SquadConfig.model_validate(config.model_dump() | changes)
            task = steps.Task(
                changed,
                here,
                steps.load_model(changed),
                split.train,
                made,
                events,
                run_dir,
                time.monotonic() + 3000,
                100,
            )
            trained = train.train(task)
            plans = [(row["from_step"], row["shares"]) for row in trained.more.tables.get("unlike_plans", [])]
            measured.append(
                {"name": name, "round": number, "train_s": trained.train_s, "plans": plans, "steps": len(trained.table)}
            )
            if here.main:
                print(
                    f"round {number}: {name} {trained.train_s:.2f} s, plans {plans}, load {os.getloadavg()[0]:.1f}",
                    flush=True,
                )

        if "splits" in options["parts"]:
            once("warm-up", 0, balance="auto", max_steps=4)
            barrier()
            for number in range(1, options["rounds"] + 1):
                for name, changes in variants(config, run_dir).items():
                    once(name, number, **changes)
        if "drift" in options["parts"]:
            middle = -(-len(made) // config.global_batch)
            for number in range(1, options["rounds"] + 1):
                once("drift", number, balance="auto", epochs=2, planted_drift=[3, 1], planted_drift_step=middle)
        if here.main:
            write_json(run_dir / "measured.json", measured)


def launch(folder: Path, *words: str) -> None:
    """Run two ranks in ``folder``, which has its config, and show what they print."""
    processes = []
    for rank in range(RANKS):
        place = {
            "RANK": rank,
            "WORLD_SIZE": RANKS,
            "LOCAL_RANK": rank,
            "LOCAL_WORLD_SIZE": RANKS,
            "BENCHLIB_OUTPUTS": folder,
        }
        path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        env = os.environ | {key: str(value) for key, value in place.items()} | {"PYTHONPATH": path}
        processes.append(
            subprocess.Popen([sys.executable, "-m", "benchlib.runtime.worker", str(folder), *words], env=env)
        )
    codes = [process.wait() for process in processes]
    if any(codes):
        raise SystemExit(f"a rank failed: exit codes {codes}")


def splits(measured: list[dict[str, Any]]) -> bool:
    """Print how far balance=auto is from the best split and how far an even one; say whether both limits hold."""
    rows: dict[str, list[float]] = {}
    for item in measured:
        if item["round"] and item["name"] != "drift":
            rows.setdefault(item["name"], []).append(item["train_s"])
    for name, values in rows.items():
        print(f"{name:8} median {statistics.median(values):6.2f} s  ({min(values):.2f} to {max(values):.2f})")
    # The best by trying is the split with the least median, not the luckiest run.
    best = min((name for name in rows if "+" in name), key=lambda name: statistics.median(rows[name]))
    over = [auto / other for auto, other in zip(rows["auto"], rows[best], strict=True)]
    even = [other / auto for auto, other in zip(rows["auto"], rows["even"], strict=True)]
    print(
        f"auto / {best}, the best: {statistics.median(over):.3f} ({min(over):.2f} to {max(over):.2f}), limit {MOST_OVER_BEST}"
    )
    print(f"even / auto: {statistics.median(even):.2f} ({min(even):.2f} to {max(even):.2f}), limit {LEAST_EVEN}")
    return statistics.median(over) <= MOST_OVER_BEST and statistics.median(even) >= LEAST_EVEN


def drift(measured: list[dict[str, Any]]) -> bool:
    """Print after how many steps a drift in the middle led to a split that gives the other rank more."""
    answers = []
    for item in (item for item in measured if item["name"] == "drift"):
        middle = item["steps"] // 2
        turned = [step - middle for step, text in item["plans"] if step > middle and int(text.split("+")[0]) <= int(text.split("+")[1])]  # fmt: skip
        answers.append(min(turned, default=sys.maxsize))
    print(f"drift answered after {answers} steps, limit {MOST_STEPS}")
    return max(answers) <= MOST_STEPS


def cost(folder: Path) -> bool:
    """Print the share of a quick run that calibration takes."""
    folder.mkdir()
    save_config(resolve("squad", "quick", "cpu", {**COMMON, "balance": "auto"}).config, folder)
    launch(folder)
    result = load_result(folder)
    calibration, total = result.value("calibration_s") or float("nan"), result.value("total_s") or float("nan")
    print(f"quick run: calibration {calibration:.2f} s of {total:.1f} s, {calibration / total:.2%}, limit {MOST_SHARE:.0%}, load {os.getloadavg()[0]:.1f}")  # fmt: skip
    return calibration / total <= MOST_SHARE


def main() -> None:
    """Measure the parts and exit with 1 where a limit does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="how often each variant is run")
    parser.add_argument("--questions", type=int, default=480, help="questions of an epoch; 16 a step")
    parser.add_argument("--parts", default="splits,drift,cost", help="comma-separated: splits, drift, cost")
    options = parser.parse_args()
    print(
        f"{cpu_model()}, {usable_cores()} cores, {RANKS} ranks of one thread, {options.questions} questions", flush=True
    )
    held: dict[str, bool] = {}
    with tempfile.TemporaryDirectory(prefix="bench-unlike-") as name:
        work, parts = Path(name) / "turns", options.parts.split(",")
        if {"splits", "drift"} & set(parts):
            work.mkdir()
            save_config(resolve("squad", "smoke", "cpu", {**COMMON, "train_questions": options.questions}).config, work)
            write_json(work / "options.json", {"rounds": options.rounds, "parts": parts})
            launch(work, "--benchmark", "bench_unlike:measure")
            measured = read_json(work / "measured.json")
            held |= {part: {"splits": splits, "drift": drift}[part](measured) for part in parts if part != "cost"}
        if "cost" in parts:
            held["cost"] = cost(Path(name) / "quick")
    print(json.dumps(held))
    sys.exit(not all(held.values()))


if __name__ == "__main__":
    main()
