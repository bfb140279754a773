"""The series behind the pictures: what a run recorded, as small frames, apart from how it is drawn.

All functions take a :class:`benchlib.results.run.Run` (or anything with its ``events`` and ``samples``) and read only what is
there: a cut run gives shorter series, a skipped one empty frames, never an error.
"""

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import pandas as pd

from benchlib.core.errors import UserError
from benchlib.core.stats import smoothed

PARTS = ("data", "forward", "backward", "exchange", "optimizer")
STEP_COLUMNS = (
    "step",
    "t",
    "loss",
    "lr",
    "samples",
    "tokens",
    "step_s",
    *(f"{part}_s" for part in PARTS),
    "exchange_exposed_s",
)


# Of a column its heading, how its numbers are written ('' for text), and the factor to its unit where there is one.
Column = tuple[str, str] | tuple[str, str, float]


class Records(Protocol):
    """The part of a :class:`benchlib.results.run.Run` that the curves need."""

    @property
    def events(self) -> Any: ...  # all, in the order of time

    @property
    def samples(self) -> Any: ...  # raw, as lists by metric

    @property
    def result(self) -> Any: ...  # or None


def _events(run: Records, kind: str) -> list[dict[str, Any]]:
    return [event for event in run.events or [] if event.get("kind") == kind]


def readable(run: Records, part: str) -> Any:
    """Return a part of a run, None where it is damaged: what the other parts show must not depend on it."""
    try:
        return getattr(run, part)
    except UserError:
        return None


def _samples(run: Records, prefix: str) -> list[float]:
    """Samples of the metric ``prefix``, with or without a scope suffix (``step_s`` finds ``step_s_minisquad_tiny``)."""
    samples: Mapping[str, list[float]] = readable(run, "samples") or {}
    return next(
        (list(values) for name, values in samples.items() if name == prefix or name.startswith(prefix + "_")), []
    )


def table(run: Records, name: str) -> pd.DataFrame:
    """Table ``name`` of the result as it was written, one row a row; empty where it is absent or damaged."""
    result = readable(run, "result")
    return pd.DataFrame(result.tables.get(name, []) if result else [])


def typed(run: Records, name: str, columns: Mapping[str, Any]) -> pd.DataFrame:
    """Table ``name`` with these columns and no others: texts ('' where there is none), numbers (NaN) or truth values.

    ``columns`` gives of each an example of its kind: ``""``, ``0.0`` or ``False``.
    """
    records = table(run, name)
    made: dict[str, Any] = {}
    for column, kind in columns.items():
        values = records[column] if column in records else pd.Series(None, index=records.index, dtype=object)
        if isinstance(kind, float):
            made[column] = pd.to_numeric(values, errors="coerce").astype(float)
        else:
            made[column] = values.where(values.notna(), "").astype(str) if kind == "" else values.eq(True)
    return pd.DataFrame(made, index=records.index)


def indexed(rows: list[dict[str, Any]], index: str, missing: str) -> pd.DataFrame:
    """Return the rows by a column, or one row that says what is missing."""
    return pd.DataFrame(rows).set_index(index) if rows else pd.DataFrame({"": [missing]}).set_index("")


