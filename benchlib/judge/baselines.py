"""Baselines: the metrics of accepted runs, under ``baselines/<benchmark>/<tier>/<key>.json``.

The key stands for the fingerprint: what has to be equal for two runs to be comparable.
"""

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchlib.config.schema import BaseConfig, build
from benchlib.core.errors import UserError, nearest
from benchlib.core.files import home
from benchlib.core.text import counted, shortened
from benchlib.judge.calibration import Calibration, load_calibration
from benchlib.judge.changepoints import levels
from benchlib.judge.checks import Ask, Check, Status
from benchlib.judge.impossible.claim import Claim
from benchlib.judge.impossible.own import Numbers
from benchlib.judge.regression import (
    LEVEL,
    LINEAR,
    LOG,
    NOTICED,
    KeptRuns,
    RegressionLimit,
    Spread,
    allowed_loss,
    baseline_check,
    chance_of_each,
    deciding_spread,
    default_spread,
    moderated,
    pooled,
    read_runs,
    regression_check,
    repeats,
    scale_of,
    side_of,
    smallest_loss,
    spread_about,
    spread_text,
)
from benchlib.results.metrics import adjusted, named
from benchlib.results.record import Record, load
from benchlib.results.run import Run, fingerprint_key
from benchlib.results.verdict import Verdict

STORED = 12  # runs beside a run that tell their spread, the newest
SEARCHED = 40  # that are looked at for them
MIN_STORED = 4  # of which one may be odd
ENOUGH_RUNS = 3  # from which on the spread between the accepted runs widens the gate's interval


class Baseline(KeptRuns):
    """The accepted runs of one fingerprint; several tell the spread between unchanged runs."""

    def claims(self) -> list[Claim]:
        """Return what the accepted runs state, under the config that the fingerprint holds. Raises ``UserError``."""
        benchmark, factors = self.latest.benchmark, self.latest.fingerprint
        # All fields that do not change the work have their defaults.
        work = {name[7:]: json.loads(text) for name, text in factors.items() if name.startswith("config.")}
        config = config_of(benchmark, work | {"backend": factors.get("backend", ""), "tier": self.latest.tier})
        return [
            claim.model_copy(update={"subject": ", ".join(filter(None, (run.run, claim.subject)))})
            for run in self.runs
            if run.result
            for claim in Numbers(run.result, run.samples, config)
        ]


def config_of(benchmark: str, values: Mapping[str, Any]) -> BaseConfig | None:
    """Return the config of these values, None where this version has no such config: fewer rules apply then."""
    try:
        return build(benchmark, values)
    except UserError:
        return None


@dataclass(frozen=True)
class Comparison:
    """A baseline for a run, or why there is none: ``factors`` lists (name, here, in the nearest baseline).

    ``calibration`` is what `benchlib calibrate` measured of the gate for the run's fingerprint, with or without a baseline;
    ``refused`` says what is wrong with its file or with that of the baseline.
    """

    baseline: Baseline | None = None
    factors: Sequence[tuple[str, str, str]] = ()
    calibration: Calibration | None = None
    refused: str = ""

    @property
    def status(self) -> Status:
        """What is to be said of a metric that is not compared."""
        return "NOT_COMPARABLE" if self.factors or self.refused else "NO_BASELINE"

    @property
    def reason(self) -> str:
        """Why nothing can be compared, in plain words."""
        if self.refused:
            return f"its baseline is refused: {self.refused}"
        factors = [f"{name} is {here} here, {there} there" for name, here, there in self.factors]
        return f"the nearest baseline differs: {shortened(factors, 4, '; ')}" if factors else "no run was accepted yet"


def folder() -> Path:
    return home() / "baselines"


def load_baseline(path: Path) -> Baseline:
    """Read a baseline file; ``UserError`` if it is cut, foreign or lost a number."""
    return read_runs(path, Baseline, "a baseline (restore it, or delete it and accept sound runs)")


def stored(root: Path | None = None, benchmark: str = "*", tier: str = "*") -> tuple[list[Baseline], dict[Path, str]]:
    """Return the sound baselines below ``root``, in the order of their paths, and why others are refused."""
    sound, refused = list[Baseline](), dict[Path, str]()
    for path in sorted((root or folder()).glob(f"{benchmark}/{tier}/*.json")):
        if path.parts[-3] != "golden":
            try:
                baseline = load_baseline(path)
            except UserError as error:
                refused[path] = str(error)
                continue
            if {fingerprint_key(run.fingerprint) for run in baseline.runs} == {path.stem}:
                sound.append(baseline)
            else:
                refused[path] = f"{path}: its name is not the key of its fingerprints: restore it, or accept runs again"
    return sound, refused


