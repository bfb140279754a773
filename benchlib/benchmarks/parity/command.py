"""The verbs ``benchlib parity record | verify | merge``. What they do is in ``command_verbs``, imported when one is called."""

import sys
from pathlib import Path

import click

from benchlib.commands import OUT, SET, user_errors


@click.group()
def command() -> None:
    """Compare what machines compute that are never online together: record, verify, merge."""


@command.command("record")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--tier", "-t", default="smoke", show_default=True, help="How much work.")
@click.option("--backend", "-b", default="cpu", show_default=True, help="What computes the reference.")
@click.option("--model", help="Model: --set model=NAME.")
@click.option("--data", help="Text of the inputs: --set data=NAME.")
@SET
@click.option("--no-weights", is_flag=True, help="Leave the weights out: the other machine has the same ones.")
@OUT
@user_errors
def record(
    folder: Path,
    tier: str,
    backend: str,
    model: str | None,
    data: str | None,
    pairs: tuple[str, ...],
    no_weights: bool,
    out: Path | None,
) -> None:
    """Record weights, inputs and results of the reference in FOLDER, which must not exist yet or be empty.

    Copy it to another machine as it is, and compare there with `benchlib parity verify FOLDER`.
    """
    from benchlib.benchmarks.parity import command_verbs

    named = {"model": model, "data": data}
    pairs = (*(f"{name}={value}" for name, value in named.items() if value is not None), *pairs)
    sys.exit(command_verbs.record(folder, tier, backend, pairs, not no_weights, out))


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
@user_errors
def verify(
    folder: Path,
    tier: str | None,
    backend: str,
    members: str,
    pairs: tuple[str, ...],
    out: Path | None,
    strict: bool,
) -> None:
    """Compute on this machine what was recorded in FOLDER elsewhere, and compare.

    Model, inputs and lengths are taken from the folder. One that was cut or altered is refused.
    """
    from benchlib.benchmarks.parity import command_verbs

    sys.exit(command_verbs.verify(folder, tier, backend, members, pairs, out, strict))


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
@click.option("--strict", is_flag=True, help="Exit with 1 where a gated result fails, 3 where nothing was compared.")
@user_errors
def merge(sources: tuple[Path, ...], to: Path | None, machine: str, strict: bool) -> None:
    """Merge results of all backends and machines into files that can be committed. [default: all parity runs]

    \b
    <backend>/test_results.json        every result of a backend
    cross_backend_validation.json      outcome by backend, the matrix, what agrees with what
    PARITY.md                          the same for readers

    What is damaged is left out and named; the rest is written, and the exit code is 2.
    """
    from benchlib.benchmarks.parity import command_verbs

    sys.exit(command_verbs.merge(sources, to, machine, strict))
