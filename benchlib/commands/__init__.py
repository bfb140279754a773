"""One file per verb of the command line, and what all of them share."""

import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import click

from benchlib.core.errors import UserError, unexpected
from benchlib.core.machine import BACKENDS

EXIT_USAGE = 2


def user_errors(command: Callable[..., Any]) -> Callable[..., Any]:
    """Show an error as one sentence instead of a traceback, with exit code 2; that of an unexpected one goes to a file."""

    @wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError):
            raise
        except Exception as error:
            from benchlib.core.terminal import harmless

            click.secho("error: ", fg="red", bold=True, nl=False, err=True)
            click.echo(harmless(_sentence(error)), err=True)
            sys.exit(EXIT_USAGE)

    return wrapped


def _sentence(error: Exception) -> str:
    from benchlib.core.files import storage_error

    understood = error if isinstance(error, UserError) else storage_error(error)
    return str(understood) if understood else unexpected(error)


# Made absolute here: the notebooks are executed in another folder.
FOLDER = click.Path(file_okay=False, resolve_path=True, path_type=Path)
BACKEND = click.option("--backend", "-b", type=click.Choice(["auto", *BACKENDS]), default="auto", show_default=True)
OUT = click.option("--out", type=FOLDER, help="Folder of the runs. [default: outputs]")
SET = click.option("--set", "-s", "pairs", multiple=True, metavar="NAME=VALUE", help="Set a parameter; repeatable.")
