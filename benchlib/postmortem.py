"""How the ranks of a run ended that did not end well, in plain words, from ``status.json``."""

from typing import Any

STACKS_LIMIT = 20_000  # characters of one stack or traceback; a report stays small with a thousand ranks
STACKS_SHOWN = 8


def ranks(status: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Return what each rank did, in words, where the run did not end well."""
    if not status or status.get("outcome") == "complete":
        return []
    rows = []
    for rank in status.get("ranks") or []:
        error = rank.get("error") or {}
        rows.append(
            {
                "rank": rank.get("rank"),
                "pid": rank.get("pid"),
                "culprit": rank.get("rank") == status.get("culprit"),
                "phase": _phase(rank),
                "end": _ending(rank, error),
                "traceback": str(error.get("traceback") or "")[-STACKS_LIMIT:],
            }
        )
    return sorted(rows, key=lambda row: not row["culprit"])


def _phase(rank: dict[str, Any]) -> str:
    step = f", step {rank['last_step']:,}" if isinstance(rank.get("last_step"), int) else ""
    return f"{rank.get('last_phase') or 'not started'}{step}"


def _ending(rank: dict[str, Any], error: dict[str, Any]) -> str:
    if error:
        return f"raised {error.get('type', 'an error')}: {error.get('message', '')}"
    if rank.get("ended_by_supervisor"):
        return f"was ended with the run ({rank.get('signal') or 'no signal needed'})"
    if rank.get("signal"):
        return f"was killed by {rank['signal']}"
    code = rank.get("returncode")
    return "had not ended" if code is None else "ended normally" if code == 0 else f"ended with exit code {code}"


def stacks(status: dict[str, Any] | None) -> list[tuple[str, str]]:
    """Return the Python stacks with the ranks that had them; ranks in the same place are told once."""
    groups: dict[str, list[str]] = {}
    culprit = (status or {}).get("culprit")
    for rank in sorted((status or {}).get("ranks") or [], key=lambda rank: rank.get("rank") != culprit):
        if rank.get("stacks"):
            groups.setdefault(str(rank["stacks"])[:STACKS_LIMIT], []).append(str(rank.get("rank")))
    rows = [(f"rank{'s' if len(members) > 1 else ''} {', '.join(members)}", stack) for stack, members in groups.items()]
    return rows[:STACKS_SHOWN]
