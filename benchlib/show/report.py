"""Executed notebooks as HTML pages, by nbconvert: the report of a run, the page of a machine, the history.

``jupyter nbconvert --to benchlib NOTEBOOK`` makes the same pages. The notebook of a run folder becomes the report of that run: the
verdict and the records first, the notebook behind them. Any other notebook becomes a page that begins with its verdict.

A page is one file that needs nothing else: no script, no request, a content security policy that keeps it so. The pictures of a
report are drawn from the records, so the report of a run that broke before its notebook could draw anything has them as well.
"""

import functools
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import nbformat
from jinja2 import Environment, pass_context
from jinja2.runtime import Context
from markupsafe import Markup, escape
from nbconvert.exporters.html import HTMLExporter
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath
from nbconvert.preprocessors import Preprocessor
from nbformat import NotebookNode
from traitlets import default
from traitlets.config import Config

from benchlib.benchmarks import spec_of
from benchlib.core.errors import UserError
from benchlib.core.files import not_written, read_object, read_text, write_text
from benchlib.core.interrupts import Interrupts
from benchlib.core.terminal import harmless
from benchlib.results.record import load
from benchlib.results.run import Run, is_run
from benchlib.results.shared import link
from benchlib.show import markup
from benchlib.show.digest import Problems, digest
from benchlib.show.figures import Picture, data_url
from benchlib.show.headless import execute
from benchlib.show.notebook import METHOD, VERDICT

NAME = "report.html"
TEXT_LIMIT = 20_000  # characters of one output of a cell
PICTURES_LIMIT = 120_000  # base64 characters of all pictures of the notebook of a run together
ALL_PICTURES_LIMIT = 340_000  # of these and the ones drawn from the records, which come first
PAGE_PICTURES_LIMIT = 900_000  # of a page without a run: its pictures are what it is there for
PUBLISH_S = 600.0  # for a notebook that runs nothing
PRIORITY = ["image/png", "image/jpeg", "text/html", "text/markdown", "text/latex", "text/plain"]


class Renderer(IPythonRenderer):
    """Markdown with MathML for formulas, without remote pictures; headings go ``deeper`` than in the notebook, below those of the page."""

    def __init__(self, deeper: int, attachments: dict[str, dict[str, str]]) -> None:
        super().__init__(escape=True, exclude_anchor_links=True, attachments=attachments)
        self.deeper = deeper

    def heading(self, text: str, level: int, **attrs: Any) -> str:
        return super().heading(text, min(level + self.deeper, 6))

    def inline_math(self, body: str) -> str:
        return markup.formula(body)

    def block_math(self, body: str) -> str:
        return markup.formula(body, block=True)

    def latex_environment(self, name: str, body: str) -> str:
        return markup.formula(f"\\begin{{{name}}}{body}\\end{{{name}}}", block=True)

    def image(self, text: str, url: str, title: str | None = None) -> str:
        missing = escape(f"[picture: {text}]")
        if url.startswith("attachment:") and url.removeprefix("attachment:") not in self.attachments:
            return missing
        return markup.clean(super().image(text, url, title)) or missing


class Fitting(Preprocessor):
    """Adds to the ``resources`` what the template shows before the notebook, and keeps the outputs of its cells small.

    ``resources["run"]`` is the content of the report, for the notebook of a run folder; ``resources["headline"]`` the verdict that
    another notebook displays. Cells of that one with the tag ``method`` go behind the others, from ``resources["method_at"]`` on.
    """

    def preprocess(self, nb: NotebookNode, resources: Any) -> tuple[NotebookNode, Any]:
        folder, limit, drawn = run_folder(resources), PAGE_PICTURES_LIMIT, dict[str, str]()
        resources["method_at"] = len(nb.cells)
        if folder:
            resources["run"] = report = content(Run(folder), resources["problems"] or Problems())
            drawn = {picture["src"].partition(",")[2]: picture["name"] for picture in report["pictures"]}
            limit = max(0, min(PICTURES_LIMIT, ALL_PICTURES_LIMIT - sum(map(len, drawn))))
        elif headline := _headline(nb):
            resources["headline"] = headline
            method = [cell for cell in nb.cells if {METHOD, "injected-parameters"} & set(cell.metadata.get("tags", []))]
            nb.cells = [cell for cell in nb.cells if cell not in method] + method
            resources["method_at"] -= len(method)
        for cell in nb.cells:
            cell.source = _cut(cell.source)
            for output in cell.get("outputs", []):
                limit -= _fit(output, limit, drawn)
        return nb, resources


