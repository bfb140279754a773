"""What a notebook calls: open a run, execute it, judge it, show it; or the past of a store, or machines compared by price.

No torch: the device work is done by other processes.
"""

import html
import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from benchlib.benchmarks import BENCHMARKS
from benchlib.config.schema import command
from benchlib.core.errors import BackendUnavailable, RunBroken, Stopped, UserError, VerdictFailed, nearest
from benchlib.core.files import outputs, read_bytes
from benchlib.core.text import UNJUDGED, badness, counted
from benchlib.judge import verdict as judging
from benchlib.judge.checks import Verdict
from benchlib.judge.cost import Offers, read_offers
from benchlib.judge.trends import History, read_history
from benchlib.launch.plan import plan, prepare, prepare_again
from benchlib.results.record import DAY, load
from benchlib.results.run import Run
from benchlib.results.verdict import GATE
from benchlib.show import machine_page, notebook
from benchlib.show.machine_page import Page

if TYPE_CHECKING:
    import pandas

Subject = Run | History | Offers | Page


def open_run(
    benchmark: str, run_dir: str, tier: str, backend: str, overrides: Mapping[str, Any], nproc: int = 0, **named: Any
) -> Run:
    """Return the run that a notebook works on: the prepared one, or a new one from the notebook's parameters.

    Of ``named`` parameters, '' and None leave the choice to the tier; 0 and False are values. ``nproc`` 0 leaves it to the machine.
    """
    notebook.begin(benchmark)
    if run_dir:
        return Run(run_dir)
    chosen = {name: value for name, value in named.items() if value is not None and value != ""}
    if nproc:
        chosen["nproc"] = nproc
    return Run(prepare(plan(benchmark, tier, backend, {**chosen, **overrides}), outputs()))


def open_history(store: str, **asked: str) -> History:
    """Read a store, '' for the usual one, as far as it is asked for. Raises ``UserError`` for a wrong filter."""
    notebook.begin()
    return read_history(store, **asked)


def open_offers(runs: str, prices: str, deadline: str) -> Offers:
    notebook.begin()
    return read_offers(runs, prices, deadline)


def open_machine(folder: str, price: float, runs: Sequence[str] = ()) -> Page:
    notebook.begin()
    return machine_page.read(folder, price, runs)


def execute(run: Run) -> Run:
    """Start the ranks, show their progress and return the finished run. A run that has begun is run again in a new folder.

    By hand it also judges the run and displays links to its report. Raises ``RankFailed`` with the failing rank's own traceback,
    ``BackendUnavailable`` for a skipped run and ``Stopped`` after an interrupt or the Stop button. No process is left in any case.
    """
    from IPython.display import display

    from benchlib.launch.launch import Launch
    from benchlib.show.widgets import headless, watch

    if (run.path / "status.json").exists() or any(run.path.glob("events-*.jsonl")):
        run = Run(prepare_again(run))
    launch = Launch(run.path, config=run.config)
    launch.start()
    try:
        status = watch(launch)
    except KeyboardInterrupt:
        status = {"outcome": "stopped", "reason": "stopped by the user"}
    finally:
        launch.close()
    after = Run(run.path)
    if not headless():
        display(_places(after, judge(after)))  # type: ignore[no-untyped-call]
    if status["outcome"] == "complete":
        return after
    if status["outcome"] == "skipped":
        raise BackendUnavailable(f"SKIPPED: {status['reason']}")
    if status["outcome"] == "stopped":
        raise Stopped(status["reason"].removeprefix("stopped "))  # "Stopped: by the user"
    launch.raise_for_status()
    raise RunBroken(status["reason"])


def judge(run: Subject) -> Verdict:
    """Check a run and write its verdict; by hand also the report and the list of runs, unless they show this verdict already.

    What looks at stored runs is judged and nothing is written.
    """
    if not isinstance(run, Run):
        return _shown(run).judge()
    from benchlib.show.widgets import headless

    stored, page = run.path / "verdict.json", run.path / "report.html"
    before = read_bytes(stored) if stored.exists() and page.exists() else b""
    verdict = judging.judge(run.path)
    if not headless() and read_bytes(stored) != before:
        from benchlib.show import index, report

        report.render(run.path)
        if DAY.match(run.path.resolve().parent.name):
            index.render(run.path.resolve().parents[1])
    return verdict


