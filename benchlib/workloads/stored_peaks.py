"""The highest rate of matrix products that any run of a store measured on a machine: the bound that its runs stand beside."""

from pathlib import Path

from benchlib.core.text import day
from benchlib.results.record import load, load_all

WORDS = ("PASS", "AMBIGUOUS")  # a run that failed may have measured what cannot be
ANY = "matmul_peak_flops"  # of a run of one precision, which its fact ``precision`` names


def highest(run_dir: Path, precision: str, ranks: int) -> tuple[float | None, str]:
    """Return the highest peak of ``precision`` (FLOP/s) that an earlier run of this machine measured, and where.

    The store is the one that ``run_dir`` lies in; a run counts with the same host, hardware, backend and number of ranks,
    whatever its day and versions. A busy neighbour lowers a peak and nothing raises it: the best of all is the machine's.
    """
    own, name = load(run_dir.resolve(), whole=False), f"matmul_{precision}_peak_flops"
    place = (own.host, own.hardware, own.backend, ranks)
    rates = [
        (metric.value, metric.reason, run)
        for run in load_all(run_dir.resolve().parents[1])
        if (run.host, run.hardware, run.backend, run.ranks) == place
        and run.word in WORDS
        and run.result
        and not (run.injected or run.copy_of)
        for metric in run.measured
        if metric.name == name or (metric.name == ANY and run.result.facts.get("precision") == precision)
    ]
    if not rates:
        return None, ""
    value, reason, run = max(rates, key=lambda item: item[0] or 0)
    by = "" if "measured by " in reason else f", measured by {run.run} on {day(run.started_at)}"
    return value, reason.replace(", the best of this run", "") + by
