"""What ``benchlib parity`` does: record on one machine, verify on another, merge the results of all.

Record and verify are runs of the benchmark like any other, through the same runner, with notebook, report and verdict.
"""

import dataclasses
import os
import shutil
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.markup import escape

from benchlib.benchmarks.parity import golden
from benchlib.benchmarks.parity import merge as results
from benchlib.benchmarks.parity.config import MEMBERS
from benchlib.commands import run
from benchlib.commands.run import console, shown
from benchlib.config.schema import parse_overrides
from benchlib.core.errors import UserError
from benchlib.core.files import not_written, outputs
from benchlib.core.machine import BACKENDS
from benchlib.core.text import counted
from benchlib.launch.plan import plan
from benchlib.results.run import Run, check_place
from benchlib.results.verdict import EXIT_BROKEN, EXIT_FAIL, EXIT_NOTHING_TO_COMPARE, EXIT_PASS

BENCHMARK = "parity"
OWN = ("record", "keep", "golden", "reference")  # what the commands themselves set


def record(
    folder: Path,
    tier: str,
    backend: str,
    model: str | None,
    data: str | None,
    pairs: Iterable[str],
    no_weights: bool,
    out: Path | None,
) -> int:
    """Compute the reference and the fp64 reference, publish them as the golden ``folder`` and return the exit code.

    Raises ``UserError`` before any work where the target is not free or a parameter is wrong.
    """
    _check_free(folder)
    named = [f"{name}={value}" for name, value in (("model", model), ("data", data)) if value is not None]
    overrides = _overrides([*named, *pairs], also=("members",))
    reference = "cpu" if backend == "auto" else backend
    wanted = {**overrides, "record": "true", "keep": "true"}
    planned = plan(BENCHMARK, tier, backend, wanted | {"reference": reference})
    if (reference := planned.config.backend) != planned.config.reference:  # auto took an accelerator
        planned = plan(BENCHMARK, tier, reference, wanted | {"reference": reference}, planned.probe)
    store = out or outputs()
    check_place(store)
    outcome = run.run_one(planned, store)
    # A recording compares nothing, and is what was asked for.
    recorded, code = outcome.run_dir / "golden", _exit_code(dataclasses.replace(outcome, missed=False), store)
    if outcome.interrupted or outcome.verdict.broken or not (recorded / golden.NAME).exists():
        console.print("[yellow]nothing was published[/]  the run has no complete recording", soft_wrap=True)
        return code or (
            EXIT_NOTHING_TO_COMPARE if planned.unavailable else EXIT_BROKEN
        )  # there is no folder to copy next
    _publish(recorded, folder, weights=not no_weights)
    return code


def verify(
    folder: Path,
    tier: str | None,
    backend: str,
    members: str,
    pairs: Iterable[str],
    out: Path | None,
    strict: bool,
) -> int:
    """Compute what a golden folder asks for, compare, and return the exit code of the verdict.

    Raises ``UserError`` before any work where the folder is damaged or a parameter contradicts it.
    """
    manifest = golden.manifest(folder)
    store = out or outputs()
    check_place(store)
    overrides = _overrides(pairs) | ({"members": members} if members else {})
    overrides = golden.parameters(manifest) | overrides | {"golden": str(folder.resolve())}
    planned = plan(BENCHMARK, tier or str(manifest["work"].get("tier") or "smoke"), backend, overrides)
    model = manifest["model"]
    what = ", ".join(str(model[name]) for name in ("name", "description") if model.get(name))
    console.print(f"[bold]golden[/]  {shown(folder)}  {escape(what)}", soft_wrap=True)
    outcome = run.run_one(planned, store)
    code = _exit_code(outcome, store)
    rows = results.read_run(Run(outcome.run_dir))[0] if code == EXIT_PASS else []
    missed = strict and not _compared(rows, planned.config.members)
    return EXIT_NOTHING_TO_COMPARE if code == EXIT_PASS and missed else code


def _exit_code(outcome: run.Outcome, store: Path) -> int:
    index = run.write_index(store, quiet=True)
    return outcome.exit_code() if outcome.interrupted else index or outcome.exit_code()


def _compared(rows: Sequence[Mapping[str, Any]], named: Sequence[str]) -> bool:
    """Whether all gated members were compared; one that compiles or exports needs what is optional, and counts if ``named``.

    Baselines do not count: the golden folder is what there is to compare with.
    """
    optional = {name for name, member in MEMBERS.items() if member.slow} - set(named)
    needed = [row for row in rows if row["gates"] and row["member"] not in optional]
    return bool(needed) and all(row["outcome"] in ("PASS", "FAIL") for row in needed)


