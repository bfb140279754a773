"""Turn the backends that a workflow was asked for into its matrix of runners.

    python scripts/parity_runners.py cpu,cuda

prints ``runners=[{"backend": "cpu", "labels": "ubuntu-latest"}, ...]``, for ``$GITHUB_OUTPUT``. An unknown backend ends it
with 2 and the nearest name.
"""

import json
import sys

from measuring import options_of

from benchlib.core.errors import UserError, nearest
from benchlib.core.machine import BACKENDS

HOSTED = "ubuntu-latest"  # the only backend of the runners that GitHub lends is the CPU


def runners(text: str) -> list[dict[str, object]]:
    """Return a row for each backend of a list separated by commas; the CPU is hosted, others need their label."""
    names = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not names:
        raise UserError(f"no backend in {text!r}: name some of {', '.join(BACKENDS)}, separated by commas")
    for name in names:
        if name not in BACKENDS:
            raise UserError(f"unknown backend {name!r}: {nearest(name, BACKENDS)}")
    return [{"backend": name, "labels": HOSTED if name == "cpu" else ["self-hosted", name]} for name in names]


if __name__ == "__main__":
    parser = options_of(__doc__)
    parser.add_argument("backends", help="comma-separated")
    try:
        print(f"runners={json.dumps(runners(parser.parse_args().backends))}")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
