"""Which waits for a device does no test miss? Each one of the table is removed, and its instrument measures without it.

    python scripts/remove_synchronisations.py        # all of them, some seconds each

The instruments run on the simulated device of tests/simulated, whose truth is known. A removal is ``caught`` if its instrument is
wrong then, ``survives`` if it is right, ``harmless`` if the table says why nothing can be wrong, and ``stale`` if its text does
not stand in its file exactly once. The exit code is 1 if one survives or is stale.
"""

import sys
from pathlib import Path

from measuring import options_of

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "simulated")]


def main() -> int:
    """Print a line for each removal and return the exit code."""
    from simcuda.build import unavailable
    from stage import Stage
    from table import BY_NAME, REMOVALS

    parser = options_of(__doc__)
    parser.add_argument("--only", default="", help="only removals whose file or text holds this")
    only = parser.parse_args().only
    if reason := unavailable():
        parser.error(f"no device can be simulated: {reason}")
    failed = 0
    with Stage.start() as stage:
        for removal in (one for one in REMOVALS if only in one.name):
            wrong = BY_NAME[removal.misses].wrong(stage, removal.change) if removal.misses else []
            stale = bool(wrong) and wrong[0].startswith("LookupError")
            word = "harmless" if removal.harmless else "stale" if stale else "caught" if wrong else "survives"
            failed += word in ("stale", "survives")
            print(f"{word:<9} {removal.name}: {removal.harmless or (wrong or [''])[0]}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
