"""Rules of floating point work: no device does more than its peak, and a share needs the peak of that device."""

from benchlib.flops import token_flops
from benchlib.impossible.claim import Claim, Compute
from benchlib.impossible.finding import PEAK_SLACK, RATE_SLACK, Finding, found
from benchlib.metrics import quantity
from benchlib.vendor_peaks import vendor_peak

FLOP = "FLOP/s"


def rate_is_below_peak(claim: Claim) -> list[Finding]:
    """FLOP/s, stated or by tokens × FLOPs of a token, do not exceed the peak (5 % slack: peaks are measured too)."""
    compute = claim.compute
    achieved = _achieved(compute) if compute else None
    if compute is None or achieved is None:
        return []
    rate, how = achieved
    peak = _peak(compute)
    if peak is None:
        return [Finding("SKIPPED", f"{quantity(rate, FLOP)} {how}: no peak of {_device(compute)} is known")]
    flops, what = peak
    reason = f"{quantity(rate, FLOP)} {how}are {rate / flops:.1%} of {what} of {quantity(flops, FLOP)}"
    good = rate <= flops * PEAK_SLACK
    limit = f"<= {quantity(flops * PEAK_SLACK, FLOP)}"
    return [found(good, reason, wrong="no device exceeds its peak", value=rate, unit=FLOP, limit=limit)]


def share_is_possible(claim: Claim) -> list[Finding]:
    """MFU is FLOP/s over the dense peak of this very device in the precision of the work; it does not exceed 1."""
    compute = claim.compute
    if compute is None or compute.mfu is None:
        return []
    share = compute.mfu
    if share < 0:
        return [found(False, f"MFU {share:.1%}", wrong="below zero")]
    if share > PEAK_SLACK:
        return [found(False, f"MFU {share:.1%} cannot be", wrong=_why_above(compute), value=share, limit="<= 1")]
    if compute.peak_precision and compute.precision and compute.peak_precision != compute.precision:
        other = f"MFU {share:.1%} is of the {compute.peak_precision} peak, but the work ran in {compute.precision}"
        return [found(False, other, wrong="another precision has another peak")]
    if compute.peak_sparse:
        dense = f"MFU {share:.1%} is of a sparse peak, twice the dense one: MFU is not available, of the dense peak it were {2 * share:.1%}"
        return [Finding("SKIPPED", dense)]
    known = vendor_peak(compute.device)
    if compute.peak_flops is None and known is None:
        return [Finding("SKIPPED", f"MFU is not available: no peak of {_device(compute)} is known")]
    if compute.flops_per_s is None or compute.peak_flops is None:
        return []
    true = compute.flops_per_s / compute.peak_flops
    reason = f"MFU {share:.1%} stated, {quantity(compute.flops_per_s, FLOP)} / {quantity(compute.peak_flops, FLOP)} = {true:.1%}"
    good = abs(share - true) <= max(RATE_SLACK * true, 0.005)
    return [found(good, reason, wrong="the share does not follow from the two rates", value=share)]


def _achieved(compute: Compute) -> tuple[float, str] | None:
    if compute.flops_per_s is not None:
        return compute.flops_per_s, ""
    if compute.tokens_per_s is not None and compute.parameters is not None:
        each = token_flops(compute.parameters, training=compute.work == "training")
        count = f"{compute.tokens_per_s:,.1f} tokens/s × {'6' if compute.work == 'training' else '2'} × {compute.parameters:.3g} parameters"
        return compute.tokens_per_s * each, f"({count}) "
    return None


def _peak(compute: Compute) -> tuple[float, str] | None:
    if compute.peak_flops is not None:
        kind = f"the {compute.peak_kind} peak" if compute.peak_kind else "the stated peak"
        source = f" ({compute.peak_source})" if compute.peak_source else ""
        return compute.peak_flops, kind + source
    known = vendor_peak(compute.device)
    dense = known.dense_flops.get(compute.precision or "bf16") if known else None
    if known is None or dense is None:
        return None
    precision = compute.precision or "bf16"
    return dense * compute.ranks, f"the claimed dense {precision} peak of {compute.ranks} × {known.name}"


def _why_above(compute: Compute) -> str:
    known = vendor_peak(compute.device)
    used = f"the peak of {quantity(compute.peak_flops, FLOP)}" if compute.peak_flops else "the peak it was taken of"
    if compute.peak_precision and compute.precision and compute.peak_precision != compute.precision:
        return f"{used} is that of {compute.peak_precision}, while the work ran in {compute.precision}"
    if known is None and compute.device:
        return f"{used} is not that of {compute.device}, whose peak is not known; MFU is not available"
    if known is not None and compute.peak_flops:
        dense = known.dense_flops.get(compute.precision or "bf16")
        if dense and dense * compute.ranks > compute.peak_flops * PEAK_SLACK:
            return f"{used} is not the dense {compute.precision or 'bf16'} peak of {known.name}, {quantity(dense * compute.ranks, FLOP)}"
    return f"{used} is another device's or another precision's, or the work was counted twice"


def _device(compute: Compute) -> str:
    return repr(compute.device) if compute.device else "this device"
