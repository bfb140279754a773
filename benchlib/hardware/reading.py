"""What the peaks of a machine say, in sentences."""

from benchlib.published import placements, summary
from benchlib.results import Run


def reading(run: Run) -> list[str]:
    """Return a sentence for each rate that was measured, with what it bounds, and where they stand beside published figures."""
    result = run.result
    assert result is not None
    rates = [metric for metric in result.metrics if metric.direction == "higher" and metric.value is not None]
    best = {
        metric.unit: max((m for m in rates if m.unit == metric.unit), key=lambda m: m.value or 0.0) for metric in rates
    }
    bounds = [
        f"The highest rate in {unit} is {metric.text} ({metric.name.replace('_', ' ')}): no benchmark on this machine can honestly show more."
        for unit, metric in best.items()
    ]
    stands = summary(placements(run))
    return [*bounds, stands] if stands else bounds
