"""Metrics of the kit loaded by path, as a user loads them, with caches of evaluate that vanish."""

import evaluate
import pytest

from benchlib.core.files import PACKAGE


@pytest.fixture(scope="session")
def by_path(tmp_path_factory):
    cache = tmp_path_factory.mktemp("evaluate")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluate.config, "HF_MODULES_CACHE", cache / "modules")
        yield lambda name: evaluate.load(str(PACKAGE / "metrics" / name), cache_dir=str(cache), keep_in_memory=True)
