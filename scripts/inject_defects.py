"""Does the test suite find defects? Those of defects.yaml are injected into a copy of the package, one at a time.

    python scripts/inject_defects.py                # all of them, about ten seconds each
    python scripts/inject_defects.py --only spec    # those whose file or words hold this
    python scripts/inject_defects.py --list

The tests named beside a defect have to pass in the copy as it is, and to fail with the defect. It is ``missed`` where they
still pass, and ``stale`` where its text does not stand in its file exactly once, or its tests cannot run: then the row has to
follow the code. The exit code is 1 unless all are caught.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import yaml
from measuring import options_of

ROOT = Path(__file__).resolve().parents[1]
TABLE = Path(__file__).with_name("defects.yaml")
TIMEOUT_S = 600  # of the tests of a defect: one may make a program wait for ever
FAILED = 1  # pytest's exit code of tests that ran and failed; others are of tests that cannot run


@dataclass(frozen=True)
class Defect:
    """``old`` becomes ``new`` in benchlib/``file``; ``tests``, below tests/ with blanks between them, have to fail."""

    file: str
    what: str
    old: str
    new: str
    tests: str

    @property
    def name(self) -> str:
        return f"{self.file}: {self.what}"

    @property
    def paths(self) -> list[str]:
        return [f"tests/{test}" for test in self.tests.split()]

    def injected(self, text: str) -> str:
        """Return the file with the defect; ``LookupError`` where its text stands there never or twice, ``SyntaxError`` as Python does."""
        if (count := text.count(self.old)) != 1:
            raise LookupError(f"its text stands there {count} times")
        changed = text.replace(self.old, self.new)
        if self.file.endswith(".py"):
            compile(changed, self.file, "exec")  # any test would catch a file that is no Python
        return changed


def defects(only: str = "") -> list[Defect]:
    """Return the rows of the table whose file or words hold ``only``."""
    table = yaml.safe_load(TABLE.read_text())
    rows = [Defect(file, **row) for file, of_file in table.items() for row in of_file]
    return [row for row in rows if only in row.name]


def copied(folder: Path) -> Path:
    """Copy the files that git knows, as they lie in the checkout now."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in listed.split("\0"):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


def failure(tree: Path, paths: list[str]) -> str:
    """Run tests of a tree until one fails and return what pytest says of it, '' where all pass.

    Raises ``LookupError`` where they cannot run.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *paths]
    environment = os.environ | {"PYTHONPATH": str(tree)}
    try:
        done = subprocess.run(
            command, cwd=tree, env=environment, timeout=TIMEOUT_S, capture_output=True, text=True, check=False
        )
    except subprocess.TimeoutExpired:
        return f"no end after {TIMEOUT_S} s"
    if done.returncode not in (0, FAILED):
        raise LookupError(f"its tests do not run:\n{(done.stdout + done.stderr)[-1500:]}")
    return done.stdout[-3000:] if done.returncode else ""


def outcome(tree: Path, defect: Defect) -> tuple[str, str]:
    """Inject a defect, run its tests and take it out again; return ``caught``, ``missed`` or ``stale``, and why it is stale."""
    place = tree / "benchlib" / defect.file
    try:
        text = place.read_text()
        injected = defect.injected(text)
    except (LookupError, OSError, SyntaxError) as error:
        return "stale", str(error)
    try:
        place.write_text(injected)
        return ("caught" if failure(tree, defect.paths) else "missed"), ""
    except LookupError as error:
        return "stale", str(error)
    finally:
        place.write_text(text)


def main() -> int:
    """Print a line for each defect and return the exit code."""
    parser = options_of(__doc__)
    parser.add_argument("--only", default="", help="only defects whose file or words hold this")
    parser.add_argument("--list", action="store_true", help="show the defects and end")
    options = parser.parse_args()
    if not (chosen := defects(options.only)):
        parser.error(f"no defect holds {options.only!r}")
    if options.list:
        print("\n".join(f"{defect.name}  ({defect.tests})" for defect in chosen))
        return 0
    counts = dict.fromkeys(("caught", "missed", "stale"), 0)
    with tempfile.TemporaryDirectory(prefix="benchlib-defects-") as folder:
        tree = copied(Path(folder))
        paths = sorted(
            {path for defect in chosen for path in defect.paths if (tree / path.partition("::")[0]).exists()}
        )
        if output := failure(tree, paths):
            print(f"{output}\nthese tests fail without a defect: fix them first")
            return 1
        for defect in chosen:
            word, why = outcome(tree, defect)
            counts[word] += 1
            print(f"{word:<8}{defect.name}{f' ({why})' if why else ''}", flush=True)
    print(", ".join(f"{count} {word}" for word, count in counts.items()))
    return 0 if counts["caught"] == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
