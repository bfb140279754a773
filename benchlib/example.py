"""One question of an extractive question answering set, as every source of data delivers it."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Example:
    """A question, the paragraph that holds its answer, and the gold answers.

    `answers` holds (text, start) pairs; `start` counts characters (code points) of `context`, so
    `context[start:start + len(text)] == text` for each of them.
    """

    id: str
    question: str
    context: str
    answers: tuple[tuple[str, int], ...]
    title: str = ""


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
