"""Foreign text into safe HTML, and the names that the templates of all pages use.

nh3 keeps an allowlist of tags and attributes and escapes the rest, so text from data, parameters or a driver can
neither run nor load anything; the pages' content security policy is the second line of defence.
"""

import functools
import html
import re
from pathlib import Path
from typing import Any

import jinja2
import nh3
from latex2mathml.converter import convert
from markupsafe import Markup

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
_OWN = {"banner", "mark", "kicker", "cards", "answers"}  # classes that say what benchlib says
SAFE_IMAGE = re.compile(r"data:image/(png|jpeg|gif|webp);base64,[A-Za-z0-9+/=\s]+\Z")
# Of relative ones only those to a report: a page of several runs links to them.
SAFE_LINK = re.compile(r"(https?://|mailto:|#)[^\s]*\Z|([\w.%-]+/)*report\.html\Z", re.IGNORECASE)
_SCOPELESS = re.compile(r"<th(?=[\s>])(?![^>]* scope=)")
NO_ALT = "picture without a description"


def _attribute(tag: str, name: str, value: str) -> str | None:
    if name == "src":
        return value if SAFE_IMAGE.match(value) else None
    if name == "href":
        return value if SAFE_LINK.match(value) else None
    if name == "class":
        return " ".join(word for word in value.split() if word not in _OWN)
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


def formula(tex: str, block: bool = False) -> Markup:
    """Return TeX as MathML; what the converter does not know stays readable as code."""
    try:
        return clean(convert(tex, display="block" if block else "inline"))
    except Exception:  # the converter raises many kinds, and a formula must never cost the report
        return Markup("<code>{}</code>").format(tex)


def signs(words: str) -> Markup:
    """Escape a sentence, write ``>=`` and ``<=`` as one sign and what stands between backticks as code."""
    escaped = html.escape(str(words)).replace("&gt;=", "≥").replace("&lt;=", "≤")
    return Markup(re.sub(r"`([^`\n]+)`", r"<code>\1</code>", escaped))


def escaped(words: object) -> str:
    """Return text that Markdown shows as it is, on one line, at most 400 characters of it."""
    line = " ".join(str(words).split())
    line = line if len(line) <= MARKDOWN_CHARACTERS else line[: MARKDOWN_CHARACTERS - 1] + "…"
    return _NUMBERED.sub(r"\1\\\2", _SPECIAL.sub(r"\\\1", html.escape(line, quote=False)))


def furnish(environment: jinja2.Environment) -> jinja2.Environment:
    """Add to an environment what the templates of all pages use; everything is escaped that is not marked as safe."""
    environment.autoescape = True
    environment.trim_blocks = environment.lstrip_blocks = True
    environment.globals |= {"look": look, "no_alt": NO_ALT}
    environment.filters |= {"safe_html": clean, "formula": formula, "signs": signs}
    # The only text besides the templates that goes in unescaped: a file of this package.
    environment.globals["style"] = Markup((TEMPLATES / "style.css").read_text(encoding="utf-8"))
    return environment


@functools.cache
def environment() -> jinja2.Environment:
    """Return the environment of the pages that are made from no notebook."""
    return furnish(jinja2.Environment(loader=jinja2.FileSystemLoader([TEMPLATES, TEMPLATES / "benchlib"])))


def page(template: str, /, **values: Any) -> str:
    """Return a page of a template; names of folders and data may hold control characters, which are left out."""
    return harmless(environment().get_template(template).render(values))