def run_folder(resources: Any) -> Path | None:
    """Return the folder of the run that a notebook belongs to: the one that was named, else the one that holds it."""
    if named := resources.get("run_folder"):
        return Path(named)
    about = resources["metadata"]
    folder = Path(about["path"] or ".")
    if about["name"] != "notebook" or not is_run(folder):
        return None
    try:  # a config of another program is no run
        read_object(folder / "config.json", {"benchmark": str, "tier": str})
    except UserError:
        return None
    return folder


def _headline(nb: NotebookNode) -> dict[str, Any] | None:
    """Return the verdict that a cell displayed: its ``word``, ``sentence`` and what it is ``about``."""
    outputs = (output for cell in nb.cells for output in cell.get("outputs", []))
    stated = [output.data[VERDICT] for output in outputs if VERDICT in output.get("data", {})]
    return stated[-1] if stated and isinstance(stated[-1], dict) else None


def _fit(output: NotebookNode, limit: int, drawn: dict[str, str]) -> int:
    """Cut an output that is too long, in place; return how much of the ``limit`` of pictures it takes, in base64 characters.

    ``drawn`` maps a picture of the report, as base64, to its name: it is linked and not shown twice.
    """
    if output.output_type == "stream":
        output.text = _cut(output.text)
    data = output.get("data", {})
    for kind in [kind for kind in PRIORITY[:2] if kind in data]:
        encoded = data[kind] = "".join(data[kind].split())
        if encoded in drawn:
            output.metadata["shown_above"] = drawn[encoded]
            return 0
        if data.get("text/plain", "").startswith("<Figure size"):  # matplotlib's words describe nothing
            data["text/plain"] = "picture that the code of this cell draws"
        if len(encoded) <= limit and markup.SAFE_IMAGE.match(f"data:{kind};base64,{encoded}"):
            return len(encoded)
        alt = output.metadata.get(kind, {}).get("alt") or data.get("text/plain") or markup.NO_ALT
        output.data = {"text/plain": f"[picture left out to keep this page small; the notebook has it: {alt}]"}
        return 0
    if len(data.get("text/html", "")) > 3 * TEXT_LIMIT:
        del data["text/html"]
        data.setdefault("text/plain", "[a table or page left out to keep this page small; the notebook has it]")
    for kind in [kind for kind in PRIORITY[3:] if kind in data]:
        data[kind] = _cut(data[kind])
    if output.output_type in ("display_data", "execute_result") and not data.keys() & set(PRIORITY):
        kinds = ", ".join(sorted(data)) or "nothing"
        output.data = {"text/plain": f"[not shown on this page, but in the notebook: {kinds}]"}
    return 0


def _cut(words: str) -> str:
    if len(words) <= TEXT_LIMIT:
        return words
    half = TEXT_LIMIT // 2
    return f"{words[:half]}\n… {len(words) - TEXT_LIMIT:,} characters left out; the notebook has all of it …\n{words[-half:]}"


class PageExporter(HTMLExporter):
    """The format ``benchlib`` of nbconvert and of JupyterLab's "Save and Export"."""

    export_from_notebook = "benchlib report"

    @default("template_name")
    def _template_name_default(self) -> str:
        return "benchlib"

    @default("extra_template_basedirs")
    def _default_extra_template_basedirs(self) -> list[str]:
        return [str(markup.TEMPLATES)]

    @property
    def default_config(self) -> Config:
        config = Config(
            {"NbConvertBase": {"display_data_priority": PRIORITY}, "CoalesceStreamsPreprocessor": {"enabled": True}}
        )
        inherited = super().default_config
        inherited.merge(config)
        return inherited

    def _init_preprocessors(self) -> None:
        super()._init_preprocessors()
        self.register_preprocessor(Fitting, enabled=True)

    def _create_environment(self) -> Environment:
        """Return nbconvert's environment with the names of all pages; what is not marked as safe is escaped."""
        return markup.furnish(super()._create_environment())

    @pass_context
    def markdown2html(self, context: Context, source: str) -> Markup:
        cell, resources = context.get("cell", {}), context["resources"]
        deeper = 2 if resources["run"] else 1 if resources["headline"] else 0
        return markup.clean(MarkdownWithMath(Renderer(deeper, cell.get("attachments", {}))).render(source))

    def from_notebook_node(  # type: ignore[override]
        self, nb: NotebookNode, resources: Any = None, **options: Any
    ) -> tuple[str, Any]:
        page, resources = super().from_notebook_node(nb, resources, **options)
        return harmless(page), resources


