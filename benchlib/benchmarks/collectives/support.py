"""What the collective library has: all ranks try each kind of case on a few elements, and what one lacks none measures."""

import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta

import torch.distributed as dist

from benchlib.runtime import group as process_group
from benchlib.workloads.collective_ops import DTYPES, Place
from benchlib.workloads.collective_timing import Case, Exercise, Kind, slowest
from benchlib.workloads.operations import OPS

TRIAL_BYTES = 64
TRIAL_S = 20  # what raises on one rank only leaves the others waiting this long, and not the run


def lacking(cases: Sequence[Case], at: Place) -> dict[Kind, str]:
    """Return why a kind of case cannot be measured here, for those that cannot. A collective."""
    mine: dict[Kind, str] = {}
    group = _trial_group(at)
    for kind in dict.fromkeys(case.kind for case in cases):
        began = time.monotonic()
        mine[kind] = _try(kind, replace(at, group=group))
        if group is not None and _left_unequal(bool(mine[kind]), time.monotonic() - began, at):
            group = _trial_group(at)  # the ranks are at different points of the old one, which nobody can tell apart
    everybody, reasons = process_group.all_gather_objects(mine), dict[Kind, str]()
    for rank, theirs in enumerate(everybody):
        for kind, reason in theirs.items():
            alike = all(others[kind] == reason for others in everybody)
            if reason:
                reasons.setdefault(kind, reason if alike else f"{reason} (rank {rank})")
    return reasons


def _trial_group(at: Place) -> dist.ProcessGroup | None:
    return dist.new_group(timeout=timedelta(seconds=TRIAL_S)) if at.ranks > 1 else None


def _left_unequal(failed: bool, seconds: float, at: Place) -> bool:
    """Tell whether ranks differ, or one waited in vain. A collective."""
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
        if kind[3] == "avg" and not DTYPES[kind[2]].is_floating_point:  # a sum that is divided has a fraction
            return "it does not average whole numbers"
        return " ".join(str(error).split())[:200] or type(error).__name__
    return ""
