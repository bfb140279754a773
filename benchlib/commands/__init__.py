"""One file per verb of the command line, and what all of them share."""

import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import click

from benchlib.core.errors import UserError
from benchlib.core.interrupts import EXIT_INTERRUPTED

__all__ = ["EXIT_INTERRUPTED", "EXIT_USAGE", "OUT", "SET", "user_errors"]

EXIT_USAGE = 2


def user_errors(command: Callable[..., Any]) -> Callable[..., Any]:
    """Show an error that a user can act on as one sentence instead of a traceback."""

    @wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except (UserError, OSError) as error:
            from benchlib.core.files import is_storage_error, not_written
            from benchlib.core.terminal import harmless

            if not isinstance(error, UserError):
                if not is_storage_error(error):
                    raise
                error = not_written(error.filename or "a file", error)
            click.secho("error: ", fg="red", bold=True, nl=False, err=True)
            click.echo(harmless(str(error)), err=True)
            sys.exit(EXIT_USAGE)

    return wrapped


# Made absolute here: the notebooks are executed in another folder.
OUT = click.option(
    "--out",
    type=click.Path(file_okay=False, resolve_path=True, path_type=Path),
    help="Folder of the runs. [default: outputs]",
)
SET = click.option(
    "--set", "-s", "pairs", multiple=True, metavar="NAME=VALUE", help="Set a parameter of the config; may be repeated."
)
