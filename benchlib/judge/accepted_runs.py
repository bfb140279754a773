"""Accepted runs as a file, and whether they can be true: the rules of impossible numbers judge a baseline whenever it is loaded.

A baseline is a file that people merge and edit. What it says of a run is held against the run's own samples, and each run
counts once: a copy would make the spread between runs look smaller than it is.
"""

import itertools
import json
from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from benchlib.config.schema import BaseConfig, build
from benchlib.core.errors import UserError
from benchlib.judge.impossible.claim import Claim
from benchlib.judge.impossible.own import Numbers, own_claims
from benchlib.judge.impossible.rules import judge_claims
from benchlib.judge.regression import Side, is_timed, side_of
from benchlib.results.metrics import RegressionLimit
from benchlib.results.record import KEPT_SAMPLES, Record
from benchlib.results.run import fingerprint_key

SCHEMA: Final = 3
MOST_RUNS = 20
LEAST_SERIES = 5  # samples that no second run repeats to the last digit


class Baseline(BaseModel):
    """The accepted runs of one fingerprint, the oldest first; several tell the spread between unchanged runs.

    ``limits`` are those that the runs were accepted with.
    """

    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="strings")

    schema_version: Literal[3] = SCHEMA
    runs: list[Record] = Field(min_length=1, max_length=MOST_RUNS)
    limits: list[RegressionLimit] = []

    @model_validator(mode="after")
    def _of_one_kind(self) -> "Baseline":
        kinds = {(run.benchmark, run.tier, fingerprint_key(run.fingerprint), bool(run.result)) for run in self.runs}
        if len(kinds) > 1 or not self.runs[0].fingerprint or not self.runs[0].result:
            raise ValueError("its runs are of several kinds, or hold no result")
        return self

    @property
    def benchmark(self) -> str:
        """The benchmark of its runs."""
        return self.latest.benchmark

    @property
    def tier(self) -> str:
        """The tier of its runs."""
        return self.latest.tier

    @property
    def fingerprint(self) -> dict[str, str]:
        """What has to be equal for a run to be compared with it."""
        return self.latest.fingerprint

    @property
    def key(self) -> str:
        """Twelve hex digits of the fingerprint."""
        return fingerprint_key(self.fingerprint)

    @property
    def latest(self) -> Record:
        """The run that was accepted last."""
        return self.runs[-1]

    def side(self, name: str) -> Side | None:
        """Return this metric of all accepted runs, or None."""
        return side_of(self.runs, name)


def faults(baseline: Baseline) -> list[str]:
    """Return why the runs of a baseline cannot be true, one sentence each; none for a sound one."""
    return [*_of_records(baseline), *_of_rules(baseline)]


def _of_rules(baseline: Baseline) -> list[str]:
    try:
        judged = judge_claims(claims(baseline))
    except UserError as error:
        return [str(error)]
    return [reason for judgement in judged for reason in judgement.failures]


def _of_records(baseline: Baseline) -> Iterator[str]:
    shares = {limit.metric for limit in baseline.limits if limit.share is not None}
    for record in baseline.runs:
        metrics = {metric.name: metric for metric in record.metrics}
        for name, values in record.samples.items():
            if name not in metrics:
                yield f"{record.run}: samples of {name}, which it did not measure"
            elif len(values) != min(metrics[name].n, KEPT_SAMPLES):
                yield f"{record.run}: {len(values)} samples of {name}, whose value is of {metrics[name].n}"
        for metric in metrics.values():
            if metric.name in shares and is_timed(metric.unit) and metric.value == 0:
                yield f"{record.run}: {metric.name} is {metric.text}, and nothing can be compared with that"
    for first, second in itertools.combinations(baseline.runs, 2):
        if first.is_copy_of(second) or _same_series(first, second):
            yield f"{second.run} is {first.run} once more: a run counts once"


def _same_series(first: Record, second: Record) -> bool:
    return any(
        len(values) >= LEAST_SERIES and len(set(values)) > 1 and values == second.samples.get(name)
        for name, values in first.samples.items()
    )


def claims(baseline: Baseline) -> list[Claim]:
    """Return what the accepted runs state, under the config that the fingerprint holds. Raises ``UserError``."""
    ranks = baseline.fingerprint.get("world_size", "")
    size = int(ranks) if ranks.isdecimal() and int(ranks) > 0 else 1
    config, stated = _config_of(baseline), list[Claim]()
    for run in baseline.runs:
        numbers = Numbers(baseline.benchmark, run.metrics, size, samples=run.samples, config=config)
        for claim in own_claims(numbers):
            subject = f"{run.run}, {claim.subject}" if claim.subject else run.run
            stated.append(claim.model_copy(update={"subject": subject}))
    return stated


def _config_of(baseline: Baseline) -> BaseConfig | None:
    """Return the config whose work a fingerprint holds; all other fields have their defaults."""
    prefix, backend = "config.", baseline.fingerprint.get("backend", "")
    stated = {name.removeprefix(prefix): text for name, text in baseline.fingerprint.items() if name.startswith(prefix)}
    try:
        work = {name: json.loads(text) for name, text in stated.items()}
    except ValueError:
        return None
    return (
        config_of(baseline.benchmark, work | {"backend": backend, "tier": baseline.tier}) if work and backend else None
    )


def config_of(benchmark: str, values: Mapping[str, Any]) -> BaseConfig | None:
    """Return the config of these values, None where this version has no such config: fewer rules apply then."""
    try:
        return build(benchmark, values)
    except UserError:
        return None
