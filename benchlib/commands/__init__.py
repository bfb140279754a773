"""The verbs of the command line, by what they work on, and the options that several of them have."""

from pathlib import Path

import click

from benchlib.core.machine import BACKENDS

# Made absolute here: the notebooks are executed in another folder.
FOLDER = click.Path(file_okay=False, resolve_path=True, path_type=Path)
BACKEND = click.option("--backend", "-b", type=click.Choice(["auto", *BACKENDS]), default="auto", show_default=True)
OUT = click.option("--out", type=FOLDER, help="Folder of the runs. [default: outputs]")
SET = click.option("--set", "-s", "pairs", multiple=True, metavar="NAME=VALUE", help="Set a parameter; repeatable.")
