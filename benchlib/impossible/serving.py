"""Rules of latencies and requests: no time below zero, percentiles in order, no failed request in a latency."""

import itertools
from collections.abc import Iterator

from benchlib.impossible.claim import Claim, Latency
from benchlib.impossible.finding import Finding, found


def latency_is_not_negative(claim: Claim) -> list[Finding]:
    """A time below zero is the difference of two clocks, or of two events that were mixed up."""
    findings = []
    for latency in claim.latencies:
        values = dict(_values(latency))
        if not values:
            continue
        wrong = [f"{name} {value:.4g} s" for name, value in values.items() if value < 0]
        reason = f"{latency.name}: " + (", ".join(wrong[:3]) or f"{len(values)} times, none below zero")
        findings.append(
            found(not wrong, reason, wrong="nothing takes less than no time; clocks or events were mixed up")
        )
    return findings


def _values(latency: Latency) -> Iterator[tuple[str, float]]:
    for name, value in (("minimum", latency.min_s), ("mean", latency.mean_s), ("maximum", latency.max_s)):
        if value is not None:
            yield name, value
    for percentile, value in latency.percentiles_s.items():
        yield f"p{percentile:g}", value
    for index, value in enumerate(latency.samples_s, 1):
        yield f"sample {index:,}", value


def percentiles_are_in_order(claim: Claim) -> list[Finding]:
    """minimum <= p50 <= p90 <= … <= maximum, and the mean lies between the ends."""
    findings = []
    for latency in claim.latencies:
        ladder = [("minimum", latency.min_s)] if latency.min_s is not None else []
        ladder += [(f"p{key:g}", value) for key, value in sorted(latency.percentiles_s.items())]
        ladder += [("maximum", latency.max_s)] if latency.max_s is not None else []
        steps = [(name, value) for name, value in ladder if value is not None]
        if len(steps) < 2:
            continue
        wrong = [
            f"{low} {first:.6g} s above {high} {second:.6g} s"
            for (low, first), (high, second) in itertools.pairwise(steps)
            if first > second * (1 + 1e-9) and second >= 0
        ]
        if latency.mean_s is not None and not steps[0][1] * (1 - 1e-9) <= latency.mean_s <= steps[-1][1] * (1 + 1e-9):
            bounded = latency.min_s is not None and latency.max_s is not None
            wrong += (
                [f"mean {latency.mean_s:.6g} s outside {steps[0][1]:.6g} to {steps[-1][1]:.6g} s"] if bounded else []
            )
        names = f"{steps[0][0]} {steps[0][1]:.4g} s to {steps[-1][0]} {steps[-1][1]:.4g} s"
        findings.append(found(not wrong, f"{latency.name}: " + ("; ".join(wrong) or f"{names}, in order")))
    return findings


def requests_add_up(claim: Claim) -> list[Finding]:
    """Issued = completed + failed, and only completed requests have a latency: failing fast is not being fast."""
    requests = claim.requests
    if requests is None:
        return []
    wrong = []
    issued, completed, failed, counted = requests.issued, requests.completed, requests.failed, requests.in_latency
    if issued is not None and completed is not None and failed is not None and issued != completed + failed:
        wrong.append(f"{issued:,} issued are not {completed:,} completed + {failed:,} failed")
    if issued is not None and failed is None and completed is not None and completed > issued:
        wrong.append(f"{completed:,} completed of {issued:,} issued")
    if completed is None and issued is not None and failed is not None:
        completed = issued - failed
    if counted is not None and completed is not None and counted > completed:
        wrong.append(f"{counted:,} are in the latency, {completed:,} completed: failed requests make it look shorter")
    known = {"issued": issued, "completed": completed, "failed": failed, "in the latency": counted}
    told = [f"{value:,} {name}" for name, value in known.items() if value is not None]
    if len(told) < 2:
        return []
    return [found(not wrong, "; ".join(wrong) or ", ".join(told))]
