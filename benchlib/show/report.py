"""``report.html`` of a run: the verdict and the records first, the executed notebook after them.

One file that needs nothing else: no script, no request, a content security policy that keeps it so. The pictures are
drawn from the records, so the report of a run that broke before its notebook could draw anything has them as well.
"""

import base64
import contextlib
import functools
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from markupsafe import Markup
from traitlets import default

from benchlib.benchmarks import BENCHMARKS, of_run
from benchlib.core.files import read_bytes, write_text
from benchlib.core.imports import importing_jupyter
from benchlib.core.terminal import harmless
from benchlib.core.text import cell, column
from benchlib.judge.snapshot import Link, link, snapshot
from benchlib.results.run import Run
from benchlib.show import markup
from benchlib.show.digest import Digest, digest, shortened
from benchlib.show.figures import DARK, LIGHT, Theme, png

with importing_jupyter():
    import nbformat
    from nbconvert.exporters import TemplateExporter

TEMPLATES = Path(__file__).resolve().parents[1] / "templates"
NAME = "report.html"
MOST_BYTES = 500_000
SHORTER = ((300, 40), (150, 12), (60, 4))  # characters of a text and entries of a list, where a run says too much
TEXT_LIMIT = 20_000  # characters of one output of a cell
PICTURES_LIMIT = 120_000  # base64 characters of all pictures of the notebook together
ALL_PICTURES_LIMIT = 340_000  # of these and the ones drawn from the records, which come first
_COMPILED = markup.Compiled()


class Exporter(TemplateExporter):
    """nbconvert with our template, with everything escaped that is not marked as safe."""

    output_mimetype = "text/html"
    pictures_limit = PICTURES_LIMIT

    @default("file_extension")
    def _file_extension_default(self) -> str:
        return ".html"

    @default("template_name")
    def _template_name_default(self) -> str:
        return "report"

    @default("extra_template_basedirs")
    def _extra_template_basedirs_default(self) -> list[str]:
        return [str(TEMPLATES)]

    def _create_environment(self) -> jinja2.Environment:
        environment: jinja2.Environment = super()._create_environment()
        environment.autoescape, environment.bytecode_cache = True, _COMPILED
        environment.trim_blocks = environment.lstrip_blocks = True
        environment.filters |= {
            "safe_html": markup.clean, "markdown": markup.markdown, "code": markup.code, "terminal": markup.plain,
            "signs": markup.signs, "cell": cell, "column": column, "shown": _Outputs(self.pictures_limit).shown,
        }  # fmt: skip
        return environment


class _Outputs:
    """Chooses the form in which a cell's output is shown, within what one report may hold."""

    def __init__(self, limit: int) -> None:
        self.limit, self.pictures = limit, 0

    def shown(self, output: Any, seen: dict[str, str]) -> dict[str, str]:
        """Return ``kind`` (html, picture, above, markdown, text, none) and what to show.

        ``seen`` maps the digest of a picture of the first half to its name: it is not shown twice.
        """
        if output.output_type == "stream":
            return {"kind": "text", "text": _cut(markup.plain(output.text))}
        if output.output_type == "error":
            error = "\n".join(output.traceback) or f"{output.ename}: {output.evalue}"
            return {"kind": "text", "text": _cut(markup.plain(error))}
        data = output.get("data", {})
        if "image/png" in data:
            return self._picture(str(data["image/png"]), data, output.get("metadata", {}), seen)
        if "text/html" in data and len(data["text/html"]) <= 3 * TEXT_LIMIT:
            return {"kind": "html", "text": data["text/html"]}
        if "text/markdown" in data:
            return {"kind": "markdown", "text": _cut(data["text/markdown"])}
        if "text/plain" in data:
            return {"kind": "text", "text": _cut(markup.plain(data["text/plain"]))}
        return {"kind": "none", "text": ""}

    def _picture(self, encoded: str, data: Any, metadata: Any, seen: dict[str, str]) -> dict[str, str]:
        encoded = "".join(encoded.split())
        alt = str(metadata.get("image/png", {}).get("alt") or data.get("text/plain") or markup.NO_ALT)
        try:
            key = hashlib.sha256(base64.b64decode(encoded, validate=True)).hexdigest()
        except ValueError:
            return {"kind": "text", "text": f"[damaged picture: {alt}]"}
        if key in seen:
            return {"kind": "above", "name": seen[key], "text": alt}
        if self.pictures + len(encoded) > self.limit:
            words = f"[picture left out to keep this report small; it is in notebook.ipynb: {alt}]"
            return {"kind": "text", "text": words}
        self.pictures += len(encoded)
        return {"kind": "picture", "src": f"data:image/png;base64,{encoded}", "text": alt}


def _cut(words: str) -> str:
    if len(words) <= TEXT_LIMIT:
        return words
    half = TEXT_LIMIT // 2
    return f"{words[:half]}\n… {len(words) - TEXT_LIMIT:,} characters left out; all of it is in notebook.ipynb …\n{words[-half:]}"


class Pictures(NamedTuple):
    """The pictures of a run in both appearances, the names of the light ones by their digest, and what could not be drawn."""

    drawn: list[dict[str, str]]
    names: dict[str, str]
    problems: list[str]


class Dark(NamedTuple):
    """The alt text and the PNG of each dark picture by name, and what could not be drawn."""

    drawn: dict[str, tuple[str, bytes]]
    problems: list[str]


