"""The verb ``benchlib inspect FILE.mlir``: what a StableHLO program consists of, without running it."""

from pathlib import Path

import click

from benchlib.commands.output import say, show_table
from benchlib.core.files import read_text
from benchlib.core.text import counted


@click.command("inspect")
@click.argument("file", type=click.Path(path_type=Path))
def command(file: Path) -> None:
    """Read a StableHLO program (FILE.mlir): check its types, count operations, FLOPs and bytes."""
    from benchlib.workloads.stablehlo.inspection import inspect

    inspection = inspect(read_text(file), str(file))
    counts = sorted(inspection.operations.items(), key=lambda item: (-item[1], item[0]))
    show_table(({"operation": kind, "count": f"{count:,}"} for kind, count in counts), right=("count",))
    say(f"dots         {_text(inspection.dot_flops, 'FLOPs')}; those of other operations are not counted")
    say(f"arguments    {_text(inspection.argument_bytes, 'bytes')}")
    say(f"results      {_text(inspection.result_bytes, 'bytes')}")
    say(f"temporaries  {_text(inspection.temporary_bytes, 'bytes')}")
    for what, count in sorted(inspection.uncounted.items()):
        say(f"not counted  {what}, {counted(count, 'time')}")


def _text(number: int | None, unit: str) -> str:
    return "dynamic" if number is None else f"{number:,} {unit}"
