"""What the benchmarks of servers state alike: workers that were lost, requests in flight, tokens that were counted in texts."""

from collections.abc import Mapping
from operator import truediv
from typing import Any

from benchlib.spec.charts import Chart, steps
from benchlib.spec.checks import Check, above
from benchlib.spec.tables import Col, Rows, Table, cols
from benchlib.workloads import model_files

COUNT_SHARE = 0.05  # by which the tokens counted in texts may differ from those that servers state
TEXTS = "Servers gave no token ids: they were asked in texts, and tokens are those that the tokenizer finds in their answers."
ratio = Col("count_ratio", "number", "tokens counted over those that servers state", truediv, "counted stated")


def losses(*first: Col) -> Table:
    """Return the table of workers that were lost and came back, and of queries that were sent again."""
    columns = [Col("t_s", "s", "after"), Col("worker", "number"), *cols("event because"), Col("times", "count")]
    return Table("losses", "worker {worker}", [*first, *columns])


def in_flight(*first: Col, title: str, empty: str) -> tuple[Table, Chart]:
    """Return the table of requests in flight of each worker, and its picture."""
    name = ", ".join(["worker {worker}", *(f"{{{col.name}}}" for col in first)])
    table = Table("inflight", name, [*first, Col("worker", "number"), Col("open", "number", "requests in flight")])
    return table, steps("in-flight", table["open"], title=title, empty=empty, x="time of the run (%)")


def tokens_counted(run: Table) -> Check:
    """Return the check of tokens that were counted in texts; ``run`` has the column ``ratio``."""
    question = "Does the tokenizer of model find as many tokens as the servers state?"
    least = run["count_ratio"], 1 - COUNT_SHARE
    return above("tokens counted", question, least, most=1 + COUNT_SHARE, when=lambda config: bool(config.workers))


def counts(counted: Mapping[str, int]) -> dict[str, Any]:
    """Return the columns ``stated`` and ``counted`` of the run: tokens of answers in text, or why there are none."""
    why = "the servers gave token ids, or texts without stating how many tokens they have"
    names = ("stated", "counted")
    return {name: counted[name] for name in names} if counted.get("stated") else {"why": dict.fromkeys(names, why)}


def in_texts(workers: Table, run: Rows) -> list[str]:
    """Return the warning of servers that give no token ids, if there were some."""
    return [TEXTS] if any(row.get("asked_in") == "text" for row in workers.rows(run)) else []


def refuse(config: Any, **parts: bool) -> None:
    """Refuse a model folder whose ``parts`` (tokenizer, weights) are not whole."""
    model_files.check(config.model, **parts)
