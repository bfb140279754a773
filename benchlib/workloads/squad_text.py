"""Questions with their paragraphs, and the official SQuAD v1.1 JSON format: read with every rule checked.

A file is ``{"version": "1.1", "data": [article]}``; an article has a ``title`` and ``paragraphs``, a paragraph a
``context`` and ``qas``, a question an ``id``, a ``question`` and ``answers``, an answer a ``text`` and the
``answer_start`` of it, counted in characters (code points) of the context. Further keys are passed over.
"""

import codecs
import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchlib.core.errors import DataError
from benchlib.core.files import read_bytes

VERSION = "1.1"

_JSON_NAMES = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}


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

    A missing file is a ``UserError``. Whatever breaks the format is a ``DataError`` that names the file, the article's
    title, the question's id (as far as the file got to them) and the reason.
    """
    source = Path(path)
    content = _parse(source)
    if not isinstance(content, dict):
        raise DataError(f"{source}: not a SQuAD file: expected an object with version and data, found {_kind(content)}")
    if "version" not in content:
        raise DataError(f'{source}: not a SQuAD v1.1 file: the key version is missing; add "version": "{VERSION}"')
    if content["version"] != VERSION:
        hint = " (SQuAD 2.0 has unanswerable questions, which this benchmark does not score)"
        raise DataError(
            f'{source}: version is {content["version"]!r}, expected "{VERSION}": give a SQuAD v1.1 file'
            + (hint if "2" in str(content["version"]) else "")
        )
    seen: dict[str, str] = {}
    examples = [
        example
        for number, article in enumerate(_list(content, "data", str(source)), start=1)
        for example in _article(article, f"{source}: article {number}", source, seen)
    ]
    if not examples:
        raise DataError(f"{source}: no questions in it")
    return examples


def check_examples(examples: Iterable[Example], source: str) -> list[Example]:
    """Return ``examples`` as a list when each keeps the rules of the format; ``source`` names them in the errors.

    For data that comes in another container (a ``datasets`` table, a generator). Raises ``DataError``.
    """
    seen: dict[str, str] = {}
    checked = []
    for example in examples:
        where = f"{source}: article {example.title!r}, question {example.id!r}"
        _claim_id(example.id, example.title, where, seen)
        _check_text(example.context, "context", where)
        _check_text(example.question, "question", where)
        if not example.answers:
            raise DataError(f"{where}: no answers: SQuAD v1.1 has at least one gold answer for each question")
        for text, start in example.answers:
            _check_answer(text, start, example.context, where)
        checked.append(example)
    if not checked:
        raise DataError(f"{source}: no questions in it")
    return checked


def _parse(source: Path) -> Any:
    raw = read_bytes(source)
    for mark, name in (
        (codecs.BOM_UTF8, "UTF-8 with a byte order mark"),
        (codecs.BOM_UTF16_LE, "UTF-16"),
        (codecs.BOM_UTF16_BE, "UTF-16"),
    ):
        if raw.startswith(mark):
            raise DataError(f"{source}: wrong encoding: the file is {name}; save it as UTF-8 without a byte order mark")
    try:
        return json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(f"{source}: wrong encoding: not UTF-8 at byte {error.start}; save the file as UTF-8") from None
    except json.JSONDecodeError as error:
        cut = "; the file ends too early, it may be cut" if error.pos >= len(error.doc.rstrip()) else ""
        if error.msg.startswith("Unterminated string"):
            cut = "; the file may be cut"
        raise DataError(
            f"{source}: not JSON: {error.msg.removesuffix(' at')} at line {error.lineno}, column {error.colno}{cut}"
        ) from None
    except RecursionError:
        raise DataError(f"{source}: not a SQuAD file: its JSON is nested too deeply") from None


def _article(article: Any, where: str, source: Path, seen: dict[str, str]) -> Iterator[Example]:
    title = _text(article, "title", where)
    where = f"{source}: article {title!r}"
    for number, paragraph in enumerate(_list(article, "paragraphs", where), start=1):
        place = f"{where}, paragraph {number}"
        context = _text(paragraph, "context", place)
        questions = _list(paragraph, "qas", place)
        # The first question stands for a paragraph whose context is wrong: its id is what a user can search for.
        first = questions[0] if questions and isinstance(questions[0], dict) else {}
        _check_text(context, "context", f"{where}, question {first['id']!r}" if "id" in first else place)
        for position, item in enumerate(questions, start=1):
            yield _question(item, f"{place}, question {position}", where, title, context, seen)


def _question(item: Any, place: str, article: str, title: str, context: str, seen: dict[str, str]) -> Example:
    name = _text(item, "id", place)
    where = f"{article}, question {name!r}"
    _claim_id(name, title, where, seen)
    question = _text(item, "question", where)
    _check_text(question, "question", where)
    if item.get("is_impossible"):
        raise DataError(
            f"{where}: is_impossible is set: unanswerable questions belong to SQuAD 2.0; give a SQuAD v1.1 file"
        )
    answers = []
    for answer in _list(item, "answers", where):
        text, start = _text(answer, "text", where), _field(answer, "answer_start", where)
        if type(start) is not int:
            raise DataError(f"{where}: answer_start must be a whole number, found {_kind(start)}")
        _check_answer(text, start, context, where)
        answers.append((text, start))
    if not answers:
        raise DataError(f"{where}: no answers: SQuAD v1.1 has at least one gold answer for each question")
    return Example(name, question, context, tuple(answers), title)


def _claim_id(name: str, title: str, where: str, seen: dict[str, str]) -> None:
    if not name:
        raise DataError(f"{where}: the id is empty")
    if name in seen:
        raise DataError(f"{where}: duplicate id: a question of article {seen[name]!r} has it too; ids must be unique")
    seen[name] = title


def _check_text(text: str, what: str, where: str) -> None:
    if not isinstance(text, str):
        raise DataError(f"{where}: the {what} must be text, found {_kind(text)}")
    if not text or (what == "context" and not text.strip()):
        raise DataError(f"{where}: the {what} is empty")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: the {what} holds half of a surrogate pair at character {error.start}: not valid text"
        ) from None


def _check_answer(text: str, start: int, context: str, where: str) -> None:
    if not text.strip():
        raise DataError(f"{where}: the text of an answer is empty")
    there = context[start : start + len(text)] if start >= 0 else ""
    if there != text:
        other = context.find(text)
        remedy = f"it first occurs at {other}" if other >= 0 else "it does not occur in the context"
        raise DataError(
            f"{where}: answer {_short(text)} is not at its offset: answer_start {start} of the context, which has "
            f"{len(context)} characters, reads {_short(there)}; {remedy}"
        )


def _field(item: Any, key: str, where: str) -> Any:
    if not isinstance(item, dict):
        raise DataError(f"{where}: expected an object with the key {key}, found {_kind(item)}")
    if key not in item:
        raise DataError(f"{where}: the key {key} is missing")
    return item[key]


def _text(item: Any, key: str, where: str) -> str:
    value = _field(item, key, where)
    if not isinstance(value, str):
        raise DataError(f"{where}: {key} must be text, found {_kind(value)}")
    return value


def _list(item: Any, key: str, where: str) -> list[Any]:
    value = _field(item, key, where)
    if not isinstance(value, list):
        raise DataError(f"{where}: {key} must be a list, found {_kind(value)}")
    return value


def _kind(value: Any) -> str:
    return _JSON_NAMES.get(type(value), f"the number {value!r}")


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")
