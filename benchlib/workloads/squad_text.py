"""Questions with their paragraphs, and the official SQuAD v1.1 JSON format: read with every rule checked."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from benchlib.core.errors import UserError
from benchlib.core.files import read_model


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


def content_sha256(examples: Iterable[Example]) -> str:
    """Return 64 hex digits that stand for ids, texts, answers and order of ``examples``; titles do not count."""
    digest = hashlib.sha256()
    for example in examples:
        fields = [example.id, example.question, example.context]
        for text, start in example.answers:
            fields += [text, str(start)]
        encoded = [field.encode() for field in fields]
        # The lengths go first: without them two ways of cutting the same characters into fields would be one.
        digest.update(repr([len(field) for field in encoded]).encode() + b"".join(encoded))
    return digest.hexdigest()


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
    titles: dict[str, str] = {}
    checked = []
    for example in examples:
        problem = _problem(example)
        if example.id in titles:
            problem = f"duplicate id: a question of article {titles[example.id]!r} has it too; ids must be unique"
        if problem:
            raise UserError(f"{source}: article {example.title!r}, question {example.id!r}: {problem}")
        titles[example.id] = example.title
        checked.append(example)
    if not checked:
        raise UserError(f"{source}: no questions in it")
    return checked


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
            first = example.context.find(text)
            place = f"it first occurs at {first}" if first >= 0 else "it does not occur in the context"
            return f"answer {text[:60]!r} is not at its offset, answer_start {start}: {place}"
    return ""
