"""Types of options of the command line."""

import math
from typing import Any

import click


class Finite(click.FloatRange):
    """A finite number within limits. click alone lets ``nan`` pass any limits, and ``inf`` where there is no upper one."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number", param, ctx)
        return number
