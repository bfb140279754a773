"""``benchlib references``: the registry of published figures as a table."""

import itertools

import click
from rich.text import Text

from benchlib.commands.output import say, show_table
from benchlib.core.errors import UserError, nearest
from benchlib.core.terminal import stacked
from benchlib.core.text import counted
from benchlib.judge.published import listed
from benchlib.judge.references import registry

COLOURS = {"trusted": "", "unconfirmed": "yellow", "invalid": "red"}


@click.command()
@click.option("--metric", "-m", default="", help="Only figures of this metric, such as f1 or matmul_flops.")
@click.option("--device", "-d", default="", help="Only figures of devices with this in their name, such as h100.")
def verb(metric: str, device: str) -> None:
    """List the published figures that runs are placed beside, with conditions, source and validity."""
    figures = registry()
    if metric and not any(name.startswith(metric) for name in figures.quantities):
        raise UserError(f"no figure of metric {metric!r}: {nearest(metric, figures.quantities)}")
    matches = list(listed(metric, device))
    if not matches:
        names = sorted({item.name for item in figures.devices.values() if not device or item.torch})
        where = f" of {metric}" if metric else ""
        raise UserError(f"no published figure{where} for a device like {device!r}: known are {'; '.join(names)}")
    heads, rows = ("published", "holds for", "source", "validity"), list[dict[str, str | Text]]()
    for metric, group in itertools.groupby(matches, lambda match: match[0].metric):
        rows.append(dict.fromkeys(heads, "") | {"holds for": Text(metric.replace("_", " "), "bold")})
        for item, cells in group:
            conditions, source = stacked(cells["conditions"], cells["notes"]), stacked(cells["source"], cells["date"])
            validity = Text(item.validity, COLOURS[item.validity])
            rows.append(dict(zip(heads, (cells["published"], conditions, source, validity), strict=True)))
    show_table(rows, right=("published",), whole=("validity",))
    words = "claimed by their sources; none was measured here. Invalid ones are never compared with."
    say(f"\n{counted(len(matches), 'figure')}, {words}")
