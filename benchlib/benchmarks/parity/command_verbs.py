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
from benchlib.core.files import outputs, writing
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
    slim: bool,
    out: Path | None,
) -> int:
    """Compute the reference and the fp64 reference, publish them as the golden ``folder`` and return the exit code.

    Raises ``UserError`` before any work where the target is not free or a parameter is wrong.
    """
    if folder.is_symlink() or (folder.exists() and (not folder.is_dir() or any(folder.iterdir()))):
        raise UserError(
            f"{folder} is there already, and a golden folder is never overwritten: name a new or an empty one"
        )
    check_place(folder.parent)
    named = [f"{name}={value}" for name, value in (("model", model), ("data", data)) if value is not None]
    overrides = _overrides([*named, *pairs], also=("members",))
    planned = plan(BENCHMARK, tier, backend, {**overrides, "record": "true", "keep": "true"})
    store = out or outputs()
    check_place(store)
    outcome = run.run_one(planned, store)
    # A recording compares nothing, and is what was asked for.
    recorded, code = outcome.run_dir / "golden", _exit_code(dataclasses.replace(outcome, missed=False), store)
    if outcome.interrupted or outcome.verdict.broken or not (recorded / golden.NAME).exists():
        console.print("[yellow]nothing was published[/]  the run has no complete recording", soft_wrap=True)
        return code or (EXIT_NOTHING_TO_COMPARE if planned.unavailable else EXIT_BROKEN)
    _publish(recorded, folder, weights=not (no_weights or slim), slim=slim)
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
    if own := [name for name in (*OWN, *also) if name in overrides]:
        raise UserError(
            f"--set {own[0]}: `benchlib parity` sets {own[0]} itself; use `benchlib run parity --set {own[0]}=…`"
        )
    return overrides


def _publish(recorded: Path, target: Path, weights: bool, slim: bool = False) -> None:
    """Move a recorded folder to its place by one rename: it is there as a whole or not at all."""
    manifest = golden.manifest(recorded)
    if not weights:
        (recorded / golden.WEIGHTS).unlink(missing_ok=True)
        if slim:
            shutil.rmtree(recorded / golden.TRUTH, ignore_errors=True)
            (recorded / golden.REFERENCE / "gradients.safetensors").unlink(missing_ok=True)
        manifest = golden.write(recorded, manifest)
    beside = target.parent / f".{target.name}.{uuid.uuid4().hex[:6]}.tmp"
    try:
        with writing(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(recorded, beside)  # copies it where it comes from another file system
            os.rename(beside, target)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    sizes = [facts["bytes"] for facts in manifest["files"].values()]
    size = f"{sum(sizes) / 1e6:,.1f} MB in {counted(len(sizes) + 1, 'file')}"
    console.print(f"golden folder: {shown(target)}  {size}", soft_wrap=True)
    if not weights:
        name, digest = escape(str(manifest["model"]["name"])), manifest["model"]["sha256"][:12]
        words = f"without the weights: the other machine needs {name} itself, with hash {digest}"
        console.print(f"[dim]{words}[/]", soft_wrap=True)
    words = f"copy it, then on the other machine: benchlib parity verify {shown(Path(target.name))}"
    console.print(f"[dim]{words}[/]", soft_wrap=True)


def merge(sources: Sequence[Path], to: Path | None, machine: str, strict: bool) -> int:
    """Merge results into the files of ``to``, keeping what is in them, and return the exit code.

    Without sources all parity runs of ``outputs/`` are taken. The code is 0 once all is written, 2 where something was left
    out as damaged; with ``strict`` also 1 where a gated result fails, which counts before 2, and 3 where nothing was compared.
    Raises ``UserError`` where there is nothing at all, and for a file of ``to`` that is damaged.
    """
    folder = to or results.committed()
    stored = [
        row
        for backend in BACKENDS
        if (path := folder / backend / results.FILE).exists()
        for row in results.read_file(path)
    ]
    for path in sources:
        if path.is_dir() and not results.of_source(path):
            raise UserError(f"{path} holds neither runs of parity nor a {results.FILE}")
    check_place(folder)
    merged = results.collect(sources or [path for path in (outputs(),) if path.is_dir()], machine, stored)
    if not (merged.rows or merged.left_out):
        raise UserError("; ".join(merged.uncounted) or "no parity results yet: run `benchlib run parity` first")
    written = results.write(merged, folder)
    console.print(results.page(merged), markup=False, soft_wrap=True)
    for sentence in merged.uncounted:
        console.print(f"[yellow]not counted[/]  {escape(sentence)}", soft_wrap=True)
    console.print("written: " + ", ".join(shown(path) for path in written), soft_wrap=True)
    words = [row["outcome"] for row in merged.rows if row["gates"]]
    if strict and "FAIL" in words:
        return EXIT_FAIL
    if merged.left_out:
        return EXIT_BROKEN
    return EXIT_NOTHING_TO_COMPARE if strict and "PASS" not in words else EXIT_PASS
