"""Baselines: the metrics of accepted runs, under ``baselines/<benchmark>/<tier>/<key>.json``.

The key stands for the fingerprint: what has to be equal for two runs to be comparable.
"""

import contextlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from benchlib.core.errors import UserError, nearest
from benchlib.core.files import home, read_model, write_json
from benchlib.core.text import quantity
from benchlib.judge.calibration import Calibration, Setup, load_calibration, simulate
from benchlib.judge.change import Kind, Spread, moderated, own_spread, pooled
from benchlib.judge.changepoints import levels
from benchlib.judge.checks import Check
from benchlib.judge.regression import (
    RegressionLimit,
    RunRecord,
    Side,
    adjusted,
    allowed_loss,
    baseline_check,
    default_spread,
    kind_of,
    named,
    open_checks,
    regression_check,
    repeats,
    side_of,
    spread_text,
)
from benchlib.results.metrics import Metric
from benchlib.results.run import Run, fingerprint, fingerprint_key

SCHEMA: Final = 2
MOST_RUNS = 20
WIDEST = 2.0  # times the limit that the smallest loss found may be: 40 % for a limit of 20 %
STORED = 12  # runs beside a run that tell their spread, the newest
SEARCHED = 40  # that are looked at for them
LEAST_STORED = 4  # of which one may be odd
COMPARISONS = 1000  # simulated for the smallest loss found, which is shown in whole percent


class Baseline(BaseModel):
    """The accepted runs of one fingerprint, the oldest first; several tell the spread between unchanged runs.

    ``limits`` are those that the runs were accepted with; none in a file of an older version.
    """

    model_config = ConfigDict(extra="forbid")

    schema_version: Literal[2] = SCHEMA
    benchmark: str
    tier: str
    fingerprint: dict[str, str]
    runs: list[RunRecord] = Field(min_length=1, max_length=MOST_RUNS)
    limits: list[RegressionLimit] = []

    @property
    def key(self) -> str:
        """Twelve hex digits of the fingerprint."""
        return fingerprint_key(self.fingerprint)

    @property
    def latest(self) -> RunRecord:
        """The run that was accepted last."""
        return self.runs[-1]

    def side(self, name: str) -> Side | None:
        """Return this metric of all accepted runs, or None."""
        return side_of(self.runs, name)


class Comparison(BaseModel):
    """A baseline for a run, or why there is none: ``factors`` lists (name, here, in the nearest baseline).

    ``calibration`` is what `benchlib calibrate` measured of the gate for the run's fingerprint, with or without a baseline;
    ``damaged`` says what is wrong with its file.
    """

    status: Literal["found", "NO_BASELINE", "NOT_COMPARABLE"]
    baseline: Baseline | None = None
    factors: list[tuple[str, str, str]] = []
    calibration: Calibration | None = None
    damaged: str = ""

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
    return read_model(path, Baseline, "a baseline", SCHEMA)


def stored(root: Path | None = None, benchmark: str = "*", tier: str = "*") -> list[tuple[Path, Baseline]]:
    """Return the baselines below ``root``, by path."""
    return [(path, load_baseline(path)) for path in sorted((root or folder()).glob(f"{benchmark}/{tier}/*.json"))]


def by_key(key: str) -> Baseline:
    """Return the one baseline whose key begins with these digits; ``UserError`` where there are none or several."""
    matches = [baseline for _, baseline in stored() if baseline.key.startswith(key)]
    if len(matches) != 1:
        raise UserError(f"{len(matches)} baselines begin with {key!r}: `benchlib baseline list` shows the keys")
    return matches[0]


def run_fingerprint(run: Run) -> dict[str, str]:
    """Return the factors of a run that make it comparable."""
    return fingerprint(run.config, run.machine, run.result.facts if run.result else {})


