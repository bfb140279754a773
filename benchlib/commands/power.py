"""`benchlib power`: what the gate of a benchmark can tell, by the number of accepted runs, before any of them is accepted.

The noise is what this machine's runs recorded: a calibration, the stored runs of one fingerprint, the accepted ones; or a spread
that the user states. The gate itself is simulated on it (``benchlib.judge.power``); nothing runs.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.markup import escape
from rich.table import Column, Table

from benchlib.core import terminal
from benchlib.core.errors import UserError, nearest
from benchlib.core.files import outputs
from benchlib.judge import baselines
from benchlib.judge import noise as made_up
from benchlib.judge.calibration import Calibration, load_calibrations
from benchlib.judge.change import Spread, moderated, own_spread, pooled
from benchlib.judge.power import ACCEPTED, Outlook, Setup, effect_text, pools_of
from benchlib.judge.regression import RegressionLimit, RunRecord, Side, faster, limits_of, side_of, spread_text
from benchlib.results.metrics import measured
from benchlib.results.run import Run, find_runs, fingerprint_key

console = terminal.console(least_width=140)
LEVEL = 100.0  # of the rate that a stated noise is looked at with: only ratios count


def power(
    target: str,
    tier: str,
    out: Path | None,
    spread: float | None,
    limit: float,
    noises: Sequence[str],
    loss: float | None,
) -> None:
    """Print the outlook of each gated metric, and with ``loss`` how many runs to accept to find it.

    Raises ``UserError`` where nothing was recorded and no ``spread`` is stated.
    """
    noises = list(made_up.KINDS) if "all" in noises else noises
    for name in noises:
        if name not in made_up.KINDS:
            raise UserError(f"--noise {name}: {nearest(name, [*made_up.KINDS, 'all'])}")
    if target:
        heading, metrics = _recorded(target, tier, out, spread, noises)
    elif spread is None:
        raise UserError("power needs a benchmark with recorded runs, or a stated noise: --spread 0.05 --limit 0.2")
    else:
        side = Side.of(measured("rate", LEVEL, "1/s", "higher"))
        wanted = RegressionLimit(metric="any rate", share=limit)
        heading, metrics = "stated noise", [_outlook(wanted, side, None, 0, spread, noises)]
    console.print(f"[bold]{escape(heading)}[/]", soft_wrap=True)
    heads = [Column(f"{count} accepted", no_wrap=True) for count in ACCEPTED]
    table = Table(
        Column("metric", no_wrap=True), "limit", Column("spread between runs", overflow="fold"), *heads,
        box=None, padding=(0, 2, 0, 0), header_style="bold",
    )  # fmt: skip
    for item in metrics:
        kind, unit = item.setup.kind, item.metric.unit
        cells = [item.at(count).text(kind, unit) for count in ACCEPTED]
        words = spread_text(item.spread, kind, unit).removeprefix("spread between runs ")
        row = (item.limit.metric, item.limit.text(item.metric.direction), words, *cells)
        table.add_row(*(escape(cell) for cell in row))
    console.print(table)
    kinds = ", ".join(dict.fromkeys(name for item in metrics for name in item.pools))
    console.print(
        f"Of one new, unchanged run, each metric on its own: false alarms, undecided comparisons; and the smallest loss found in 99%. Noise: {kinds}; the worst counts.",
        style="dim",
        soft_wrap=True,
    )
    if loss is not None:
        for item in metrics:
            console.print(escape(enough_text(item, loss)), soft_wrap=True)


def enough_text(item: Outlook, loss: float) -> str:
    """Say how many runs to accept so that a loss of this share is found in 99% of comparisons."""
    name, kind, most = item.limit.metric, item.setup.kind, baselines.MOST_RUNS
    if kind != "ratio":
        return f"{name}: its limit is an amount, not a share: see the table."
    if loss <= item.setup.allowed:
        return f"{name}: a loss of {loss:.0%} is within the limit of {item.setup.allowed:.0%} and passes: --set limits.{name}={loss / 2:g}"
    count = item.enough(loss, most)
    if count is None:
        least = effect_text(item.at(most).effect, kind, "")
        return f"{name}: {most} accepted runs, the most that a baseline holds, find {least}, not {loss:.0%}: set a tighter limit, or quieten the machine."
    return f"{name}: a loss of {loss:.0%} is found with {count} accepted run{'s' * (count != 1)}."


def _recorded(
    target: str, tier: str, out: Path | None, spread: float | None, noises: Sequence[str]
) -> tuple[str, list[Outlook]]:
    """Return where the noise of a benchmark comes from, and what its metrics look like."""
    run, store = _newest(target, tier, out or outputs()), baselines.folder()
    calibration: Calibration | None
    if run:
        comparison, limits = baselines.find(run), limits_of(run)
        calibration, baseline = comparison.calibration, comparison.baseline
        stored = [*baselines.stored_runs(run, limits), RunRecord.of(run, limits)]
        spreads = baselines.known_spreads(run, limits, calibration, [])
        origin = f"{len(stored)} stored runs, the newest {run.path.name}"
    else:  # what is committed, as on a machine that only judges
        accepted = [item for _, item in baselines.stored(store, target, tier)]
        measured_here = load_calibrations(store, target, tier)
        keys = {
            fingerprint_key(factors)
            for factors in [item.fingerprint for item in accepted] + [item.fingerprint for item in measured_here]
        }
        if len(keys) != 1:
            reason = (
                f"{len(keys)} machines have baselines or calibrations of it" if keys else "nothing was recorded of it"
            )
            raise UserError(
                f"{target}, tier {tier}: {reason}: run it here once (`benchlib run {target} --tier {tier}`), or leave the benchmark "
                "out and state its noise, --spread 0.05"
            )
        baseline, calibration = next(iter(accepted), None), next(iter(measured_here), None)
        limits = (
            baseline.limits
            if baseline and baseline.limits
            else [item.limit for item in calibration.metrics]
            if calibration
            else []
        )
        stored, spreads, origin = [], {}, "no stored run"
    accepted_runs = baseline.runs if baseline else []
    records = [record for record in accepted_runs if not any(map(record.is_copy_of, stored))]
    origin += f", {len(accepted_runs)} accepted" * bool(accepted_runs) + ", a calibration" * bool(calibration)
    metrics = []
    for limit in limits:
        side = side_of([*records, *stored], limit.metric) or (calibration.side(limit.metric) if calibration else None)
        if side is None or not side.runs:
            continue
        calibrated = calibration.spread(limit.metric) if calibration else None
        borrowed = spreads.get(limit.metric) or calibrated
        metrics.append(
            _outlook(
                limit, side, calibrated if stored or records else None, borrowed.dof if borrowed else 0, spread, noises
            )
        )
    return f"{target}, {tier}: {origin}", metrics


def _newest(target: str, tier: str, out: Path) -> Run | None:
    """Return the newest complete run that was not slowed down on purpose."""
    for path in find_runs(out):
        run = Run(path)
        try:
            whole = run.config.benchmark == target and run.config.tier == tier and run.result is not None
            if whole and run.result.status == "complete" and not baselines.planted(run):  # type: ignore[union-attr]
                return run
        except UserError:  # damaged: no witness
            continue
    return None


def _outlook(
    limit: RegressionLimit,
    side: Side,
    calibrated: Spread | None,
    known_dof: int,
    stated: float | None,
    noises: Sequence[str],
) -> Outlook:
    """Return the outlook of a metric. A ``stated`` spread takes the place of what is known of a share."""
    setup = Setup.of(limit, side, known_dof=known_dof)
    readings = side.readings(setup.kind)
    if stated is not None and setup.kind == "ratio":
        spread: Spread | None = Spread(stated, 0, "what was stated")
        readings, setup = [], replace(setup, known_dof=0)  # which the gate does not know of
    else:
        own = own_spread([readings])
        own = replace(own, source=f"{len(readings)} runs") if own else None
        spread = moderated(pooled(calibrated, own), setup.default)
    made = noises if setup.kind == "ratio" and faster(side.metric) else ()
    spread = spread or Spread(0.0, 0, "nothing")
    return Outlook(side.metric, limit, setup, spread, pools_of(spread.s, readings, made))
