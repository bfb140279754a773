"""The command line: what verbs there are. Each is declared with its options in a file of ``commands``, imported when it is called."""

import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

import click

from benchlib import __version__
from benchlib.commands import EXIT_USAGE, user_errors
from benchlib.core import interrupts
from benchlib.core.interrupts import EXIT_INTERRUPTED

MAY_BE_EMPTY = "--planted"  # of calibrate: no planted slow-down
VERBS = {  # where a verb is declared, below ``commands``, and what it does
    "baseline": ("list:baseline", "Accept, list and show what later runs are compared with."),
    "calibrate": ("calibrate:verb", "Measure what the gate can detect on this machine."),
    "compare": ("compare:verb", "Compare runs with the first one, also by price."),
    "doctor": ("list:doctor", "Show what this machine can run and what is missing."),
    "export": ("export:verb", "Write stored runs for other tools."),
    "history": ("history:verb", "Judge and draw the stored runs over time."),
    "inspect": ("inspect:verb", "Read and check a StableHLO program."),
    "judge": ("judge:verb", "Look for impossible numbers in results of any origin."),
    "list": ("list:verb", "List benchmarks, tiers, backends and clusters, or the stored runs."),
    "references": ("list:references", "List the published figures that runs are placed beside."),
    "report": ("run:report", "Judge and render stored runs again, without running anything."),
    "run": ("run:verb", "Run a benchmark, or a tier with all its benchmarks."),
    "serve": ("serve:verb", "Serve a language model over HTTP: a worker."),
}


class _Verbs(click.Group):
    """The verbs below, and those that benchmarks bring along; these are imported when they are asked for."""

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        """Read the words of the command line; an empty one would mean a default, or the working folder, and nobody asks so."""
        for before, word in zip(["", *args], args, strict=False):
            name, sign, value = word.partition("=")
            own = word.startswith("-") and sign and not value
            if (own and name != MAY_BE_EMPTY) or (not word and before != MAY_BE_EMPTY):
                option = name if own else before if before.startswith("-") else ""
                what = f"{option}: an empty value" if option else "an empty word"
                raise click.UsageError(f"{what}: give one, or leave it out (is a variable of your shell not set?)")
        return super().parse_args(context, args)

    def list_commands(self, context: click.Context) -> list[str]:
        from benchlib.benchmarks import loadable

        return sorted([*VERBS, *(item.name for item in loadable() if item.command)])

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name in VERBS:
            file, _, own = VERBS[name][0].partition(":")
            with interrupts.ending():
                module = importlib.import_module(f"benchlib.commands.{file}")
            return getattr(module, own)  # type: ignore[no-any-return]
        from benchlib.benchmarks import BENCHMARKS

        return user_errors(lambda: BENCHMARKS[name].command if name in BENCHMARKS else None)()  # type: ignore[no-any-return]

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of verbs without importing them."""
        rows = []
        for name in self.list_commands(context):
            verb = None if name in VERBS else self.get_command(context, name)
            rows.append((name, verb.get_short_help_str(200) if verb else VERBS[name][1]))
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def invoke(self, context: click.Context) -> Any:
        """Run a verb; an interrupt ends it with its own exit code, where click alone would say 1, as for a failed gate."""
        try:
            return super().invoke(context)
        except KeyboardInterrupt:
            click.echo("Stopped by the user", err=True)
            sys.exit(EXIT_INTERRUPTED)

    def main(self, args: Sequence[str] | None = None, *more: Any, **options: Any) -> Any:
        """Run the command line; after an interrupt end at once, so that a second one cannot change the exit code."""
        if args is not None:  # a caller in its own process
            return super().main(args, *more, **options)
        with interrupts.ending():
            from benchlib.core.terminal import open_ended

        sys.stdout, sys.stderr = open_ended(sys.stdout), open_ended(sys.stderr)
        try:
            return super().main(args, *more, **options)
        except KeyboardInterrupt:  # before click looks after it
            interrupts.end()
        except SystemExit as ending:
            code = _flushed(ending.code)
            if code == EXIT_INTERRUPTED:
                os._exit(EXIT_INTERRUPTED)
            sys.exit(code)

    def make_context(self, *args: Any, **options: Any) -> click.Context:
        """Read the words of the command line; click alone would end an interrupt here with 1."""
        try:
            return super().make_context(*args, **options)
        except KeyboardInterrupt:
            interrupts.end()


def _flushed(code: Any) -> Any:
    """Write out what was printed, and return the exit code: 2 where a full disk took none of it. Python alone would say 120."""
    try:
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left would fail once more at the end
        if not code:
            click.echo(f"error: the standard output cannot be written: {error.strerror}", err=True)
        return code or EXIT_USAGE
    return code


@click.group(cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="benchlib")
def main() -> None:
    """Check whether a training and inference stack is right, fast and worth its price.

    \b
    Exit codes: 0 passed, 1 a check failed, 2 the run broke or the input was wrong,
    3 what was named could not be had (a backend, a benchmark that was skipped), or
    with --strict a gate was skipped or had no baseline, 130 interrupted.
    """


if __name__ == "__main__":
    main()
