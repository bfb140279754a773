"""``benchlib predict``: the joint rate of workers from the rate of each alone. Nothing is measured."""

import math

import click

from benchlib.commands.output import say, show_table
from benchlib.core import splits
from benchlib.core.errors import UserError
from benchlib.core.text import counted


@click.command("predict")
@click.argument("rates", nargs=-1, type=float, metavar="RATE RATE...")
@click.option("--samples", type=click.IntRange(1), default=13368, show_default=True, help="Samples that they share.")
def verb(rates: tuple[float, ...], samples: int) -> None:
    """Predict how fast workers are together from the RATE of each alone, in samples/s.

    With equal shares the slowest worker decides: n times its rate. With shares in proportion to
    the rates all workers end together: the sum. Efficiency is the joint rate over that sum.
    """
    wrong = [rate for rate in rates if not 0 < rate < math.inf]
    if wrong:
        raise UserError(f"a rate of {wrong[0]:g} samples/s: each RATE has to be above 0 and finite")
    if len(rates) < 2:
        raise UserError(
            f"{counted(len(rates), 'rate')}: give the rate of each worker, two or more (benchlib predict 0.18 0.29)"
        )
    show_table(splits.rows(rates, samples))
    say("Predicted, not measured: network, dispatcher and start-up come on top.", style="dim")
