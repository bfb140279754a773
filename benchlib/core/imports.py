"""Large libraries and data without Python's cycle collector, which looks again and again through what stays for good."""

import contextlib
import gc
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Import in this block; what is there at its end is never looked through again. A fifth of the time of torch and transformers."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.freeze()
            gc.enable()


@contextlib.contextmanager
def importing_jupyter() -> Iterator[None]:
    """Import nbformat, or what brings it, in this block: without the grammar of IRIs, for which jsonschema takes a second.

    No notebook has IRIs. It is as if the grammar were not installed, which jsonschema takes well; others may load it later.
    """
    grammar = "rfc3987_syntax"
    hidden = grammar not in sys.modules
    if hidden:
        sys.modules[grammar] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if hidden:
            sys.modules.pop(grammar, None)


def loaded() -> None:
    """Exclude what is loaded from garbage collection, and collect the rest seldom: it took an eighth of the time per dispatched query."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
