"""The verb ``benchlib parallel layout``: a mesh of many ranks, built and checked in one process."""

import click

from benchlib.benchmarks import BENCHMARKS
from benchlib.benchmarks.parallel.shapes import MODELS, STAGES_PER_RANK, STRATEGIES, Layout
from benchlib.commands import user_errors
from benchlib.core.errors import UserError


@click.group()
def command() -> None:
    """Check how a model would be spread over ranks that are not here."""


@command.command("layout")
@click.argument("model", type=click.Choice(list(MODELS)))
@click.argument("strategy", type=click.Choice(list(STRATEGIES)))
@click.option("--data", type=click.IntRange(1), default=1, help="Copies of the model.")
@click.option("--tensor", type=click.IntRange(1), default=1, help="Ranks that share each matrix.")
@click.option("--pipeline", type=click.IntRange(1), default=1, help="Ranks that have some of the layers each.")
@click.option(
    "--schedule", type=click.Choice(list(STAGES_PER_RANK)), default="1f1b", help="Of a pipeline. [default: 1f1b]"
)
@user_errors
def layout(model: str, strategy: str, data: int, tensor: int, pipeline: int, schedule: str) -> None:
    """Build STRATEGY for a narrow MODEL on ranks of torch's fake process group and count what the corners of the mesh hold.

    \b
    benchlib parallel layout llama-8b data_tensor_pipeline --data 8 --tensor 4 --pipeline 4
    """
    whole, axes = Layout(data, tensor, pipeline), STRATEGIES[strategy].axes
    for axis in ("data", "tensor", "pipeline"):
        if getattr(whole, axis) > 1 and axis not in axes:
            raise UserError(
                f"--{axis} {getattr(whole, axis)}: {strategy} spreads over {' and '.join(axes) or 'no ranks'}: leave it out"
            )
    if whole.world < 2:
        raise UserError(
            f"{strategy} on one rank is no layout: give degrees above 1, as in --{axes[0] if axes else 'data'} 8"
        )
    try:
        rows = BENCHMARKS["parallel"].part("layout_check", "check")(
            model, strategy, schedule if pipeline > 1 else "", whole
        )
    except (RuntimeError, ValueError) as error:
        raise UserError(f"{strategy} cannot be laid out as {whole}: {error}") from None
    click.echo(f"{strategy}, {whole}: {whole.world} ranks, {len(rows)} at the corners built from a narrow {model}")
    for row in rows:
        place = ", ".join(f"{axis} {number}" for axis, number in row["place"].items())
        click.echo(
            f"  rank {row['rank']} ({place}) holds {row['held']:,} parameters; estimate for the fullest {row['estimate']:,.0f}"
        )
