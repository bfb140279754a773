"""What notebooks need around their cells: parameters that exist, and tables that can be read."""

import html
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from benchlib.config.schema import config_class
from benchlib.core.errors import UserError, nearest
from benchlib.core.text import counted, quantity
from benchlib.results.verdict import Verdict

if TYPE_CHECKING:
    import pandas


class Shown(NamedTuple):
    """What a notebook shows of stored runs: what was asked for, tables and pictures by name, sentences, where it is from.

    ``judge`` gives the verdict on them; ``word`` and ``sentence`` replace its own at the top of a page, ``about`` names what it is on.
    """

    asked: Mapping[str, str]
    tables: Mapping[str, Sequence[Mapping[str, Any]]]
    figures: Mapping[str, Callable[[], list[Any]]]
    reading: Sequence[str]
    provenance: Sequence[Mapping[str, str]]
    judge: Callable[[], Verdict]
    about: Sequence[str] = ()
    word: str = ""
    sentence: str = ""


@dataclass(frozen=True)
class Headline:
    """A verdict as a cell displays it; a page that is made from the notebook begins with it."""

    word: str
    sentence: str
    about: tuple[str, ...] = ()

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        words = f"**{self.word}**: {html.escape(self.sentence)}"
        return {"text/markdown": words, "text/plain": f"{self.word}: {self.sentence}", VERDICT: asdict(self)}


@dataclass(frozen=True)
class Cell:
    """A cell of a table that is more than its text: ``page`` is its safe HTML."""

    text: str
    page: str

    def __str__(self) -> str:
        return self.text

    def __html__(self) -> str:
        return self.page


METHOD = "method"  # tag of cells that say how a page was made
VERDICT = "application/vnd.benchlib.verdict+json"  # the verdict in an output: a page begins with it

# JupyterLab aligns the cells of tables right, also those with words, by a rule more specific than this one.
_LEFT = "<style scoped>table.left th, table.left td {text-align: left !important}</style>"


def begin(benchmark: str = "") -> None:
    """Refuse wrong parameters, and let the kernel show tables left-aligned, with thousands separated and sentences in full."""
    from IPython import get_ipython

    if kernel := get_ipython():  # type: ignore[no-untyped-call]
        import pandas as pd

        _refuse_unknown_parameters(kernel.user_ns, benchmark)
        pd.set_option("display.max_colwidth", None)
        kernel.display_formatter.formatters["text/html"].for_type(pd.DataFrame, table_html)


def _refuse_unknown_parameters(variables: dict[str, Any], benchmark: str) -> None:
    """Raise ``UserError`` for a name that papermill injected and the parameters cell does not have.

    papermill itself only warns and lets the notebook run with the default of what was meant. A field of the benchmark's
    config that is no parameter of the notebook goes into ``overrides``.
    """
    defined: set[str] = set()
    for cell in list(variables.get("In", [])):
        names = set(re.findall(r"^(\w+)(?:: \w+)? = ", cell, re.MULTILINE))
        unknown = sorted(names - defined) if cell.startswith("# Parameters\n") and defined else []
        if unknown:
            fields = [name for name in unknown if benchmark and name in config_class(benchmark).model_fields]
            values = ", ".join(f"{name}: {json.dumps(variables[name], default=str)}" for name in fields)
            remedy = f'set this field of the config with -y "{{overrides: {{{values}}}}}"'
            why = remedy if unknown[0] in fields else nearest(unknown[0], defined)
            raise UserError(f"the notebook has no parameter {unknown[0]!r}: {why}")
        defined |= names


def table_html(frame: "pandas.DataFrame") -> str:
    """Return a table as HTML: left-aligned, integers with thousands separated, other numbers with three digits or more.

    Rows with an empty cell in the column that ``attrs["folded"]`` names are folded away. On a narrow page the cells of a row of a
    table with ``attrs["narrow"]`` are written one below the other.
    """
    import pandas as pd

    def shown(value: Any) -> str:
        if hasattr(value, "__html__"):
            return str(value.__html__())
        if pd.api.types.is_bool(value) or not pd.api.types.is_number(value):
            return html.escape(str(value), quote=False)
        return f"{value:,}" if pd.api.types.is_integer(value) else quantity(float(str(value)))

    attrs = frame.attrs
    # As the name of the columns the index's stands in their line, not in an empty one below.
    frame = frame.map(shown, na_action="ignore").rename(index=shown, columns=shown)
    if frame.index.name and frame.columns.nlevels == 1:
        frame.columns.name, frame.index.name = frame.index.name, None

    def page(part: "pandas.DataFrame") -> str:
        rows = pd.get_option("display.max_rows")
        return part.to_html(border=0, na_rep="", max_rows=rows, classes="left", escape=False)  # type: ignore[no-any-return]

    if column := attrs.get("folded"):
        first, rest = frame[frame[column] != ""], frame[frame[column] == ""]
        words = f"{counted(len(rest), 'parameter')} at the default"
        return f"<div>{_LEFT}{page(first)}<details><summary>{words}</summary>{page(rest)}</details></div>"
    kind = ' class="fold"' if attrs.get("narrow") else ""
    return f"<div{kind}>{_LEFT}{page(frame)}</div>"