def by_key(key: str) -> Baseline:
    """Return the one baseline whose key begins with these digits; ``UserError`` where there are none or several."""
    matches = [baseline for baseline in stored()[0] if baseline.key.startswith(key)]
    if len(matches) != 1:
        raise UserError(f"{len(matches)} baselines begin with {key!r}: `benchlib baseline list` shows the keys")
    return matches[0]


def find(run: Run, root: Path | None = None) -> Comparison:
    """Find the baseline of a run, or the nearest one and the factors in which it differs."""
    place, key = (run.config.benchmark, run.config.tier), fingerprint_key(run.fingerprint)
    try:
        calibration = load_calibration(root or folder(), *place, run.fingerprint)
    except UserError as error:
        return Comparison(refused=str(error))
    sound, refused = stored(root, *place)
    for path, reason in refused.items():
        if path.stem == key:
            return Comparison(calibration=calibration, refused=reason)
    candidates = [(differences(run.fingerprint, baseline.latest.fingerprint), baseline) for baseline in sound]
    factors, nearest = min(candidates, key=lambda pair: len(pair[0]), default=([], None))
    return Comparison(None if factors else nearest, factors, calibration)


def differences(here: dict[str, str], there: dict[str, str]) -> list[tuple[str, str, str]]:
    """Return (name, here, there) for each factor that differs."""
    pairs = [(name, here.get(name, "absent"), there.get(name, "absent")) for name in sorted(here.keys() | there.keys())]
    return [pair for pair in pairs if pair[1] != pair[2]]


def require_alike(run: Run, here: dict[str, str], there: dict[str, str]) -> None:
    """Raise ``UserError`` where a run is of another kind than those that it is to be accepted with."""
    for name, own, other in differences(here, there)[:1]:
        raise UserError(f"{run.path} cannot be accepted with the others: {name} is {own} here, {other} there")


def regression_checks(run: Run, limits: Sequence[RegressionLimit], comparison: Comparison) -> list[Check]:
    """Compare each metric that has a limit with the baseline; a metric that only one side has is listed.

    The earlier repetitions of an undecided run (``repeats.json``) count with it. An accepted run is compared with the other accepted ones: with itself it would always pass.
    """
    result, limits = run.result, adjusted(limits, run.config.limits)
    assert result is not None
    names, checks = [limit.metric for limit in limits], list[Check]()
    if unused := [name for name in run.config.limits if not any(named(name, metric) for metric in names)]:
        # Who set one believes that it gates. In a tier it may be that of another benchmark.
        wrong = "; ".join(f"limits.{name}: {nearest(name, names)}" for name in unused)
        ask = Ask("limits apply", "Does every limit that was set belong to a metric?", "regression")
        checks.append(ask.skipped(f"no metric with a limit has this name: {wrong}", gates=True))
    status, reason, baseline = comparison.status, comparison.reason, comparison.baseline
    latest, earlier = load(run.path), repeats(run)
    others = [record for record in baseline.runs if not record.is_copy_of(latest)] if baseline else []
    if baseline is None or not others:
        reason = "this run is the baseline itself" if baseline else reason
        for limit in limits:
            metric = result.metric(limit.metric)
            if metric is not None and metric.value is not None:
                words = {"limit": limit.text(metric.direction), "reason": f"measured {metric.text}; {reason}"}
                checks.append(baseline_check(metric, status=status, value=metric.value, **words))
        return checks
    spreads = known_spreads(latest, limits, comparison.calibration, [*baseline.runs, *earlier, latest])
    chance = chance_of_each(limits, result.metrics)
    for limit in limits:
        # A value that is no number must not hide behind those of earlier repetitions.
        metric = latest.metric(limit.metric)
        together = [*earlier, latest] if metric is not None and metric.value is not None else [latest]
        new, old = side_of(together, limit.metric), side_of(others, limit.metric)
        if any(side and side.metric.provenance != "not_available" for side in (new, old)):
            known = [spreads.get(limit.metric + part) for part in ("", LEVEL)]
            checks.append(regression_check(limit, new, old, known[0], chance, known[1]))
    return checks


