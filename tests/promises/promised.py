"""How a promise is declared: a test that runs a command, or calls a public function, and looks at what comes out.

The docstring of a module is the title of its section in docs/promises.md, which ``scripts/make_promises_doc.py`` writes from here.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import pytest


@dataclass(frozen=True)
class Promise:
    """A row: its number, what a user can do, the command that does it, and the hardware that the whole of it needs."""

    number: str
    what: str
    command: str
    needs: str = ""


def promise(number: str, what: str, command: str, needs: str = "") -> Callable[[Any], Any]:
    """Declare that a test holds a promise. With ``needs`` the test shows what can be shown without it and ends with ``skip_rest``."""
    row = Promise(number, what, command, needs)
    assert re.fullmatch(r"P\d{3}", number) and what and command

    def declare(test: Any) -> Any:
        assert test.__name__.startswith(f"test_{number.lower()}_"), f"{test.__name__} holds {number}"
        test.promise = row
        return test

    return declare


def skip_rest(reason: str) -> NoReturn:
    """End a test whose remaining part needs hardware that is not here."""
    pytest.skip(reason)
