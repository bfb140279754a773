"""One question of an extractive question answering set, as every source of data delivers it."""

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
