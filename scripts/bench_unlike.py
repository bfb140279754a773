"""How close does a planned split of unlike ranks come to the best one, how soon is a drift answered, and what does it cost?

Question: with one of two ranks three times slower, how long does a balanced epoch take beside the best split found by trying, and
beside an even one? After how many steps does a drift lead to another split? Which share of a quick run is calibration?

Method: two processes of one thread; rank 1 does its work three times (planted_work). They train once with balance=auto, and every
step takes another split in turns: the planned one, the even one, and those around the harmonic one. Each epoch has the same
batches and begins with the next split, so that in one round every split has had every batch. A step lasts as long as its slowest
rank, and of equal steps (one batch, one split) the fastest counts, since neighbours on the machine make no step faster; an
epoch's time is the sum over its batches, for the planned split the median of the rounds. For the drift the slow rank changes in
the middle of a training. The cost is that of a run of the benchmark itself on the quick tier (`python -m benchlib.runtime.worker`),
from its launch to its result.

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
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

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


def tried(samples: int) -> dict[str, list[int]]:
    """Return the splits that are compared with the planned one, by name."""
    splits = {f"{first}+{samples - first}": [first, samples - first] for first in range(3 * samples // 4 - AROUND, 3 * samples // 4 + AROUND + 1)}  # fmt: skip
    return {"even": [samples // RANKS] * RANKS, **splits}


def turn(step: int, per_epoch: int, names: Sequence[str]) -> str:
    """Return whose turn a step is: in as many epochs as there are names each of them has every place of an epoch."""
    epoch, place = divmod(step, per_epoch)
    return names[(epoch + place) % len(names)]


def measure(config: SquadConfig, run_dir: Path, events: EventWriter) -> None:
    """Train by turns, then with a drift; rank 0 leaves seconds and plans in measured.json. What every rank executes."""
    from benchlib.benchmarks.squad import passes, train
    from benchlib.core.events import Moment
    from benchlib.runtime.group import world
    from benchlib.runtime.measurement import Rank
    from benchlib.runtime.steps import Columns
    from benchlib.workloads import features
    from benchlib.workloads.batches import steps_per_epoch

    options = read_json(run_dir / "options.json")
    splits = tried(config.global_batch)
    names = ["auto", *splits]
    measured: dict[str, Any] = {"steps": [], "drift": []}
    with world(config, run_dir) as here:
        split, loaded = passes.load_data(config), passes.load_model(config)
        made = features.build(split.train, loaded.tokenizer, config.max_length, config.doc_stride, True, None)

        def once(name: str, **changes: Any) -> tuple[list[float], list[list[int]], list[Any]]:
            changed = SquadConfig.model_validate(config.model_dump() | {"balance": "auto"} | changes)
            rank = Rank(changed, run_dir, here, events, Moment.now())
            task = passes.Task(rank, passes.load_model(changed), made, 100)
            trained = train.train(task)
            plans = [(row["from_step"], row["shares"]) for row in trained.tables["splits"]]
            if here.main:
                print(f"{name}: {trained.train_s:.1f} s, plans {plans}, load {os.getloadavg()[0]:.1f}", flush=True)
            columns = Columns(trained.table)
            return columns["step_s"].max(axis=1).tolist(), columns["samples"].astype(int).tolist(), plans

        per_epoch = steps_per_epoch(len(made), config.global_batch)
        planned, indices = passes.Batches.split, passes.Batches.indices
        if "splits" in options["parts"]:

            def by_turns(batches: Any, step: int) -> shares.Split | None:
                plan, name = planned(batches, step), turn(step, per_epoch, names)
                if plan is None or name not in splits:
                    return plan
                pairs = zip(plan.members, splits[name], strict=True)
                return replace(plan, members=tuple(replace(member, samples=count) for member, count in pairs))

            def of_one_epoch(batches: Any, step: int) -> Any:
                return indices(batches, step % per_epoch)

            with mock.patch.multiple(passes.Batches, split=by_turns, indices=of_one_epoch):
                step_s, given, _ = once("by turns", epochs=len(names) * options["rounds"])
            for number, (seconds, samples) in enumerate(zip(step_s, given, strict=True)):
                name, place = turn(number, per_epoch, names), number % per_epoch
                round_ = number // (per_epoch * len(names))
                measured["steps"].append({"name": name, "round": round_, "place": place, "split": "+".join(map(str, samples)), "step_s": seconds})  # fmt: skip
        if "drift" in options["parts"]:
            middle = 2 * per_epoch
            for number in range(1, options["rounds"] + 1):
                *_, plans = once(f"drift {number}", epochs=4, planted_drift_step=middle)
                turned = [step - middle for step, text in plans if step > middle and text[0] <= text[1]]  # fmt: skip
                measured["drift"].append(min(turned, default=sys.maxsize))
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


def splits(steps: list[dict[str, Any]]) -> bool:
    """Print how far balance=auto is from the best split and how far an even one; say whether both limits hold."""
    least: dict[tuple[int, str], float] = {}
    for row in steps:
        same = row["place"], row["split"]
        least[same] = min(row["step_s"], least.get(same, float("inf")))
    rounds = 1 + max(row["round"] for row in steps)
    epoch_s: dict[str, float] = {}
    for name in dict.fromkeys(row["name"] for row in steps):
        own = [[row for row in steps if (row["name"], row["round"]) == (name, number)] for number in range(rounds)]
        epoch_s[name] = statistics.median(sum(least[row["place"], row["split"]] for row in rows) for rows in own)
        whole = [sum(row["step_s"] for row in rows) for rows in own]
        print(f"{name:5} {epoch_s[name]:6.2f} s an epoch; with neighbours {min(whole):.2f} to {max(whole):.2f} s")
    best = min((name for name in epoch_s if "+" in name), key=lambda name: epoch_s[name])
    over, even = epoch_s["auto"] / epoch_s[best], epoch_s["even"] / epoch_s["auto"]
    print(f"auto / {best}, the best: {over:.3f}, limit {MOST_OVER_BEST}; even / auto: {even:.3f}, limit {LEAST_EVEN}")
    return over <= MOST_OVER_BEST and even >= LEAST_EVEN


def drift(answers: list[int]) -> bool:
    """Print after how many steps a drift in the middle led to a split that gives the other rank as much or more."""
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
    parser.add_argument(
        "--rounds", type=int, default=3, help="how often each split has every batch, and how often the drift is planted"
    )
    parser.add_argument("--questions", type=int, default=240, help="questions of an epoch; 16 a step")
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
            held |= {"splits": splits(measured["steps"])} if "splits" in parts else {}
            held |= {"drift": drift(measured["drift"])} if "drift" in parts else {}
        if "cost" in parts:
            held["cost"] = cost(Path(name) / "quick")
    print(json.dumps(held))
    sys.exit(not all(held.values()))


if __name__ == "__main__":
    main()
