"""A run as one value: what comparing, exporting and sharing need of it, wherever it is stored.

A damaged part costs only itself: it is named in ``problems`` and left empty.
"""

import json
import math
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from benchlib.baselines import run_fingerprint
from benchlib.checks import Verdict
from benchlib.digest import identity, judgement, span, tolerant
from benchlib.errors import UserError
from benchlib.record import KEPT_SAMPLES, thinned
from benchlib.registry import BENCHMARKS
from benchlib.regression import RegressionLimit
from benchlib.results import Result, Run

T = TypeVar("T")
KEPT_BYTES = 8_000  # of one table or one fact, as JSON


class Snapshot(BaseModel):
    """A run, whole or not. ``word`` is PASS, FAIL, AMBIGUOUS, SKIPPED, BROKEN, STOPPED, UNFINISHED or DAMAGED.

    ``samples`` are raw samples by metric, ``limits`` how much worse the benchmark lets its metrics get, ``fingerprint``
    the factors that make it comparable, ``left_out`` what :meth:`thinned` dropped.
    """

    model_config = ConfigDict(extra="forbid")

    schema_version: Literal[1] = 1
    run: str
    benchmark: str
    tier: str
    backend: str
    word: str
    sentence: str
    started_at: float | None = None
    ended_at: float | None = None
    config: dict[str, Any] = Field(default_factory=dict)
    machine: dict[str, Any] = Field(default_factory=dict)
    result: Result | None = None
    verdict: Verdict | None = None
    limits: list[RegressionLimit] = Field(default_factory=list)
    fingerprint: dict[str, str] = Field(default_factory=dict)
    samples: dict[str, list[float]] = Field(default_factory=dict)
    problems: list[str] = Field(default_factory=list)
    left_out: list[str] = Field(default_factory=list)
    # Where its report lies on this machine, '' where there is none: no part of the run.
    report: str = Field("", exclude=True, repr=False)

    @property
    def complete(self) -> bool:
        """Whether the run has a whole result that can be compared."""
        return self.result is not None and self.result.status == "complete" and bool(self.fingerprint)

    def thinned(self, kept: int = KEPT_SAMPLES) -> "Snapshot":
        """Return the run with at most ``kept`` samples of each metric (quantiles, see ``record.thinned``) and without long tables.

        Samples that are not all finite numbers are left out: JSON has no word for them.
        """
        result, left_out = self.result, list(self.left_out)
        if result is not None:
            parts = {}
            for name in ("tables", "facts"):
                whole: dict[str, Any] = getattr(result, name)
                parts[name] = {key: value for key, value in whole.items() if len(_json(value)) <= KEPT_BYTES}
                left_out += [f"{name}.{key}" for key in whole.keys() - parts[name].keys()]
            result = result.model_copy(update=parts)
        samples = {}
        for name, values in self.samples.items():
            if not all(isinstance(value, (int, float)) and math.isfinite(value) for value in values):
                left_out.append(f"samples.{name}")
            elif kept:
                samples[name] = thinned(values, kept)
        return self.model_copy(update={"result": result, "samples": samples, "left_out": sorted(set(left_out))})


def _json(value: Any) -> str:
    return json.dumps(value, default=str)


def snapshot(run: Run) -> Snapshot:
    """Read a run folder, whole, partial or damaged, into one value. Raises nothing for what is damaged."""
    problems: list[str] = []

    read = tolerant(run, problems)
    config, result = read(lambda: run.config), read(lambda: run.result)
    verdict, status = read(lambda: _verdict(run)), read(lambda: run.status)
    word, sentence = judgement(
        verdict.model_dump() if verdict else None, status if isinstance(status, dict) else None, result
    )
    if problems:  # without its config, result or verdict a run is not what its other records still say
        word, sentence = "DAMAGED", "Parts of the run cannot be read: " + "; ".join(dict.fromkeys(problems)) + "."
    benchmark, tier, backend = identity(run, config, result)
    started, ended = span(result, status if isinstance(status, dict) else None)
    whole = config is not None and result is not None and result.status == "complete"
    report = run.path / "report.html"
    machine = read(lambda: _object(run.machine, "machine.json")) or {}
    return Snapshot(
        run=run.path.resolve().name,
        benchmark=benchmark,
        tier=tier,
        backend=backend,
        word=word,
        sentence=sentence,
        started_at=started,
        ended_at=ended,
        config=config.model_dump(mode="json") if config else {},
        machine=machine,
        result=result,
        verdict=verdict,
        limits=(read(lambda: BENCHMARKS[benchmark].load("limits")(run)) or []) if whole else [],
        fingerprint=(read(lambda: run_fingerprint(run)) or {}) if whole and machine else {},
        samples=read(lambda: run.samples) or {},
        problems=list(dict.fromkeys(problems)),
        report=str(report) if report.exists() else "",
    )


def _verdict(run: Run) -> Verdict | None:
    if run.verdict is None:
        return None
    try:
        return Verdict.model_validate(run.verdict)
    except ValueError as error:
        raise UserError(f"verdict.json: not a verdict of this version ({str(error).splitlines()[0]})") from None


def _object(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UserError(f"{name}: not a JSON object")
    return value
