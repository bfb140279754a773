"""The highest rate of matrix products that any run of a store measured on a machine: the bound that its runs stand beside."""

from pathlib import Path

from benchlib.core.errors import UserError
from benchlib.core.text import day
from benchlib.results import store
from benchlib.results.run import load_result

WORDS = ("PASS", "AMBIGUOUS")  # a run that failed may have measured what cannot be
ANY = "matmul_peak_flops"  # of a run of one precision, which its fact ``precision`` names


def highest(run_dir: Path, precision: str, ranks: int) -> tuple[float | None, str]:
    """Return the highest peak of ``precision`` (FLOP/s) that an earlier run of this machine measured, and where.

    The store is the one that ``run_dir`` lies in; a run counts with the same host, hardware, backend and number of ranks,
    whatever its day and versions. A busy neighbour lowers a peak and nothing raises it: the best of all is the machine's.
    """
    folder = run_dir.resolve()
    own, name = store.Reader().read(str(folder)), f"matmul_{precision}_peak_flops"
    place = (own.host, own.hardware, own.backend, ranks)
    rates = [
        (metric.value, metric.name, folder.parents[1] / run.path)
        for run in store.read(folder.parents[1])
        if (run.host, run.hardware, run.backend, run.ranks) == place
        and run.word in WORDS
        and not (run.planted or run.copy_of)
        for metric in run.metrics
        if metric.name in (name, ANY)
    ]
    for value, metric_name, path in sorted(rates, reverse=True):
        try:
            result = load_result(path)
        except (UserError, OSError):
            continue
        metric = result.metric(metric_name)
        if metric and (metric_name == name or result.facts.get("precision") == precision):
            by = "" if "measured by " in metric.reason else f", measured by {path.name} on {day(result.started_at)}"
            return value, metric.reason.replace(", the best of this run", "") + by
    return None, ""
