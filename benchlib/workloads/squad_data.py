"""Questions with their paragraphs: of a file in the official SQuAD v1.1 JSON format, or of the Hugging Face hub; every rule is checked."""

import hashlib
import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from benchlib.core.errors import UserError
from benchlib.core.files import read_model

HUB_NAME = "rajpurkar/squad"


@dataclass(frozen=True, slots=True)
class Example:
    """A question, the paragraph that holds its answer, and the gold answers.

    ``answers`` holds (text, start) pairs; ``start`` counts characters (code points) of ``context``, so
    ``context[start:start + len(text)] == text`` for each of them.
    """

    id: str
    question: str
    context: str
    answers: tuple[tuple[str, int], ...]
    title: str = ""


class _Part(BaseModel):
    model_config = ConfigDict(strict=True)  # further keys are ignored


class _Answer(_Part):
    text: str
    answer_start: int


class _Question(_Part):
    id: str
    question: str
    answers: list[_Answer]
    is_impossible: Literal[False] = False  # SQuAD 2.0 has unanswerable questions, which this benchmark does not score


class _Paragraph(_Part):
    context: str
    qas: list[_Question]


class _Article(_Part):
    title: str
    paragraphs: list[_Paragraph]


class _File(_Part):
    version: Literal["1.1"]
    data: list[_Article]


def read_squad(path: Path | str) -> list[Example]:
    """Read a SQuAD v1.1 file, in the order of the file.

    Raises ``UserError`` that names the file and the place where the format is broken.
    """
    examples = []
    for article in read_model(path, _File, "a SQuAD v1.1 file").data:
        for paragraph in article.paragraphs:
            for item in paragraph.qas:
                answers = tuple((answer.text, answer.answer_start) for answer in item.answers)
                examples.append(Example(item.id, item.question, paragraph.context, answers, article.title))
    return check_examples(examples, str(path))


def check_examples(examples: Iterable[Example], source: str) -> list[Example]:
    """Return ``examples`` as a list; ``UserError`` names ``source``, article and question where a rule is broken."""
    seen: dict[str, Example] = {}
    for example in examples:
        problem = _problem(example)
        if example.id in seen:
            problem = "duplicate id: another question has it, too"
        if problem:
            raise UserError(f"{source}: article {example.title!r}, question {example.id!r}: {problem}")
        seen[example.id] = example
    if not seen:
        raise UserError(f"{source}: no questions in it")
    return [*seen.values()]


def _problem(example: Example) -> str:
    parts = {"id": example.id, "question": example.question, "context": example.context.strip()}
    if empty := next((name for name, text in parts.items() if not text), ""):
        return f"the {empty} is empty"
    if not example.answers:
        return "no answers: SQuAD v1.1 has at least one gold answer for each question"
    for text, start in example.answers:
        if not text.strip():
            return "the text of an answer is empty"
        if start < 0 or not example.context.startswith(text, start):
            return f"answer {text[:60]!r} is not at its offset, answer_start {start}"
    return ""


def load_hub(name: str = HUB_NAME) -> tuple[list[Example], list[Example]]:
    """Load (training, validation) questions of a ``datasets`` repository with SQuAD's columns.

    ``name`` is a repository of the hub or a local folder laid out like one. What ``datasets`` has in its cache is used
    without a connection.
    """
    import datasets  # a second of import that the other sources need not pay

    try:
        tables = datasets.load_dataset(name)
        parts = [list(map(_example, tables[part])) for part in ("train", "validation")]
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


def _example(row: Any) -> Example:
    answers = row["answers"]
    pairs = tuple(zip(answers["text"], answers["answer_start"], strict=True))
    return Example(row["id"], row["question"], row["context"], pairs, row["title"])


def take(examples: Sequence[Example], count: int, seed: int) -> list[Example]:
    """Return ``count`` of ``examples`` in their order; all of them for 0 or when there are no more.

    The choice depends on ids and seed only, not on the order of the data or a library's generator: those with the
    smallest SHA-256 of "seed:id". A smaller count is therefore always a part of a larger one.
    """

    def rank(index: int) -> bytes:
        return hashlib.sha256(f"{seed}:{examples[index].id}".encode()).digest()

    return [
        examples[index] for index in sorted(heapq.nsmallest(count or len(examples), range(len(examples)), key=rank))
    ]
