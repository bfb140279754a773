"""``repeats.json``: the earlier repetitions that a run of ``--repeat N`` is judged together with.

The records are copied, not linked: a run stays judged as it was when the folders of the others are gone.
"""

from collections.abc import Sequence
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from benchlib.errors import UserError
from benchlib.files import read_json, write_json
from benchlib.record import RunRecord
from benchlib.results import Run

NAME = "repeats.json"
_RECORDS = TypeAdapter(list[RunRecord])


def repeats(run: Run) -> list[RunRecord]:
    """Return the earlier repetitions of a run, the oldest first; none where it was not repeated."""
    path = run.path / NAME
    if not path.exists():
        return []
    try:
        return _RECORDS.validate_python(read_json(path))
    except ValidationError as error:
        raise UserError(f"{path}: not the records of repetitions ({error.errors()[0]['msg']})") from None


def save_repeats(run_dir: Path | str, records: Sequence[RunRecord]) -> None:
    """Write the earlier repetitions into the folder of the latest one."""
    write_json(Path(run_dir) / NAME, _RECORDS.dump_python(list(records), mode="json"))
