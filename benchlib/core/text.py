"""What goes to a terminal. Stored files, folder names and messages are foreign text: they may colour nothing, move no
cursor and change no title, whatever they hold."""

import datetime
import math
import os
import re
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderHook, RenderResult
from rich.control import Control
from rich.measure import Measurement
from rich.segment import Segment

from benchlib.results.metrics import quantity

# Escape sequences as a whole, then what is left of control characters (C0 but tab and line feed, C1), and the marks that
# turn the direction of writing or break lines: they make a line read as something else.
_SEQUENCE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


def harmless(text: str) -> str:
    """Return text without control characters; bytes of a name that are no UTF-8 become question marks."""
    return _CONTROL.sub("", _SEQUENCE.sub("", text)).encode(errors="replace").decode()


def one_line(text: str) -> str:
    """Return a name as one harmless line: a line feed or tab in it shows as a space."""
    return harmless(" ".join(text.split()))


class _Harmless(RenderHook):
    """Cleans the text of all that is printed; rich's own colours travel beside the text and stay."""

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [item if isinstance(item, Control) else _Clean(item) for item in renderables]


class _Clean:
    def __init__(self, inner: ConsoleRenderable) -> None:
        self.inner = inner

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        return _cleaned(console.render(self.inner, options))

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement.get(console, options, self.inner)


def _cleaned(segments: Iterable[Segment]) -> Iterable[Segment]:
    return (part if part.control else Segment(harmless(part.text), part.style) for part in segments)


def console(*, stderr: bool = False, least_width: int = 0) -> Console:
    """Return a console that prints harmless text only.

    A pipe has no width: tables are written ``least_width`` wide there, unless COLUMNS says how wide whoever reads them is.
    """
    made = Console(highlight=False, stderr=stderr)
    if not made.is_terminal:  # settled here: rich would look at the variable again for each line
        made.width = made.width if "COLUMNS" in os.environ else max(made.width, least_width)
    made.push_render_hook(_Harmless())
    return made


# Words for readers: names of metrics, kinds of checks and scopes, signs of verdicts, and how values are written.


GROUPS = (
    ("measured", "Measured", "taken on this machine in this run"),
    ("derived", "Derived", "computed from measured values"),
    ("claimed", "Claimed", "stated by a document or a vendor, not checked here"),
    ("not_available", "Not available", "this machine or this run cannot give it"),
)
MARKS = {
    "PASS": "✓",
    "FAIL": "✗",
    "BROKEN": "✗",
    "AMBIGUOUS": "≈",
    "SKIPPED": "–",
    "NO_BASELINE": "○",
    "NOT_COMPARABLE": "≠",
    "UNFINISHED": "…",
    "STOPPED": "■",
    "DAMAGED": "!",
    "DIFFERS": "≈",
}
UNJUDGED = ("NOT_COMPARABLE", "NO_BASELINE", "SKIPPED")
KINDS = {
    "outcome": "Outcome",
    "sanity": "Sanity",
    "target": "Targets",
    "reference": "Published reference",
    "budget": "Budget",
    "regression": "Regression against the baseline",
}


# What a result may come from instead of the real thing, by the parts of a scope (``minisquad_tiny``).
SCOPES = {
    "minisquad": "generated data",
    "files": "data from the user's files",
    "subset": "a shortened data set",
    "tiny": "the embedded stand-in model",
    "random": "random initial weights",
    "cut": "a training that was cut short",
}


def stand_ins(scope: str, model: Any) -> list[str]:
    """Return a sentence that names the stand-ins of a ``scope`` and of a model, as facts give it; none where all is real."""
    found = model if isinstance(model, dict) else {}
    named = [
        *scope.split("_"),
        *["tiny"] * (found.get("name") == "tiny"),
        *["random"] * (found.get("init") == "random"),
    ]
    parts = [SCOPES.get(part, part) for part in dict.fromkeys(named) if part]
    if not parts:
        return []
    listed = parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]
    return [
        f"These results come from {listed}. They count only for their own baseline, never for the target of the real benchmark."
    ]


def moment(seconds: float) -> str:
    """Write a unix time as local date and time with its zone; one that no calendar has as an unknown time."""
    try:
        return datetime.datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M %Z")
    except (OverflowError, OSError, ValueError):
        return "an unknown time"


def day(seconds: float) -> str:
    """Write the local date of a unix time."""
    return moment(seconds).split()[0] if moment(seconds)[:1].isdigit() else "unknown"


def duration(seconds: float) -> str:
    """Write a duration in the unit that fits; a clock that was set back gives one below zero."""
    seconds = seconds or 0.0  # no minus before a zero
    if seconds < 0:
        return f"-{duration(-seconds)}"
    if not math.isfinite(seconds):
        return "unknown"
    minutes, rest = divmod(round(seconds), 60)
    return (
        f"{minutes // 60} h {minutes % 60} min"
        if minutes >= 60
        else f"{minutes} min {rest} s"
        if minutes
        else f"{seconds:.3g} s"
    )


def seconds(value: float) -> str:
    """Write a duration with three figures and its unit: ``0.2614`` becomes ``261 ms``."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if abs(value) >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value / 1e-6:.3g} µs"


def text(value: Any) -> str:
    """Write a JSON value for a reader."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return quantity(value)
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, dict):
        return ", ".join(f"{str(name).replace('_', ' ')} {text(item)}" for name, item in value.items())
    if isinstance(value, (list, tuple)):
        shown = ", ".join(text(item) for item in value[:12])
        return shown + (f" … ({len(value)} in all)" if len(value) > 12 else "")
    return "" if value is None else str(value)


def cell(value: Any, name: str) -> str:
    """Write a value of a table's column ``name``; rates of operations get their unit."""
    return (
        quantity(float(value), "FLOP/s") if name.endswith("_flops") and isinstance(value, (int, float)) else text(value)
    )
