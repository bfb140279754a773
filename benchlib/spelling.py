"""What a misspelt name may have meant."""

import difflib
from collections.abc import Iterable


def nearest(name: str, names: Iterable[str]) -> str:
    """Return a sentence that names the known name most like ``name``, else all of them."""
    known = sorted(names)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {close[0]}?" if close else "known: " + ", ".join(known)
