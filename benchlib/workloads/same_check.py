"""A check of several kinds of training: whether all of them compute the same series of numbers."""

import math
from typing import Any

from benchlib.spec.checks import Check, Limit, below, off
from benchlib.spec.tables import Col, Ref, Row, Rows


def same(name: str, question: str, ref: Ref, per: str, share: Limit, **more: Any) -> Check:
    """The rows with the same value of the column ``per`` have the same series of numbers, up to a share."""

    def apart(run: Rows, rows: list[Row]) -> list[Row]:
        compared = [row for row in rows if ref.numbers(row, run) or not ref.why(row)]
        first = {row.get(per): row for row in reversed(compared)}
        pairs = [(row, first[row.get(per)]) for row in compared if row is not first[row.get(per)]]
        return [{**row, "_apart": _apart(ref.numbers(row, run), ref.numbers(other, run))} for row, other in pairs]

    def alone(run: Rows) -> str:
        return unless(run) or ("" if differing.rows(run) else "only one ran: there is nothing to compare")

    differing, unless = ref.table.pick(apart), more.pop("unless", lambda run: "")
    error = Ref(differing, Col("_apart", "error", f"{ref.col.heading} differ by"))
    return below(name, question, (error, share), unless=alone, **more)


def _apart(series: list[float], others: list[float]) -> float:
    """Return the largest relative difference; infinite where one has more numbers, or one that is not finite."""
    if len(series) != len(others) or not all(map(math.isfinite, [*series, *others])):
        return math.inf
    return max(map(off, series, others))
