"""Question answering data: one loader with three sources.

``minisquad`` is generated, ``squad`` comes from the Hugging Face hub through ``datasets`` (which caches it), ``files``
are two files in the official SQuAD v1.1 format.
"""

import hashlib
import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchlib.core.errors import UserError
from benchlib.workloads import minisquad
from benchlib.workloads.squad_text import Example, check_examples, content_sha256, read_squad

HUB_NAME = "rajpurkar/squad"


@dataclass(frozen=True)
class Split:
    """Questions to train on and to evaluate on, after the caps.

    ``shared`` counts ids that are in both lists: such questions do not measure generalisation. ``sha256`` is of the
    content of both lists: equal means equal questions in equal order.
    """

    train: list[Example]
    eval: list[Example]
    description: str
    shared: int
    sha256: str


def load(
    data: str, train_questions: int, eval_questions: int, seed: int, train_file: str = "", eval_file: str = ""
) -> Split:
    """Load the questions of a source, at most ``train_questions`` and ``eval_questions`` of them (0: all).

    ``data`` is "minisquad" (generated from ``seed``, needs both counts), "squad" (the hub's) or "files" (the two given
    ones). Raises ``UserError`` where a source cannot be reached or its content breaks the format.
    """
    if data == "minisquad":
        source = "minisquad, the embedded generator"
        whole = (minisquad.generate(train_questions, seed, "train"), minisquad.generate(eval_questions, seed, "eval"))
    elif data == "squad":
        source, whole = HUB_NAME, load_hub()
    else:
        source, whole = f"{train_file}, {eval_file}", (read_squad(train_file), read_squad(eval_file))
    train, evaluation = take(whole[0], train_questions, seed), take(whole[1], eval_questions, seed)
    description = (
        f"{source}: {_counts(train, len(whole[0]))} to train on, {_counts(evaluation, len(whole[1]))} to evaluate on"
    )
    shared = len({example.id for example in train} & {example.id for example in evaluation})
    return Split(train, evaluation, description, shared, content_sha256([*train, *evaluation]))


def load_hub(name: str = HUB_NAME) -> tuple[list[Example], list[Example]]:
    """Load (training, validation) questions of a ``datasets`` repository with SQuAD's columns.

    ``name`` is a repository of the hub or a local folder laid out like one. What ``datasets`` has in its cache is used
    without a connection.
    """
    import datasets  # a second of import that the other sources need not pay

    try:
        tables = datasets.load_dataset(name)
        parts = [list(map(_example, tables[part])) for part in ("train", "validation")]
    except (KeyError, TypeError) as error:
        raise UserError(f"{name}: not laid out like {HUB_NAME}: {error!r}") from error
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        # datasets reports an unreachable hub as ConnectionError, a missing folder as FileNotFoundError and an offline
        # cache without this set as ValueError; all of them are for the user to mend.
        reason = " ".join(str(error).split())
        raise UserError(
            f"{name} cannot be loaded: {reason}. It is neither in the cache of datasets nor reachable: connect once "
            "(without HF_HUB_OFFLINE and HF_DATASETS_OFFLINE), or give train_file=F and eval_file=G in the SQuAD v1.1 "
            "JSON format, or use data=minisquad"
        ) from error
    return check_examples(parts[0], f"{name} (train)"), check_examples(parts[1], f"{name} (validation)")


def take(examples: Sequence[Example], count: int, seed: int) -> list[Example]:
    """Return ``count`` of ``examples`` in their order; all of them for 0 or when there are no more.

    The choice depends on ids and seed only, not on the order of the data or a library's generator: those with the
    smallest SHA-256 of "seed:id". A smaller count is therefore always a part of a larger one.
    """
    if count == 0 or count >= len(examples):
        return list(examples)

    def rank(index: int) -> bytes:
        return hashlib.sha256(f"{seed}:{examples[index].id}".encode()).digest()

    return [examples[index] for index in sorted(heapq.nsmallest(count, range(len(examples)), key=rank))]


def _example(row: Any) -> Example:
    answers = row["answers"]
    pairs = tuple(zip(answers["text"], answers["answer_start"], strict=True))
    return Example(row["id"], row["question"], row["context"], pairs, row["title"])


def _counts(examples: list[Example], available: int) -> str:
    return f"{len(examples)} questions" if len(examples) == available else f"{len(examples)} of {available} questions"
