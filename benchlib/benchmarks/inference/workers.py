"""The servers behind ``workers=``: what they say of themselves before the run, and what became of them in each test. No torch."""

from typing import Any

from benchlib.benchmarks.inference.bounds import Bound
from benchlib.benchmarks.inference.config import InferenceConfig
from benchlib.core.errors import UserError
from benchlib.workloads.llm.engines import Settings

SUT = "Network SUT"  # in the name that the system tells LoadGen: MLPerf's rules for the network division
TABLES = ("workers", "losses", "inflight")  # of the dispatcher's record, kept with the name of the test


def meet(config: InferenceConfig, settings: Settings, tokenizer: Any) -> tuple[dict[str, Any], list[Bound]]:
    """Return what the workers say of themselves, after each answered a query, and the bounds of each: none where one does not say.

    They are of one model, and of ours. Raises ``UserError`` for a worker that is not there, refuses the token or serves something
    else than another one or than ``model``, whose tokenizer makes the prompts.
    """
    from benchlib.workloads.llm.dispatch import EXAMPLE, Dispatcher, unlike  # aiohttp: readers of a run need none

    dispatcher = Dispatcher(settings)
    try:
        dispatcher.start()
        each = [worker.says for worker in dispatcher.workers]
        says = dict(each[0])
        if says.get("engine") != "sim":  # which takes any prompt
            model = says.get("model") if config.served_model else config.model
            mine = {"model": model, "cut": list(tokenizer(EXAMPLE)["input_ids"])}
            if why := unlike(mine, says):
                raise UserError(
                    f"model = {config.model} makes the prompts, and {config.workers[0]} differs from it, {why}: set model to what the "
                    "workers serve, or served_model to the name that they have for it"
                )
        bounds = [Bound.of({**own, **peaks}) for own, peaks in zip(each, dispatcher.peaks(), strict=True)]
    finally:
        dispatcher.stop()
    says.pop("cut", None)
    says["engines"] = sorted({str(own.get("engine") or own.get("owned_by") or "") for own in each})
    return says, [bound for bound in bounds if bound] if all(bounds) else []


def sentences(tables: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Return what was lost, by test, in words; nothing where every worker was there all the time."""
    lines = []
    for test in dict.fromkeys(row["test"] for row in tables.get("losses", [])):
        lost = [row for row in tables["losses"] if row["test"] == test]
        state = {row["worker"]: row for row in tables.get("workers", []) if row["test"] == test}
        again = sum(row["times"] for row in lost if row["event"] == "requeued")
        parts = []
        for worker in dict.fromkeys(row["worker"] for row in lost if row["event"] == "down"):
            down = next(row for row in lost if row["worker"] == worker and row["event"] == "down")
            back = [
                row["t_s"]
                for row in lost
                if (row["worker"], row["event"]) == (worker, "up") and row["t_s"] >= down["t_s"]
            ]
            when = "was not there" if down["t_s"] <= 0 else f"was lost after {down['t_s']:.1f} s"
            then = f"came back after {back[0]:.1f} s" if back else "did not come back"
            parts.append(f"worker {state[worker]['url']} {when} and {then}")
        parts.append(f"{again} queries were sent again to others" if again else "no query had to be sent again")
        lines.append(f"{test}: {'; '.join(parts)}.")
    return lines
