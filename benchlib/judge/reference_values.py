"""Reference values: what a tier computes on any machine, in ``baselines/references/<benchmark>-<tier>.json``.

A baseline is of one machine and holds speeds. A reference is of one piece of work and holds what training learns and what
models answer: losses, scores, differences. Its key is the work and the versions that change numerics, not the hardware. It is
accepted from several runs, on other processors, with other kernels or thread counts: a value may be off by ``SPREADS`` times
what these runs differ by, and at least by what its column allows.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from benchlib.core.errors import UserError
from benchlib.core.text import counted, listing, shortened
from benchlib.judge.baselines import differences, folder, require_alike
from benchlib.judge.checks import Ask, Check
from benchlib.judge.regression import KeptRuns, read_runs
from benchlib.results.metrics import measured
from benchlib.results.record import NAMING, Record
from benchlib.results.run import Result, Run

SPREADS = 3
NAME = "reference values"  # of the check
VERSIONS = ("torch", "transformers")  # that change what is computed
NO_VALUE = ("config.threads",)  # fields of the work that change no value


class Quality(NamedTuple):
    """A number that does not depend on the hardware: its value and unit, and how far off it may be at least."""

    value: float
    unit: str
    least: float

    @property
    def text(self) -> str:
        return f"{self.value:.5g} {self.unit}".strip()


class Compared(NamedTuple):
    """An accepted value with its tolerance, and that of a run."""

    name: str
    here: Quality
    value: float
    tolerance: float

    @property
    def agrees(self) -> bool:
        return abs(self.here.value - self.value) <= self.tolerance

    @property
    def text(self) -> str:
        return f"{self.value:.5g} ± {self.tolerance:.2g}" if self.tolerance else f"exactly {self.value:.5g}"


def _compared(reference: KeptRuns, qualities: Mapping[str, Quality]) -> Iterator[Compared]:
    """Yield each value of a run that was accepted as well."""
    for name, quality in qualities.items():
        metrics = [metric for run in reference.runs if (metric := run.metric(name))]
        if values := [metric.value for metric in metrics if metric.value is not None]:
            yield Compared(name, quality, median(values), max(quality.least, SPREADS * (max(values) - min(values))))


def path_of(run: Run, root: Path | None = None) -> Path:
    """Return the file of the reference of a run's benchmark and tier, below the folder of the baselines."""
    return (root or folder()) / "references" / f"{run.config.benchmark}-{run.config.tier}.json"


def load(path: Path) -> KeptRuns:
    return read_runs(path, KeptRuns, "a reference")


def _factors(run: Run) -> dict[str, str]:
    work = [name for name in run.fingerprint if name.startswith("config.") and name not in NO_VALUE]
    return {name: value for name, value in run.fingerprint.items() if name in (*VERSIONS, "world_size", *work)}


def accept(
    runs: Sequence[Run],
    values: Sequence[Mapping[str, Quality]],
    reason: str,
    add: bool = False,
    root: Path | None = None,
) -> Path:
    """Write what runs computed as the reference of their work, or ``add`` it. Raises ``UserError`` for runs of different work."""
    path, factors, accepted = path_of(runs[0], root), _factors(runs[0]), dict[str, Record]()
    if add and path.exists():
        accepted = {run.run: run for run in load(path).runs}
        factors = [*accepted.values()][-1].fingerprint
    for run, qualities in zip(runs, values, strict=True):
        require_alike(run, _factors(run), factors)
        if not qualities:
            raise UserError(f"{run.path}: {run.config.benchmark} computes nothing that is the same on any machine")
        metrics = [measured(name, quality.value, quality.unit, derived=True) for name, quality in qualities.items()]
        accepted[run.path.name] = Record(
            run=run.path.name,
            **{name: getattr(run.config, name) for name in NAMING},
            machine={"cpu": {"model": str(run.machine.get("cpu", {}).get("model"))}},
            result=Result.of(run.config, status="complete", metrics=metrics),
            fingerprint=factors,
            reason=reason,
            accepted_at=time.time(),
        )
    return KeptRuns(runs=[*accepted.values()]).save(path)


def compared(run: Run, values: Mapping[str, Quality], root: Path | None = None) -> list[Compared]:
    """Return the values of a run beside the reference of the same work and versions; nothing where there is none."""
    path = path_of(run, root)
    reference = load(path) if path.exists() else None
    if reference is None or differences(_factors(run), reference.latest.fingerprint):
        return []
    return list(_compared(reference, values))


def reference_checks(run: Run, values: Callable[[], Mapping[str, Quality]], root: Path | None = None) -> list[Check]:
    """Compare the values of a run with the reference of its work; nothing where there is none.

    Other versions leave it open. A backend on which no run was accepted is compared, but its check gates nothing.
    """
    ask = Ask(NAME, "Does this stack compute what it computes on other machines?")
    path = path_of(run, root)
    if not path.exists():
        return []
    try:
        reference = load(path)
    except UserError as error:
        return [ask.fact(False, str(error))]
    if differing := differences(_factors(run), reference.latest.fingerprint):
        versions = [f"{name} {there}, this run of {here}" for name, here, there in differing if name in VERSIONS]
        same_work = len(versions) == len(differing)
        return [ask.answer("NOT_COMPARABLE", f"the reference is of {listing(versions)}")] if same_work else []
    items = list(_compared(reference, values()))
    if not items:
        return [ask.skipped("the run has none of the values of its reference")]
    wrong = [f"{item.name} {item.here.text}, the reference is {item.text}" for item in items if not item.agrees]
    right = [f"{item.name} {item.here.text} ({item.text})" for item in items if item.agrees]
    source = f"{counted(len(reference.runs), 'run')}: {reference.latest.reason}"
    reason = f"{counted(len(right), 'value')} as the reference: {shortened(right, 3, '; ')}"
    if wrong:
        reason = f"this stack computes something else: {shortened(wrong, 3, '; ')}"
    gates = run.config.backend in {item.backend for item in reference.runs}
    return [ask.fact(not wrong, reason, gates=gates, source=source)]