def find(run: Run, root: Path | None = None) -> Comparison:
    """Find the baseline of a run, or the nearest one and the factors in which it differs."""
    here = run_fingerprint(run)
    measured, damaged = None, ""
    try:
        measured = load_calibration(root or folder(), run.config.benchmark, run.config.tier, fingerprint_key(here))
    except UserError as error:
        damaged = str(error)
    candidates = [
        (differences(here, baseline.fingerprint), baseline)
        for _, baseline in stored(root, run.config.benchmark, run.config.tier)
    ]
    if not candidates:
        return Comparison(status="NO_BASELINE", calibration=measured, damaged=damaged)
    factors, nearest = min(candidates, key=lambda pair: len(pair[0]))
    if factors:
        return Comparison(status="NOT_COMPARABLE", factors=factors, calibration=measured, damaged=damaged)
    return Comparison(status="found", baseline=nearest, calibration=measured, damaged=damaged)


def differences(here: dict[str, str], there: dict[str, str]) -> list[tuple[str, str, str]]:
    """Return (name, here, there) for each factor that differs."""
    names = sorted(here.keys() | there.keys())
    return [
        (name, here.get(name, "absent"), there.get(name, "absent"))
        for name in names
        if here.get(name) != there.get(name)
    ]


def regression_checks(run: Run, limits: Sequence[RegressionLimit], comparison: Comparison) -> list[Check]:
    """Compare each metric that has a limit with the baseline; a metric that only one side has is listed.

    The earlier repetitions of an undecided run (``repeats.json``) count with it, but those whose level shifted only where all
    did. An accepted run is compared with the other accepted ones: with itself it would always pass.
    """
    result, limits = run.result, adjusted(limits, run.config.limits)
    assert result is not None
    unused = [name for name in run.config.limits if not any(named(name, limit.metric) for limit in limits)]
    checks = [_unused_check(unused, [limit.metric for limit in limits])] if unused else []
    if comparison.baseline is None:
        assert comparison.status != "found"
        return [*checks, *open_checks(limits, result, comparison.status, comparison.reason)]
    latest, earlier = RunRecord.of(run, limits), repeats(run)
    others = [record for record in comparison.baseline.runs if not record.is_copy_of(latest)]
    if not others:
        return [*checks, *open_checks(limits, result, "NO_BASELINE", "this run is the baseline itself")]
    limits, edited = _as_accepted(limits, comparison.baseline.limits)
    checks += edited
    known = known_spreads(run, limits, comparison.calibration, [*comparison.baseline.runs, *earlier, latest])
    for limit in limits:
        # A value that is no number must not hide behind those of earlier repetitions.
        metric = latest.metric(limit.metric)
        together = [*earlier, latest] if metric is not None and metric.value is not None else [latest]
        new, old = side_of(together, limit.metric), side_of(others, limit.metric)
        if all(side is None or side.metric.provenance == "not_available" for side in (new, old)):
            continue
        if old is None and new is not None:
            reason = f"only this run has it ({new.metric.text})"
            checks.append(baseline_check(new.metric, status="NOT_COMPARABLE", reason=reason, value=new.metric.value))
        elif new is None and old is not None:
            reason = f"only the baseline has it ({old.metric.text})"
            checks.append(baseline_check(old.metric, status="NOT_COMPARABLE", reason=reason))
        elif new is not None and old is not None:
            checks.append(regression_check(limit, new.undisturbed(), old, known.get(limit.metric)))
    return checks


def _unused_check(names: Sequence[str], metrics: Sequence[str]) -> Check:
    """List limits that no metric has: who set one believes that it gates. In a tier it may be that of another benchmark."""
    wrong = "; ".join(f"limits.{name}: {nearest(name, metrics)}" for name in names)
    return Check(
        name="limits apply",
        kind="regression",
        question="Does every limit that was set belong to a metric?",
        status="SKIPPED",
        reason=f"no metric with a limit has this name: {wrong}",
    )


