"""The verb ``benchlib inspect FILE.mlir``: what a StableHLO program consists of, without running it."""

from pathlib import Path

import click

from benchlib.commands.output import say, show_table
from benchlib.core.errors import UserError
from benchlib.core.files import read_bytes


@click.command("inspect")
@click.argument("file", type=click.Path(path_type=Path))
def command(file: Path) -> None:
    """Read a StableHLO program (FILE.mlir): check its types, count operations, FLOPs and bytes."""
    from benchlib.workloads.stablehlo import mlir

    try:
        text = read_bytes(file).decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{file} is no text (byte {error.start}): StableHLO is read as text, bytecode is not") from None
    inspection = mlir.inspect(text, str(file))
    counts = sorted(inspection.operations.items(), key=lambda item: (-item[1], item[0]))
    show_table(({"operation": kind, "count": f"{count:,}"} for kind, count in counts), right=("count",))
    say(f"dots         {inspection.dot_flops:,} FLOPs")
    say(f"arguments    {inspection.argument_bytes:,} bytes")
    say(f"results      {inspection.result_bytes:,} bytes")
    say(f"temporaries  {inspection.temporary_bytes:,} bytes")
