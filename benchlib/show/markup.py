"""Foreign text into safe HTML: Markdown with formulas, code, terminal output and HTML that a cell displayed.

nh3 keeps an allowlist of tags and attributes and escapes the rest, so text from data, parameters or a driver can
neither run nor load anything; the report's content security policy stands behind that.
"""

import functools
import html
import re
from pathlib import Path
from typing import Any

import jinja2
import mistune
import nh3
import pygments
from latex2mathml.converter import convert
from markupsafe import Markup
from mistune.plugins.math import math
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

from benchlib.core.terminal import harmless
from benchlib.core.text import look

TEMPLATES = Path(__file__).resolve().parents[1] / "templates"
MARKDOWN_CHARACTERS = 400
# What Markdown would take for itself; underscores inside a word and punctuation inside a line it leaves alone.
_SPECIAL = re.compile(r"([\\`*\[\]#|~$@]|(?<!\w)_|_(?!\w)|:(?=//)|(?<=www)\.|^[-+])")
_NUMBERED = re.compile(r"^(\d+)([.)])(?=\s|$)")
_PROGRESS = "meter progress tfoot"
_MATH = "math mfrac mi mn mo mover mpadded mrow mspace msqrt mroot mstyle msub msubsup msup mtable mtd mtext mtr munder munderover"
_DROPPED = "script style template iframe object embed svg title head noscript textarea select"
_ATTRIBUTES = "align alt class colspan display height high lang linethickness low max min mathvariant optimum rowspan scope stretchy title value width"
SAFE_IMAGE = re.compile(r"data:image/(png|jpeg|gif|webp);base64,[A-Za-z0-9+/=\s]+\Z")
SAFE_LINK = re.compile(r"(https?://|mailto:|#)[^\s]*\Z", re.IGNORECASE)
ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07|[\x00-\x08\x0b\x0c\x0e-\x1f]")
_SCOPELESS = re.compile(r"<th(?=[\s>])(?![^>]* scope=)")
NO_ALT = "picture without a description"


def _attribute(tag: str, name: str, value: str) -> str | None:
    if name == "src":
        return value if SAFE_IMAGE.match(value) else None
    if name == "href":
        return value if SAFE_LINK.match(value) else None
    return value or NO_ALT if (tag, name) == ("img", "alt") else value


_CLEANER = nh3.Cleaner(
    tags=nh3.ALLOWED_TAGS | set(f"{_PROGRESS} {_MATH}".split()),
    clean_content_tags=set(_DROPPED.split()),
    attributes={"*": set(_ATTRIBUTES.split()), "a": {"href"}, "img": {"src"}},
    attribute_filter=_attribute,
    url_schemes={"http", "https", "mailto", "data"},  # data: of pictures only, see _attribute
)


def clean(source: str) -> Markup:
    """Return HTML with allowed tags and attributes only; scripts, styles, forms and remote pictures are left out."""
    page = _CLEANER.clean(source)
    # nh3 escapes < and > in attributes, so what looks like a tag here is one.
    page = re.sub(r"<img(?![^>]* src=)[^>]*>", "", page)
    page = re.sub(r"<img(?![^>]* alt=)", f'<img alt="{NO_ALT}"', page)
    # pandas writes row headers without a scope.
    page = re.sub(r"<tbody.*?</tbody>", lambda body: _SCOPELESS.sub('<th scope="row"', body[0]), page, flags=re.DOTALL)
    return Markup(_SCOPELESS.sub('<th scope="col"', page))


def formula(tex: str, block: bool = False) -> str:
    """Return TeX as MathML; what the converter does not know stays readable as code."""
    try:
        return str(clean(convert(tex, display="block" if block else "inline")))
    except Exception:  # the converter raises many kinds, and a formula must never cost the report
        return f"<code>{html.escape(tex)}</code>"


class _Renderer(mistune.HTMLRenderer):
    """Markdown without raw HTML and remote pictures; headings go two levels down, below those of the report."""

    def heading(self, text: str, level: int, **attrs: Any) -> str:
        return f"<h{min(level + 2, 6)}>{text}</h{min(level + 2, 6)}>\n"

    def image(self, text: str, url: str, title: str | None = None) -> str:
        return str(clean(super().image(text, url, title))) or html.escape(f"[picture: {text}]")


def _make_markdown() -> mistune.Markdown:
    markdown = mistune.create_markdown(
        escape=True, renderer=_Renderer(escape=True), plugins=["table", "strikethrough", math]
    )
    assert isinstance(markdown.renderer, mistune.HTMLRenderer)
    markdown.renderer.register("inline_math", lambda _, text: formula(text))
    markdown.renderer.register("block_math", lambda _, text: formula(text, block=True))
    return markdown


_MARKDOWN = _make_markdown()


def markdown(source: str) -> Markup:
    """Return Markdown as HTML; formulas between dollar signs become MathML, raw HTML is shown as text."""
    return clean(str(_MARKDOWN(source)))


def code(source: str) -> Markup:
    return Markup(pygments.highlight(source, PythonLexer(stripnl=False), HtmlFormatter(nowrap=True)))


def signs(words: str) -> Markup:
    """Escape a sentence, write ``>=`` and ``<=`` as one sign and what stands between backticks as code."""
    escaped = html.escape(str(words)).replace("&gt;=", "≥").replace("&lt;=", "≤")
    return Markup(re.sub(r"`([^`\n]+)`", r"<code>\1</code>", escaped))


def escaped(words: object) -> str:
    """Return text that Markdown shows as it is, on one line, at most 400 characters of it."""
    line = " ".join(str(words).split())
    line = line if len(line) <= MARKDOWN_CHARACTERS else line[: MARKDOWN_CHARACTERS - 1] + "…"
    return _NUMBERED.sub(r"\1\\\2", _SPECIAL.sub(r"\\\1", html.escape(line, quote=False)))


def plain(text: str) -> str:
    """Return terminal text without colours and control characters; of overwritten lines only the last state."""
    lines = (line.rstrip("\r").rsplit("\r", 1)[-1] for line in ANSI.sub("", text.replace("\r\n", "\n")).split("\n"))
    return "\n".join(lines)


@functools.cache
def environment() -> jinja2.Environment:
    """Return the environment of all pages: everything is escaped that is not marked as safe."""
    result = jinja2.Environment(
        loader=jinja2.FileSystemLoader([TEMPLATES, TEMPLATES / "report"]),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    result.globals["look"] = look
    result.filters |= {"safe_html": clean, "markdown": markdown, "code": code, "signs": signs, "terminal": plain}
    # The only text besides the templates that goes in unescaped: a file of this package.
    result.globals["style"] = Markup((TEMPLATES / "style.css").read_text(encoding="utf-8"))
    return result


def page(template: str, /, **values: Any) -> str:
    """Return a page of a template; names of folders and data may hold control characters, which are left out."""
    return harmless(environment().get_template(template).render(values))