def conclude(run: Run, verdict: Verdict, fail_on_verdict: bool = False) -> None:
    """Display the verdict.

    Raises ``VerdictFailed`` for a run that failed, broke or was stopped, where ``fail_on_verdict`` asks for it: papermill ends with exit code 1.
    """
    from IPython.display import display

    display(verdict_text(verdict, run))  # type: ignore[no-untyped-call]
    if fail_on_verdict and verdict.verdict in ("FAIL", "BROKEN", "STOPPED"):
        raise VerdictFailed(verdict.sentence)


def _places(run: Run, verdict: Verdict) -> Any:
    def link(path: Path) -> str:  # relative to the notebook: JupyterLab opens it in a tab
        return f"[{path.name}]({quote(os.path.relpath(path))})"

    here = run.path.resolve()
    word = load(here, False, verdict).word
    lines = [f"- report ({word}): {link(here / 'report.html')}", f"- run folder: `{here}`"]
    lines += [f"- all runs: {link(here.parents[1] / 'index.html')}"] * bool(DAY.match(here.parent.name))
    if run.result is not None:  # else nothing to compare: stopped or broken
        lines.append(f"- compare: `benchlib compare OTHER_RUN {shlex.quote(str(here))}`")
    return _markdown(*lines)


# What the cells show.


def _shown(subject: History | Offers | Page) -> notebook.Shown:
    from benchlib.show import cost, history  # with matplotlib: only who shows it pays

    if isinstance(subject, Page):
        return machine_page.shown(subject)
    return history.shown(subject) if isinstance(subject, History) else cost.shown(subject)


def _markdown(*lines: str) -> Any:
    from IPython.display import Markdown

    return Markdown("\n".join(lines))


def _frame(rows: Iterable[Mapping[str, Any]]) -> "pandas.DataFrame":
    """Return records as a table by their first column; "none" where there are none."""
    import pandas as pd

    records = list(rows) or [{"": "none"}]
    first = next(iter(records[0]))
    return pd.DataFrame(records).set_index(first).rename_axis(first or None)


def _named(there: Mapping[str, Any], name: str, what: str) -> Any:
    if name not in there:
        raise UserError(f"no {what} {name!r} here: {nearest(name, there)}")
    return there[name]


def config_table(run: Subject) -> "pandas.DataFrame":
    """Return the config with origin and meaning of each field; a notebook folds those at their defaults.

    Of a history and of offers, what was asked for.
    """
    if not isinstance(run, Run):
        return _frame({"": name, "asked for": value} for name, value in _shown(run).asked.items())
    rows = [
        {
            "parameter": name,
            "value": f"{value:,}" if type(value) is int else str(value),
            "from": run.origins.get(name, ""),
            "default": "" if value == field.default else str(field.default),
            "meaning": field.description or "",
        }
        for name, field in type(run.config).model_fields.items()
        if (value := getattr(run.config, name)) != {}  # no limit of the user's own
    ]
    frame = _frame(rows)
    frame.attrs["folded"] = "default"
    return frame


def expectation(run: Run) -> "pandas.DataFrame":
    """Return the bounds for the run before it starts: the targets of its tier, and what was accepted for its fingerprint."""
    from benchlib.judge import baselines

    config, accepted = run.config, baselines.find(run).baseline
    bounds = [
        (name.removeprefix("target_"), value, f"target of the {config.tier} tier: {field.description}")
        for name, field in type(config).model_fields.items()
        if name.startswith("target_") and (value := getattr(config, name)) is not None
    ]
    bounds.append(("time", config.budget_s, "budget of the tier, in seconds"))
    if accepted:
        source = f"accepted as {accepted.key}, the latest of {len(accepted.runs)}"
        latest = accepted.latest
        bounds += [(item.name, item.value, source) for item in latest.metrics if item.name in latest.samples]
    return _frame({"bound": name, "value": value, "source": source} for name, value, source in bounds)


