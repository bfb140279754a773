"""The values of a collectives run under the names and conditions of the published figures."""

from benchlib.collectives.config import CollectivesConfig
from benchlib.placing import Measured, device_name
from benchlib.results import Run


def measured(run: Run) -> list[Measured]:
    """Return the all-reduce of the largest message: what is published of other operations the registry does not hold."""
    config, result = run.config, run.result
    assert isinstance(config, CollectivesConfig) and result is not None
    rate = result.value("allreduce_busbw_gbps")
    if rate is None:
        return []
    rows = [
        row
        for row in result.tables.get("series", [])
        if (row["operation"], row["variant"]) == ("all_reduce", "library")
    ]
    conditions = {
        "definition": "bus bandwidth",
        "devices": config.world_size,
        "nodes": config.nnodes,
        "message_bytes": max(row["bytes"] for row in rows),
    }
    return [
        Measured(
            "allreduce_gbps", "all-reduce", rate, device_name(run.machine, config.backend, config.nproc), conditions
        )
    ]