def _as_accepted(
    limits: Sequence[RegressionLimit], accepted: Sequence[RegressionLimit]
) -> tuple[list[RegressionLimit], list[Check]]:
    """Return the limits to judge by, and a check that lists those that are not as the baseline was accepted with.

    A limit that went missing still counts; one that was edited counts as it is now.
    """
    here = {limit.metric: limit for limit in limits}
    missing = [limit for limit in accepted if limit.metric not in here]
    edited = [(limit, here[limit.metric]) for limit in accepted if limit != here.get(limit.metric, limit)]
    if not missing and not edited:
        return list(limits), []
    parts = [f"{now.metric} {_size(now)}, accepted with {_size(then)}" for then, now in edited]
    parts += [f"{limit.metric} has none, the accepted {_size(limit)} counts" for limit in missing]
    check = Check(
        name="limits as accepted",
        kind="regression",
        question="Are the limits those that the baseline was accepted with?",
        status="FAIL",
        reason="; ".join(parts),
        source="baseline",
        gates=False,
    )
    return [*limits, *missing], [check]


def _size(limit: RegressionLimit) -> str:
    return f"{limit.share:.0%}" if limit.share is not None else f"{limit.amount:g}"


def known_spreads(
    run: Run, limits: Iterable[RegressionLimit], calibration: Calibration | None, counted: Sequence[RunRecord]
) -> dict[str, Spread]:
    """Return by metric the spread between unchanged runs that a calibration and the stored runs of this fingerprint tell.

    ``counted`` are the runs that are compared: their own spread is pooled with this one and must not count twice.
    """
    earlier = [record for record in stored_runs(run, limits) if not any(map(record.is_copy_of, counted))]
    found = {}
    for limit in limits:
        side = side_of(earlier, limit.metric)
        stored = (
            _stored_spread(side, kind_of(limit, *(min(item) for item in side.runs))) if side and side.runs else None
        )
        if spread := pooled(calibration.spread(limit.metric) if calibration else None, stored):
            found[limit.metric] = spread
    return found


def _stored_spread(side: Side, kind: Kind) -> Spread | None:
    """Return the spread of stored runs about their levels, so that a step between them or an odd one does not count."""
    if len(side.runs) < LEAST_STORED:
        return None
    values = [item.value for item in side.readings(kind)]
    split = levels([math.exp(value) for value in values] if kind == "ratio" else values)
    # The levels of values above zero are compared in logarithms, whatever the limit is.
    s = split.spread * (abs(float(np.median(values))) if split.ratio and kind == "difference" else 1.0)
    return Spread(s, split.free, f"{len(values)} stored runs") if split.free else None


def stored_runs(run: Run, limits: Iterable[RegressionLimit]) -> list[RunRecord]:
    """Return the newest complete runs of the same fingerprint that lie beside a run and began before it, the oldest first.

    Accepted or not, passed or not; one that cannot be read is no witness.
    """
    here, config, records = run_fingerprint(run), run.config, list[RunRecord]()
    began, limits = run.result.started_at if run.result else math.inf, list(limits)
    folders = run.path.absolute().parent.parent.glob(f"{config.tier}-*/{config.benchmark}-{config.backend}-*")
    newest = sorted(folders, key=lambda path: (path.parent.name, path.name), reverse=True)
    for folder in newest[:SEARCHED]:
        if folder == run.path.absolute() or len(records) == STORED:
            continue
        with contextlib.suppress(UserError, OSError, ValueError):
            other = Run(folder)
            result = other.result
            whole = result is not None and result.status == "complete" and result.started_at < began
            if whole and not planted(other) and run_fingerprint(other) == here:
                records.append(RunRecord.of(other, limits))
    return records[::-1]


@dataclass(frozen=True)
class Width:
    """How much the accepted runs of a metric differ, and what the gate makes of it.

    ``values`` are the runs' values, ``spread`` that between unchanged runs with its source, ``own`` the change (or amount)
    that the limit allows, ``effect`` the smallest loss that the gate finds in 99 % of single runs.
    """

    metric: Metric
    kind: Kind
    limit: str
    values: list[float]
    spread: Spread
    measured: bool
    own: float
    effect: float

    @property
    def too_wide(self) -> bool:
        """Whether the gate surely finds only losses more than ``WIDEST`` times as large as the limit."""
        return self.measured and 0 < WIDEST * self.own < self.effect

    def cells(self) -> dict[str, str]:
        """Return what a reader sees of it."""
        low, high = (quantity(value, self.metric.unit) for value in (min(self.values), max(self.values)))
        sign = "-" if self.metric.direction == "higher" else "+"
        effect = f"{self.effect:.0%}" if self.kind == "ratio" else quantity(self.effect, self.metric.unit)
        return {
            "metric": self.metric.name,
            "runs": f"{len(self.values)}, {low} to {high}" if len(self.values) > 1 else f"1, {high}",
            "spread": spread_text(self.spread, self.kind, self.metric.unit).removeprefix("spread between runs "),
            "limit": self.limit,
            "smallest loss found": f"{sign}{effect}",
        }


