"""What the numbers of a collectives run say, in sentences."""

from benchlib.metrics import quantity
from benchlib.results import Run


def reading(run: Run) -> list[str]:
    """Return sentences about what was verified and reached."""
    result = run.result
    assert result is not None
    found = [
        f"{result.facts['checked_elements']:,} elements were compared, {result.facts['wrong_elements']:,} are wrong."
    ]
    rate = result.metric("allreduce_busbw_gbps")
    if rate is not None and rate.value is not None:
        found.append(f"The all-reduce reaches {quantity(rate.value)} Gbps of bus bandwidth ({rate.reason}).")
    return found
