"""PNG files of the pictures of runs, drawn from the records as in their reports."""

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchlib.core.errors import UserError
from benchlib.core.files import write_bytes
from benchlib.core.text import counted
from benchlib.results.record import Record
from benchlib.results.run import Run
from benchlib.show import report
from benchlib.show.digest import Problems


def write(runs: Sequence[Record], output: str) -> str:
    """Write ``pictures/NAME.png`` into each run folder, or ``OUTPUT/RUN/NAME.png``; return how many files went where."""
    if output == "-" or Path(output).is_file():
        raise UserError(f"--output {output}: pictures are several files; name a folder, or leave --output out")
    if nowhere := [run.run for run in runs if not run.folder]:
        raise UserError(f"{nowhere[0]} is a report without its run folder: pictures are drawn from the files of a run")
    count = 0
    for run in runs:
        folder = Path(output) / run.run if output else Path(run.folder) / "pictures"
        count += save(report.content(Run(run.folder), Problems()), folder)
    where = f"below {output}" if output else "into pictures/ of each run folder"
    return f"{counted(count, 'picture')} of {counted(len(runs), 'run')} written {where}"


def save(content: Mapping[str, Any], folder: Path) -> int:
    """Write the pictures of a report's content as ``folder/NAME.png``; return how many."""
    folder.mkdir(parents=True, exist_ok=True)
    for picture in content["pictures"]:
        write_bytes(folder / f"{picture['name']}.png", base64.b64decode(picture["src"].partition(",")[2]))
    return len(content["pictures"])
