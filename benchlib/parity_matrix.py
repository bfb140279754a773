"""One matrix of parity over all backends and machines: the newest result of each member counts.

What cannot be read is a sentence in ``left_out`` (of the frame: ``attrs["left_out"]``), and never an error.
"""

import dataclasses
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchlib.backends import BACKENDS
from benchlib.config import nearest
from benchlib.errors import UserError
from benchlib.parity.members import MEMBERS
from benchlib.parity_results import FILE, WHOLE, MemberResult, NotCounted, RunResult, read_file, read_run
from benchlib.paths import home, outputs
from benchlib.results import Run, find_runs, is_run

if TYPE_CHECKING:
    import pandas

LATEST = 50  # runs of one machine and backend that are read, from the newest on: older ones hold no newest result
DAY_S = 86400.0
COLUMNS = (
    "machine", "backend", "member", "device", "precision", "mode", "gates", "outcome", "reason", "max_difference",
    "one_minus_cosine", "limit", "model", "stand_in", "torch", "versions", "ended_at", "age_days", "run",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Merged:
    """The newest results, each with its run, in the order of backends, machines and members.

    ``left_out`` are sentences on what is damaged, ``uncounted`` on runs that are in order and say nothing.
    """

    results: tuple[RunResult, ...]
    left_out: tuple[str, ...] = ()
    uncounted: tuple[str, ...] = ()

    @property
    def rows(self) -> list[tuple[RunResult, MemberResult]]:
        """Each member's result with the run that it is from."""
        pairs = [(run, row) for run in self.results for row in run.members]
        return sorted(pairs, key=lambda pair: (*_place(pair[0]), _rank(pair[1].member, MEMBERS), pair[1].member))

    def of(self, backend: str) -> list[RunResult]:
        """Return the results of one backend."""
        return [run for run in self.results if run.backend == backend]


def committed() -> Path:
    """Return the folder of results that are committed: ``parity-results/`` of the checkout."""
    return home() / "parity-results"


def collect(sources: Iterable[Path | str | Run], machine: str = "") -> Merged:
    """Read ``sources`` into the newest results: runs, folders of runs, files of results, folders of those.

    ``machine`` replaces the host names of runs. Raises ``UserError`` for a source that is not there at all.
    """
    found: list[RunResult] = []
    left_out: list[str] = []
    uncounted: list[str] = []
    for item in _items(sources):
        try:
            if isinstance(item, Run):
                found.append(read_run(item, machine))
            else:
                found += read_file(item)
        except NotCounted as error:
            uncounted.append(str(error))
        except (UserError, OSError) as error:
            left_out.append(str(error))
    return newest(found, left_out, uncounted)


def newest(results: Iterable[RunResult], left_out: Sequence[str] = (), uncounted: Sequence[str] = ()) -> Merged:
    """Keep of each machine, backend and member the newest result.

    A run as a whole (skipped, broken) counts where nothing newer is there of its machine and backend, one that only
    recorded the reference where no run of these compared anything.
    """
    taken: dict[tuple[str, str, str], int] = {}
    ordered = sorted(results, key=lambda run: (-run.ended_at.timestamp(), run.run, run.model_dump_json()))
    last: dict[tuple[str, str], Any] = {}
    for run in sorted(ordered, key=_compared_nothing):
        last.setdefault((run.machine, run.backend), run.ended_at)
    kept = []
    for number, run in enumerate(ordered):
        members = [row for row in run.members if _counts(run, row, last)]
        fresh = [row for row in members if taken.setdefault((run.machine, run.backend, row.member), number) == number]
        if fresh:
            kept.append(run.model_copy(update={"members": tuple(sorted(fresh, key=_member_order))}))
    ordered = sorted(kept, key=lambda run: (*_place(run), -run.ended_at.timestamp()))
    return Merged(tuple(ordered), tuple(dict.fromkeys(left_out)), tuple(dict.fromkeys(uncounted)))


def _compared_nothing(run: RunResult) -> bool:
    return all(row.outcome == "NOT COMPARED" for row in run.members)


def _counts(run: RunResult, row: MemberResult, last: dict[tuple[str, str], Any]) -> bool:
    return row.member != WHOLE or run.ended_at == last[(run.machine, run.backend)]


def _member_order(row: MemberResult) -> tuple[int, str]:
    return _rank(row.member, MEMBERS), row.member


def _place(run: RunResult) -> tuple[int, str]:
    return _rank(run.backend, BACKENDS), run.machine


def _rank(name: str, names: Iterable[str]) -> int:
    listed = list(names)
    return listed.index(name) if name in listed else len(listed)


def _items(sources: Iterable[Path | str | Run]) -> Iterable[Run | Path]:
    """Yield the runs and files that the sources stand for."""
    for source in sources:
        if isinstance(source, Run):
            yield source
            continue
        path = Path(source)
        if path.is_file():
            yield path
        elif not path.is_dir():
            raise UserError(f"{path}: no such run, folder or file of results")
        elif is_run(path):
            yield Run(path)
        else:
            runs = _parity_runs(path)
            files = sorted([*path.glob(FILE), *path.glob(f"*/{FILE}")])
            if not runs and not files:
                raise UserError(f"{path} holds neither runs of parity nor a {FILE}")
            yield from map(Run, runs)
            yield from files


def _parity_runs(folder: Path) -> list[Path]:
    """Return the parity runs in a folder of runs, or of a day of them, the newest first and not all of them.

    Their names say benchmark and backend; a folder may hold thousands, and only the newest results count.
    """
    count: dict[str, int] = {}
    kept = []
    days = find_runs(folder)
    one_day = sorted((path.parent for path in folder.glob("*/config.json")), reverse=True)
    for run in (*days, *one_day):
        if run.name.startswith("parity-"):
            kind = "-".join(run.name.split("-")[:2])
            count[kind] = count.get(kind, 0) + 1
            if count[kind] <= LATEST:
                kept.append(run)
    return kept


def merged(
    runs: Iterable[Path | str | Run] | None = None, files: Iterable[Path | str] | None = None, now: float | None = None
) -> "pandas.DataFrame":
    """Return the matrix as a frame with ``COLUMNS``; None takes all runs of ``outputs/`` and the committed results."""
    return frame(collect([*_runs(runs), *_files(files)]), now)


def around(run: Any, now: float | None = None) -> "pandas.DataFrame":
    """Return the matrix of a run, the other parity runs of its store and the committed results.

    ``run`` is a ``Run``, or anything with its ``result``, which has no store. Its own results are in it, also where a newer
    run lies beside it or a fault was planted in it.
    """
    path = Path(run.path).resolve() if getattr(run, "path", None) else None
    others = [Run(other) for other in _parity_runs(path.parent.parent) if other.resolve() != path] if path else []
    beside = collect([*others, *_files(None)])
    try:
        own = read_run(run, planted=True)
    except (UserError, OSError) as error:
        return frame(dataclasses.replace(beside, left_out=(str(error), *beside.left_out)), now)
    kept = (_without(other, own) for other in beside.results)
    return frame(Merged((own, *(other for other in kept if other.members)), beside.left_out), now)


def _without(other: RunResult, own: RunResult) -> RunResult:
    """Return a result without the members that another one of the same machine and backend has."""
    if (other.machine, other.backend) != (own.machine, own.backend):
        return other
    names = {row.member for row in own.members}
    return other.model_copy(
        update={"members": tuple(row for row in other.members if row.member not in names | {WHOLE})}
    )


def _runs(runs: Iterable[Path | str | Run] | None) -> list[Path | str | Run]:
    if runs is not None:
        return list(runs)
    store = outputs()
    return [Run(path) for path in _parity_runs(store)] if store.is_dir() else []


def _files(files: Iterable[Path | str] | None) -> list[Path | str]:
    return list(files) if files is not None else [*sorted(committed().glob(f"*/{FILE}"))]


def frame(found: Merged, now: float | None = None) -> "pandas.DataFrame":
    """Return merged results as a frame: a row each, missing numbers as NaN, missing texts as ''."""
    import pandas as pd

    moment = time.time() if now is None else now
    rows = [
        {
            "machine": run.machine,
            "backend": run.backend,
            "member": row.member,
            "device": row.device or run.environment.get("devices", ""),
            "precision": row.precision,
            "mode": row.mode,
            "gates": row.gates,
            "outcome": row.outcome,
            "reason": row.reason,
            "max_difference": row.max_difference,
            "one_minus_cosine": row.one_minus_cosine,
            "limit": row.limit,
            "model": run.model,
            "stand_in": run.stand_in,
            "torch": run.environment.get("torch", ""),
            "versions": versions(run),
            "ended_at": run.ended_at.timestamp(),
            "age_days": (moment - run.ended_at.timestamp()) / DAY_S,
            "run": run.run,
        }
        for run, row in found.rows
    ]
    made = pd.DataFrame(rows, columns=list(COLUMNS))
    numbers = ["max_difference", "one_minus_cosine", "limit", "ended_at", "age_days"]
    made[numbers] = made[numbers].astype(float)
    made.attrs["left_out"] = list(found.left_out)
    return made


def versions(run: RunResult) -> str:
    """Return ``torch 2.13.0, transformers 5.0.0, driver nvidia 580.1``."""
    names = ("torch", "transformers", *(name for name in run.environment if name.startswith("driver ")))
    return ", ".join(f"{name} {run.environment[name]}" for name in names if run.environment.get(name))


@dataclasses.dataclass(frozen=True)
class Standing:
    """What all results of a backend say together: its outcome, why, on which machines, and what failed where."""

    backend: str
    outcome: str
    reason: str
    machines: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()


def standing(found: Merged, backend: str) -> Standing:
    """Return the outcome of a backend over all machines: FAIL before PASS, and PASS only where something was compared.

    Members that do not gate cannot fail it, and cannot make it pass.
    """
    if backend not in BACKENDS:
        raise UserError(f"unknown backend {backend!r}: {nearest(backend, BACKENDS)}")
    rows = [(run, row) for run, row in found.rows if run.backend == backend]
    machines = tuple(dict.fromkeys(run.machine for run, _ in rows))
    if not rows:
        return Standing(backend, "NOT COMPARED", "no machine with it left a result")
    gated = [(run, row) for run, row in rows if row.gates]
    failed = [(run, row) for run, row in gated if row.outcome == "FAIL"]
    if failed:
        names = tuple(dict.fromkeys(f"{row.member} on {run.machine}" for run, row in failed))
        return Standing(backend, "FAIL", f"{', '.join(names)}: {failed[0][1].reason}", machines, names)
    passed = [row.member for _, row in gated if row.outcome == "PASS"]
    if passed:
        missing = list(dict.fromkeys(f"{row.member} on {run.machine}" for run, row in gated if row.outcome != "PASS"))
        reason = f"{len(passed)} of {len(gated)} gated results are there and within their tolerances"
        return Standing(
            backend, "PASS", reason + (f"; not compared: {', '.join(missing)}" if missing else ""), machines
        )
    for outcome in ("SKIPPED", "NOT COMPARED"):
        open_ = [row for _, row in rows if row.outcome == outcome]
        if open_ and all(row.outcome == outcome for _, row in gated or rows):
            return Standing(backend, outcome, open_[0].reason, machines)
    reasons = "; ".join(dict.fromkeys(row.reason for _, row in gated if row.reason))
    return Standing(backend, "NOT COMPARED", reasons or "no gated member was compared", machines)
