"""The verbs ``benchlib parity record | verify | merge``: record on one machine, verify on another, merge the results of all.

Record and verify are runs of the benchmark like any other, through the same runner, with notebook, report and verdict. What takes long
to import is imported when a verb is called.
"""

import dataclasses
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from benchlib.benchmarks.parity import golden
from benchlib.benchmarks.parity.config import MEMBERS
from benchlib.commands import OUT, SET
from benchlib.commands.output import place, say
from benchlib.config.schema import parse_overrides
from benchlib.core.errors import UserError
from benchlib.core.files import home, outputs, writing
from benchlib.core.machine import BACKENDS
from benchlib.core.text import counted
from benchlib.results.verdict import EXIT_BROKEN, EXIT_FAIL, EXIT_NOTHING_TO_COMPARE, EXIT_PASS

OWN = ("record", "keep", "golden", "reference")  # what the commands themselves set


@click.group("parity", result_callback=sys.exit)
def command() -> None:
    """Compare what machines compute that are never online together: record, verify, merge."""


@command.command("record")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--tier", "-t", default="smoke", show_default=True, help="How much work.")
@click.option("--backend", "-b", default="cpu", show_default=True, help="What computes the reference.")
@click.option("--model", help="Model: --set model=NAME.")
@click.option("--data", help="Text of the inputs: --set data=NAME.")
@SET
@click.option(
    "--slim", is_flag=True, help="Inputs, logits and layers alone: to ship for `shipped recording`, not to verify."
)
@OUT
def record(
    folder: Path,
    tier: str,
    backend: str,
    pairs: Iterable[str],
    slim: bool,
    out: Path | None,
    **named: str | None,
) -> int:
    """Record weights, inputs and results of the reference in FOLDER, which must not exist yet or be empty.

    Copy it to another machine as it is, and compare there with `benchlib parity verify FOLDER`.
    """
    from benchlib.launch.plan import plan
    from benchlib.results.run import check_place

    if folder.is_symlink() or (folder.exists() and (not folder.is_dir() or any(folder.iterdir()))):
        raise UserError(
            f"{folder} is there already, and a golden folder is never overwritten: name a new or an empty one"
        )
    check_place(folder.parent)
    pairs = [*(f"{name}={value}" for name, value in named.items() if value is not None), *pairs]
    overrides = _overrides(pairs, *OWN, "members") | {"record": "true", "keep": "true"}
    planned = plan("parity", tier, backend, overrides)
    outcome = _run(planned, out)
    # A recording compares nothing, and is what was asked for.
    recorded, code = outcome.run_dir / "golden", dataclasses.replace(outcome, missed=False).exit_code()
    if outcome.interrupted or outcome.verdict.broken or not (recorded / golden.NAME).exists():
        say(("nothing was published", "yellow"), "  the run has no complete recording")
        return code or (EXIT_NOTHING_TO_COMPARE if planned.unavailable else EXIT_BROKEN)
    _publish(recorded, folder, slim)
    return code


@command.command("verify")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--tier", "-t", help="How much time it may take. [default: that of the recording]")
@click.option(
    "--backend", "-b", default="auto", show_default=True, help="Where: auto, cpu, cuda, rocm, mps, xpu or tpu."
)
@click.option("--members", default="", help="Ways to compute, separated by commas. [default: all of the backend]")
@SET
@OUT
@click.option("--strict", is_flag=True, help="Exit with 3 where a gated member was not compared.")
def verify(
    folder: Path, tier: str | None, backend: str, members: str, pairs: Iterable[str], out: Path | None, strict: bool
) -> int:
    """Compute on this machine what was recorded in FOLDER elsewhere, and compare.

    Model, inputs and lengths are taken from the folder. One that was cut or altered is refused.
    """
    from benchlib.benchmarks.parity import merge as results
    from benchlib.launch.plan import plan

    manifest = golden.manifest(folder)
    overrides = golden.parameters(manifest) | _overrides(pairs, *OWN) | {"golden": str(folder.resolve())}
    overrides |= {"members": members} if members else {}
    planned = plan("parity", tier or str(manifest["work"].get("tier") or "smoke"), backend, overrides)
    what = ", ".join(str(manifest["model"][name]) for name in ("name", "description") if manifest["model"].get(name))
    say(("golden", "bold"), f"  {place(folder)}  {what}")
    outcome = _run(planned, out)
    code = outcome.exit_code()
    missed = strict and code == EXIT_PASS and not _compared(results.read_run(outcome.run_dir), planned.config.members)
    return EXIT_NOTHING_TO_COMPARE if missed else code