def widths(baseline: Baseline, limits: Iterable[RegressionLimit], known: Mapping[str, Spread]) -> list[Width]:
    """Return what the spread of the accepted runs makes of each limit; ``known`` are spreads that others tell, by metric."""
    rows = []
    for limit in limits:
        side = baseline.side(limit.metric)
        if side is None or not side.runs:
            continue
        kind, direction = kind_of(limit, *(min(run) for run in side.runs)), side.metric.direction
        told, default = known.get(limit.metric), default_spread(side.metric, limit, kind)
        measured = pooled(own_spread([side.readings(kind)]), told)
        spread = moderated(measured, default)
        if spread is None:
            continue
        own = allowed_loss(limit, kind, direction, side.value(kind))
        own = own if kind == "difference" else abs(math.expm1(-own if direction == "higher" else own))
        judged = (
            limit if limit.amount is not None or kind == "ratio" else RegressionLimit(metric=limit.metric, amount=own)
        )
        setup = Setup(judged, direction, len(side.runs), known_dof=told.dof if told else 0, default=default)
        effect = simulate(setup, spread.s, COMPARISONS).effect
        values = [replace(side, runs=(run,)).value(kind) for run in side.runs]
        scatter = measured is not None and measured.s >= (default or 0.0)
        rows.append(Width(side.metric, kind, limit.text(direction), values, spread, scatter, own, effect))
    return rows


def _require_narrow(rows: Sequence[Width]) -> None:
    wide = [row.cells() for row in rows if row.too_wide]
    if wide:
        reasons = "; ".join(
            f"{row['metric']} of {row['runs']}: the limit is {row['limit']}, the smallest loss found is {row['smallest loss found']}"
            for row in wide
        )
        raise UserError(
            f"not accepted: the runs differ so much that the gate would find only losses of more than {WIDEST:g} times the limit ({reasons}). "
            "Run again on a quiet machine, leave out disturbed runs, or accept them with --force"
        )


def accept(
    runs: Run | Sequence[Run],
    reason: str,
    limits: Iterable[RegressionLimit],
    *,
    add: bool = False,
    if_improved: bool = False,
    force: bool = False,
    root: Path | None = None,
) -> Path:
    """Make runs of one kind the baseline of their fingerprint, or with ``add`` more runs of it, and return the file.

    All or none are accepted. Raises ``UserError`` for an incomplete run, did not pass or was slowed down on purpose
    (``require_acceptable``, by the stored verdict), for runs of different kinds and a run that is given twice, for an empty
    reason, with ``add`` where there is no baseline to add to, and with ``if_improved`` where a metric with a limit is worse
    than in the baseline it would replace, so that gates never loosen. Without ``force`` runs are refused whose spread makes a
    limit more than ``WIDEST`` times as wide.
    """
    chosen = [runs] if isinstance(runs, Run) else list(runs)
    if add and if_improved:
        raise UserError("--add keeps the baseline and --if-improved replaces it: choose one")
    if not reason.strip():
        raise UserError("a baseline needs --reason: say why this run is the new normal")
    first, limits = chosen[0], list(limits)
    for run in chosen:
        require_acceptable(run)
        other = differences(run_fingerprint(run), run_fingerprint(first))
        if other:
            name, here, there = other[0]
            raise UserError(
                f"{run.path} cannot be in one baseline with {first.path.name}: {name} is {here} here, {there} there"
            )
    comparison = find(first, root)
    kept = _kept(comparison, first) if add else []
    for run in chosen:
        record = RunRecord.of(run, limits, reason.strip())
        if if_improved and comparison.baseline is not None:
            _require_no_loss(record, comparison.baseline, limits)
        kept = [*kept, _new(record, kept)]
    if len(kept) > MOST_RUNS:
        raise UserError(
            f"a baseline holds {MOST_RUNS} runs at most, these would be {len(kept)}: accept fewer, or leave out --add"
        )
    baseline = Baseline(
        benchmark=first.config.benchmark,
        tier=first.config.tier,
        fingerprint=run_fingerprint(first),
        runs=kept,
        limits=limits,
    )
    if not force:
        known = known_spreads(first, limits, comparison.calibration, kept)
        _require_narrow(widths(baseline, limits, known))
    path = (root or folder()) / baseline.benchmark / baseline.tier / f"{baseline.key}.json"
    write_json(path, baseline.model_dump(mode="json"))
    return path


