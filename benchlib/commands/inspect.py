"""``benchlib inspect FILE.mlir``: what a StableHLO program consists of, read and type-checked without running it."""

from pathlib import Path
from typing import Any

import click

from benchlib.commands.output import say, show_table
from benchlib.core import mlir
from benchlib.core.definitions import size_text
from benchlib.core.errors import UserError
from benchlib.core.files import read_object


def _arguments(path: Path) -> tuple[list[str], list[str]]:
    beside = path.with_name(path.name + ".json")
    if not beside.is_file():
        return [], []
    arguments = read_object(beside, {"arguments": list})["arguments"]
    texts: list[Any] = [(item.get("name"), item.get("role")) for item in arguments if isinstance(item, dict)]
    if len(texts) < len(arguments) or not all(isinstance(text, str) for pair in texts for text in pair):
        raise UserError(f"{beside}: an argument has no name or role: convert the model again")
    return [name for name, _ in texts], [role for _, role in texts]


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
def verb(file: Path) -> None:
    """Read a StableHLO program (FILE.mlir): check its types, count operations, FLOPs and bytes.

    A manifest beside it, FILE.mlir.json, tells which layer is which: then they are listed as well.
    """
    if not file.is_file():
        raise UserError(f"{file}: there is no such file")
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{file} is no text (byte {error.start}): StableHLO is read as text, bytecode is not") from None
    names, roles = _arguments(file)
    inspection = mlir.inspect(text, names, roles, str(file))
    counts = sorted(inspection.operations.items(), key=lambda item: (-item[1], item[0]))
    numbers = ("count", "operations", "dots", "weights")
    show_table(({"operation": kind, "count": f"{count:,}"} for kind, count in counts), right=numbers)
    rows = [
        {
            "layer": layer,
            "operations": f"{item.operations:,}",
            "dots": f"{item.dot_flops / 1e9:.3g} GFLOP",
            "weights": size_text(item.weight_bytes),
        }
        for layer, item in inspection.layers.items()
    ]
    show_table(rows if names else [], right=numbers)
    say(f"dots         {inspection.dot_flops:,} FLOPs")
    say(f"arguments    {inspection.argument_bytes:,} bytes")
    say(f"results      {inspection.result_bytes:,} bytes")
    say(f"temporaries  {inspection.temporary_bytes:,} bytes")
