"""``benchlib page``: one page for the runs of a tier on a machine."""

from pathlib import Path

import click

from benchlib.commands.output import place, say
from benchlib.core.errors import UserError


@click.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--price", type=click.FloatRange(0, min_open=True), metavar="USD", help="Of a device (CPU: machine) hour."
)
def verb(folder: Path, price: float | None) -> None:
    """Write FOLDER/report.html: whether this machine is right, fast and worth its price.

    FOLDER is the day of a tier, such as outputs/quick-20261126. The newest run of each
    benchmark counts; one that was changed on purpose or skipped only where there is no other.
    """
    from benchlib.show import machine_page

    if not machine_page.newest(folder):
        raise UserError(f"{folder} holds no run: name the day of a tier, such as outputs/quick-20261126")
    say(f"page: {place(machine_page.render(folder, usd_per_hour=price))}")