def content(run: Run, problems: Problems) -> dict[str, Any]:
    """Return what the report of a run folder shows before its notebook, whole, partial or damaged."""
    record = load(run.path)
    report, pictures = digest(record, run, problems), list[dict[str, str]]()
    for name, draw in spec_of(record.benchmark).figures().items():
        about = f"the picture {name} could not be drawn: "
        pictures += problems.part(partial(_drawn, name, draw, run), [], about)
    data = problems.part(lambda: link(record), None, "the data of the run cannot be carried by this report: ")
    damaged = tuple(problem.partition(" ")[0].rstrip(":") for problem in record.problems)  # the sentence names these
    sentences = [problem.replace(f"{run.path}/", "") for problem in problems]
    left = [problem for problem in dict.fromkeys(sentences) if not (damaged and problem.startswith(damaged))]
    return report | {"problems": left, "pictures": pictures, "data": data}


def _drawn(name: str, draw: Callable[[Run], Picture], run: Run) -> list[dict[str, str]]:
    picture = draw(run)
    return [] if picture.empty else [{"name": name, "alt": picture.alt, "src": data_url(picture)}]


def html(run: Run) -> str:
    """Return the report of a run folder, whole, partial or damaged, as one HTML document.

    A notebook that cannot be shown is left out and named.
    """
    path, problems, notebook = run.path / "notebook.ipynb", Problems(), nbformat.v4.new_notebook()
    if path.exists():
        notebook = problems.part(lambda: _read(path), notebook, f"{path.name}: not a readable notebook: ")
    try:
        return _converted(notebook, run_folder=str(run.path), problems=problems)
    except Exception as error:  # a notebook can be wrong in ways that its schema does not know
        if not notebook.cells:
            raise
        problems.append(f"{path.name}: not a readable notebook: {type(error).__name__}: {error}")
        return _converted(nbformat.v4.new_notebook(), run_folder=str(run.path), problems=problems)


def _read(path: Path) -> NotebookNode:
    notebook = nbformat.reads(read_text(path), as_version=4)
    nbformat.validate(notebook)
    return notebook


@functools.cache
def exporter() -> PageExporter:
    """Return the one exporter of this process: its templates are compiled once."""
    return PageExporter()


def _converted(notebook: NotebookNode, **resources: Any) -> str:
    page, _ = exporter().from_notebook_node(notebook, {"metadata": {"name": "notebook"}, **resources})
    return page


def render(run_dir: Path | str) -> Path:
    """Write ``report.html`` into a run folder and return its path.

    The folder may lack any part; only a folder that does not exist is a ``UserError``.
    """
    run = Run(run_dir)
    path = run.path / NAME
    write_text(path, html(run))
    return path


def publish(source: Path, notebook: Path, page: Path, parameters: Mapping[str, Any]) -> None:
    """Execute a notebook that runs nothing, keep it as ``notebook`` and write it as ``page``.

    Raises ``UserError`` if a cell fails, the kernel dies or takes longer than ``PUBLISH_S``.
    """
    notebook, page = notebook.resolve(), page.resolve()  # it is executed in a folder of its own
    log = notebook.with_name(f".{notebook.stem}.log")
    try:
        notebook.parent.mkdir(parents=True, exist_ok=True)
        with Interrupts() as interrupts, interrupts.allowed():
            execute(source, notebook, parameters, PUBLISH_S, log)
    except OSError as error:
        raise not_written(notebook, error) from None
    except Exception as error:  # a failing cell, a dead kernel, a time-out
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(f"the notebook {source.name} stopped: {lines[-1]}; see {notebook}") from None
    text, _ = exporter().from_filename(str(notebook))
    write_text(page, text)
