"""Results of parity by member, from run folders and from the files that other machines left: read without trust.

A file is ``<folder>/<backend>/test_results.json``: every result of one backend, on any number of machines, fit to be
committed. ``benchlib parity merge`` writes them. ``collect`` makes one matrix of them all, in which the newest result of each
member counts. What cannot be read is a sentence in ``left_out`` (of the frame: ``attrs["left_out"]``), never an error.
"""

import dataclasses
import datetime
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from benchlib.benchmarks.parity import tolerances
from benchlib.benchmarks.parity.config import MEMBERS
from benchlib.config.schema import nearest
from benchlib.core.errors import UserError, explained
from benchlib.core.files import check_schema, home, read_json
from benchlib.core.machine import BACKENDS
from benchlib.core.text import MARKS
from benchlib.results.run import Result, Run, find_runs, is_run

if TYPE_CHECKING:
    import pandas

LATEST = 50  # runs of one machine and backend that are read, from the newest on: older ones hold no newest result
DAY_S = 86400.0
COLUMNS = (
    "machine", "backend", "member", "word", "reason", "max_difference", "limit", "model", "stand_in", "versions", "age_days", "own",
)  # fmt: skip
SCHEMA = 1
FILE = "test_results.json"
SIDES = ("reference", "truth")  # what members are compared with, which are none themselves
WHOLE = "all"  # stands for a member where a run as a whole has an outcome and no member has one
MOST_TEXT = 2000
SIGNS = {**MARKS, "NOT COMPARED": "○"}

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

    @property
    def holds(self) -> bool:
        """Whether the value is within the limit: a word in a file proves nothing."""
        if self.value is None or self.limit is None:
            return False
        return self.value >= self.limit if self.quantity == tolerances.SPANS else self.value <= self.limit


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
            raise ValueError(f"{self.member} is PASS although {wrong[0]} failed")
        if beyond := [row.quantity for row in self.quantities if row.status == "PASS" and not row.holds]:
            raise ValueError(
                f"{self.member} is PASS although the value of {beyond[0]} is beyond its limit, or one is missing"
            )
        if not any(row.status == "PASS" for row in self.quantities):
            raise ValueError(f"{self.member} is PASS although nothing was compared")
        if None not in (self.max_difference, self.limit) and self.max_difference > self.limit:  # type: ignore[operator]
            raise ValueError(
                f"{self.member} is PASS although its difference {self.max_difference:g} is above {self.limit:g}"
            )
        return self


class RunResult(_Stored):
    """What one run says about the members of one backend on one machine.

    ``reference`` says in words what they were compared with, ``reference_sha256`` which recorded logits: two machines that
    compute a reference of the same words may differ by rounding.
    """

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
    reference_sha256: str = Text
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
        results = list(ResultFile.model_validate(values).results)
        for run in results:
            _require_credible(run)
        return results
    except ValidationError as error:
        raise UserError(f"{path}: not results of parity ({explained(error)})") from None
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def _require_credible(run: RunResult) -> None:
    """Raise ``UserError`` for a result of the future, and for a limit that is looser than any that the table can become."""
    if run.ended_at.timestamp() > time.time() + DAY_S:  # a day for clocks and time zones
        raise UserError(f"a result of {run.machine} is of {run.ended_at:%Y-%m-%d}, which is in the future")
    named = re.search(r" on (\w+)", run.reference)
    other = named[1] if named and named[1] in BACKENDS else run.backend
    for row in run.members:
        for entry in row.quantities if row.outcome == "PASS" else ():
            if entry.status != "PASS" or entry.limit is None:
                continue
            most = tolerances.loosest(run.backend, other, row.precision, entry.quantity)
            if entry.limit < most.value if most.at_least else entry.limit > most.value:
                raise UserError(
                    f"{row.member} of {run.machine} was judged by {entry.quantity} {'>=' if most.at_least else '<='} {entry.limit:g}, "
                    f"which is looser than the table's {most.text} can become"
                )


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
        raise NotCounted(f"{place}: it has not ended, or was cut off before it wrote a result")
    try:
        facts, machine_facts = result.facts if result else {}, getattr(run, "machine", None) or {}
        model = facts["model"] if isinstance(facts.get("model"), Mapping) else {}
        return RunResult(
            machine=machine or str(machine_facts.get("host") or "this machine"),
            backend=work.backend,
            run=Path(place).name if place != "the run" else "",
            tier=work.tier,
            ended_at=datetime.datetime.fromtimestamp(round(float(ended_at)), datetime.UTC),
            model=_model(model),
            stand_in=model.get("init") == "random" or model.get("name") == "tiny",
            model_sha256=str(facts.get("model_sha256") or ""),
            inputs_sha256=str(facts.get("inputs_sha256") or ""),
            reference=_reference(facts.get("reference")),
            reference_sha256=str((facts.get("reference") or {}).get("outputs_sha256") or ""),
            environment=_environment(machine_facts, work.backend),
            members=tuple(_members(result, status)),
        )
    except (ValidationError, KeyError, TypeError, ValueError, AttributeError, OverflowError, OSError) as error:
        first = explained(error) if isinstance(error, ValidationError) else f"{type(error).__name__}: {error}"
        raise UserError(
            f"{place}: result.json does not hold the tables of parity ({first}): it is cut, altered or of another version"
        ) from None