def _run(planned: Any, out: Path | None) -> Any:
    from benchlib.commands import run
    from benchlib.results.run import check_place
    from benchlib.show import index

    store = out or outputs()
    check_place(store)
    outcome = run.run_one(planned, store)
    index.render(store)
    return outcome


def _compared(rows: Sequence[Mapping[str, Any]], named: Sequence[str]) -> bool:
    """Whether all gated members were compared; one that compiles or exports needs what is optional, and counts if ``named``.

    Baselines do not count: the golden folder is what there is to compare with.
    """
    optional = {name for name, member in MEMBERS.items() if member.slow} - set(named)
    needed = [row for row in rows if row["gates"] and row["member"] not in optional]
    return bool(needed) and all(row["outcome"] in ("PASS", "FAIL") for row in needed)


def _overrides(pairs: Iterable[str], *own: str) -> dict[str, Any]:
    """Return what ``--set`` gave; ``UserError`` for what the command itself sets."""
    overrides: dict[str, Any] = dict(parse_overrides(pairs))
    for name in (name for name in own if name in overrides):
        raise UserError(f"--set {name}: `benchlib parity` sets {name} itself; use `benchlib run parity --set {name}=…`")
    return overrides


def _publish(recorded: Path, target: Path, slim: bool) -> None:
    """Move a recorded folder to its place. Half a copy has no manifest, or one that does not fit: it is refused."""
    manifest = golden.manifest(recorded)
    if slim:
        for name in (golden.WEIGHTS, f"{golden.REFERENCE}/gradients.safetensors"):
            (recorded / name).unlink(missing_ok=True)
        shutil.rmtree(recorded / golden.FP64, ignore_errors=True)
        manifest = golden.write(recorded, manifest)
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists():
            target.rmdir()  # else it would be moved into it
        shutil.move(recorded, target)
    sizes = [facts["bytes"] for facts in manifest["files"].values()]
    say(f"golden folder: {place(target)}  {sum(sizes) / 1e6:,.1f} MB in {counted(len(sizes) + 1, 'file')}")
    if not slim:
        again = f"benchlib parity verify {place(Path(target.name))}"
        say(f"copy it, then on the other machine: {again}", style="dim")


@command.command("merge")
@click.argument("sources", nargs=-1, type=click.Path(path_type=Path), metavar="[RUN|FOLDER|FILE]...")
@click.option(
    "--to",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder of the files; what lies in it already stays in them. [default: parity-results]",
)
@click.option(
    "--as", "machine", default="", metavar="NAME", help="Name the runs' machine so, instead of by its host name."
)
@click.option(
    "--strict",
    is_flag=True,
    help="Exit with 1 if a gated result fails or a run has a planted fault, 3 without any comparison.",
)
def merge(sources: Sequence[Path], to: Path | None, machine: str, strict: bool) -> int:
    """Merge results of all backends and machines into files that can be committed. [default: all parity runs]

    \b
    BACKEND/test_results.json                every result of a backend
    BACKEND/cross_backend_validation.json    its outcome, its part of the matrix, what agrees with it
    BACKEND/BERT_SQUAD_BACKEND_REPORT.md     the same for readers
    cross_backend_validation.json            outcome by backend, the matrix of all, what agrees with what
    PARITY.md                                the same for readers

    A run with an injected fault is left out and named; --strict fails then. What is damaged is left out and named; the
    rest is written, and the exit code is 2.
    """
    from benchlib.benchmarks.parity import merge as results
    from benchlib.results.run import check_place

    folder = to or home() / "parity-results"
    paths = [path for backend in BACKENDS if (path := folder / backend / results.FILE).exists()]
    stored = [row for path in paths for row in results.read_file(path)]
    for path in sources:
        if path.is_dir() and not results.of_source(path):
            raise UserError(f"{path} holds neither runs of parity nor a {results.FILE}")
    check_place(folder)
    merged = results.collect(sources or [path for path in (outputs(),) if path.is_dir()], machine, stored)
    if not any(merged):
        raise UserError("no parity results yet: run `benchlib run parity` first; unfinished runs do not count")
    written = results.write(merged, folder)
    say(results.page(merged))
    say(f"written: {', '.join(map(place, written))}")
    words = [row["outcome"] for row in merged.rows if row["gates"]]
    if strict and (merged.planted or "FAIL" in words):
        return EXIT_FAIL
    if merged.left_out:
        return EXIT_BROKEN
    return EXIT_NOTHING_TO_COMPARE if strict and "PASS" not in words else EXIT_PASS
