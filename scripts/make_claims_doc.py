"""Write the tables of docs/claims.md: the rules of impossible numbers and the fields of a claim file, from their own descriptions.

python scripts/make_claims_doc.py            # write
python scripts/make_claims_doc.py --check    # write nothing; exit with 1 where the page is out of date
"""

import sys
import types
import typing
from collections.abc import Iterator
from typing import Any

from measuring import options_of
from pydantic import BaseModel

from benchlib.core.files import home, write_text
from benchlib.judge.impossible.claim import Claim, ClaimFile, Part
from benchlib.judge.impossible.rules import RULES

PAGE = home() / "docs" / "claims.md"
BEGIN, END = "<!-- written by scripts/make_claims_doc.py -->\n", "<!-- end of what is written -->\n"
WORDS = {int: "whole number", float: "number", str: "text", bool: "true or false", type(None): ""}


def kind(annotation: Any) -> str:
    """Say in words what a field takes."""
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return kind(inner[0])
    if origin is typing.Literal:
        return ", ".join(repr(value).replace("'", '"') for value in inner)
    if origin in (typing.Union, types.UnionType):
        return next(word for word in map(kind, inner) if word)
    if origin is list:
        return f"list of {kind(inner[0])}s"
    if origin is dict:
        return f"{kind(inner[1])}s by name".replace("texts", "text")
    return WORDS.get(annotation, "object")


def fields(title: str, model: type[BaseModel], words: str = "") -> Iterator[str]:
    """Yield the lines of a section: what a model is, and its fields."""
    yield from ("", f"## {title}", "", *([words, ""] if words else []))
    yield from ("| field | takes | what it is |", "|---|---|---|")
    for name, field in model.model_fields.items():
        needed = " (needed)" if field.is_required() else ""
        yield f"| `{name}` | {kind(field.annotation)} | {field.description}{needed} |"


def tables() -> str:
    """Return what stands between the two comments of the page."""
    lines = ["", "| rule | refuses |", "|---|---|", *(f"| {rule.name} | {rule.catches} |" for rule in RULES.values())]
    lines += [*fields("The file", ClaimFile), *fields("A claim", Claim)]
    for name, field in Claim.model_fields.items():
        for model in typing.get_args(field.annotation):
            if isinstance(model, type) and issubclass(model, Part):
                lines += fields(f"`{name}`", model, " ".join((model.__doc__ or "").replace("``", "`").split()))
    return "\n".join([*lines, "", ""])


def page() -> str:
    """Return the page with its tables as they should be."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return before + BEGIN + tables() + END + rest.partition(END)[2]


if __name__ == "__main__":
    parser = options_of(__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 where the page is out of date")
    if parser.parse_args().check:
        sys.exit(page() != PAGE.read_text(encoding="utf-8"))
    write_text(PAGE, page())
