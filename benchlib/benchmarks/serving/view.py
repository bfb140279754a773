"""What a report of the serving benchmark shows first, its tables and its words."""

from typing import Any

from benchlib.spec.unported import View


def tables(run: Any) -> dict[str, list[dict[str, Any]]]:
    """Return the tables of the report, by heading."""
    from benchlib.benchmarks.serving import tables

    return tables.report(run)


def scope_of(config: Any, result: Any) -> str:
    """Return the end of the metrics' names of a run: what its workers said of themselves counts, and not what was asked for."""
    return str(config.scope(result.facts.get("engines", ()) if result else ()))


def warnings(config: Any, result: Any) -> list[str]:
    """Return what limits the meaning of a result."""
    scope = scope_of(config, result)
    made = [
        "The engine `sim` computes nothing: rates and times are those of clients, network and dispatcher."
        if scope == "sim"
        else "Prompts are random tokens of a chosen length: speed and no quality."
    ]
    if not config.workers and config.worker_count > 1 and scope != "sim":
        made.append("All workers share this machine: what one of them gains, another may lose.")
    few = min((row["queries"] for row in result.tables.get("load", [])), default=0) if result else 0
    if few and few < 100:
        made.append(f"The shortest run of the sweep has {few} queries: its p99 is the largest. Set point_s higher.")
    return made


VIEW = View(
    headlines=("samples_per_s_all", "scaling_efficiency", "knee_per_s", "ttft_p99_at_knee_ms", "tpot_p99_at_knee_ms", "projected_hours", "dispatcher_cpu_ms", "total_s"),
    labels={
        "samples_per_s_all": "All workers together",
        "tokens_per_s_all": "New tokens",
        "samples_per_s_sum": "Sum of each alone",
        "scaling_efficiency": "Scaling efficiency",
        "knee_per_s": "Highest rate within the limits",
        "goodput_at_knee_per_s": "Goodput at it",
        "ttft_at_knee_ms": "First token, median",
        "ttft_p90_at_knee_ms": "First token, p90",
        "ttft_p99_at_knee_ms": "First token, p99",
        "tpot_at_knee_ms": "Further tokens, median",
        "tpot_p90_at_knee_ms": "Further tokens, p90",
        "tpot_p99_at_knee_ms": "Further tokens, p99",
        "dispatcher_cpu_ms": "Dispatcher, CPU per query",
        "client_late_p99_ms": "Lateness of the client, p99",
        "projected_hours": "Projection, full set",
        "worker_startup_s": "Start of a worker",
        "worker_memory_gb": "Memory of the fullest worker",
        "device_memory_gb": "Device memory",
    },
    tables=tables,
    warnings=warnings,
    rate="tokens_per_s_all",
    ways=(
        "workers", "engine", "worker_count", "worker_slots", "sim_step_ms", "queries", "rounds", "arrivals", "loads", "point_s",
        "refine", "concurrencies", "ttft_ms", "tpot_ms", "percentile", "deadline_s", "stall_s", "gone_s", "recovery",
        "target_efficiency", "project_samples",
    ),
)  # fmt: skip
