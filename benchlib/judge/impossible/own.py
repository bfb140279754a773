"""What a result of the kit states, as claims: each benchmark says what its numbers are, all values are finite."""

import math

from pydantic import ValidationError

from benchlib.benchmarks import BENCHMARKS
from benchlib.core.errors import UserError
from benchlib.judge.impossible.claim import Claim, Quantity
from benchlib.judge.impossible.numbers import Numbers


def own_claims(numbers: Numbers) -> list[Claim]:
    """Return what a result states, nothing for a skipped run; ``UserError`` where a value is outside its field's range.

    Of a benchmark that this version does not know only the values themselves can be judged.
    """
    if not numbers.metrics and not numbers.tables:
        return []
    try:
        stated = BENCHMARKS[numbers.benchmark].claims(numbers) if numbers.benchmark in BENCHMARKS else []
        return [*stated, Claim(quantities=quantities(numbers))]
    except (ValidationError, TypeError) as error:
        first = error.errors()[0] if isinstance(error, ValidationError) else {"loc": ("a table",), "msg": str(error)}
        where = ".".join(map(str, first["loc"]))
        raise UserError(f"the result of {numbers.benchmark} states an invalid {where}: {first['msg']}") from None


def quantities(numbers: Numbers) -> list[Quantity]:
    """Return every measured or derived value with its raw samples."""
    stated = []
    for metric in numbers.metrics:
        if metric.value is None and metric.provenance not in ("measured", "derived"):
            continue
        raw = list(numbers.samples.get(metric.name, metric.samples))
        finite = all(map(math.isfinite, raw))
        stated.append(
            Quantity(
                name=metric.name,
                value=metric.value if finite else None,
                unit=metric.unit,
                samples=raw if finite else [],
                # Fewer raw samples than the value is of were thinned, as in a baseline.
                median_of_samples=len(raw) == metric.n,
                low=metric.ci_low,
                high=metric.ci_high,
            )
        )
    return stated
