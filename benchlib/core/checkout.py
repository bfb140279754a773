"""Which code of the kit ran: a version number does not tell of a changed checkout."""

import hashlib
import subprocess
from pathlib import Path

from benchlib.core.files import PACKAGE
from benchlib.core.text import shortened

PARTS = ("benchlib", "params")  # what decides how a run measures and what it computes; a run holds its own notebook
GIT_S = 10.0  # for one question to git
NAMED = 3  # changed files that are named


def code(root: Path = PACKAGE.parent) -> str:
    """Return the commit of the checkout ``root``, with the files that were changed since and a digest of the changes.

    '' without git, or if ``root`` is no checkout of its own. Two runs of one text ran the same code.
    """
    if not (root / ".git").exists():
        return ""
    commit = _git(root, "rev-parse", "--short=12", "HEAD")
    if not commit:
        return ""
    changed = _git(root, "ls-files", "--modified", "--deleted", "--others", "--exclude-standard", "-z", "--", *PARTS)
    changed += _git(root, "diff", "--cached", "--name-only", "-z", "--", *PARTS)
    names = sorted({name for name in changed.split("\0") if name})
    if not names:
        return commit.strip()
    digest = hashlib.sha256()
    for name in names:
        path = root / name
        digest.update(f"{name}\0".encode() + (path.read_bytes() if path.is_file() else b"deleted"))
    return f"{commit.strip()}, changed since: {shortened(names, NAMED)} ({digest.hexdigest()[:8]})"


def _git(root: Path, *words: str) -> str:
    """Return what git answers; '' without git, or if it fails."""
    try:
        done = subprocess.run(("git", "-C", str(root), *words), capture_output=True, timeout=GIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode(errors="replace") if done.returncode == 0 else ""
