"""The command line: what verbs there are. Each is declared with its options in a file of ``commands``, imported when it is called."""

import importlib
import io
import sys
from typing import Any

import click

from benchlib import __version__
from benchlib.core.errors import UserError, nearest, unexpected
from benchlib.core.interrupts import EXIT_INTERRUPTED

LONGEST = 1000  # letters of a first sentence: more than any has
EXIT_USAGE = 2  # wrong input, or an error that nobody foresaw
VERBS = {  # by where they stand in ``commands``
    **{name: f"{name}.verb" for name in ("baseline", "calibrate", "compare", "history", "predict", "run")},
    **{name: f"stored.{name}" for name in ("export", "page", "report")},
    **{name: f"judge.{name}" for name in ("judge", "references")},
    "doctor": "kit.doctor",
    "list": "kit.show",
}


def _of_benchmarks() -> dict[str, click.Command]:
    from benchlib.benchmarks import loadable

    return {item.command.name: item.command for item in loadable() if item.command}


class _Verbs(click.Group):
    """The verbs above, and those that benchmarks bring along; these are imported when they are asked for."""

    def main(self, *args: Any, **options: Any) -> Any:
        """Run the program: what the encoding of a terminal or a pipe lacks shows as a question mark, and ends nothing."""
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")
        return super().main(*args, **options)

    def list_commands(self, context: click.Context) -> list[str]:
        return sorted([*VERBS, *_of_benchmarks()])

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name in VERBS:
            module, attribute = VERBS[name].split(".")
            return getattr(importlib.import_module(f"benchlib.commands.{module}"), attribute)  # type: ignore[no-any-return]
        return _of_benchmarks().get(name)

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """List the verbs, each with its whole first sentence: click would cut it at the end of the line."""
        commands = [(name, self.get_command(context, name)) for name in self.list_commands(context)]
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, command.get_short_help_str(limit=LONGEST)) for name, command in commands if command]
            )

    def resolve_command(
        self, context: click.Context, words: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the verb of a command line; for an unknown one the nearest is named."""
        if self.get_command(context, words[0]) is None:
            context.fail(f"no verb {words[0]!r}: {nearest(words[0], self.list_commands(context))}")
        return super().resolve_command(context, words)

    def invoke(self, context: click.Context) -> Any:
        """Run a verb: an error is one sentence and exit code 2, the traceback of an unexpected one goes to a file.

        After an interrupt the code is 130: click alone would say 1, as for a failed gate.
        """
        try:
            return super().invoke(context)
        except (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError):
            raise
        except KeyboardInterrupt:
            click.echo("Stopped by the user", err=True)
            sys.exit(EXIT_INTERRUPTED)
        except Exception as error:
            from benchlib.core.files import storage_error
            from benchlib.core.terminal import harmless
            from benchlib.show.headless import NEEDS, lacking

            understood = error if isinstance(error, UserError) else storage_error(error)
            if isinstance(error, ModuleNotFoundError) and str(error.name).partition(".")[0] in {*NEEDS, "mistune"}:
                understood = UserError(lacking())
            click.secho("error: ", fg="red", bold=True, nl=False, err=True)
            click.echo(harmless(str(understood) if understood else unexpected(error)), err=True)
            sys.exit(EXIT_USAGE)


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
