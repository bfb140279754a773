"""Judged quantities that are single numbers: losses, repeats, invariance, F1."""

import math
from dataclasses import replace

from benchlib.parity import tolerances
from benchlib.parity.rows import Row
from benchlib.parity.sides import Sides


def loss(sides: Sides) -> Row:
    """Judge the loss of the first training batch."""
    other, own = sides.reference.meta.get("loss"), sides.candidate.meta.get("loss")
    if other is None:
        return sides.judge.skip(tolerances.LOSS, "the reference has none")
    if own is None:
        return sides.lacking(tolerances.LOSS, "loss")
    return sides.judge.judge(tolerances.LOSS, abs(own - other), limit=sides.eased_loss(tolerances.LOSS))


def curve(sides: Sides) -> Row:
    """Judge the loss of every training step, and fill the table ``curves``."""
    own, other = (list(side.meta.get("curve") or []) for side in (sides.candidate, sides.reference))
    truth = list((sides.truth.meta.get("curve") if sides.truth else None) or [])
    if not other:
        return sides.judge.skip(tolerances.CURVE, "the reference has none")
    if not own:
        return sides.lacking(tolerances.CURVE, "curve")
    sides.tables["curves"] = [
        {
            "step": step,
            "loss": loss,
            "reference_loss": reference,
            "truth_loss": truth[step] if step < len(truth) else None,
        }
        for step, (loss, reference) in enumerate(zip(own, other, strict=False))
    ]
    if len(own) != len(other):
        return sides.judge.fail(tolerances.CURVE, f"{len(own)} steps, the reference has {len(other)}")
    differences = [math.nan if None in pair else abs(pair[0] - pair[1]) for pair in zip(own, other, strict=True)]
    broken = next((step for step, value in enumerate(differences) if math.isnan(value)), None)
    if broken is not None:
        return sides.judge.fail(tolerances.CURVE, "a loss is not finite", f"step {broken}")
    value = max(differences)
    limit = sides.eased_loss(tolerances.CURVE)
    return sides.judge.judge(tolerances.CURVE, value, f"step {differences.index(value)}", limit=limit)


def repeats(sides: Sides) -> Row:
    """Judge whether the member gives the same bits again."""
    found = sides.candidate.meta.get("repeats")
    if not found:
        return sides.lacking(tolerances.REPEATS, "repeats")
    if found.get("max_abs") is None:
        return sides.judge.fail(tolerances.REPEATS, "not finite")
    value = float(found["max_abs"])
    if not found.get("identical") and value == 0.0:
        return sides.judge.fail(
            tolerances.REPEATS, f"{found['runs']} runs differ in bits, if only in the sign of a zero"
        )
    return sides.judge.judge(tolerances.REPEATS, value, "", f"{found['runs']} runs of one input")


def invariance(sides: Sides, quantity: str, name: str) -> Row:
    """Judge whether a row's logits depend on its neighbours, or on how far it is padded."""
    found = sides.candidate.meta.get("invariance") or {}
    if found.get(name) is None:
        return sides.lacking(quantity, "invariance")
    return sides.judge.judge(quantity, float(found[name]), limit=sides.eased(quantity))


def f1(sides: Sides, scores: tuple[float, float] | None, questions: int) -> Row:
    """Judge the F1 of the reference and of the candidate, in points; in bf16 one answer of a small set may change."""
    judge, limit = sides.judge, sides.judge.tolerance(tolerances.F1)
    if scores is None:
        reason = (sides.candidate.meta.get("absent") or {}).get(tolerances.F1)
        return judge.skip(tolerances.F1, reason or "there is no dev set")
    if judge.member.precision == "bf16" and questions:
        limit = replace(limit, value=max(limit.value, 100 / questions))
    count = f", {questions} questions" if questions else ""
    reason = f"{scores[1]:.2f}, the reference {scores[0]:.2f}{count}"
    return judge.judge(tolerances.F1, abs(scores[1] - scores[0]), "", reason, limit)