def known_spreads(
    run: Record, limits: Iterable[RegressionLimit], calibration: Calibration | None, beside: Sequence[Record]
) -> dict[str, Spread]:
    """Return by metric the spread between unchanged runs that a calibration and the stored runs of this fingerprint tell.

    Those of undisturbed levels have names that end with ``LEVEL``. ``beside`` are the runs that are compared: their own spread is pooled with this one and must not count twice. Where the folder
    of the ``run`` is not at hand there are no stored ones. The spread of these is that about their levels, so that a step between
    them or an odd one does not count.
    """
    earlier = [record for record in stored_runs(run) if not any(map(record.is_copy_of, beside))]
    spreads = {}
    for limit in limits:
        side, values = side_of(earlier, limit.metric), dict[str, list[float]]()
        scale = scale_of(limit, side.lowest) if side and side.runs else LOG
        if side and len(side.runs) >= MIN_STORED:
            values = {"": side.values(scale), LEVEL: side.levels}
        for part in ("", LEVEL):
            about = None
            if of_runs := values.get(part):
                about = spread_about(levels(of_runs), scale, float(np.median(of_runs)), f"{len(of_runs)} stored runs")
            if spread := pooled(calibration.spread(limit.metric + part) if calibration else None, about):
                spreads[limit.metric + part] = spread
    return spreads


def stored_runs(run: Record) -> list[Record]:
    """Return the newest complete runs of the same fingerprint that lie beside a run and began before it, the oldest first.

    Accepted or not, passed or not; one that is damaged is no witness.
    """
    records, place = list[Record](), Path(run.folder).absolute()
    folders = place.parent.parent.glob(f"{run.tier}-*/{run.benchmark}-{run.backend}-*") if run.folder else ()
    for folder in sorted(folders, key=lambda path: (path.parent.name, path.name), reverse=True)[:SEARCHED]:
        if folder == place or len(records) == STORED:
            continue
        other = load(folder, whole=False)
        alike = other.complete and not other.problems and other.fingerprint == run.fingerprint
        if alike and other.started_at < run.started_at and not other.injected and not continued(other):
            records.append(load(folder))
    return records[::-1]


class Width(NamedTuple):
    """The smallest loss that the gate finds in a metric of accepted runs, as a row, and as a multiple of the limit."""

    cells: dict[str, str]
    times: float


def widths(baseline: Baseline, limits: Iterable[RegressionLimit], known: Mapping[str, Spread]) -> list[Width]:
    rows = []
    for limit in limits:
        side = side_of(baseline.runs, limit.metric)
        if not side or not side.runs:
            continue
        metric, scale = side.metric, scale_of(limit, side.lowest)
        measured = pooled(deciding_spread(side, scale), known.get(limit.metric + LEVEL * bool(side.levels)))
        if not (spread := moderated(measured, default_spread(metric, limit, scale, side.others))):
            continue
        effect = smallest_loss(limit, side, measured, len(side.runs))
        allowed = scale.size(allowed_loss(limit, scale, metric.direction, side.value(scale)))
        cells = {
            "metric": metric.name,
            "accepted": side.text(scale),
            "spread": spread_text(spread, scale, metric.unit).removeprefix("spread between runs "),
            "limit": limit.text(metric.direction),
            "smallest loss found": ("-" if metric.direction == "higher" else "+")
            + scale.size_text(effect, metric.unit),
        }
        rows.append(Width(cells, effect / allowed if allowed else 0.0))
    return rows


def reach(accepted: Baseline, rows: Sequence[Width]) -> str:
    """Say what others took while the runs ran, the smallest loss that the gate finds in its widest metric, and what to do."""
    others = float(np.median([run.others for run in accepted.runs]))
    words = [f"Others took {others:.0%} of the processors while the accepted runs ran."]
    if rows:
        widest = max(rows, key=lambda row: row.times)
        form = "The gate is sure to detect a change of {smallest loss found} in {metric}; the limit is {limit}."
        words.append(form.format_map(widest.cells))
    if others >= NOTICED:
        words.append(
            "To find smaller losses, run again on a quiet machine and accept those runs instead; here, use --repeat 5."
        )
    if len(accepted.runs) < ENOUGH_RUNS:
        more = f"accept {ENOUGH_RUNS} or more (--add), or run `benchlib calibrate {accepted.latest.benchmark} --tier {accepted.latest.tier}`"
        words.append(f"The gate assumes how much unchanged runs differ: to measure it, {more}.")
    return " ".join(words)


