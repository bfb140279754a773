"""`benchlib references`: the registry of published figures as a table."""

from rich.markup import escape
from rich.table import Column, Table

from benchlib import terminal
from benchlib.config import nearest
from benchlib.errors import UserError
from benchlib.published import listed
from benchlib.references import QUANTITIES, registry

MARKS = {"trusted": "trusted", "unconfirmed": "[yellow]unconfirmed[/]", "invalid": "[red]invalid[/]"}


def show(metric: str = "", device: str = "") -> None:
    """Print the published figures, those of one metric or device where asked; ``UserError`` where there are none."""
    known = registry()
    if metric and not any(name.startswith(metric) for name in QUANTITIES):
        raise UserError(f"no figure of metric {metric!r}: {nearest(metric, QUANTITIES)}")
    rows = list(listed(metric, device))
    if not rows:
        names = sorted({item.name for item in known.devices.values() if not device or item.torch})
        where = f" of {metric}" if metric else ""
        raise UserError(f"no published figure{where} for a device like {device!r}: known are {'; '.join(names)}")
    console = terminal.console(least_width=120)
    table = Table(
        Column("published", justify="right", min_width=12),
        Column("holds for", ratio=3),
        Column("source", ratio=2, overflow="fold"),
        Column("validity", no_wrap=True),
        box=None,
        padding=(0, 2),
        header_style="bold",
    )
    last = ""
    for item, told in rows:
        if item.metric != last:
            table.add_row("", f"[bold]{item.metric.replace('_', ' ')}[/]", "", "")
            last = item.metric
        notes = f"\n[dim]{escape(told['notes'])}[/]" if told["notes"] else ""
        source = f"{escape(told['source'])}\n[dim]{escape(told['date'])}[/]"
        table.add_row(escape(told["published"]), escape(told["conditions"]) + notes, source, MARKS[item.validity])
    console.print(table)
    count = f"{len(rows)} figure{'s' * (len(rows) != 1)}"
    console.print(f"\n{count}, claimed by their sources; none was measured here. Invalid ones are never compared with.")