def _overrides(pairs: Iterable[str], also: Sequence[str] = ()) -> dict[str, Any]:
    overrides: dict[str, Any] = dict(parse_overrides(pairs))
    for name in (*OWN, *also):
        if name in overrides:
            raise UserError(
                f"--set {name}={overrides[name]}: `benchlib parity` sets {name} itself; for a run with your own, "
                f"`benchlib run parity --set {name}={overrides[name]}`"
            )
    return overrides


def _check_free(target: Path) -> None:
    """Raise ``UserError`` where a golden folder cannot be published: the place is taken or not writable."""
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise UserError(f"{target} is not a folder: name a new or an empty one")
    if target.is_dir() and any(target.iterdir()):
        raise UserError(
            f"{target} is not empty, and a golden folder is never overwritten: name another one, or remove this one first"
        )
    check_place(target.parent)


def _publish(recorded: Path, target: Path, weights: bool) -> None:
    """Move a recorded folder to its place by one rename: it is there as a whole or not at all."""
    manifest = golden.manifest(recorded)
    if not weights:
        (recorded / golden.WEIGHTS).unlink(missing_ok=True)
        manifest = golden.write(recorded, manifest)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _move(recorded, target)
    except OSError as error:
        raise not_written(target, error) from error
    sizes = {name: facts["bytes"] for name, facts in manifest["files"].items()}
    largest = sorted(sizes, key=lambda name: (-sizes[name], name))[:3]
    console.print(
        f"golden folder: {shown(target)}  {_megabytes(sum(sizes.values()))} in {counted(len(sizes) + 1, 'file')}: "
        + ", ".join(f"{escape(name)} {_megabytes(sizes[name])}" for name in largest),
        soft_wrap=True,
    )
    if not weights:
        console.print(
            f"[dim]without the weights: the verifying machine needs {escape(str(manifest['model'].get('name')))} itself, "
            f"with hash {escape(str(manifest['model'].get('sha256'))[:12])}[/]",
            soft_wrap=True,
        )
    console.print(
        f"[dim]copy it, then on the other machine: benchlib parity verify {shown(Path(target.name))}[/]",
        soft_wrap=True,
    )


def _move(recorded: Path, target: Path) -> None:
    """Move a folder beside its place, which copies it from another file system, then rename it."""
    beside = target.parent / f".{target.name}.{uuid.uuid4().hex[:6]}.tmp"
    try:
        shutil.move(recorded, beside)
        os.rename(beside, target)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"


def merge(sources: Sequence[Path], to: Path | None, machine: str, strict: bool) -> int:
    """Merge results into the files of ``to``, keeping what is in them, and return the exit code.

    Without sources all parity runs of ``outputs/`` are taken. Raises ``UserError`` where there is nothing at all.
    """
    folder = to or results.committed()
    before, damaged = list[Any](), dict[str, str]()
    for path in (path for backend in BACKENDS if (path := folder / backend / results.FILE).exists()):
        try:
            before += results.read_file(path)
        except UserError as error:
            damaged[path.parent.name] = str(error).replace(str(path), f"{path.parent.name}/{path.name}")
    try:
        fresh = results.collect(sources or [path for path in (outputs(),) if path.is_dir()], machine)
    except UserError:
        if sources or not (before or damaged):
            raise
        fresh = results.newest([])
    merged = results.newest([*fresh.rows, *before], [*damaged.values(), *fresh.left_out], fresh.uncounted)
    if not (merged.rows or merged.left_out or merged.uncounted):
        raise UserError("no parity results yet: run `benchlib run parity` first")
    check_place(folder)
    written = results.write(merged, folder, untouched=damaged)
    console.print(results.page(merged), markup=False, soft_wrap=True)
    for sentence in merged.uncounted:
        console.print(f"[yellow]not counted[/]  {escape(sentence)}", soft_wrap=True)
    for backend in damaged:
        path = folder / backend / results.FILE
        console.print(f"[red]not written[/]  {shown(path)} is damaged: restore or remove it, then merge again")
    console.print("written: " + ", ".join(shown(path) for path in written), soft_wrap=True)
    return _merge_code(merged, strict)


def _merge_code(merged: results.Merged, strict: bool) -> int:
    """Return 0 once all is written, 2 where something was left out as damaged.

    With ``strict`` also 1 where a gated result fails, which counts before 2, and 3 where nothing was compared.
    """
    words = [row["outcome"] for row in merged.rows if row["gates"]]
    if strict and "FAIL" in words:
        return EXIT_FAIL
    if merged.left_out:
        return EXIT_BROKEN
    return EXIT_NOTHING_TO_COMPARE if strict and "PASS" not in words else EXIT_PASS
