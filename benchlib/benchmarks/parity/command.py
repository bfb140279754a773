"""The verbs ``benchlib parity record | verify | merge``. What they do is in ``command_verbs``, imported when one is called."""

import sys
from pathlib import Path
from typing import Any, NoReturn

import click

from benchlib.commands import OUT, SET, user_errors


def _call(verb: str, given: dict[str, Any]) -> NoReturn:
    from benchlib.benchmarks.parity import command_verbs

    sys.exit(getattr(command_verbs, verb)(**given))


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
@click.option("--slim", is_flag=True, help="Inputs, logits and layers alone: a recording that can be shipped.")
@OUT
@user_errors
def record(**given: Any) -> None:
    """Record weights, inputs and results of the reference in FOLDER, which must not exist yet or be empty.

    Copy it to another machine as it is, and compare there with `benchlib parity verify FOLDER`.
    """
    _call("record", given)


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
def verify(**given: Any) -> None:
    """Compute on this machine what was recorded in FOLDER elsewhere, and compare.

    Model, inputs and lengths are taken from the folder. One that was cut or altered is refused.
    """
    _call("verify", given)


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
def merge(**given: Any) -> None:
    """Merge results of all backends and machines into files that can be committed. [default: all parity runs]

    \b
    <backend>/test_results.json        every result of a backend
    cross_backend_validation.json      outcome by backend, the matrix, what agrees with what
    PARITY.md                          the same for readers

    What is damaged is left out and named; the rest is written, and the exit code is 2.
    """
    _call("merge", given)
