"""Write the badges of the README.

Question: which badges hold at the address where the repository really is?
Method: the address is `Repository` in `[project.urls]` of pyproject.toml, else the remote `origin`, else --repository.
With an address the badges of CI and Binder are written; without one they are left out, since they could lead nowhere. What stands between the two comments in README.md is replaced.

    python scripts/badges.py                            # write
    python scripts/badges.py --repository OWNER/NAME    # for a repository that has no such remote yet
    python scripts/badges.py --check                    # write nothing; exit with 1 where README.md is out of date
"""

import argparse
import re
import subprocess
import sys
import tomllib
from urllib.parse import quote

from benchlib.core.files import home, write_text

BEGIN, END = "<!-- badges: written by scripts/badges.py -->", "<!-- /badges -->"
ADDRESS = re.compile(r"(?:https://github\.com/|git@github\.com:|ssh://git@github\.com/)([\w.-]+/[\w.-]+?)(?:\.git)?/?")
# What a visitor wants to see comes first. binder/postBuild makes the report.
DEMO = (
    ("Explorer on Binder", "binder-explorer", "voila/render/notebooks/90_history.ipynb"),
    ("A finished report on Binder", "binder-report", "files/binder/report.html"),
    ("Notebooks on Binder", "binder-notebooks", "lab/tree/notebooks/10_squad.ipynb"),
)


def address() -> str:
    """Return OWNER/NAME of the repository on GitHub, '' where nothing tells."""
    project = tomllib.loads((home() / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = [project.get("urls", {}).get("Repository", "")]
    if not named[0]:
        command = ["git", "-C", str(home()), "remote", "get-url", "origin"]
        named = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()
    found = ADDRESS.fullmatch(named[0]) if named else None
    return found[1] if found else ""


def binder(repository: str, path: str) -> str:
    """Return the link that starts the demo with ``path`` open."""
    return f"https://mybinder.org/v2/gh/{repository}/HEAD?urlpath={quote(path, safe='')}"


def badges(repository: str) -> str:
    """Return the badges as Markdown, one a line."""
    workflow = f"https://github.com/{repository}/actions/workflows/ci.yml"
    needs = tomllib.loads((home() / "pyproject.toml").read_text(encoding="utf-8"))["project"]["requires-python"]
    python = quote(needs.removeprefix(">=") + "+")
    addressed = (
        ("CI", f"{workflow}/badge.svg", workflow),
        *(
            (text, f"https://img.shields.io/badge/{badge}-579aca", binder(repository, path))
            for text, badge, path in DEMO
        ),
    )
    rows = (
        *(addressed if repository else ()),
        ("Licence: Apache 2.0", "https://img.shields.io/badge/licence-Apache--2.0-4c1", "LICENSE"),
        (f"Python {needs}", f"https://img.shields.io/badge/python-{python}-4c1", "pyproject.toml"),
    )
    return "\n".join(f"[![{text}]({image})]({link})" for text, image, link in rows)


def main() -> None:
    """Write or check README.md."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repository", default="", metavar="OWNER/NAME", help="on GitHub [as pyproject or origin say]")
    parser.add_argument("--check", action="store_true", help="write nothing")
    arguments = parser.parse_args()
    path = home() / "README.md"
    before = path.read_text(encoding="utf-8")
    pattern = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
    if not pattern.search(before):
        sys.exit(f"README.md has no place for the badges: put the lines `{BEGIN}` and `{END}` there")
    content = f"{BEGIN}\n{badges(arguments.repository or address())}\n{END}"
    after = pattern.sub(lambda _: content, before)
    if arguments.check:
        sys.exit(0 if after == before else "README.md: the badges are out of date: python scripts/badges.py")
    write_text(path, after)


if __name__ == "__main__":
    main()
