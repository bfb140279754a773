"""Foreign text into safe HTML: Markdown with formulas, code, terminal output and HTML that a cell displayed.

Everything that comes out is built from an allowlist and escapes the rest, so text from data, parameters or a driver can
neither run nor load anything, whatever a browser makes of it; the report's content security policy stands behind that.
"""

import html
import re
from html.parser import HTMLParser
from typing import Any

import mistune
import pygments
from latex2mathml.converter import convert
from markupsafe import Markup
from mistune.plugins.math import math
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

_TEXT = "a abbr b blockquote br caption code col colgroup dd del details div dl dt em figcaption figure h1 h2 h3 h4 h5 h6 hr i img kbd li meter"
_MORE = "ol p pre progress s samp small span strong sub summary sup table tbody td tfoot th thead tr u ul"
_MATH = "math mfrac mi mn mo mover mpadded mrow mspace msqrt mroot mstyle msub msubsup msup mtable mtd mtext mtr munder munderover"
TAGS = frozenset(f"{_TEXT} {_MORE} {_MATH}".split())
DROPPED = frozenset(
    [
        "script",
        "style",
        "template",
        "iframe",
        "object",
        "embed",
        "svg",
        "title",
        "head",
        "noscript",
        "textarea",
        "select",
    ]
)
VOID = frozenset(("br", "col", "hr", "img"))
ATTRIBUTES = frozenset(
    [
        "align",
        "alt",
        "class",
        "colspan",
        "display",
        "height",
        "high",
        "lang",
        "linethickness",
        "low",
        "max",
        "min",
        "mathvariant",
        "optimum",
        "rowspan",
        "scope",
        "stretchy",
        "title",
        "value",
        "width",
    ]
)
SAFE_IMAGE = re.compile(r"data:image/(png|jpeg|gif|webp);base64,[A-Za-z0-9+/=\s]+\Z")
SAFE_LINK = re.compile(r"(https?://|mailto:|#)[^\s]*\Z", re.IGNORECASE)
ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07|[\x00-\x08\x0b\x0c\x0e-\x1f]")


class _Cleaner(HTMLParser):
    """Writes a document again from its parse: allowed tags and attributes, all else as text or not at all."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self.open: list[str] = []
        self.dropping: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if self.dropping or tag in DROPPED:
            self.dropping.append(tag)
            return
        if tag not in TAGS or (tag == "img" and not SAFE_IMAGE.match(dict(attrs).get("src") or "")):
            return
        self.parts.append(f"<{tag}{self._attributes(tag, attrs)}>")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if self.dropping:
            if tag in self.dropping:
                while self.dropping.pop() != tag:
                    pass
            return
        if tag in self.open:
            # Inner tags that were left open end here, so that a cell's output cannot swallow the page around it.
            while True:
                inner = self.open.pop()
                self.parts.append(f"</{inner}>")
                if inner == tag:
                    return

    def handle_data(self, data: str) -> None:
        if not self.dropping:
            self.parts.append(html.escape(data))

    def _attributes(self, tag: str, attrs: list[tuple[str, str | None]]) -> str:
        kept = {name: value or "" for name, value in attrs if name in ATTRIBUTES}
        values = {name: value or "" for name, value in attrs}
        if tag == "img":
            kept |= {"src": values["src"], "alt": values.get("alt") or "picture without a description"}
        if tag == "a" and SAFE_LINK.match(values.get("href", "")):
            kept |= {"href": values["href"], "rel": "noopener noreferrer"}
        if tag == "th" and "scope" not in kept:
            kept["scope"] = "row" if "tbody" in self.open else "col"  # pandas writes row headers without a scope
        return "".join(f' {name}="{html.escape(value)}"' for name, value in kept.items())


def clean(source: str) -> Markup:
    """Return HTML with allowed tags and attributes only; scripts, styles, forms and remote pictures are left out."""
    cleaner = _Cleaner()
    cleaner.feed(source)
    cleaner.close()
    return Markup("".join(cleaner.parts) + "".join(f"</{tag}>" for tag in reversed(cleaner.open)))


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
    """Return Python code with spans for its colours."""
    return Markup(pygments.highlight(source, PythonLexer(stripnl=False), HtmlFormatter(nowrap=True)))


def signs(words: str) -> Markup:
    """Escape a sentence, write ``>=`` and ``<=`` as one sign and what stands between backticks as code."""
    escaped = html.escape(str(words)).replace("&gt;=", "≥").replace("&lt;=", "≤")
    return Markup(re.sub(r"`([^`\n]+)`", r"<code>\1</code>", escaped))


def plain(text: str) -> str:
    """Return terminal text without colours and control characters; of overwritten lines only the last state."""
    lines = (line.rstrip("\r").rsplit("\r", 1)[-1] for line in ANSI.sub("", text.replace("\r\n", "\n")).split("\n"))
    return "\n".join(lines)
