"""Rules of MLPerf LoadGen summaries: VALID follows from the constraints, and these from the printed figures."""

from benchlib import early_stopping
from benchlib.impossible.claim import Claim, LoadGen
from benchlib.impossible.finding import Finding, agrees, figure, found


def verdict_follows_from_constraints(claim: Claim) -> list[Finding]:
    """A run is VALID when no constraint is unmet; one that LoadGen calls INVALID is no result."""
    run = claim.loadgen
    if run is None or run.valid is None:
        return []
    unmet = [name for name, word in run.satisfied.items() if word.upper() == "NO"]
    if run.valid:
        reason = "VALID" + (
            f" although not satisfied: {', '.join(unmet)}" if unmet else ", and every constraint is satisfied"
        )
        return [found(not unmet, reason)]
    return [
        found(
            False,
            f"LoadGen calls the run INVALID; not satisfied: {', '.join(unmet) or 'not told'}",
            wrong="it is no result",
        )
    ]


def duration_is_long_enough(claim: Claim) -> list[Finding]:
    """The run lasted the minimum that it claims to have satisfied."""
    run = claim.loadgen
    if run is None or run.duration_s is None or run.min_duration_s is None:
        return []
    satisfied = next((word for name, word in run.satisfied.items() if name.lower().startswith("min duration")), "")
    enough = run.duration_s >= run.min_duration_s * (1 - 1e-9)
    reason = f"{run.duration_s:,.1f} s of at least {run.min_duration_s:,.1f} s"
    claims = satisfied.upper() == "YES" or (not satisfied and run.valid is True)
    return [found(enough or not claims, reason, wrong="it is shorter than the minimum that it calls satisfied")]


def latency_keeps_its_target(claim: Claim) -> list[Finding]:
    """In the Server scenario the target percentile lies under the target latency where the constraint is satisfied."""
    run = claim.loadgen
    if run is None or run.scenario != "Server" or not run.target_latency_s or run.target_percentile_s is None:
        return []
    satisfied = next((word for name, word in run.satisfied.items() if name.lower().startswith("performance")), "")
    claims = satisfied.upper() == "YES" or (not satisfied and run.valid is True)
    met = run.target_percentile_s <= run.target_latency_s
    reason = f"p{run.target_percentile or 99:g} of {1e3 * run.target_percentile_s:,.1f} ms, target {1e3 * run.target_latency_s:,.1f} ms"
    return [found(met or not claims, reason, wrong="the constraint is called satisfied")]


def samples_follow_from_rate(claim: Claim) -> list[Finding]:
    """Offline: samples per second × the time of the last sample = the samples of the query."""
    run = claim.loadgen
    if run is None or run.samples_per_s is None or run.samples is None or not run.duration_s:
        return []
    true = run.samples / run.duration_s
    reason = f"{figure(run.samples_per_s)} samples/s stated, {run.samples:,} samples in {run.duration_s:,.3f} s = {figure(true)}"
    return [found(agrees(run.samples_per_s, true, true, 1e-3), reason, wrong="it is another rate")]


def early_stopping_counts(claim: Claim) -> list[Finding]:
    """The queries that early stopping asks for and sets aside are those of its formula (confidence 99 %)."""
    run = claim.loadgen
    if run is None or run.processed is None or (run.at_least is None and run.short_of is None):
        return []
    share = (run.target_percentile or (90 if run.scenario == "SingleStream" else 99)) / 100
    wrong = []
    if run.short_of is not None and run.short_of > 0 and run.valid:
        wrong.append(f"VALID although {run.short_of:,} queries are missing")
    if run.at_least is not None:
        need = early_stopping.queries_needed(share, 1)
        if run.at_least != need:
            wrong.append(f"asks for {run.at_least:,} queries, the formula for {need:,}")
        if run.processed < need and run.valid:
            wrong.append(f"{run.processed:,} queries are fewer than the {need:,} that p{100 * share:g} takes")
        aside = early_stopping.discarded(share, run.processed)
        if run.discarded is not None and aside is not None and run.discarded != aside:
            wrong.append(f"sets {run.discarded:,} latencies aside, the formula {aside:,}")
    reason = f"{run.processed:,} queries" + _told(run)
    return [found(not wrong, reason, wrong="; ".join(wrong))]


def _told(run: LoadGen) -> str:
    told = f", at least {run.at_least:,} needed" if run.at_least is not None else ""
    told += f", {run.discarded:,} set aside" if run.discarded is not None else ""
    return told + (f", {run.short_of:,} missing" if run.short_of else "")
