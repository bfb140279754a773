"""How much faster is benchlib's training loop than the usual recipe, and does it cost accuracy?

Question: windows of SQuAD questions per second of training by `engine=native`, against transformers' Trainer that pads
to the maximum length and against the one that pads to the longest window of a batch, on the cores of this machine.

Method: each variant is a run of the benchmark itself (`python -m benchlib.runtime.worker`) in processes of its own. All train
one epoch on the same questions with the same global batch. The variants take turns, `--rounds` times, so that a busy
neighbour slows all of them; the ratio is formed within each round, and the table has the median of the rounds. The time is
that of the training loop: start-up, tokenising and evaluation are excluded. A question has about one window. A variant whose
precision this machine does not support is skipped.

    python scripts/bench_training.py --train train.json --eval dev.json --model FOLDER
    python scripts/bench_training.py --train train.json --eval dev.json --model FOLDER --questions 0 --f1 --rounds 1

`--f1` evaluates on all of `--eval` and compares F1; `--questions 0` trains on all questions.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchlib.config.schema import build, save_config
from benchlib.core.machine import cpu_model, probe_devices, usable_cores
from benchlib.results.run import load_result

GLOBAL_BATCH = 16
SHOWN_LINES = 20  # of a failed rank's log

# name: (ranks, parameters); a rank has cores / ranks threads. The others are compared with the first one that is run.
VARIANTS: dict[str, tuple[int, dict[str, Any]]] = {
    "trainer-max-fp32": (2, {"engine": "trainer", "trainer_padding": "max_length"}),
    "trainer-longest-fp32": (2, {"engine": "trainer", "trainer_padding": "longest"}),
    "trainer-max-fp32-1x": (1, {"engine": "trainer", "trainer_padding": "max_length"}),
    "native-fp32": (2, {}),
    "native-fp32-1x": (1, {}),
    "native-bf16": (2, {"precision": "bf16"}),
    "trainer-max-bf16": (2, {"engine": "trainer", "trainer_padding": "max_length", "precision": "bf16"}),
    "trainer-longest-bf16": (2, {"engine": "trainer", "trainer_padding": "longest", "precision": "bf16"}),
}
DEFAULT = ["trainer-max-fp32", "trainer-longest-fp32", "native-fp32", "native-bf16"]


def run(name: str, options: argparse.Namespace, work: Path) -> dict[str, float]:
    """Run one variant; return windows per second, padding share, F1 and the final loss."""
    ranks, changes = VARIANTS[name]
    values: dict[str, Any] = {
        "data": "files", "train_file": options.train, "eval_file": options.eval, "model": options.model, "nproc": ranks,
        "train_questions": options.questions, "eval_questions": 0 if options.f1 else 2, "max_length": 384, "doc_stride": 128,
        "batch_size": GLOBAL_BATCH // ranks, "learning_rate": options.learning_rate, "seed": options.seed, "epochs": 1,
        "budget_s": 1e6, "stall_timeout_s": 600, "checkpoint_every": -1,
    }  # fmt: skip
    with tempfile.TemporaryDirectory(dir=work) as folder:
        run_dir = Path(folder)
        save_config(build("squad", values | changes), run_dir)
        processes = []
        for rank in range(ranks):
            place = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks}
            env = os.environ | {key: str(value) for key, value in place.items()} | {"BENCHLIB_OUTPUTS": str(work)}
            with (work / f"{name}.rank{rank}.log").open("w") as log:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "benchlib.runtime.worker", folder], env=env, stdout=log, stderr=log
                    )
                )
        codes = [process.wait() for process in processes]
        if any(codes):
            failed = next(rank for rank, code in enumerate(codes) if code)
            lines = (work / f"{name}.rank{failed}.log").read_text(errors="replace").splitlines()[-SHOWN_LINES:]
            raise SystemExit("\n".join([f"{name} failed, rank {failed} with exit code {codes[failed]}:", *lines]))
        result = load_result(run_dir)
    suffix = "_files"
    seen, seconds = sum(result.facts["samples_seen"]), result.value("train_s") or 0.0
    return {
        "windows_per_s": seen / seconds,
        "questions_per_s": seen / seconds * result.facts["questions"]["train"] / result.facts["features"]["train"],
        "padding_share": result.value("padding_share") or 0.0,
        "mfu": result.value("mfu") or 0.0,
        "loss_final": result.value(f"loss_final{suffix}") or 0.0,
        "f1": result.value(f"f1{suffix}") or 0.0,
    }


def main() -> None:
    """Run the variants in turns and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", required=True, help="SQuAD v1.1 file to train on")
    parser.add_argument("--eval", required=True, help="SQuAD v1.1 file to evaluate on")
    parser.add_argument("--model", required=True, help="encoder: a folder or a hub name")
    parser.add_argument("--questions", type=int, default=320, help="questions of an epoch; 0: all of the file")
    parser.add_argument("--rounds", type=int, default=3, help="how often each variant is run")
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--variants", default=",".join(DEFAULT), help="comma-separated; known: " + ", ".join(VARIANTS))
    parser.add_argument("--f1", action="store_true", help="evaluate on all of --eval")
    parser.add_argument("--json", type=Path, help="write the numbers of every run here")
    options = parser.parse_args()
    names = options.variants.split(",")
    unknown = [name for name in names if name not in VARIANTS]
    if unknown:
        parser.error(f"unknown variant {unknown[0]}: known are {', '.join(VARIANTS)}")

    lacks = probe_devices()["backends"]["cpu"].get("lacks", {})
    skipped = {name: why for name in names if (why := lacks.get(VARIANTS[name][1].get("precision", "fp32")))}
    for name, why in skipped.items():
        print(f"{name}: skipped, {why}", flush=True)
    names = [name for name in names if name not in skipped]
    if not names:
        parser.error("no variant can run here")

    rows: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as work:
        for number in range(options.rounds):
            for name in names:
                rows[name].append(run(name, options, Path(work)))
                print(
                    f"round {number + 1}: {name}: {rows[name][-1]['questions_per_s']:.2f} questions/s, load {os.getloadavg()[0]:.1f}",
                    flush=True,
                )

    print(
        f"\n{cpu_model()}, {usable_cores()} cores, global batch {GLOBAL_BATCH}, max length 384, {options.questions or 'all'} questions"
    )
    print(f"{'variant':28} {'questions/s':>12} {'ratio':>6} {'(range)':>13} {'padding':>8} {'MFU':>6} {'F1':>6}")
    for name in names:
        speeds = [row["questions_per_s"] for row in rows[name]]
        ratios = [
            row["questions_per_s"] / base["questions_per_s"]
            for row, base in zip(rows[name], rows[names[0]], strict=True)
        ]
        last = rows[name][-1]
        f1 = f"{statistics.median(row['f1'] for row in rows[name]):6.2f}" if options.f1 else "     -"
        print(
            f"{name:28} {statistics.median(speeds):12.2f} {statistics.median(ratios):6.2f} {f'({min(ratios):.2f}-{max(ratios):.2f})':>13}"
            f" {last['padding_share']:8.1%} {last['mfu']:6.1%} {f1}"
        )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
