"""Results of parity by member, from run folders and from the files that other machines left: read without trust.

A file is ``<folder>/<backend>/test_results.json``: every result of one backend, on any number of machines, fit to be
committed. ``benchlib parity merge`` writes them.
"""

import datetime
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from benchlib.backends import BACKENDS
from benchlib.errors import UserError
from benchlib.files import check_schema, read_json
from benchlib.results import Result

SCHEMA = 1
FILE = "test_results.json"
SIDES = ("reference", "truth")  # what members are compared with, which are none themselves
WHOLE = "all"  # stands for a member where a run as a whole has an outcome and no member has one
DIFFERENCE = "logits max difference"  # the quantity whose value and limit the matrix shows
MOST_TEXT = 2000

Outcome = Literal["PASS", "FAIL", "SKIPPED", "NOT COMPARED"]
Text = Field("", max_length=MOST_TEXT)


class NotCounted(UserError):
    """A run that is in order and says nothing about its backend: of another benchmark, unfinished, disturbed on purpose."""


class _Stored(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())


class Quantity(_Stored):
    """One compared quantity. ``limit`` is None where it has none; ``worst`` names the case, parameter or layer."""

    quantity: str = Field(min_length=1, max_length=100)
    value: float | None = None
    limit: float | None = None
    status: Literal["PASS", "FAIL", "SKIPPED"]
    gates: bool = True
    worst: str = Text


class MemberResult(_Stored):
    """One way to compute on one machine against the reference.

    ``max_difference`` and ``one_minus_cosine`` are the worst of all compared logits, ``limit`` is the tolerance of the first;
    ``truth`` says whether the member is ``closer``, ``as close`` or ``farther`` than the reference to the fp64 result.
    """

    member: str = Field(min_length=1, max_length=100)
    device: str = Text
    precision: str = Text
    mode: str = Text
    gates: bool = True
    outcome: Outcome
    reason: str = Text
    max_difference: float | None = Field(None, ge=0)
    limit: float | None = Field(None, ge=0)
    one_minus_cosine: float | None = None
    truth: str = Text
    quantities: tuple[Quantity, ...] = ()

    @model_validator(mode="after")
    def _agrees_with_its_numbers(self) -> "MemberResult":
        if self.outcome != "PASS":
            return self
        wrong = [row.quantity for row in self.quantities if row.status == "FAIL" and row.gates]
        if wrong:
            raise ValueError(f"{self.member} says PASS although {wrong[0]} failed")
        if not any(row.status == "PASS" for row in self.quantities):
            raise ValueError(f"{self.member} says PASS although nothing was compared")
        if None not in (self.max_difference, self.limit) and self.max_difference > self.limit:  # type: ignore[operator]
            raise ValueError(
                f"{self.member} says PASS although its difference {self.max_difference:g} is above {self.limit:g}"
            )
        return self


