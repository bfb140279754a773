"""What the collective library has: each kind of case is tried on a few elements before anything is measured.

All ranks try the same in the same order and then agree, so that what one of them lacks, none of them measures.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from benchlib import process_group
from benchlib.collectives.cases import Case, Kind
from benchlib.collectives.exercise import Exercise
from benchlib.collectives.ops import OPS, Place

TRIAL_BYTES = 64
TRIAL_S = 20  # an operation that raises on one rank only leaves the others waiting this long, and not the run


def lacking(cases: Sequence[Case], at: Place) -> dict[Kind, str]:
    """Return why a kind of case cannot be measured here, for those that cannot. A collective."""
    kinds = dict.fromkeys(case.kind for case in cases)
    group = dist.new_group(timeout=timedelta(seconds=TRIAL_S)) if at.ranks > 1 else None
    trial = Place(at.rank, at.ranks, at.device, group)
    mine = {kind: _try(kind, trial) for kind in kinds}
    found: dict[Kind, str] = {}
    for rank, theirs in enumerate(process_group.all_gather_objects(mine)):
        for kind, reason in theirs.items():
            if reason:
                found.setdefault(kind, reason if at.ranks == 1 else f"{reason} (rank {rank})")
    if group is not None:
        dist.destroy_process_group(group)
    return found


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
