"""The program: ``benchlib``, and ``python -m benchlib``."""

from benchlib.cli import main

if __name__ == "__main__":
    main()
