"""Write docs/promises.md from tests/promises: what benchlib does, one line each, with the command.

python scripts/make_promises_doc.py
"""

import importlib
import sys
from pathlib import Path
from types import ModuleType

from benchlib.core.files import home, write_text

PROMISES = home() / "tests" / "promises"
HEAD = """# What benchlib does

Each line is held by a test in `tests/promises/` that runs the command on small input; `pytest tests/promises -q` prints their
states. This page is written by `scripts/make_promises_doc.py`.
"""


def sections() -> list[ModuleType]:
    """Import the modules of the promises, in the order of their first row."""
    sys.path[:0] = [str(PROMISES), str(PROMISES.parent / "fixtures")]
    modules = [importlib.import_module(path.stem) for path in PROMISES.glob("test_*.py")]
    return sorted((module for module in modules if rows(module)), key=lambda module: min(rows(module)))


def rows(module: ModuleType) -> dict[str, str]:
    """Return the line of each promise of a module by its number."""
    promised = [test.promise for test in vars(module).values() if hasattr(test, "promise")]
    lines = {}
    for row in promised:
        needs = f" Needs {row.needs}." if row.needs else ""
        what = row.what[:1].upper() + row.what[1:]
        lines[row.number] = f"| {row.number} | {what}.{needs} | `{row.command.replace('|', chr(92) + '|')}` |"
    return lines


def page() -> str:
    """Return the whole page."""
    parts = [HEAD]
    for module in sections():
        title = (module.__doc__ or module.__name__).strip().splitlines()[0].rstrip(".")
        table = "\n".join(line for _, line in sorted(rows(module).items()))
        parts.append(f"\n## {title}\n\n| | what you can do | command |\n|---|---|---|\n{table}\n")
    return "".join(parts)


if __name__ == "__main__":
    write_text(Path(home() / "docs" / "promises.md"), page())