def _members(result: Result | None, status: Mapping[str, Any]) -> Iterable[MemberResult]:
    """Yield the results of the members, or one of the run as a whole where no member has any."""
    skipped = result.reason if result and result.status == "skipped" else ""
    if not skipped and status.get("outcome") == "skipped":
        skipped = str(status["reason"])
    rows = [row for row in result.tables.get("members", []) if row["member"] not in SIDES] if result else []
    if result and rows and not skipped:
        yield from (_member(row, result.tables) for row in rows)
        return
    if skipped:
        outcome, reason = "SKIPPED", skipped
    elif status.get("outcome", "complete") != "complete":
        outcome, reason = "FAIL", f"the run broke: {status['reason']}"
    elif result is None or result.status != "complete":
        outcome, reason = "FAIL", "the run left no complete result"
    else:
        outcome, reason = "NOT COMPARED", "only the reference was recorded"
    yield MemberResult(member=WHOLE, outcome=outcome, reason=reason[:MOST_TEXT])  # type: ignore[arg-type]


def _member(row: Mapping[str, Any], tables: Mapping[str, list[dict[str, Any]]]) -> MemberResult:
    quantities, truths = (
        [entry for entry in tables.get(name, []) if entry["member"] == row["member"]]
        for name in ("quantities", "truth")
    )
    difference, cosine = (
        next((entry for entry in quantities if entry["quantity"] == name), {})
        for name in (tolerances.LOGITS, tolerances.COSINE)
    )
    outcome, reason = row["outcome"], str(row.get("reason") or "")
    if outcome == "PASS" and not any(entry["status"] == "PASS" for entry in quantities):
        outcome, reason = "NOT COMPARED", "none of its quantities was compared"
    return MemberResult(
        **_stated(row, "member", "device", "precision", "mode", "gates"),
        outcome=outcome,
        reason=reason[:MOST_TEXT],
        max_difference=difference.get("value"),
        limit=difference.get("limit"),
        one_minus_cosine=cosine.get("value"),
        truth=next((str(entry["verdict"]) for entry in truths), ""),
        quantities=tuple(Quantity(**_stated(entry, *Quantity.model_fields)) for entry in quantities),
    )


