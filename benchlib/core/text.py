"""Words and numbers for readers: kinds of checks, signs of verdicts, quantities with units, times."""

import datetime
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

GROUPS = (
    ("measured", "Measured", "taken on this machine, in this run unless the note names another"),
    ("derived", "Derived", "computed from measured values"),
    ("claimed", "Claimed", "stated by a document or a vendor, not checked here"),
    ("not_available", "Not available", "this machine or this run cannot give it"),
)


class Look(NamedTuple):
    """How a status word is shown: a sign for readers who see no colour, the tone of pages, the colour of terminals."""

    mark: str
    tone: str
    colour: str


# The words for runs and checks, the worst first: what is listed first, and what stands for several. docs/verdicts.md says what
# they mean.
WORDS = {
    "DAMAGED": Look("!", "bad", "red"),
    "BROKEN": Look("✗", "bad", "red"),
    "FAIL": Look("✗", "bad", "red"),
    "UNFINISHED": Look("…", "warn", "white"),
    "STOPPED": Look("■", "warn", "yellow"),
    "RUNNING": Look("▸", "calm", "white"),
    "AMBIGUOUS": Look("≈", "warn", "yellow"),
    "INCOMPLETE": Look("–", "warn", "yellow"),
    "DIFFERS": Look("≈", "warn", "yellow"),
    "NOT_COMPARABLE": Look("≠", "warn", "blue"),
    "NO_BASELINE": Look("○", "calm", "blue"),
    "SKIPPED": Look("–", "calm", "yellow"),
    "PASS": Look("✓", "good", "green"),
}
OF_RUNS = ("PASS", "FAIL", "BROKEN", "STOPPED", "AMBIGUOUS", "SKIPPED", "RUNNING", "UNFINISHED", "DAMAGED")
UNJUDGED = ("NOT_COMPARABLE", "NO_BASELINE", "SKIPPED")
NOT_EVALUATED = "not evaluated (no target or baseline)"


def look(word: str) -> Look:
    return WORDS.get(word, Look("?", "calm", "white"))


def badness(word: str) -> int:
    """Return the place of a word among all, the worst at 0; an unknown one is as bad as any."""
    return list(WORDS).index(word) if word in WORDS else 0


KINDS = {
    "outcome": "Outcome",
    "sanity": "Sanity",
    "target": "Targets",
    "reference": "Published reference",
    "budget": "Budget",
    "regression": "Regression against the baseline",
}


def check_word(status: str, gates: bool) -> str:
    """Return the word for a check of a status: a gate that was skipped had something to evaluate, and lacks a part of it."""
    return {("FAIL", False): "DIFFERS", ("SKIPPED", True): "INCOMPLETE"}.get((status, gates), status)


# What a result may come from instead of the real thing, by the parts of a scope (``minisquad_tiny``).
SCOPES = {
    "minisquad": "generated data",
    "files": "data from the user's files",
    "subset": "a shortened data set",
    "tiny": "the embedded stand-in model",
    "random": "random initial weights",
    "cut": "a training that was cut short",
}


def stand_ins(parts: Iterable[object]) -> list[str]:
    """Return a sentence that names the stand-ins among the parts of a scope and of a model; none where all is real."""
    named = [SCOPES[part] for part in dict.fromkeys(map(str, parts)) if part in SCOPES]
    counts = "They count only for their own baseline, never for the target of the real benchmark."
    return [f"These results come from {listing(named)}. {counts}"] if named else []


def counted(number: int, noun: str) -> str:
    """Return ``1 run`` or ``3 runs``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def shortened(names: Sequence[str], most: int = 3, between: str = ", ") -> str:
    """Return the first of many names and how many more there are: ``a, b, c and 2 more``."""
    return between.join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def listing(names: Sequence[str]) -> str:
    """Write names as a list: ``a, b and c``."""
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


UNITS = {"ratio": "", "us": "µs"}  # as readers see them


def quantity(value: float, unit: str = "") -> str:
    """Format a value with about three significant digits: ``0.0512 s``, ``220.1 GFLOP/s``, ``65.3%``; a ratio has no unit."""
    size = abs(value)
    if unit == "h" and 0 < size < 1:
        return quantity(60 * value, "min")
    if unit == "FLOP/s":
        for prefix, scale in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6)):
            if size >= scale:
                return f"{quantity(value / scale)} {prefix}{unit}"
    form = ".3g" if size < 10 or size >= 1e7 else ".2f" if size < 100 else ".1f" if size < 1000 else ",.0f"
    return with_unit(format(value, form), UNITS.get(unit, unit))


def with_unit(number: str, unit: str) -> str:
    """Write a number with its unit: ``12.3 ms``, ``65.3%``."""
    return f"{number}%" if unit == "%" else f"{number} {unit}".strip()


def capitalized(words: str) -> str:
    """Return a sentence with a capital first letter; one that begins with a parameter or a path stays as it is."""
    first, _, rest = words.partition(" ")
    return words[:1].upper() + words[1:] if first.isalpha() and not rest.startswith("=") else words


def moment(seconds: float) -> str:
    """Write a unix time as local date and time with its zone."""
    return datetime.datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M %Z")


def day(seconds: float) -> str:
    return moment(seconds).split()[0]


def duration(seconds: float) -> str:
    """Write a duration in the unit that fits."""
    minutes, rest = divmod(round(seconds), 60)
    if not minutes:
        return f"{seconds:.3g} s"
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def seconds(value: float) -> str:
    """Write a duration with three figures and its unit: ``0.2614`` becomes ``261 ms``."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if abs(value) >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value / 1e-6:.3g} µs"


def text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return quantity(value)
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, dict):
        return ", ".join(f"{name.replace('_', ' ')} {text(item)}" for name, item in value.items())
    if isinstance(value, (list, tuple)):
        return shortened(list(map(text, value)), 12)
    return "" if value is None else str(value)