def accept(
    runs: Run | Sequence[Run],
    reason: str,
    limits: Iterable[RegressionLimit],
    *,
    add: bool = False,
    if_improved: bool = False,
    root: Path | None = None,
) -> Path:
    """Make runs of one kind the baseline of their fingerprint, or with ``add`` more runs of it, and return the file.

    All or none are accepted. Raises ``UserError`` for a run that is incomplete, failed or was slowed down on purpose
    (``require_acceptable``, by the stored verdict), for runs of different kinds, a run that is given twice, an empty reason, with
    ``add`` where there is nothing to add to, and with ``if_improved`` where a metric with a limit is worse than before.
    """
    chosen, limits = [runs] if isinstance(runs, Run) else list(runs), list(limits)
    if add and if_improved:
        raise UserError("--add keeps the baseline and --if-improved replaces it: choose one")
    if not reason.strip():
        raise UserError("a baseline needs --reason: say why this run is the new normal")
    first = chosen[0]
    for run in chosen:
        require_acceptable(run)
        require_alike(run, run.fingerprint, first.fingerprint)
    comparison = find(first, root)
    current = comparison.baseline
    if (add and current is None) or (if_improved and comparison.refused):
        option = "--add" if add else "--if-improved"
        raise UserError(f"{option}: {first.path.name} has no baseline to be put beside, {comparison.reason}")
    accepted = list(current.runs) if current and add else []
    for run in chosen:
        record = load(run.path).kept(limits, reason.strip(), time.time())
        # A run that counts twice would make the spread between runs look smaller than it is.
        for other in (other for other in accepted if other.is_copy_of(record)):
            twice = "is in the baseline already" if other.run == record.run else f"is a copy of {other.run}"
            raise UserError(f"{record.run} {twice}: accept runs of their own")
        accepted.append(record)
    better_than = current.runs if current and if_improved else []
    if worse := [limit.metric for limit in limits if _worse(limit.metric, accepted, better_than)]:
        raise UserError(f"not accepted (--if-improved): worse than the baseline in {', '.join(worse)}")
    baseline = Baseline(runs=accepted, limits=limits)
    return baseline.save((root or folder()) / accepted[0].benchmark / accepted[0].tier / f"{baseline.key}.json")


def _worse(name: str, runs: Sequence[Record], current: Sequence[Record]) -> bool:
    """Compare both sides; a run that lost the metric is worse."""
    new, old = side_of(runs, name), side_of(current, name)
    if old is None or not old.runs:
        return False
    if new is None or len(new.runs) < len(runs):
        return True
    after, before = new.value(LINEAR), old.value(LINEAR)
    return after < before if new.metric.direction == "higher" else after > before


def require_acceptable(run: Run, verdict: Verdict | None = None) -> None:
    """Raise ``UserError`` for a run that is incomplete, failed or was slowed down on purpose.

    ``verdict`` counts instead of the stored one, which may be older than what is in the folder.
    """
    result, verdict = run.result, verdict or run.verdict
    if result is None or result.status != "complete" or verdict is None or verdict.broken:
        why = verdict.sentence if verdict else "it was never judged"
        raise UserError(f"{run.path} is not a complete run and cannot be accepted: {why}")
    if why := continued(run):
        raise UserError(f"{run.path} was {why}: its times hold only a part of the run; run it again")
    if names := injected(run):
        raise UserError(f"{run.path} was slowed down or changed on purpose ({', '.join(names)}) and cannot be accepted")
    if verdict.verdict in ("FAIL", "SKIPPED"):
        remedy = "fix it and run again; where its baseline is outdated, delete that file first"
        raise UserError(f"{run.path} did not pass ({verdict.verdict}: {verdict.sentence}): {remedy}")


def injected(run: Run) -> list[str]:
    fields = type(run.config).model_fields.items()
    names = {name: field.default for name, field in fields if name.startswith("planted_")}
    return [name for name, default in names.items() if getattr(run.config, name) != default]


def restarts(run: Run | Record) -> int:
    """Return how often the ranks of a run were started again after a failure, on whichever node."""
    counts = (run.status or {}).get("restarts"), run.result.facts.get("restarts") if run.result else None
    return max((count for count in counts if isinstance(count, int)), default=0)


def continued(run: Run | Record) -> str:
    """Return how a run went on from a checkpoint, of its own or of another run; '' for one that is of a piece."""
    if count := restarts(run):
        return f"started again {counted(count, 'time')} after failures"
    step = run.result.facts.get("resumed_step") if run.result else None
    return f"resumed at step {step:,} of another run" if isinstance(step, int) and step > 0 else ""