class RunResult(_Stored):
    """What one run says about the members of one backend on one machine. ``reference`` is what they were compared with."""

    machine: str = Field(min_length=1, max_length=200)
    backend: str
    run: str = Text
    tier: str = Text
    ended_at: datetime.datetime
    model: str = Text
    stand_in: bool = False
    model_sha256: str = Text
    inputs_sha256: str = Text
    reference: str = Text
    environment: dict[str, str] = Field(default_factory=dict, max_length=50)
    members: tuple[MemberResult, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _is_of_a_known_backend(self) -> "RunResult":
        if self.backend not in BACKENDS:
            raise ValueError(f"unknown backend {self.backend[:40]!r}")
        if self.ended_at.tzinfo is None:
            raise ValueError(f"ended_at {self.ended_at} has no time zone")
        if len({row.member for row in self.members}) < len(self.members):
            raise ValueError("a member is listed twice")
        if any(len(text) > MOST_TEXT for pair in self.environment.items() for text in pair):
            raise ValueError("a text of the environment is too long")
        return self


class ResultFile(_Stored):
    """A file of results of one backend."""

    schema_version: Literal[1] = 1
    kind: Literal["benchlib.parity.results"] = "benchlib.parity.results"
    backend: str
    results: tuple[RunResult, ...]

    @model_validator(mode="after")
    def _is_of_one_backend(self) -> "ResultFile":
        other = [row.backend for row in self.results if row.backend != self.backend]
        if other:
            raise ValueError(f"a result of {other[0]} in a file of {self.backend}")
        return self


def read_file(path: Path) -> list[RunResult]:
    """Read a file of results; ``UserError`` where it is missing, cut, altered or of another kind."""
    values = read_json(path)
    check_schema(path, values, SCHEMA)
    try:
        return list(ResultFile.model_validate(values).results)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        says = str(first["msg"]).removeprefix("Value error, ")
        raise UserError(f"{path}: not results of parity ({f'{where}: ' if where else ''}{says})") from None


def read_run(run: Any, machine: str = "", planted: bool = False) -> RunResult:
    """Return what a run says, whole or broken; ``machine`` replaces its host name.

    ``run`` is a ``Run``, or anything with its ``result``. Raises ``UserError`` for a damaged run, and its kind ``NotCounted`` for
    one that is unfinished, of another benchmark or, unless ``planted``, with a fault that was planted on purpose.
    """
    place = getattr(run, "path", None) or "the run"
    config, result = getattr(run, "config", None), run.result
    work = config or result
    if work is None or work.benchmark != "parity":
        raise NotCounted(f"{place}: {f'a run of {work.benchmark}, ' if work else ''}not of parity")
    if getattr(config, "planted_layer", -1) >= 0 and not planted:
        raise NotCounted(f"{place}: a fault was planted in it on purpose, it tells nothing about {work.backend}")
    status = getattr(run, "status", None) or {}
    if status.get("outcome") == "stopped":
        raise NotCounted(f"{place}: it was stopped by its user before it could say what came out")
    ended_at = (result.ended_at if result else None) or status.get("ended_at")
    if ended_at is None:
        raise NotCounted(f"{place}: it has not ended, or was cut off before it could say what came out")
    try:
        facts, told = result.facts if result else {}, getattr(run, "machine", None) or {}
        model = facts["model"] if isinstance(facts.get("model"), Mapping) else {}
        return RunResult(
            machine=machine or str(told.get("host") or "this machine"),
            backend=work.backend,
            run=Path(place).name if place != "the run" else "",
            tier=work.tier,
            ended_at=datetime.datetime.fromtimestamp(round(float(ended_at)), datetime.UTC),
            model=_model(model),
            stand_in=_stands_in(model),
            model_sha256=str(facts.get("model_sha256") or ""),
            inputs_sha256=str(facts.get("inputs_sha256") or ""),
            reference=_reference(facts.get("reference")),
            environment=_environment(told, work.backend),
            members=tuple(_members(result, status)),
        )
    except (ValidationError, KeyError, TypeError, ValueError, AttributeError, OverflowError, OSError) as error:
        first = error.errors()[0]["msg"] if isinstance(error, ValidationError) else f"{type(error).__name__}: {error}"
        raise UserError(
            f"{place}: result.json does not hold the tables of parity ({first}): it is cut, altered or of another version"
        ) from None


def _members(result: Result | None, status: Mapping[str, Any]) -> Iterable[MemberResult]:
    """Yield the results of the members, or one of the run as a whole where no member has any."""
    skipped = result.reason if result and result.status == "skipped" else ""
    if not skipped and status.get("outcome") == "skipped":
        skipped = str(status["reason"])
    rows = [row for row in result.tables.get("members", []) if row["member"] not in SIDES] if result else []
    if skipped:
        yield MemberResult(member=WHOLE, outcome="SKIPPED", reason=skipped[:MOST_TEXT])
    elif rows:
        yield from (_member(row, result.tables) for row in rows)  # type: ignore[union-attr]
    elif status.get("outcome", "complete") != "complete":
        yield MemberResult(member=WHOLE, outcome="FAIL", reason=f"the run broke: {status['reason']}"[:MOST_TEXT])
    elif result is None or result.status != "complete":
        yield MemberResult(member=WHOLE, outcome="FAIL", reason="the run left no complete result")
    else:
        yield MemberResult(member=WHOLE, outcome="NOT COMPARED", reason="only the reference was recorded")


def _member(row: Mapping[str, Any], tables: Mapping[str, list[dict[str, Any]]]) -> MemberResult:
    name = str(row["member"])
    quantities = [_quantity(one) for one in tables.get("quantities", []) if one["member"] == name]
    logits = [one for one in tables.get("logits", []) if one["member"] == name]
    judged = next((one for one in quantities if one.quantity == DIFFERENCE), None)
    outcome, reason = str(row["outcome"]), str(row.get("reason") or "")
    if outcome == "PASS" and not any(one.status == "PASS" for one in quantities):
        outcome, reason = "NOT COMPARED", "none of its quantities was compared"
    return MemberResult(
        member=name,
        device=str(row.get("device") or ""),
        precision=str(row.get("precision") or ""),
        mode=str(row.get("mode") or ""),
        gates=bool(row.get("gates", True)),
        outcome=outcome,  # type: ignore[arg-type]
        reason=reason[:MOST_TEXT],
        max_difference=judged.value if judged and judged.value is not None else _worst(logits, "max_abs"),
        limit=judged.limit if judged else None,
        one_minus_cosine=_worst(logits, "one_minus_cosine"),
        truth=next((str(one["verdict"]) for one in tables.get("truth", []) if one["member"] == name), ""),
        quantities=tuple(quantities),
    )


def _quantity(row: Mapping[str, Any]) -> Quantity:
    return Quantity(
        quantity=row["quantity"],
        value=row.get("value"),
        limit=row.get("limit"),
        status=row["status"],
        gates=bool(row.get("gates", True)),
        worst=str(row.get("worst") or "")[:MOST_TEXT],
    )


def _worst(rows: Iterable[Mapping[str, Any]], column: str) -> float | None:
    values = [float(row[column]) for row in rows if row.get(column) is not None]
    return max((value for value in values if math.isfinite(value)), default=None)


def _model(model: Mapping[str, Any]) -> str:
    """Return ``bert-base, random weights``: the name, and what is not the real thing about it."""
    words = [str(model.get("name") or "")]
    words += ["random weights"] if model.get("init") == "random" else []
    return ", ".join(word for word in words if word)[:MOST_TEXT]


def _stands_in(model: Mapping[str, Any]) -> bool:
    return model.get("init") == "random" or str(model.get("name") or "") == "tiny"


def _reference(reference: Any) -> str:
    """Return ``eager on cpu, torch 2.13.0``."""
    if not isinstance(reference, Mapping):
        return ""
    environment = reference.get("environment")
    torch = environment.get("torch") if isinstance(environment, Mapping) else None
    if isinstance(environment, Mapping) and torch is None and isinstance(environment.get("versions"), Mapping):
        torch = environment["versions"].get("torch")
    words = f"eager on {reference.get('backend') or 'an unknown backend'}"
    return f"{words}, torch {torch}" if torch else words


def _environment(machine: Mapping[str, Any], backend: str) -> dict[str, str]:
    """Return what is worth knowing of a machine, as texts by name; what is not known is left out."""
    cpu, versions = machine.get("cpu", {}), machine.get("versions", {})
    device = machine.get("devices", {}).get("backends", {}).get(backend, {})
    names = ", ".join(dict.fromkeys(map(str, device.get("names", [])))) if backend != "cpu" else ""
    found = {
        "devices": f"{device.get('count', 1)} x {names}" if names else "",
        "processor": f"{cpu.get('model')}, {cpu.get('usable_cores')} cores" if cpu.get("model") else "",
        "system": str(machine.get("system") or ""),
        **{f"driver {name}": str(version) for name, version in (machine.get("drivers") or {}).items()},
        **{name: str(versions.get(name) or "") for name in ("python", "torch", "transformers", "benchlib")},
    }
    return {name: text[:MOST_TEXT] for name, text in found.items() if text}