def row_dicts(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the rows of a frame as plain values by column."""
    return [{str(name): value for name, value in row.items()} for row in frame.to_dict("records")]


def report(run: Records, tables: Mapping[str, Callable[[Records], pd.DataFrame]]) -> dict[str, list[dict[str, Any]]]:
    """Return the tables that have something to show, as rows by heading. An index of numbers alone is no column."""
    made = {heading: make(run) for heading, make in tables.items()}
    return {
        heading: row_dicts(frame if isinstance(frame.index, pd.RangeIndex) else frame.reset_index())
        for heading, frame in made.items()
        if len(frame) and len(frame.columns)
    }


def written(columns: Mapping[str, Column], name: str, run: Records) -> pd.DataFrame:
    """Return table ``name`` with its columns named and its numbers written; empty where the run left none."""
    frame = typed(run, name, {column: 0.0 if form else "" for column, (_, form, *_) in columns.items()})
    for column, (_, form, *factor) in columns.items():
        if form:
            values = frame[column] * (factor[0] if factor else 1)
            frame[column] = [form.format(value) if value == value else "" for value in values]
    return frame.rename(columns={column: heading for column, (heading, *_) in columns.items()})


def tables(columns: Mapping[str, tuple[str, Mapping[str, Column]]]) -> dict[str, Callable[[Records], pd.DataFrame]]:
    """Return what makes each table, by its heading, from the columns to show."""
    return {heading: functools.partial(written, of_table, name) for name, (heading, of_table) in columns.items()}


def steps(run: Records) -> pd.DataFrame:
    """Training steps in order, one row a step (numbers; NaN where a value is missing or was not finite)."""
    rows = [event for event in _events(run, "step") if event.get("step") is not None]
    frame = pd.DataFrame(rows, columns=pd.Index(STEP_COLUMNS))
    frame = frame.apply(pd.to_numeric, errors="coerce").dropna(subset=["step"])
    # A resumed or repeated step is written again: the later line is the one that counts.
    return frame.drop_duplicates("step", keep="last").sort_values("step", ignore_index=True)


def plan(run: Records) -> Mapping[str, Any]:
    """The last plan event: total_steps, planned_steps, epoch_share, reason; empty when there was none."""
    plans = _events(run, "plan")
    return plans[-1] if plans else {}


def smooth(values: pd.Series) -> pd.Series:
    """Smooth as the checks do (``benchlib.core.stats.smoothed``), so that picture and verdict show the same number."""
    return pd.Series(smoothed(values.tolist()), index=values.index)


def steady(run: Records) -> tuple[float, float] | None:
    """First and last step that count for the speed, or None where the run does not say.

    The fact ``steady_from_step`` names the first; without it the samples of the step time are the last steps.
    """
    index = steps(run)["step"]
    if index.empty:
        return None
    result = readable(run, "result")
    first = (result.facts if result else {}).get("steady_from_step")
    if first is None:
        counted = len(_samples(run, "step_s"))
        first = float(index.iloc[-counted]) if 0 < counted <= len(index) else None
    return (float(first), float(index.iloc[-1])) if first is not None and first <= index.iloc[-1] else None


def step_times(run: Records) -> pd.Series:
    """Seconds of each counted step, of its slowest rank: the samples, or the events where there are none."""
    samples = _samples(run, "step_s")
    if not samples:
        samples = _in_window(steps(run), steady(run))["step_s"].dropna().tolist()
    return pd.Series(samples, dtype=float).dropna()


def ranks(run: Records) -> pd.DataFrame:
    """Seconds of a step on each rank, the one with most work first: columns ``rank``, ``own_s``, ``step_s``.

    ``own_s`` is the rank's own work, without waiting for other ranks; NaN where the run did not tell it. From the
    result's table ``ranks``.
    """
    frame = table(run, "ranks").reindex(columns=["rank", "own_work_s_median", "step_s_median"])
    frame = frame.apply(pd.to_numeric, errors="coerce").set_axis(["rank", "own_s", "step_s"], axis=1)
    frame = frame.dropna(subset=["rank", "step_s"])
    return frame.sort_values(["own_s", "step_s"], ascending=False, ignore_index=True)


def _in_window(frame: pd.DataFrame, window: tuple[float, float] | None) -> pd.DataFrame:
    return frame if window is None else frame[frame["step"].between(*window)]


def throughput(run: Records) -> pd.DataFrame:
    """Samples per second of each step: columns ``step``, ``samples_per_s``, ``steady`` (inside the counted window)."""
    frame = steps(run)[["step", "samples", "step_s"]].dropna()
    frame = frame[frame["step_s"] > 0]
    counted = frame["step"].isin(_in_window(frame, steady(run))["step"])
    return pd.DataFrame({"step": frame["step"], "samples_per_s": frame["samples"] / frame["step_s"], "steady": counted})


def split(run: Records) -> dict[str, float]:
    """Median seconds of each part of a steady step, in the order of execution; ``other`` is what no part covers.

    Gradient exchange counts only as far as it is exposed, that is not hidden behind the backward pass, where the run
    recorded that; so the parts of one step add up to it.
    """
    frame = _in_window(steps(run), steady(run))

    def median(name: str) -> float | None:
        # The samples of the metrics are means over the ranks: the picture and the table then say the same.
        value = pd.Series(_samples(run, name) or frame.get(name), dtype=float).median()
        return None if math.isnan(value) else float(value)

    medians = {part: median(f"time_{part}_s") or median(f"{part}_s") for part in PARTS}
    if (exposed := median("exchange_exposed_s")) is not None:
        medians["exchange"] = exposed
    parts, whole = {part: value for part, value in medians.items() if value is not None}, median("step_s") or 0.0
    rest = whole - sum(parts.values())
    return parts | ({"other": rest} if parts and rest > 0.005 * whole else {})


def memory(run: Records, key: str = "rss_bytes_per_pid") -> pd.DataFrame:
    """Memory by the supervisor's sensor ``key``: columns ``seconds`` (since launch), ``rank``, ``gb`` (1e9 bytes)."""
    launched, readings = _events(run, "launched")[-1:], _events(run, "sensor")
    pids = {str(pid): rank for event in launched for rank, pid in enumerate(event.get("ranks") or [])}
    rows = [
        (event["t"] - (launched or readings)[0]["t"], rank, value / 1e9)
        for event in readings
        for rank, value in _by_rank(event.get(key), pids)
        if type(value) in (int, float)
    ]
    return pd.DataFrame(rows, columns=pd.Index(["seconds", "rank", "gb"]))


def _by_rank(value: Any, pids: Mapping[str, int]) -> Iterable[tuple[int, Any]]:
    """Return the values of a sensor by rank: one for each process, one for each device, or one."""
    if isinstance(value, Mapping):
        return [(pids.get(pid, place), item) for place, (pid, item) in enumerate(value.items())]
    return enumerate(value if isinstance(value, list) else [value])
