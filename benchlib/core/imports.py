"""Imports of large libraries without Python's cycle collector, which looks again and again through what stays for good."""

import contextlib
import gc
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