def draw_dark(run: Run, benchmark: str) -> Dark:
    """Draw the dark pictures of a run from its records; neither verdict nor notebook is needed."""
    own, dark = of_run(benchmark), Dark({}, [])
    for name in own.figures if own else {}:
        if drawn := _drawn(run, benchmark, name, DARK, dark.problems):
            dark.drawn[name] = drawn
    return dark


def _drawn(run: Run, benchmark: str, name: str, theme: Theme, problems: list[str]) -> tuple[str, bytes] | None:
    """Return the alt text and the PNG of a picture; None where it is empty, or a problem that is noted."""
    try:
        picture = BENCHMARKS[benchmark].figures[name](run, theme)
        return None if picture.empty else (picture.alt, png(picture))
    except Exception as error:  # foreign numbers break a picture in many ways, and must never cost the report
        problems.append(f"the picture {name} could not be drawn: {error}".replace(f"{run.path}/", ""))
        return None


def draw_pictures(
    run: Run, benchmark: str, dark: Dark | None = None, shown: Mapping[str, bytes] | None = None
) -> Pictures:
    """Draw the pictures of a run in both appearances, but for the ``dark`` ones that are there already.

    ``shown`` are light ones by their alt text, those of the notebook that was just executed: the same need no drawing.
    """
    out, names = list[dict[str, str]](), dict[str, str]()
    dark = dark or draw_dark(run, benchmark)
    alts = [alt for alt, _ in dark.drawn.values()]
    for name, (alt, second) in dark.drawn.items():
        # Of two pictures with one alt text it is not known which one the notebook shows.
        light = (shown or {}).get(alt) if alts.count(alt) == 1 else None
        if not light and (drawn := _drawn(run, benchmark, name, LIGHT, dark.problems)):
            light = drawn[1]
        if not light:
            continue
        names[hashlib.sha256(light).hexdigest()] = name
        sources = {"light": light, "dark": second}
        out.append(
            {"name": name, "alt": alt}
            | {key: f"data:image/png;base64,{base64.b64encode(value).decode()}" for key, value in sources.items()}
        )
    return Pictures(out, names, dark.problems)


def pictures_in(notebook: Path) -> dict[str, bytes]:
    """Return the pictures of an executed notebook by their alt text, empty for a text of several; none where it cannot be read."""
    pictures = dict[str, bytes]()
    for output in (each for part in _notebook(notebook, []).cells for each in part.get("outputs", [])):
        alt = output.get("metadata", {}).get("image/png", {}).get("alt")
        with contextlib.suppress(KeyError, ValueError):
            picture = base64.b64decode(output["data"]["image/png"])
            pictures[alt] = picture if pictures.get(alt, picture) == picture else b""
    return pictures


def _notebook(path: Path, problems: list[str]) -> nbformat.NotebookNode:
    if path.exists():
        try:
            notebook = nbformat.reads(read_bytes(path).decode(), as_version=4)
            nbformat.validate(notebook)
            return notebook
        except Exception as error:  # nbformat refuses a damaged notebook in many ways
            reason = (str(error).replace(f"{path}: ", "") or type(error).__name__).splitlines()[0][:200]
            problems.append(f"{path.name}: not a readable notebook ({reason})")
    return nbformat.v4.new_notebook()


def _data(run: Run, problems: list[str]) -> Link | None:
    """Pack the run for programs that read the report; what cannot be written as JSON costs only this link."""
    try:
        return link(snapshot(run))
    except ValueError as error:
        problems.append(f"the data of the run cannot be carried by this report: {str(error).splitlines()[0]}")
        return None


@functools.cache
def style() -> Markup:
    """Return the style sheet of all pages."""
    # The only text besides the templates that goes in unescaped: a file of this package.
    return Markup((TEMPLATES / "style.css").read_text(encoding="utf-8"))


def html(run: Run, pictures: Pictures | None = None) -> str:
    """Return the report of a run folder, whole, partial or damaged, as one HTML document under 500 kB.

    ``pictures`` are those that were drawn already.
    """
    content: Digest = digest(run)
    pictures = pictures or draw_pictures(run, content.benchmark)
    content.problems += pictures.problems
    notebook = _notebook(run.path / "notebook.ipynb", content.problems)
    data = _data(run, content.problems)
    # Damaged parts are named once, whichever reader met them.
    content.problems = list(dict.fromkeys(content.problems))
    resources = {"run": content, "pictures": pictures.drawn, "seen": pictures.names, "style": style(), "data": data}
    drawn = sum(len(picture["light"]) + len(picture["dark"]) for picture in pictures.drawn)
    page = _page(notebook, resources, max(0, min(PICTURES_LIMIT, ALL_PICTURES_LIMIT - drawn)))
    for level in SHORTER:
        if len(page.encode()) <= MOST_BYTES:
            break
        # What a run says is cut first, then the notebook goes.
        resources["run"] = shortened(content, *level)
        page = _page(notebook if level == SHORTER[0] else nbformat.v4.new_notebook(), resources, 0)
    return page


def _page(notebook: nbformat.NotebookNode, resources: dict[str, Any], pictures_limit: int) -> str:
    exporter = Exporter()
    exporter.pictures_limit = pictures_limit
    body, _ = exporter.from_notebook_node(notebook, dict(resources))
    return harmless(str(body))  # names of folders and data may hold control characters


def render(run_dir: Path | str, pictures: Pictures | None = None) -> Path:
    """Write ``report.html`` into a run folder and return its path; ``pictures`` as in ``html``.

    The folder may lack any part; only a folder that does not exist is a ``UserError``.
    """
    run = Run(run_dir)
    path = run.path / NAME
    write_text(path, html(run, pictures))
    return path
