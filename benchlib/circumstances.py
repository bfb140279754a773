"""What was around a run and does not decide whether it is comparable: host, kernel, drivers, exact versions, load, time."""

from collections.abc import Sequence
from typing import Any

from benchlib.labels import moment
from benchlib.metrics import quantity
from benchlib.snapshot import Snapshot


def circumstances(runs: Sequence[Snapshot]) -> dict[str, str]:
    """Return what was around the runs, by name; several values are listed."""
    gathered: dict[str, dict[str, None]] = {}
    for run in runs:
        for name, value in _of_run(run).items():
            gathered.setdefault(name, {})[value] = None
    return {
        name: ", ".join(list(values)[:3]) + (f" and {len(values) - 3} more" if len(values) > 3 else "")
        for name, values in gathered.items()
    }


def _of_run(run: Snapshot) -> dict[str, str]:
    machine = run.machine
    found = {"started": moment(run.started_at) if run.started_at else "unknown"}
    if machine:
        found |= {name: str(machine.get(name) or "unknown") for name in ("host", "system")}
        load = machine.get("load_average")
        found["load average of 1 min"] = quantity(float(load[0])) if isinstance(load, list) and load else "unknown"
        found |= {f"driver {name}": str(value) for name, value in _dict(machine.get("drivers")).items()}
        versions = _dict(machine.get("versions")) | _dict(_dict(machine.get("devices")).get("versions"))
        found |= {f"version of {name}": str(value) for name, value in versions.items()}
    return found | {
        f"config.{name}": str(value)
        for name, value in run.config.items()
        if f"config.{name}" not in run.fingerprint and name not in ("benchmark", "tier", "backend")
    }


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