def _stated(row: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Return the fields that a row states, none of them null."""
    return {name: row[name] for name in names if row.get(name) is not None}


def _model(model: Mapping[str, Any]) -> str:
    """Return ``bert-base, random weights``: the name, and what is not the real thing about it."""
    words = [str(model.get("name") or ""), "random weights" if model.get("init") == "random" else ""]
    return ", ".join(filter(None, words))[:MOST_TEXT]


def _reference(reference: Any) -> str:
    """Return ``eager on cpu, torch 2.13.0``."""
    if not isinstance(reference, Mapping):
        return ""
    environment = reference.get("environment")
    torch = environment.get("torch") if isinstance(environment, Mapping) else None
    return f"eager on {reference.get('backend') or 'an unknown backend'}" + (f", torch {torch}" if torch else "")


def _environment(machine: Mapping[str, Any], backend: str) -> dict[str, str]:
    """Return what is worth knowing of a machine, as texts by name; what is not known is left out."""
    cpu, versions = machine.get("cpu", {}), machine.get("versions", {})
    device = machine.get("devices", {}).get("backends", {}).get(backend, {})
    names = ", ".join(dict.fromkeys(map(str, device.get("names", [])))) if backend != "cpu" else ""
    texts = {
        "devices": f"{device.get('count', 1)} x {names}" if names else "",
        "processor": f"{cpu.get('model')}, {cpu.get('usable_cores')} cores" if cpu.get("model") else "",
        "system": str(machine.get("system") or ""),
        **{f"driver {name}": str(version) for name, version in (machine.get("drivers") or {}).items()},
        **{name: str(versions.get(name) or "") for name in ("python", "torch", "transformers", "benchlib")},
    }
    return {name: text[:MOST_TEXT] for name, text in texts.items() if text}


@dataclasses.dataclass(frozen=True)
class Merged:
    """The newest results, each with its run, in the order of backends, machines and members.

    ``left_out`` are sentences on what is damaged, ``uncounted`` on runs that are in order and say nothing.
    """

    results: tuple[RunResult, ...]
    left_out: tuple[str, ...] = ()
    uncounted: tuple[str, ...] = ()

    @property
    def rows(self) -> list[tuple[RunResult, MemberResult]]:
        """Each member's result with the run that it is from."""
        pairs = [(run, row) for run in self.results for row in run.members]
        return sorted(pairs, key=lambda pair: (*_place(pair[0]), *_member_order(pair[1])))


def word(outcome: str, gates: bool, compared: bool = True) -> str:
    """Return an outcome as readers meet it: beyond tolerance where nothing gates is a difference, no failure."""
    return "DIFFERS" if outcome == "FAIL" and not gates and compared else outcome


def signed(word: str) -> str:
    """Return the word for an outcome behind its sign."""
    return f"{SIGNS[word]} {word}"


def committed() -> Path:
    """Return the folder of results that are committed: ``parity-results/`` of the checkout."""
    return home() / "parity-results"


def collect(sources: Iterable[Path | str | Run], machine: str = "") -> Merged:
    """Read ``sources`` into the newest results: runs, folders of runs, files of results, folders of those.

    ``machine`` replaces the host names of runs. Raises ``UserError`` for a source that is not there at all.
    """
    results: list[RunResult] = []
    left_out: list[str] = []
    uncounted: list[str] = []
    for item in _items(sources):
        try:
            if isinstance(item, Run):
                results.append(read_run(item, machine))
            else:
                results += read_file(item)
        except NotCounted as error:
            uncounted.append(str(error))
        except (UserError, OSError) as error:
            left_out.append(str(error))
    return newest(results, left_out, uncounted)


def newest(results: Iterable[RunResult], left_out: Sequence[str] = (), uncounted: Sequence[str] = ()) -> Merged:
    """Keep of each machine, backend and member the newest result.

    A run as a whole (skipped, broken) counts where nothing newer is there of its machine and backend, one that only
    recorded the reference where no run of these compared anything.
    """
    ordered = sorted(results, key=lambda run: (-run.ended_at.timestamp(), run.run, run.model_dump_json()))
    last: dict[tuple[str, str], datetime.datetime] = {}
    for run in sorted(ordered, key=lambda run: all(row.outcome == "NOT COMPARED" for row in run.members)):
        last.setdefault((run.machine, run.backend), run.ended_at)
    kept, taken = [], set[tuple[str, str, str]]()
    for run in ordered:
        place = run.machine, run.backend
        counts = [row for row in run.members if row.member != WHOLE or run.ended_at == last[place]]
        fresh = [row for row in counts if (*place, row.member) not in taken]
        taken |= {(*place, row.member) for row in fresh}
        if fresh:
            kept.append(run.model_copy(update={"members": tuple(sorted(fresh, key=_member_order))}))
    kept.sort(key=lambda run: (*_place(run), -run.ended_at.timestamp()))
    return Merged(tuple(kept), tuple(dict.fromkeys(left_out)), tuple(dict.fromkeys(uncounted)))


def _member_order(row: MemberResult) -> tuple[int, str]:
    return _rank(row.member, MEMBERS), row.member


def _place(run: RunResult) -> tuple[int, str]:
    return _rank(run.backend, BACKENDS), run.machine


def _rank(name: str, names: Iterable[str]) -> int:
    return {known: place for place, known in enumerate(names)}.get(name, 1000)


def _items(sources: Iterable[Path | str | Run]) -> Iterable[Run | Path]:
    """Yield the runs and files that the sources stand for."""
    for source in sources:
        if isinstance(source, Run):
            yield source
            continue
        path = Path(source)
        if path.is_file():
            yield path
        elif not path.is_dir():
            raise UserError(f"{path}: no such run, folder or file of results")
        elif is_run(path):
            yield Run(path)
        else:
            runs = _parity_runs(path)
            files = sorted([*path.glob(FILE), *path.glob(f"*/{FILE}")])
            if not runs and not files:
                raise UserError(f"{path} holds neither runs of parity nor a {FILE}")
            yield from map(Run, runs)
            yield from files


def _parity_runs(folder: Path) -> list[Path]:
    """Return the parity runs in a folder of runs, or of a day of them, the newest first and not all of them.

    Their names say benchmark and backend; a folder may hold thousands, and only the newest results count.
    """
    count: dict[str, int] = {}
    kept = []
    one_day = sorted((path.parent for path in folder.glob("*/config.json")), reverse=True)
    for run in (*find_runs(folder), *one_day):
        if run.name.startswith("parity-"):
            kind = "-".join(run.name.split("-")[:2])
            count[kind] = count.get(kind, 0) + 1
            if count[kind] <= LATEST:
                kept.append(run)
    return kept


def around(run: Any, now: float | None = None) -> "pandas.DataFrame":
    """Return the results of a run (``own`` is True), then those of its store's other parity runs and the committed ones.

    ``run`` is a ``Run``, or anything with its ``result``, which has no store. Its own results are in it, also where a newer
    run lies beside it or a fault was planted in it; runs with planted faults are never among the others.
    """
    path = Path(run.path).resolve() if getattr(run, "path", None) else None
    others = [Run(other) for other in _parity_runs(path.parent.parent) if other.resolve() != path] if path else []
    beside = collect([*others, *sorted(committed().glob(f"*/{FILE}"))])
    try:
        own = read_run(run, planted=True)
    except (UserError, OSError) as error:
        return frame(dataclasses.replace(beside, left_out=(str(error), *beside.left_out)), now)
    return frame(Merged((own, *_without(beside.results, own)), beside.left_out), now, own)


def _without(results: Iterable[RunResult], own: RunResult) -> Iterable[RunResult]:
    """Yield results without the members that ``own`` has of the same machine and backend, and without a word on the whole run."""
    names = {WHOLE, *(row.member for row in own.members)}
    for other in results:
        if (other.machine, other.backend) != (own.machine, own.backend):
            yield other
        elif members := tuple(row for row in other.members if row.member not in names):
            yield other.model_copy(update={"members": members})


def frame(merged: Merged, now: float | None = None, own: RunResult | None = None) -> "pandas.DataFrame":
    """Return merged results as a frame, those of ``own`` first: one row each, missing numbers as NaN, missing texts as ''."""
    import pandas as pd

    moment = time.time() if now is None else now
    rows = [
        {
            "machine": run.machine,
            "backend": run.backend,
            "member": row.member,
            "word": word(row.outcome, row.gates, row.max_difference is not None),
            "reason": row.reason,
            "max_difference": row.max_difference,
            "limit": row.limit,
            "model": run.model,
            "stand_in": run.stand_in,
            "versions": versions(run),
            "age_days": (moment - run.ended_at.timestamp()) / DAY_S,
            "own": run is own,
        }
        for run, row in sorted(merged.rows, key=lambda pair: pair[0] is not own)
    ]
    kinds = dict.fromkeys(("max_difference", "limit", "age_days"), float) | {"own": bool}
    made = pd.DataFrame(rows, columns=list(COLUMNS)).astype(kinds)
    made.attrs["left_out"] = list(merged.left_out)
    return made


def versions(run: RunResult) -> str:
    """Return ``torch 2.13.0, transformers 5.0.0, driver nvidia 580.1``."""
    names = ("torch", "transformers", *(name for name in run.environment if name.startswith("driver ")))
    return ", ".join(f"{name} {run.environment[name]}" for name in names if run.environment.get(name))


@dataclasses.dataclass(frozen=True)
class Standing:
    """What all results of a backend say together: its outcome, why, on which machines, and what failed where."""

    backend: str
    outcome: str
    reason: str
    machines: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()


def standing(merged: Merged, backend: str) -> Standing:
    """Return the outcome of a backend over all machines: FAIL before PASS, and PASS only where something was compared.

    Members that do not gate cannot fail it, and cannot make it pass.
    """
    if backend not in BACKENDS:
        raise UserError(f"unknown backend {backend!r}: {nearest(backend, BACKENDS)}")
    rows = [(run, row) for run, row in merged.rows if run.backend == backend]
    machines = tuple(dict.fromkeys(run.machine for run, _ in rows))
    if not rows:
        return Standing(backend, "NOT COMPARED", "no result from any machine")
    gated = [(run, row) for run, row in rows if row.gates]
    failed = [(run, row) for run, row in gated if row.outcome == "FAIL"]
    if failed:
        names = tuple(dict.fromkeys(f"{row.member} on {run.machine}" for run, row in failed))
        return Standing(backend, "FAIL", f"{', '.join(names)}: {failed[0][1].reason}", machines, names)
    passed = [row.member for _, row in gated if row.outcome == "PASS"]
    if passed:
        missing = list(dict.fromkeys(f"{row.member} on {run.machine}" for run, row in gated if row.outcome != "PASS"))
        reason = f"{len(passed)} of {len(gated)} gated results are within their tolerances"
        return Standing(
            backend, "PASS", reason + (f"; not compared: {', '.join(missing)}" if missing else ""), machines
        )
    for outcome in ("SKIPPED", "NOT COMPARED"):
        open_ = [row for _, row in rows if row.outcome == outcome]
        if open_ and all(row.outcome == outcome for _, row in gated or rows):
            return Standing(backend, outcome, open_[0].reason, machines)
    reasons = "; ".join(dict.fromkeys(row.reason for _, row in gated if row.reason))
    return Standing(backend, "NOT COMPARED", reasons or "no gated member was compared", machines)
