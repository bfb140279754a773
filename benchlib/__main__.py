"""The program: ``benchlib``, and ``python -m benchlib``. From its first line on Ctrl+C ends it with 130 and without a traceback."""

import gc

from benchlib.core import interrupts


def main() -> None:
    """Load the command line, which takes a moment, and run it."""
    gc.set_threshold(50_000, 20, 20)  # most objects are modules' own and stay: looking took a seventh of the time
    with interrupts.ending():
        from benchlib.cli import main as command_line
    command_line()


if __name__ == "__main__":
    main()
