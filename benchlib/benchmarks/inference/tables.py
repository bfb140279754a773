"""The tables of an inference run for its notebook."""

from collections.abc import Callable

import pandas as pd

from benchlib.benchmarks.inference.view import VIEW
from benchlib.results.frames import Records


def _of(heading: str) -> Callable[[Records], pd.DataFrame]:
    def make(run: Records) -> pd.DataFrame:
        assert VIEW.tables is not None
        return pd.DataFrame(VIEW.tables(run)[heading]) if run.result else pd.DataFrame()

    return make


MORE: dict[str, Callable[[Records], pd.DataFrame]] = {
    heading: _of(heading)
    for heading in (
        "Tests",
        "Before the run: how many queries a percentile takes",
        "Reduced rules",
        "ROUGE and its controls",
        "Timeline of single queries",
    )
}
