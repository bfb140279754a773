"""What the collective library has: each kind of case is tried on a few elements before anything is measured.

All ranks try the same in the same order and then agree, so that what one of them lacks, none of them measures.
"""

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from benchlib import process_group
from benchlib.collectives.cases import Case, Kind
from benchlib.collectives.exercise import Exercise
from benchlib.collectives.measure import slowest
from benchlib.collectives.ops import OPS, Group, Place

TRIAL_BYTES = 64
TRIAL_S = 20  # an operation that raises on one rank only leaves the others waiting this long, and not the run


def lacking(cases: Sequence[Case], at: Place) -> dict[Kind, str]:
    """Return why a kind of case cannot be measured here, for those that cannot. A collective."""
    mine: dict[Kind, str] = {}
    group = _trial_group(at)
    for kind in dict.fromkeys(case.kind for case in cases):
        began = time.monotonic()
        mine[kind] = _try(kind, Place(at.rank, at.ranks, at.device, group))
        if group is not None and _left_unequal(bool(mine[kind]), time.monotonic() - began, at):
            group = _trial_group(at)  # the ranks are at different points of the old one, which nobody can tell apart
    found: dict[Kind, str] = {}
    everybody = process_group.all_gather_objects(mine)
    for rank, theirs in enumerate(everybody):
        for kind, reason in theirs.items():
            if reason:
                alike = all(others[kind] == reason for others in everybody)
                found.setdefault(kind, reason if alike else f"{reason} (rank {rank})")
    return found


def _trial_group(at: Place) -> Group:
    """Return a group of all ranks that gives up soon; None for one rank."""
    return dist.new_group(timeout=timedelta(seconds=TRIAL_S)) if at.ranks > 1 else None


def _left_unequal(failed: bool, seconds: float, at: Place) -> bool:
    """Tell whether some ranks failed and others did not, or one waited in vain. A collective."""
    flags = [float(failed), float(not failed), float(failed and seconds > TRIAL_S / 2)]
    some_failed, some_ran, some_waited = slowest(flags, at.device)
    return bool(some_waited or (some_failed and some_ran))


def _try(kind: Kind, at: Place) -> str:
    """Return why a kind fails on this rank, '' where it runs; whether it is right is for the measurement to say."""
    if at.ranks < OPS[kind[0]].least_ranks:
        return "one rank has nobody to send to"
    try:
        trial = Exercise(Case(*kind, bytes=TRIAL_BYTES), at)
        trial.restore()
        trial.run()
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        said = " ".join(str(error).split()) or type(error).__name__
        if kind[3] == "avg" and "can't be cast" in said:  # torch divides the sum, and has nowhere to put a fraction
            return "it does not average whole numbers"
        return said[:200]
    return ""


def rows(found: dict[Kind, str]) -> list[dict[str, Any]]:
    """Return the table ``unsupported``: a row for each operation, type and reduction that is missing."""
    return [
        {
            "operation": operation,
            "variant": variant,
            "dtype": dtype,
            "reduction": reduction,
            "in_place": in_place,
            "reason": reason,
        }
        for (operation, variant, dtype, reduction, in_place), reason in found.items()
    ]
