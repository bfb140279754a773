"""Runs in an MLflow store: parameters, metrics with their samples as steps, tags, and the report as an artifact.

A run that the store has already keeps its numbers; its verdict and its report are brought up to date.
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchlib.core.errors import UserError
from benchlib.core.text import counted
from benchlib.results.record import Record

BATCHES = {"params": 100, "metrics": 1000}  # in one request, MLflow's limits
MAX_CHARACTERS = 6000
# How MLflow calls a run's end; a gate that failed belongs to a run that finished.
STATES = {"PASS": "FINISHED", "FAIL": "FINISHED", "AMBIGUOUS": "FINISHED", "SKIPPED": "FINISHED", "STOPPED": "KILLED"}
_TAG = "benchlib.run"


def write(runs: Sequence[Record], output: str) -> str:
    """Write to the store at ``output``: a tracking URI, or the path of an SQLite file; else ``$MLFLOW_TRACKING_URI``."""
    uri = _uri(output)
    if (file := _file(uri)) and (file.is_dir() or not file.parent.is_dir()):
        raise UserError(f"{file}: name a file in a folder that exists, as mlflow.db")
    # MLflow reports its use to its makers; a report of numbers is no reason to call anyone.
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    from mlflow.exceptions import MlflowException
    from mlflow.tracking import MlflowClient
    from sqlalchemy.exc import SQLAlchemyError

    try:
        client = MlflowClient(tracking_uri=uri)
        updated = sum(_store(client, uri, run) for run in runs)
    except (MlflowException, SQLAlchemyError) as error:
        raise UserError(f"MLflow at {uri}: {str(error).splitlines()[0]}") from None
    there = f", {updated} of them already stored" if updated else ""
    return f"{counted(len(runs), 'run')} in MLflow at {uri}{there}"


def _uri(output: str) -> str:
    if output in ("", "-"):
        if named := os.environ.get("MLFLOW_TRACKING_URI", ""):
            return named
        places = "--output mlflow.db, --output http://HOST:5000, or MLFLOW_TRACKING_URI"
        raise UserError(f"mlflow needs its store: {places}")
    return output if "://" in output else f"sqlite:///{Path(output).expanduser().resolve()}"


def _file(uri: str) -> Path | None:
    return Path(uri.removeprefix("sqlite:///")) if uri.startswith("sqlite:///") else None


def _experiment(client: Any, uri: str, name: str) -> str:
    experiment = client.get_experiment_by_name(name)
    if experiment:
        return str(experiment.experiment_id)
    # A store in a file keeps its artifacts beside it, not in whatever folder the command was given.
    file = _file(uri)
    place = (file.parent / "mlartifacts" / name).resolve().as_uri() if file else None
    return str(client.create_experiment(name, artifact_location=place))


def _store(client: Any, uri: str, run: Record) -> bool:
    experiment = _experiment(client, uri, _key(f"benchlib-{run.benchmark}-{run.tier}"))
    quoted = run.run.replace("'", "")
    stored = client.search_runs([experiment], filter_string=f"tags.`{_TAG}` = '{quoted}'", max_results=1)
    started = int(1000 * run.started_at)
    tags = _tags(run, quoted)
    entry = stored[0] if stored else client.create_run(experiment, start_time=started, tags=tags, run_name=run.run)
    key = entry.info.run_id
    if stored:
        for name, value in tags.items():
            client.set_tag(key, name, value)
    else:
        _numbers(client, key, run)
    if run.report and Path(run.report).is_file():
        client.log_artifact(key, run.report)
    ended = int(1000 * run.ended_at) if run.ended_at else None
    client.set_terminated(key, status=STATES.get(run.word, "FAILED"), end_time=ended)
    return bool(stored)


def _tags(run: Record, name: str) -> dict[str, str]:
    tags = {_TAG: name, "mlflow.note.content": run.sentence[:MAX_CHARACTERS], "benchlib.verdict": run.word}
    tags |= {"benchlib.backend": run.backend, "benchlib.host": run.host}
    checks = run.verdict.checks if run.verdict else []
    tags |= {f"benchlib.check.{_key(check.name)}": check.status for check in checks}
    return tags | {f"benchlib.version.{_key(k)}": str(v) for k, v in run.machine.get("versions", {}).items()}


def _numbers(client: Any, key: str, run: Record) -> None:
    from mlflow.entities import Metric, Param

    moment = int(1000 * (run.ended_at or run.started_at))
    params = [Param(_key(name), str(value)[:MAX_CHARACTERS]) for name, value in run.config.items()]
    metrics = [Metric(_key(metric.name), metric.value, moment, 0) for metric in run.metrics if metric.value is not None]
    metrics += [
        Metric(f"samples/{_key(name)}", float(value), moment, step)
        for name, values in run.samples.items()
        for step, value in enumerate(values)
    ]
    for kind, items in (("params", params), ("metrics", metrics)):
        for start in range(0, len(items), BATCHES[kind]):
            client.log_batch(key, **{kind: items[start : start + BATCHES[kind]]})


def _key(name: str) -> str:
    """Return a name that MLflow takes: letters, digits, ``_ - . : /`` and spaces."""
    return re.sub(r"[^\w\-.: /]", "_", name)[:250]
