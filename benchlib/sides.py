"""The sides of a comparison: what an argument of ``benchlib compare`` stands for.

A run folder, a folder of runs (all complete runs of one fingerprint are one side), a shared report, a baseline's file or
the first digits of its key.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchlib import baselines
from benchlib.baselines import Baseline, differences
from benchlib.errors import UserError
from benchlib.record import RunRecord
from benchlib.results import PARTS, Result, fingerprint_key, is_run
from benchlib.snapshot import Snapshot
from benchlib.stored import load

_KEY = re.compile(r"[0-9a-f]{4,12}\Z")


@dataclass(frozen=True)
class Compared:
    """One side: runs of one benchmark, tier and fingerprint. ``label`` is the argument that named them."""

    label: str
    runs: tuple[Snapshot, ...]

    @property
    def benchmark(self) -> str:
        """The benchmark of all of its runs."""
        return self.runs[0].benchmark

    @property
    def tier(self) -> str:
        """The tier of all of its runs."""
        return self.runs[0].tier

    @property
    def fingerprint(self) -> dict[str, str]:
        """What makes its runs comparable with each other."""
        return self.runs[0].fingerprint

    def records(self) -> list[RunRecord]:
        """Return its runs as the regression gate reads them: from folder, report or baseline with the same samples."""
        return [
            RunRecord(
                run=run.run,
                started_at=run.result.started_at,
                recorded_at=run.result.started_at,
                metrics=run.result.metrics,
                samples=run.thinned().samples,
            )
            for run in self.runs
            if run.result is not None
        ]


@dataclass
class Argument:
    """What one argument stands for: a side for each benchmark, and what was left out with the reason."""

    text: str
    sides: dict[str, Compared] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)


def read_argument(text: str) -> Argument:
    """Read what ``text`` names. Raises ``UserError`` where that is nothing, damaged, or of several fingerprints."""
    runs = _runs(text)
    found = Argument(text)
    found.left_out = [f"{run.run}: {_why(run)}" for run in runs if not run.complete]
    whole: list[Snapshot] = []
    for run in (run for run in runs if run.complete):
        twice = next((known.run for known in whole if known.config == run.config and known.result == run.result), "")
        if twice:  # counted as a second run it would make the spread between runs look smaller than it is
            found.left_out.append(f"{run.run}: a copy of {twice}")
        else:
            whole.append(run)
    if not whole:
        raise UserError(
            f"{text} has no complete run to compare: " + "; ".join(found.left_out[:5])
            if len(runs) > 1
            else f"{text} is no complete run: {_why(runs[0])}"
        )
    for benchmark in dict.fromkeys(run.benchmark for run in whole):
        members = tuple(run for run in whole if run.benchmark == benchmark)
        _one_fingerprint(text, benchmark, members)
        found.sides[benchmark] = Compared(text, members)
    return found


def _runs(text: str) -> list[Snapshot]:
    path = Path(text)
    if path.is_file() and path.suffix == ".json":
        # A file of a run folder stands for its run; any other JSON has to be a baseline.
        return (
            load(path.parent)
            if path.name in PARTS and is_run(path.parent)
            else _accepted(baselines.load_baseline(path))
        )
    if not path.exists() and _KEY.match(text):
        stored = [item for _, item in baselines.stored() if item.key.startswith(text)]
        if len(stored) != 1:
            raise UserError(f"{len(stored)} baselines begin with {text!r}: `benchlib baseline list` shows the keys")
        return _accepted(stored[0])
    return load(path)


def _accepted(baseline: Baseline) -> list[Snapshot]:
    """Return the runs of a baseline. It keeps no machine and no config, but what of them decides."""
    factors = baseline.fingerprint
    world = factors.get("world_size", "")
    return [
        Snapshot(
            run=record.run,
            benchmark=baseline.benchmark,
            tier=baseline.tier,
            backend=factors.get("backend", "?"),
            word="PASS",
            sentence=f"accepted: {record.reason}",
            started_at=record.started_at,
            result=Result(
                status="complete",
                benchmark=baseline.benchmark,
                tier=baseline.tier,
                backend=factors.get("backend", "?"),
                world_size=int(world) if world.isdigit() else 0,
                started_at=record.started_at,
                metrics=record.metrics,
            ),
            fingerprint=factors,
            samples=record.samples,
        )
        for record in baseline.runs
    ]


def _why(run: Snapshot) -> str:
    if run.problems:
        return "; ".join(run.problems)
    return run.sentence if run.word != "PASS" else "its result is not complete"


def _one_fingerprint(text: str, benchmark: str, runs: Sequence[Snapshot]) -> None:
    groups: dict[tuple[str, str], list[Snapshot]] = {}
    for run in runs:
        groups.setdefault((run.tier, fingerprint_key(run.fingerprint)), []).append(run)
    if len(groups) == 1:
        return
    kinds = sorted(groups.values(), key=len, reverse=True)
    first = kinds[0][0]
    lines = []
    for members in kinds:
        names = ", ".join(run.run for run in members[:3]) + (
            f" and {len(members) - 3} more" if len(members) > 3 else ""
        )
        factors = differences(members[0].fingerprint, first.fingerprint)
        told = [f"{name} {here}" for name, here, _ in factors[:3]]
        told += [f"tier {members[0].tier}"] if members[0].tier != first.tier else []
        lines.append(f"  {names}" + (f" ({', '.join(told)})" if told else ""))
    raise UserError(
        f"{text} holds {benchmark} runs of {len(groups)} kinds that cannot be compared with each other; name the runs of one:\n"
        + "\n".join(lines)
    )
