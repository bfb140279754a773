"""Where an export goes: the standard output, or a file that is whole or absent."""

import sys
from pathlib import Path

from benchlib.errors import UserError
from benchlib.files import write_text


def put(text: str, output: str, what: str) -> str:
    """Write text to ``output`` ('' and ``-``: the standard output) and return the sentence that says so."""
    if output in ("", "-"):
        sys.stdout.write(text)
        return ""
    path = file_at(output)
    write_text(path, text)
    return f"{what} written to {path}"


def file_at(output: str) -> Path:
    """Return the file that ``output`` names; a folder is a ``UserError``."""
    path = Path(output).expanduser()
    if path.is_dir():
        raise UserError(f"--output {output} is a folder: name a file in it")
    return path


def counted(number: int, noun: str) -> str:
    """Return ``1 run`` or ``3 runs``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
