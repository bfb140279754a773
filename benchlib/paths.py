"""Where the kit's files are: notebooks, params, baselines and outputs lie beside the package in a checkout."""

import os
from pathlib import Path

from benchlib.errors import UserError

PACKAGE = Path(__file__).resolve().parent


def home() -> Path:
    """Return the checkout that holds ``notebooks/`` and ``params/``.

    Raises ``UserError`` where the package was installed without its checkout.
    """
    root = PACKAGE.parent
    if not (root / "params").is_dir() or not (root / "notebooks").is_dir():
        raise UserError(
            f"{root} holds no notebooks/ and params/: install benchlib from its checkout with `pip install -e .`"
        )
    return root


def outputs() -> Path:
    """Return the default folder of runs: ``$BENCHLIB_OUTPUTS``, else ``outputs/`` of the checkout."""
    chosen = os.environ.get("BENCHLIB_OUTPUTS")
    return Path(chosen).resolve() if chosen else home() / "outputs"


def cache() -> Path:
    """Return the folder of rebuildable files (tokenised features); deleting it costs time only."""
    return outputs() / ".cache"
