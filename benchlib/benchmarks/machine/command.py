"""The verb ``benchlib machine init``: this machine as a preset for estimates, from its measured peaks."""

from pathlib import Path

import click

from benchlib.commands import OUT, user_errors


@click.group()
def command() -> None:
    """Write this machine as a preset that estimates are made for."""


@command.command("init")
@click.argument("run", required=False, type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--name", default="this", show_default=True, help="File params/machines/NAME.yaml.")
@click.option("--tier", "-t", default="smoke", show_default=True, help="How much work, where it has to be measured.")
@click.option("--backend", "-b", default="auto", show_default=True, help="Where, as for `benchlib run`.")
@click.option("--force", is_flag=True, help="Replace a file that is there.")
@OUT
@user_errors
def init(run: Path | None, name: str, tier: str, backend: str, force: bool, out: Path | None) -> None:
    """Write params/machines/NAME.yaml from RUN, a run of the benchmark machine. [default: measure now]

    `benchlib run parallel --dry-run` takes the preset `this` by itself, others with --set machine=NAME.
    """
    from benchlib.benchmarks.machine import command_init

    path = command_init.write(run or command_init.measure(tier, backend, out), name, force)
    click.echo(f"preset: {path}")
