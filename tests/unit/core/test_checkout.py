"""A run says which code measured it: the commit, and what was changed since."""

import subprocess

import pytest

from benchlib.core.checkout import code


@pytest.fixture
def root(tmp_path):
    """A checkout with one commit."""
    (tmp_path / "benchlib").mkdir()
    (tmp_path / "benchlib" / "loop.py").write_text("STEPS = 1\n")
    (tmp_path / "README.md").write_text("text")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "-c", "user.name=a", "-c", "user.email=a@b.c", "commit", "--quiet", "-m", "first")
    return tmp_path


def git(root, *words):
    return subprocess.run(("git", "-C", str(root), *words), check=True, capture_output=True, text=True).stdout.strip()


def test_a_clean_checkout_is_its_commit_and_a_changed_one_names_its_files(root):
    commit = git(root, "rev-parse", "--short=12", "HEAD")
    (root / "README.md").write_text("other words")
    assert code(root) == commit, "what measures nothing does not count"
    texts = set()
    for steps in (2, 3):
        (root / "benchlib" / "loop.py").write_text(f"STEPS = {steps}\n")
        texts.add(code(root))
    (root / "benchlib" / "more.py").write_text("")
    texts.add(code(root))
    assert len(texts) == 3 and all(text.startswith(f"{commit}, changed since: benchlib/loop.py") for text in texts)
    git(root, "add", ".")
    assert code(root) in texts, "added to the index they are changed all the same"


def test_what_is_no_checkout_has_no_code_to_name(tmp_path):
    assert code(tmp_path) == ""
