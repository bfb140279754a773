"""Baselines: the metrics of accepted runs, under ``baselines/<benchmark>/<tier>/<key>.json``.

The key stands for the fingerprint: what has to be equal for two runs to be comparable.
"""

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from benchlib.checks import Check
from benchlib.errors import UserError
from benchlib.files import read_json, write_json
from benchlib.machine import fingerprint, fingerprint_key
from benchlib.metrics import Metric
from benchlib.paths import home
from benchlib.regression import RegressionLimit, open_checks, regression_check
from benchlib.results import Run

KEPT_SAMPLES = 200


class Baseline(BaseModel):
    """An accepted run. ``samples`` holds at most 200 of each metric's samples, evenly spaced."""

    model_config = ConfigDict(extra="forbid")

    schema_version: int = 1
    benchmark: str
    tier: str
    fingerprint: dict[str, str]
    run: str
    reason: str
    accepted_at: float
    metrics: list[Metric]
    samples: dict[str, list[float]]

    @property
    def key(self) -> str:
        """Twelve hex digits of the fingerprint."""
        return fingerprint_key(self.fingerprint)

    def metric(self, name: str) -> Metric | None:
        """Return the metric of this name, or None."""
        return next((metric for metric in self.metrics if metric.name == name), None)


class Comparison(BaseModel):
    """A baseline for a run, or why there is none: ``factors`` lists (name, here, in the nearest baseline)."""

    status: Literal["found", "NO_BASELINE", "NOT_COMPARABLE"]
    baseline: Baseline | None = None
    factors: list[tuple[str, str, str]] = []

    @property
    def reason(self) -> str:
        """Why nothing can be compared, in plain words."""
        if self.status == "NO_BASELINE":
            return "no run was accepted yet"
        shown = "; ".join(f"{name} is {here} here, {there} there" for name, here, there in self.factors[:4])
        more = f" and {len(self.factors) - 4} more" if len(self.factors) > 4 else ""
        return f"the nearest baseline differs: {shown}{more}"


def folder() -> Path:
    """Return the folder of the committed baselines."""
    return home() / "baselines"


def load_baseline(path: Path) -> Baseline:
    """Read a baseline file; ``UserError`` where it is cut or foreign."""
    try:
        return Baseline.model_validate(read_json(path))
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"{path}: not a baseline ({'.'.join(map(str, first['loc']))}: {first['msg']})") from None


def stored(root: Path | None = None, benchmark: str = "*", tier: str = "*") -> list[tuple[Path, Baseline]]:
    """Return the baselines below ``root``, by path."""
    return [(path, load_baseline(path)) for path in sorted((root or folder()).glob(f"{benchmark}/{tier}/*.json"))]


def run_fingerprint(run: Run) -> dict[str, str]:
    """Return the factors of a run that make it comparable."""
    return fingerprint(run.config, run.machine, run.result.facts if run.result else {})


def find(run: Run, root: Path | None = None) -> Comparison:
    """Find the baseline of a run, or the nearest one and the factors in which it differs."""
    known = [baseline for _, baseline in stored(root, run.config.benchmark, run.config.tier)]
    if not known:
        return Comparison(status="NO_BASELINE")
    here = run_fingerprint(run)
    ranked = sorted(
        ((differences(here, baseline.fingerprint), baseline) for baseline in known), key=lambda pair: len(pair[0])
    )
    factors, nearest = ranked[0]
    if factors:
        return Comparison(status="NOT_COMPARABLE", factors=factors)
    return Comparison(status="found", baseline=nearest)


def differences(here: dict[str, str], there: dict[str, str]) -> list[tuple[str, str, str]]:
    """Return (name, here, there) for each factor that differs."""
    names = sorted(here.keys() | there.keys())
    return [
        (name, here.get(name, "absent"), there.get(name, "absent"))
        for name in names
        if here.get(name) != there.get(name)
    ]


def regression_checks(run: Run, limits: Sequence[RegressionLimit], comparison: Comparison) -> list[Check]:
    """Compare each metric that has a limit with the baseline; a metric that only one side has is listed."""
    result = run.result
    assert result is not None
    if comparison.baseline is None:
        assert comparison.status != "found"
        return open_checks(limits, result, comparison.status, comparison.reason)
    checks = []
    for limit in limits:
        new, old = result.metric(limit.metric), comparison.baseline.metric(limit.metric)
        if (new is None or new.provenance == "not_available") and (old is None or old.provenance == "not_available"):
            continue
        if new is None or old is None:
            where = "the baseline" if new is None else "this run"
            metric = new or old
            assert metric is not None
            checks.append(
                Check(
                    name=f"{limit.metric} vs baseline",
                    kind="regression",
                    question=f"Is {limit.metric} no worse than in the accepted run?",
                    status="NOT_COMPARABLE",
                    reason=f"only {where} has it ({metric.text})",
                    value=new.value if new else None,
                    unit=metric.unit,
                    source="baseline",
                )
            )
            continue
        checks.append(
            regression_check(
                limit, new, run.samples.get(limit.metric, []), old, comparison.baseline.samples.get(limit.metric, [])
            )
        )
    return checks


def accept(
    run: Run, reason: str, limits: Iterable[RegressionLimit], *, if_improved: bool = False, root: Path | None = None
) -> Path:
    """Make a run the baseline of its fingerprint and return the file.

    Raises ``UserError`` for a run that is not whole or did not pass, for an empty reason, and with ``if_improved``
    where a metric with a limit is worse than in the baseline it would replace, so that gates never loosen.
    """
    if not reason.strip():
        raise UserError("a baseline needs --reason: say why this run is the new normal")
    result, verdict = run.result, run.verdict
    if result is None or result.status != "complete" or verdict is None or verdict["broken"]:
        why = verdict["sentence"] if verdict else "it was never judged"
        raise UserError(f"{run.path} is no whole run and cannot be accepted: {why}")
    if verdict["verdict"] in ("FAIL", "SKIPPED"):
        others = [check["name"] for check in verdict["checks"] if check["gates"] and check["status"] == "FAIL"]
        raise UserError(
            f"{run.path} did not pass ({verdict['verdict']}: {', '.join(others) or verdict['sentence']}): mend it, or delete the baseline that no longer holds and run again"
        )
    limits = list(limits)
    current = find(run, root).baseline
    if if_improved and current is not None:
        worse = [
            name for name in (limit.metric for limit in limits) if _worse(result.metric(name), current.metric(name))
        ]
        if worse:
            raise UserError(f"not accepted (--if-improved): worse than the baseline in {', '.join(worse)}")
    baseline = Baseline(
        benchmark=run.config.benchmark,
        tier=run.config.tier,
        fingerprint=run_fingerprint(run),
        run=run.path.name,
        reason=reason.strip(),
        accepted_at=time.time(),
        metrics=result.metrics,
        samples={
            limit.metric: _thinned(run.samples.get(limit.metric, []))
            for limit in limits
            if run.samples.get(limit.metric)
        },
    )
    path = (root or folder()) / baseline.benchmark / baseline.tier / f"{baseline.key}.json"
    write_json(path, baseline.model_dump(mode="json"))
    return path


def _worse(new: Metric | None, old: Metric | None) -> bool:
    if old is None or old.value is None:
        return False
    if new is None or new.value is None:
        return True
    return new.value < old.value if new.direction == "higher" else new.value > old.value


def _thinned(samples: list[float]) -> list[float]:
    step = max(1, -(-len(samples) // KEPT_SAMPLES))
    return samples[::step]
