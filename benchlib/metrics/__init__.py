"""Metrics of the evaluate library, each a folder for ``evaluate.load`` and what the benchmarks score with.

They import nothing of benchlib: ``evaluate.load`` copies the file into its own cache.
"""

import importlib
import tempfile
from typing import Any


def load(name: str) -> Any:
    """Return the metric of a folder, an ``evaluate.Metric``, without the files that ``evaluate.load`` leaves in ~/.cache.

    The first call imports evaluate, which takes seconds. Raises ``ImportError`` if a package of the metric is missing.
    """
    path = f"{__name__}.{name}.{name}"
    importlib.import_module(path)
    from evaluate.loading import import_main_class

    metric: Any = import_main_class(path)
    with tempfile.TemporaryDirectory() as folder:  # evaluate makes a cache folder, which stays empty
        return metric(cache_dir=folder, keep_in_memory=True)