def checked(verdict: Verdict) -> Any:
    """Return what was checked beside the comparison with accepted runs, as Markdown to display."""
    names = "; ".join(check.name for check in verdict.checks if not check.name.endswith(GATE))
    return _markdown(f"Checked: {html.escape(names or 'nothing')}.")


def checks_table(verdict: Verdict) -> "pandas.DataFrame":
    """Return the checks with status, reason and limit: failed and undecided ones first, those that passed counted in one row."""
    rows = [
        {"check": check.name, "status": check.word, "reason": check.reason, "limit": check.limit}
        for check in sorted(verdict.checks, key=lambda check: badness(check.word))
        if check.status != "PASS"
    ]
    if passed := len(verdict.checks) - len(rows):
        unsure = sum(row["status"] not in UNJUDGED for row in rows)
        rows.insert(unsure, {"check": counted(passed, "check"), "status": "PASS", "reason": "", "limit": ""})
    return _frame(rows)


def figure(run: Subject, name: str, always: bool = True) -> None:
    """Display a picture of the run's benchmark by its name. If the run recorded nothing to draw, a sentence says so; with ``always``
    false nothing is displayed then.

    Raises ``UserError`` for one that the benchmark does not have. Of a history and of offers a name may be several.
    """
    from IPython.display import display

    from benchlib.show.figures import show

    if isinstance(run, Run):
        pictures = [_named(BENCHMARKS[run.config.benchmark].spec.figures(), name, "picture")(run)]
    else:
        pictures = _named(_shown(run).figures, name, "picture")()
    for picture in pictures:
        if not picture.empty:
            show(picture)
        elif always:
            display(_markdown(f"*{html.escape(picture.alt)}*"))  # type: ignore[no-untyped-call]


def frame(run: Subject, name: str) -> "pandas.DataFrame":
    """Return what a picture of a run is drawn from, a row an observation. ``UserError`` for a name that it does not have."""
    if not isinstance(run, Run):
        raise UserError("only the pictures of a run have a frame: session.table has the rows of what looks at several")
    return _named(BENCHMARKS[run.config.benchmark].spec.drawn_from(), name, "picture")(run)


def table(run: Subject, name: str) -> "pandas.DataFrame":
    if not isinstance(run, Run):
        frame = _frame(_named(_shown(run).tables, name, "table"))
        frame.attrs["narrow"] = isinstance(run, Page)
        return frame
    import pandas as pd

    return pd.DataFrame(_named(BENCHMARKS[run.config.benchmark].spec.frames(run), name, "table")())


def metrics_table(run: Run) -> "pandas.DataFrame":
    from benchlib.show.digest import interval

    if run.result is None:
        raise UserError(f"{run.path} has no result")
    return _frame(
        {"metric": item.name, "value": item.text, "n": item.n, "provenance": item.provenance}
        | {"95% interval": interval(item), "note": item.reason}
        for item in run.result.metrics
    )


def reading(run: Subject) -> Any:
    if isinstance(run, Run):
        sentences = BENCHMARKS[run.config.benchmark].spec.reading(run)
    else:
        sentences = [html.escape(sentence, quote=False) for sentence in _shown(run).reading]
    return _markdown(*(f"- {sentence}" for sentence in sentences))


def verdict_text(verdict: Verdict, subject: Subject | None = None) -> notebook.Headline:
    if isinstance(subject, Run):
        config = subject.config
        about = (config.benchmark, f"{config.tier} tier", f"{config.backend}, {counted(config.world_size, 'rank')}")
        return notebook.Headline(load(subject.path, False, verdict).word, verdict.sentence, about)
    if subject is None:
        return notebook.Headline(verdict.verdict, verdict.sentence)
    shown = _shown(subject)
    return notebook.Headline(shown.word or verdict.verdict, shown.sentence or verdict.sentence, tuple(shown.about))


def provenance(run: Subject) -> "pandas.DataFrame":
    """Return machine and versions of the run, and the command that repeats it; of others what they were made from."""
    if not isinstance(run, Run):
        return _frame(_shown(run).provenance)
    from benchlib.show.digest import machine_rows

    facts = [("run", run.path.name), ("command", command(run.config)), *machine_rows(run.machine)]
    return _frame({"": name, "value": value} for name, value in facts)