def _require_no_loss(record: RunRecord, current: Baseline, limits: Iterable[RegressionLimit]) -> None:
    worse = [limit.metric for limit in limits if _worse(record.metric(limit.metric), current.side(limit.metric))]
    if worse:
        raise UserError(f"not accepted (--if-improved): worse than the baseline in {', '.join(worse)}")


def require_acceptable(run: Run, verdict: dict[str, Any] | None = None) -> None:
    """Raise ``UserError`` for an incomplete run, did not pass or was slowed down on purpose.

    ``verdict`` counts instead of the stored one, which may be older than what is in the folder.
    """
    result, verdict = run.result, verdict or run.verdict
    if result is None or result.status != "complete" or verdict is None or verdict["verdict"] in ("BROKEN", "STOPPED"):
        why = verdict["sentence"] if verdict else "it was never judged"
        raise UserError(f"{run.path} is not a complete run and cannot be accepted: {why}")
    if count := restarts(run):
        raise UserError(
            f"{run.path} was started again {count} time{'s' * (count != 1)} after failures: its times hold only a part of the run; run it again"
        )
    if names := planted(run):
        raise UserError(f"{run.path} was slowed down or changed on purpose ({', '.join(names)}) and cannot be accepted")
    if verdict["verdict"] in ("FAIL", "SKIPPED"):
        others = [check["name"] for check in verdict["checks"] if check["gates"] and check["status"] == "FAIL"]
        raise UserError(
            f"{run.path} did not pass ({verdict['verdict']}: {', '.join(others) or verdict['sentence']}): fix it, or delete the outdated baseline and run again"
        )


def planted(run: Run) -> list[str]:
    """Return the parameters by which a run was slowed down or changed on purpose."""
    fields = type(run.config).model_fields
    return [
        name for name in fields if name.startswith("planted_") and getattr(run.config, name) != fields[name].default
    ]


def restarts(run: Run) -> int:
    """Return how often the ranks of a run were started again after a failure, on whichever node."""
    counts = (run.status or {}).get("restarts"), run.result.facts.get("restarts") if run.result else None
    return max((count for count in counts if isinstance(count, int)), default=0)


def _kept(comparison: Comparison, run: Run) -> list[RunRecord]:
    if comparison.baseline is None:
        raise UserError(
            f"--add: there is no baseline to add {run.path.name} to, {comparison.reason}; accept it without --add"
        )
    return comparison.baseline.runs


def _new(record: RunRecord, kept: Sequence[RunRecord]) -> RunRecord:
    """Return the record; a run that counts twice would make the spread between runs look smaller than it is."""
    for accepted in kept:
        if accepted.is_copy_of(record):
            twice = "is in the baseline already" if accepted.run == record.run else f"is a copy of {accepted.run}"
            raise UserError(f"{record.run} {twice}: accept runs of their own")
    return record


def _worse(new: Metric | None, old: Side | None) -> bool:
    if old is None or not old.runs:
        return False
    if new is None or new.value is None:
        return True
    before = old.value("difference")
    return new.value < before if new.direction == "higher" else new.value > before
