"""How much faster is the training loop of `squad` than the usual recipe, and does it cost accuracy?

Windows of SQuAD questions per second of training by `engine=native`, against transformers' Trainer that pads to the maximum
length or to the longest window of a batch. Each variant is a run of the benchmark itself (`python -m benchlib.runtime.worker`) in processes of its own. All train one
epoch on the same questions with the same global batch. The variants are interleaved, `--rounds` times; the ratio to the first one
is formed within each round. The time is that of the training loop, without start-up, tokenising and evaluation. A question has
about one window. A precision that this machine does not support ends the run with its reason.

    python scripts/bench_training.py --train train.json --eval dev.json --model FOLDER
    python scripts/bench_training.py --train train.json --eval dev.json --model FOLDER --questions 0 --f1 --rounds 1

`--f1` evaluates on all of `--eval`; `--questions 0` trains on all questions.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from measuring import interleaved, machine, options_of, ratio, spread

from benchlib.config.schema import build, save_config
from benchlib.results.run import Run

GLOBAL_BATCH, RANKS = 16, 2  # a rank has cores / ranks threads
VARIANTS: dict[str, dict[str, Any]] = {
    "trainer-max-fp32": {"engine": "trainer", "trainer_padding": "max_length"},
    "trainer-longest-fp32": {"engine": "trainer", "trainer_padding": "longest"},
    "native-fp32": {},
    "native-bf16": {"precision": "bf16"},
}


def run(name: str, options: argparse.Namespace, work: Path) -> dict[str, float]:
    """Questions per second, padding share, MFU and F1 of one run."""
    values: dict[str, Any] = {
        "data": "files", "train_file": options.train, "eval_file": options.eval, "model": options.model, "nproc": RANKS,
        "train_questions": options.questions, "eval_questions": 0 if options.f1 else 2, "max_length": 384, "doc_stride": 128,
        "batch_size": GLOBAL_BATCH // RANKS, "learning_rate": 1e-4, "epochs": 1, "budget_s": 1e6, "stall_timeout_s": 600,
        "checkpoint_every": -1,
    }  # fmt: skip
    with tempfile.TemporaryDirectory(dir=work) as folder:
        save_config(build("squad", values | VARIANTS[name]), Path(folder))
        processes = []
        for rank in range(RANKS):
            place = {"RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": RANKS}
            env = os.environ | {key: str(value) for key, value in place.items()} | {"BENCHLIB_OUTPUTS": str(work)}
            command = [sys.executable, "-m", "benchlib.runtime.worker", folder]
            processes.append(subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL))
        codes = [process.wait() for process in processes]
        if any(codes):
            raise SystemExit(f"{name} failed")
        result = Run(folder).result
    assert result is not None
    row = result.facts
    windows_per_question = row["epoch_items"] / row["train_questions"]
    questions_per_s = sum(row["samples_seen"]) / windows_per_question / (result.value("train_s") or float("nan"))
    metrics = {name: result.value(name) or 0.0 for name in ("padding_share", "mfu")}
    return metrics | {"questions_per_s": questions_per_s, "f1": result.value("f1_files") or 0.0}


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--train", required=True, help="SQuAD v1.1 file to train on")
    parser.add_argument("--eval", required=True, help="SQuAD v1.1 file to evaluate on")
    parser.add_argument("--model", required=True, help="encoder: a folder or a hub name")
    parser.add_argument("--questions", type=int, default=320, help="questions of an epoch; 0: all of the file [320]")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each variant [3]")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--f1", action="store_true", help="evaluate on all of --eval")
    options = parser.parse_args()
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in options.variants}
    with tempfile.TemporaryDirectory() as work:
        for name in interleaved(options.variants, options.rounds):
            rows[name].append(run(name, options, Path(work)))
            print(f"{name}: {rows[name][-1]['questions_per_s']:.2f} questions/s", flush=True)
    print(f"\n{machine()}, global batch {GLOBAL_BATCH}, max length 384, {options.questions or 'all'} questions")
    speeds = {name: [row["questions_per_s"] for row in of_name] for name, of_name in rows.items()}
    for name, of_name in rows.items():
        padding, mfu, f1 = (statistics.median(row[key] for row in of_name) for key in ("padding_share", "mfu", "f1"))
        print(f"{name:21} {spread(speeds[name])} questions/s, ratio {ratio(speeds[name], speeds[options.variants[0]])}, "
              f"padding {padding:.1%}, MFU {mfu:.1%}{f', F1 {f1:.2f}' if options.f1 else ''}")  # fmt: skip


if __name__ == "__main__":
    main()
