"""Recorded runs with changes: what a run would be judged like if it had measured something else."""

import gzip
import json
import re

import make_smoke
import pytest

from benchlib import session
from benchlib.results.run import Run


def edited(benchmark, folder, config=(), facts=(), times=(), samples=()):
    """Make a run folder of a recorded smoke run after changes; return its path.

    ``config``, ``facts`` and ``samples`` replace values. ``times`` are factors: of metrics and samples by the beginning of their name, of a column
    as in ``steps[0].step_s``.
    """
    content = json.loads(gzip.decompress((make_smoke.SMOKE / f"{benchmark}.json.gz").read_bytes()))
    content["config.json"] |= dict(config)
    result, lists = content["result.json"], content["samples"]
    result["facts"] |= dict(facts)
    lists |= dict(samples)
    for name, factor in dict(times).items():
        for metric in result["metrics"]:
            if metric["name"].startswith(name):
                metric["value"] *= factor
        lists |= {key: [value * factor for value in lists[key]] for key in lists if key.startswith(name)}
        if column := re.fullmatch(r"(\w+)\[(\d)\]\.(\w+)", name):
            table, number, key = column.groups()
            row = result["facts"] if table == "run" else result["tables"][table][int(number)]
            row[key] = row[key] * factor
    store = folder.parent / f"{folder.name}-recorded"
    store.mkdir(parents=True)
    (store / f"{benchmark}.json.gz").write_bytes(gzip.compress(json.dumps(content).encode()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(make_smoke, "SMOKE", store)
        return make_smoke.unpack(benchmark, folder).path


def judged(path):
    """Judge a run folder; return the verdict."""
    return session.judge(Run(path))
