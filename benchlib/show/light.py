"""seaborn without what it needs of scipy for densities and clusters alone: half a second in every notebook and report."""

import sys
from collections.abc import Callable
from importlib import import_module
from types import SimpleNamespace
from typing import Any


def _later(module: str, name: str) -> Callable[..., Any]:
    """Return a function of a module that is imported when it is called."""
    return lambda *values, **options: getattr(import_module(module), name)(*values, **options)


_clusters = {name: _later("scipy.cluster.hierarchy", name) for name in ("linkage", "dendrogram")}
_parts: dict[str, Any] = {
    "scipy.stats": SimpleNamespace(gaussian_kde=_later("scipy.stats", "gaussian_kde")),
    "scipy.cluster": SimpleNamespace(hierarchy=SimpleNamespace(**_clusters)),
}
_absent = _parts.keys() - sys.modules.keys()
sys.modules |= {module: _parts[module] for module in _absent}
try:
    import seaborn  # noqa: F401  # for the modules that draw
finally:
    for module in _absent:
        del sys.modules[module]
