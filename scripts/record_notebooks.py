"""Record the committed notebooks: execute each on the smoke tier and normalise it.

Runs every cell in order with the defaults of the parameters cell; then numbers ids and counts, drops what changes
from run to run (timestamps, transient metadata, progress), and refuses what must not be committed (errors, injected
parameters, unrun cells, more than 300 kB). Cells whose output is stable are byte-identical when recorded again. Each is
executed over an empty folder of runs, so the history shows the kit's own demo runs.

    python scripts/record_notebooks.py            # execute and write
    python scripts/record_notebooks.py --check    # only check what is committed
"""

import os
import sys
import tempfile
from pathlib import Path

import nbformat
from measuring import options_of
from nbclient import NotebookClient

from benchlib.core.files import home, write_text
from benchlib.show.headless import kernel_manager

LIMIT_BYTES = 300_000
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def execute(notebook: nbformat.NotebookNode, folder: Path) -> None:
    """Execute all cells in place, in ``folder``, with an empty folder of runs."""
    with tempfile.TemporaryDirectory(prefix="benchlib-record-") as outputs:
        os.environ |= {"BENCHLIB_HEADLESS": "1", "BENCHLIB_OUTPUTS": outputs}
        NotebookClient(
            notebook,
            timeout=600,
            kernel_name="python3",
            kernel_manager_class=kernel_manager(Path(os.devnull)),
            resources={"metadata": {"path": str(folder)}},
            record_timing=False,
            coalesce_streams=True,
        ).execute()


def normalise(notebook: nbformat.NotebookNode) -> None:
    """Remove from a notebook, in place, what differs between two recordings of the same thing."""
    notebook.metadata = nbformat.from_dict(METADATA)
    notebook.nbformat_minor = 5
    count = 0
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number:02d}"
        tags = cell.metadata.get("tags")
        cell.metadata = nbformat.from_dict({"tags": tags} if tags else {})
        if cell.cell_type != "code":
            continue
        count += 1
        cell.execution_count = count
        for output in cell.outputs:
            if "execution_count" in output:
                output.execution_count = count
            # A live view means nothing in a file; the text and HTML beside it do.
            output.get("data", {}).pop("application/vnd.jupyter.widget-view+json", None)


def problems(notebook: nbformat.NotebookNode, size: int) -> list[str]:
    """Return what must not be committed, one sentence each."""
    messages = [f"{size:,} bytes, more than {LIMIT_BYTES:,}"] if size > LIMIT_BYTES else []
    for cell in notebook.cells:
        if "injected-parameters" in cell.metadata.get("tags", []):
            messages.append(f"{cell.id}: injected parameters")
        if cell.cell_type == "code" and cell.execution_count is None:
            messages.append(f"{cell.id}: not executed")
        if any(output.output_type == "error" for output in cell.get("outputs", [])):
            messages.append(f"{cell.id}: an error")
    return messages


def main() -> None:
    """Record or check all notebooks; exit with 1 where one must not be committed."""
    parser = options_of(__doc__)
    parser.add_argument("--check", action="store_true", help="execute nothing, write nothing")
    parser.add_argument("notebooks", nargs="*", type=Path, help="only these [all]")
    arguments = parser.parse_args()
    failed = False
    for path in arguments.notebooks or sorted((home() / "notebooks").glob("*.ipynb")):
        notebook = nbformat.read(path, as_version=4)
        if not arguments.check:
            execute(notebook, path.parent)
            normalise(notebook)
        content = nbformat.writes(notebook) + "\n"
        messages = problems(notebook, len(content.encode()))
        failed |= bool(messages)
        print(f"{path.name}: {'; '.join(messages) or 'in order'}")
        if not arguments.check and not messages:
            write_text(path, content)
    sys.exit(failed)


if __name__ == "__main__":
    main()
