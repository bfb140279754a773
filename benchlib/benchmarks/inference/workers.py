"""The servers behind ``workers=``: what they say of themselves before the run. No torch."""

from typing import Any

from benchlib.benchmarks.inference.config import InferenceConfig
from benchlib.core.errors import UserError
from benchlib.workloads.llm.dispatch import EXAMPLE, Dispatcher, unlike
from benchlib.workloads.llm.engines import Settings


def meet(config: InferenceConfig, settings: Settings, tokenizer: Any) -> dict[str, Any]:
    """Return what the workers say of themselves, after each answered a query: they are of one model, and of ours.

    Raises ``UserError`` for a worker that is not there, refuses the token or serves something else than another one or than
    ``model``, whose tokenizer makes the prompts.
    """
    dispatcher = Dispatcher(settings)
    try:
        dispatcher.start()
        each = [worker.says for worker in dispatcher.workers]
    finally:
        dispatcher.stop()
    says = dict(next((one for one in each if one), {}))
    if says.get("engine") != "sim":  # which takes any prompt
        mine = {
            "model": says.get("model") if config.served_model else config.model,
            "cut": list(tokenizer(EXAMPLE)["input_ids"]),
        }
        if why := unlike(mine, says):
            raise UserError(
                f"model = {config.model} makes the prompts, and {config.workers[0]} differs from it, {why}: set model to what the "
                "workers serve, or served_model to the name that they have for it"
            )
    says.pop("cut", None)
    return says | {"engines": sorted({str(one.get("engine") or one.get("owned_by") or "") for one in each})}
