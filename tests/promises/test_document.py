"""The list of promises is whole, and the page that is written from it is up to date."""

import subprocess
import sys

from benchlib.core.files import home


def test_every_row_has_a_test_and_its_line_in_the_document():
    code = "import make_promises_doc; print(make_promises_doc.page(), end='')"  # its modules have names of other tests
    folder = home() / "scripts"
    page = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True).stdout
    assert page == (home() / "docs" / "promises.md").read_text(encoding="utf-8"), "run scripts/make_promises_doc.py"
    rows = [line[2:6] for line in page.splitlines() if line.startswith("| P")]
    assert rows == [f"P{number:03}" for number in range(1, 151)]
