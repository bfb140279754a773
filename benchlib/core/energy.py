"""Energy and mean power of this machine between two moments, by the readings that its supervisor left in the events of a run."""

from collections.abc import Sequence

import numpy as np

from benchlib.core.events import Event

Reached = tuple[float | None, str]  # a number, or why there is none


def energy_j(events: Sequence[Event], began: float, ended: float) -> Reached:
    """Return what the hardware's own counter rose by between two wall times, in J, or why it is not known.

    Readings come once a second: at both ends the counter is interpolated between the readings next to them.
    """
    times_s, joules = _series(events, "energy_j")
    return _rise(events, "energy_j", times_s, joules, began, ended)


def mean_power_w(events: Sequence[Event], began: float, ended: float) -> Reached:
    """Return the mean power between two wall times in W: energy over time, or without a counter the readings of power over time."""
    energy, _ = energy_j(events, began, ended)
    reason = ""
    if energy is None:
        times_s, watts = _series(events, "power_w")
        parts = np.diff(times_s) * (watts[1:] + watts[:-1]) / 2
        energy, reason = _rise(events, "power_w", times_s, np.append(0.0, parts.cumsum()), began, ended)
    return (None if energy is None else energy / (ended - began)), reason


def _series(events: Sequence[Event], name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the wall times of the readings of one name and their values, as far as there are some."""
    pairs = [(event["t"], event[name]) for event in events if event["kind"] == "sensor" and _is_number(event.get(name))]
    times_s, values = np.array(pairs, dtype=float).reshape(-1, 2).T
    return times_s, values


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _rise(
    events: Sequence[Event], name: str, times_s: np.ndarray, totals: np.ndarray, began: float, ended: float
) -> Reached:
    if len(times_s) > 1 and times_s[0] <= began < ended <= times_s[-1]:
        before, after = np.interp([began, ended], times_s, totals)
        return float(after - before), ""
    stated: dict[str, str] = next(
        (event["availability"] for event in reversed(events) if event["kind"] == "sensors"), {}
    )
    return None, str(stated.get(name, f"no readings of {name} both before its begin and after its end"))
