"""The program: ``benchlib``, and ``python -m benchlib``. From its first line on Ctrl+C ends it with 130 and without a traceback."""

from benchlib.core import interrupts


def main() -> None:
    """Load the command line, which takes a moment, and run it."""
    with interrupts.ending():
        from benchlib.cli import main as command_line
    command_line()


if __name__ == "__main__":
    main()
