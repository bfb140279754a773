"""The tables of a run for its notebook."""

from collections.abc import Callable

import pandas as pd

from benchlib.benchmarks.compiled.view import VIEW
from benchlib.results.frames import Records


def _of(heading: str) -> Callable[[Records], pd.DataFrame]:
    def make(run: Records) -> pd.DataFrame:
        assert VIEW.tables is not None
        return pd.DataFrame(VIEW.tables(run)[heading]) if run.result else pd.DataFrame()

    return make


MORE: dict[str, Callable[[Records], pd.DataFrame]] = {
    heading: _of(heading)
    for heading in (
        "Programs",
        "Gradients",
        "Executors",
        "One file, several runtimes",
        "Compiled for hardware that is not here",
    )
}
