"""``report.html`` of a run: the verdict and the records first, the executed notebook after them.

One file that needs nothing else: no script, no request, a content security policy that keeps it so. The pictures are
drawn from the records, so the report of a run that broke before its notebook could draw anything has them as well.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import nbformat

from benchlib.benchmarks import spec_of
from benchlib.core.files import read_bytes, write_text
from benchlib.results.record import load
from benchlib.results.run import Run
from benchlib.results.shared import link
from benchlib.show import markup
from benchlib.show.digest import Problems, digest
from benchlib.show.figures import Picture, data_url

NAME = "report.html"
TEXT_LIMIT = 20_000  # characters of one output of a cell
PICTURES_LIMIT = 120_000  # base64 characters of all pictures of the notebook together
ALL_PICTURES_LIMIT = 340_000  # of these and the ones drawn from the records, which come first


def forms(limit: int, seen: Mapping[str, str]) -> Callable[[Any], dict[str, str]]:
    """Return what chooses the form in which an output of a cell is shown, with pictures of at most ``limit`` base64 characters.

    ``seen`` maps a picture of the first half, as base64, to its name: it is not shown twice. A form has a ``kind`` (html, picture,
    above, markdown, text) and what to show.
    """
    left = limit

    def shown(output: Any) -> dict[str, str]:
        nonlocal left
        data = output.get("data", {})
        if output.output_type in ("stream", "error"):
            text = (
                output.text if "text" in output else "\n".join(output.traceback) or f"{output.ename}: {output.evalue}"
            )
        elif "image/png" in data:
            encoded, about = "".join(data["image/png"].split()), output.metadata.get("image/png", {})
            alt = str(about.get("alt") or data.get("text/plain") or markup.NO_ALT)
            if encoded in seen:
                return {"kind": "above", "name": seen[encoded], "text": alt}
            if len(encoded) <= left:
                left -= len(encoded)
                return {"kind": "picture", "src": f"data:image/png;base64,{encoded}", "text": alt}
            text = f"[picture left out to keep this report small; it is in notebook.ipynb: {alt}]"
        elif "text/html" in data and len(data["text/html"]) <= 3 * TEXT_LIMIT:
            return {"kind": "html", "text": data["text/html"]}
        elif "text/markdown" in data:
            return {"kind": "markdown", "text": _cut(data["text/markdown"])}
        else:
            text = data.get("text/plain", "")
        return {"kind": "text", "text": _cut(markup.plain(text))}

    return shown


def _cut(words: str) -> str:
    if len(words) <= TEXT_LIMIT:
        return words
    half = TEXT_LIMIT // 2
    return f"{words[:half]}\n… {len(words) - TEXT_LIMIT:,} characters left out; all of it is in notebook.ipynb …\n{words[-half:]}"


def _drawn(name: str, draw: Callable[[Run], Picture], run: Run) -> list[dict[str, str]]:
    picture = draw(run)
    return [] if picture.empty else [{"name": name, "alt": picture.alt, "src": data_url(picture)}]


def _notebook(path: Path) -> nbformat.NotebookNode:
    notebook = nbformat.reads(read_bytes(path).decode(), as_version=4)
    nbformat.validate(notebook)
    return notebook


def html(run: Run) -> str:
    """Return the report of a run folder, whole, partial or damaged, as one HTML document."""
    record, problems, path = load(run.path), Problems(), run.path / "notebook.ipynb"
    content, pictures = digest(record, run, problems), list[dict[str, str]]()
    for name, draw in spec_of(record.benchmark).figures().items():
        about = f"the picture {name} could not be drawn: "
        pictures += problems.part(partial(_drawn, name, draw, run), [], about)
    data = problems.part(lambda: link(record), None, "the data of the run cannot be carried by this report: ")
    notebook = nbformat.v4.new_notebook()
    if path.exists():
        notebook = problems.part(lambda: _notebook(path), notebook, f"{path.name}: not a readable notebook: ")
    damaged = tuple(problem.partition(" ")[0].rstrip(":") for problem in record.problems)  # the sentence names these
    sentences = [problem.replace(f"{run.path}/", "") for problem in problems]
    left = [problem for problem in dict.fromkeys(sentences) if not (damaged and problem.startswith(damaged))]
    limit = max(0, min(PICTURES_LIMIT, ALL_PICTURES_LIMIT - sum(len(picture["src"]) for picture in pictures)))
    seen = {picture["src"].partition(",")[2]: picture["name"] for picture in pictures}
    values = {"run": content | {"problems": left}, "pictures": pictures, "data": data, "nb": notebook}
    return markup.page("index.html.j2", shown=forms(limit, seen), **values)


def render(run_dir: Path | str) -> Path:
    """Write ``report.html`` into a run folder and return its path.

    The folder may lack any part; only a folder that does not exist is a ``UserError``.
    """
    run = Run(run_dir)
    path = run.path / NAME
    write_text(path, html(run))
    return path
