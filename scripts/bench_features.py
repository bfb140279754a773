"""How fast are the features made?

Question: what does benchlib's feature builder (every context tokenised once, windows joined by the tokenizer) gain over the usual recipe (``tokenizer(..., return_overflowing_tokens=True)`` and a loop for the
answer positions, through ``datasets.map``, whose cache is Arrow)?

Method: both make the features of the same questions, in turns (A B, B A, ...). The ratio is
the median of the ratios of the rounds. Nothing is padded on either side. With fewer questions in the file than asked for, its articles are
repeated with a number before each question and context, so that no text is equal to another and the size is reached
honestly.

    python scripts/bench_features.py --file train-v1.1.json --tokenizer bert-base-uncased
    python scripts/bench_features.py --questions 90000 --ours-only   # generated questions, the embedded tokenizer
"""

import argparse
import dataclasses
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchlib.workloads import encoders, features, minisquad
from benchlib.workloads.squad_text import Example, read_squad


def questions(path: str, count: int, seed: int) -> list[Example]:
    """Return ``count`` questions of a file, or generated ones; 0: all of the file."""
    if not path:
        return minisquad.generate(count or 10_000, seed, "train")
    base = read_squad(path)
    copies = [
        dataclasses.replace(
            example,
            id=f"{copy}-{example.id}",
            question=f"{copy} {example.question}" if copy else example.question,
            context=f"{copy} {example.context}" if copy else example.context,
            answers=tuple((text, start + len(f"{copy} ")) for text, start in example.answers)
            if copy
            else example.answers,
        )
        for copy in range(-(-(count or len(base)) // len(base)))
        for example in base
    ]
    return copies[: count or len(base)]


def usual_recipe(examples: list[Example], tokenizer: Any, max_length: int, doc_stride: int, folder: Path) -> int:
    """Make the features with ``datasets.map`` and return their number."""
    import datasets

    table = datasets.Dataset.from_dict(
        {
            "question": [example.question for example in examples],
            "context": [example.context for example in examples],
            "begin": [example.answers[0][1] for example in examples],
            "end": [example.answers[0][1] + len(example.answers[0][0]) for example in examples],
        }
    )

    def prepare(batch: dict[str, list[Any]]) -> Any:
        encoded = tokenizer(
            [question.lstrip() for question in batch["question"]],
            batch["context"],
            truncation="only_second",
            max_length=max_length,
            stride=doc_stride,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
        )
        starts, ends = [], []
        for i, (index, offsets) in enumerate(
            zip(encoded.pop("overflow_to_sample_mapping"), encoded.pop("offset_mapping"), strict=True)
        ):
            parts = encoded.sequence_ids(i)
            low = parts.index(1)
            high = len(parts) - 1 - parts[::-1].index(1)
            begin, end = batch["begin"][index], batch["end"][index]
            if offsets[low][0] > begin or offsets[high][1] < end:
                starts.append(0)
                ends.append(0)
                continue
            while low <= high and offsets[low][0] <= begin:
                low += 1
            while offsets[high][1] >= end:
                high -= 1
            starts.append(low - 1)
            ends.append(high + 1)
        encoded["start_positions"], encoded["end_positions"] = starts, ends
        return encoded

    return len(
        table.map(
            prepare, batched=True, remove_columns=table.column_names, cache_file_name=str(folder / "recipe.arrow")
        )
    )


def main() -> None:
    """Measure and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", default="", help="a SQuAD v1.1 JSON file; without it the questions are generated")
    parser.add_argument("--tokenizer", default="", help="hub name or folder; without it the embedded model's")
    parser.add_argument(
        "--questions", type=int, default=0, help="how many; 0: all of the file, or 10,000 generated ones"
    )
    parser.add_argument("--max-length", type=int, default=384)
    parser.add_argument("--doc-stride", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ours-only", action="store_true", help="skip the usual recipe")
    arguments = parser.parse_args()

    import datasets
    import transformers

    datasets.disable_progress_bars()
    transformers.utils.logging.set_verbosity_error()
    folder = arguments.tokenizer or str(encoders.TINY)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    examples = questions(arguments.file, arguments.questions, seed=0)
    size = (arguments.max_length, arguments.doc_stride)

    ours: list[float] = []
    recipe: list[float] = []
    made = 0

    def build_ours() -> None:
        nonlocal made
        began = time.perf_counter()
        made = len(features.build(examples, tokenizer, *size, True, None))
        ours.append(time.perf_counter() - began)

    def build_recipe() -> None:
        with tempfile.TemporaryDirectory() as cache:
            began = time.perf_counter()
            count = usual_recipe(examples, tokenizer, *size, Path(cache))
            recipe.append(time.perf_counter() - began)
            assert count == made or not made, f"{count} features here, {made} there"

    for number in range(1 if arguments.ours_only else arguments.rounds):
        order = [build_ours] if arguments.ours_only else [build_ours, build_recipe][:: 1 if number % 2 == 0 else -1]
        for measure in order:
            measure()

    report: dict[str, Any] = {
        "questions": len(examples),
        "features": made,
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "build_s": [round(value, 3) for value in ours],
        "build_questions_per_s": round(len(examples) / statistics.median(ours)),
    }
    if recipe:
        report["recipe_s"] = [round(value, 3) for value in recipe]
        report["recipe_questions_per_s"] = round(len(examples) / statistics.median(recipe))
        report["ratio"] = round(statistics.median(theirs / mine for theirs, mine in zip(recipe, ours, strict=True)), 2)
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
