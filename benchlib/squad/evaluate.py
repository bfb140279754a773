"""Answers to the evaluation questions by all ranks together, their score, and the worst misses.

Letters: F windows, T tokens of all windows.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchlib import devices
from benchlib.batches import collate
from benchlib.events import EventWriter
from benchlib.example import Example
from benchlib.features import Features
from benchlib.models import Loaded
from benchlib.process_group import World
from benchlib.squad.steplog import comm_device

TOKENS_PER_BATCH = 8192  # without gradients a batch needs little memory; larger ones are no faster on a CPU
MISSES = 20
_AROUND = 120  # characters of context on each side of the gold answer in the table of misses


def predict(
    loaded: Loaded, features: Features, world: World, events: EventWriter, precision: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return (start logits, end logits), float32 (T,) each, whole on rank 0. Called by all ranks.

    Windows are sorted by length and dealt in turns, so that the ranks have equal work and pad little.
    """
    model = loaded.model.eval()
    order = np.argsort(-features.lengths, kind="stable")[world.rank :: world.size]
    logits = np.zeros((2, len(features.input_ids)), np.float32)
    done = 0
    with torch.inference_mode():
        while done < len(order):
            count = max(1, TOKENS_PER_BATCH // int(features.lengths[order[done]]))
            part = order[done : done + count]
            batch = collate(features, part, loaded.tokenizer.pad_token_id).to(world.device)
            with devices.autocast(precision, world.device):
                output = model(**batch.inputs)
            real = np.arange(batch.shape[1]) < features.lengths[part][:, None]
            places = (features.starts[part][:, None] + np.arange(batch.shape[1]))[real]
            for row, found in enumerate((output.start_logits, output.end_logits)):
                logits[row, places] = found.float().cpu().numpy()[real]
            done += len(part)
            events.emit("progress", phase="evaluate", done=done, total=len(order), unit="windows")
    # Each rank filled its own places and left the others zero: the sum puts them together.
    total = torch.from_numpy(logits).to(comm_device(world))
    dist.reduce(total, dst=0)
    joined = total.cpu().numpy()
    return joined[0], joined[1]


def misses(
    examples: Sequence[Example],
    predictions: Mapping[str, str],
    per_question: Sequence[Mapping[str, Any]],
    limit: int = MISSES,
) -> list[dict[str, Any]]:
    """Return the questions with the lowest F1 below 100, the worst first, with an excerpt around the gold answer."""
    wrong = sorted((row for row in per_question if row["f1"] < 100), key=lambda row: row["f1"])[:limit]
    by_id = {example.id: example for example in examples}
    rows = []
    for row in wrong:
        example = by_id[row["id"]]
        texts = list(dict.fromkeys(text for text, _ in example.answers))
        first, size = example.answers[0][1], len(example.answers[0][0])
        low, high = max(0, first - _AROUND), min(len(example.context), first + size + _AROUND)
        excerpt = ("…" if low else "") + example.context[low:high] + ("…" if high < len(example.context) else "")
        rows.append(
            {
                "id": example.id,
                "question": example.question,
                "prediction": predictions.get(example.id, ""),
                "answers": texts,
                "f1": row["f1"],
                "context": excerpt,
            }
        )
    return rows
