"""An explorer of stored runs: pick benchmark, tier, machine, metrics and runs; trends, curves and numbers follow.

In JupyterLab and in Voila it is made of ipywidgets, and every choice draws the pictures again. It is published together
with an HTML form of its first state, which is what a stored notebook and a report show. Where nobody looks on
(``BENCHLIB_HEADLESS``, no kernel, no ipywidgets) the pictures and the table of that state are displayed as they are.
"""

import base64
import html
import textwrap
from collections.abc import Sequence
from typing import Any

import pandas as pd

from benchlib.core.errors import UserError
from benchlib.judge import trends
from benchlib.judge.trends import History
from benchlib.results.record import Record
from benchlib.results.run import Run
from benchlib.show import history
from benchlib.show.figures import LIGHT, Picture, blank, leave_empty, png, show
from benchlib.show.widgets import interactive

ALL = "all"
LISTED = 300  # runs that can be picked, the newest of those that pass the filters
DRAWN = 3  # metrics with a picture
PICKED = 3  # runs at the beginning
SPACED = '<table style="border-spacing:1.4em .1em;border-collapse:separate"'
CURVE_METRIC = {"throughput": "train_samples_per_s", "step times": "step_s", "loss": "loss_final"}


class View:
    """What is picked and what it shows; knows nothing of widgets. Assign to the fields, then ask."""

    def __init__(self, past: History) -> None:
        self.past = past
        self.tier, self.machine, self.curve = ALL, ALL, next(iter(history.CURVES))
        counted = [run for run in past.runs if not trends.exclusion(run)]
        # A benchmark that records steps has curves to show; among those the one with the most runs.
        names = [run.benchmark for run in counted if run.headline("step_s")] or [run.benchmark for run in past.runs]
        self.benchmark = max(sorted(set(names)), key=names.count) if names else ALL
        self.metrics: tuple[str, ...] = ()
        self.picked: tuple[str, ...] = ()
        self._runs: dict[str, Run] = {}
        self.settle()

    def options(self, name: str) -> list[str]:
        """Return what can be chosen for ``benchmark``, ``tier`` or ``machine``."""
        values = {run.hardware if name == "machine" else getattr(run, name) for run in self.past.runs}
        return [ALL, *sorted(value for value in values if value)]

    def runs(self) -> list[Record]:
        """Return the runs that pass the filters, the newest first."""
        asked = {"benchmark": self.benchmark, "tier": self.tier, "hardware": self.machine}
        passed = [
            run
            for run in self.past.runs[::-1]
            if all(value in (ALL, getattr(run, name)) for name, value in asked.items())
        ]
        return passed[:LISTED]

    def known_metrics(self) -> list[str]:
        """Return the metrics of the runs that pass the filters, key numbers first."""
        members = [run for run in self.runs()[::-1] if run.measured]
        if not members:
            return []
        names = dict.fromkeys(metric.name for run in members for metric in run.measured)
        return list(dict.fromkeys([*trends.key_metrics(members), *names]))

    def settle(self) -> None:
        """Drop picks that the filters no longer allow, and pick something where nothing is left."""
        paths = [run.path for run in self.runs()]
        self.picked = tuple(path for path in self.picked if path in paths)
        if not self.picked:
            # The newest runs of the longest series: they have a trend to lie in.
            whole = [run for run in self.runs() if not trends.exclusion(run)]
            keys = [run.series for run in whole]
            longest = max(keys, key=keys.count) if keys else ""
            self.picked = tuple([run.path for run in whole if run.series == longest][:PICKED] or paths[:PICKED])
        available = self.known_metrics()
        self.metrics = tuple(name for name in self.metrics if name in available)
        if not self.metrics:
            wanted = CURVE_METRIC["throughput"]
            self.metrics = (
                (next((name for name in available if name.startswith(wanted)), available[0]),) if available else ()
            )

    def chosen(self) -> list[Record]:
        """Return the picked runs, the newest first."""
        return [run for run in self.runs() if run.path in self.picked]

    def pictures(self) -> list[Picture]:
        """Draw the trends of the metrics, and the curve of the picked runs overlaid."""
        chosen = self.chosen()
        series = next((run.series for run in chosen if not trends.exclusion(run)), "")
        members = [run for run in self.past.runs if run.series == series and not trends.exclusion(run)]
        shown = [trends.trend(name, members) for name in self.metrics[:DRAWN]] if series else []
        drawn = [history.trend(trend, runs=chosen) for trend in shown if trend]
        return [*drawn, self._overlay(chosen)]

    def _overlay(self, chosen: list[Record]) -> Picture:
        try:
            return history.overlay(self.curve, [(_label(run), self._open(run)) for run in chosen])
        except (UserError, OSError) as error:  # a run was removed or damaged since the store was read
            figure, axes = blank("overlay", LIGHT)
            return leave_empty(figure, axes, LIGHT, textwrap.fill(str(error), 56))

    def _open(self, run: Record) -> Run:
        if run.path not in self._runs:
            self._runs[run.path] = Run(run.folder)
        return self._runs[run.path]

    def table(self) -> pd.DataFrame:
        """Return the picked runs with their verdict and the chosen metrics."""
        rows = []
        for run in self.chosen():
            metrics = {name: run.headline(name) for name in self.metrics}
            values = {trends.label(name): m.text if m else "" for name, m in metrics.items()}
            where = {
                "verdict": run.word,
                "machine": run.hardware,
                "ranks": run.ranks,
                "torch": run.setup.get("torch", ""),
            }
            rows.append({"run": _label(run), **where, **values})
        return pd.DataFrame(rows) if rows else pd.DataFrame({"no run is picked": []})

    def html(self) -> str:
        """Return pictures and table as HTML that needs nothing else."""
        shown = "".join(_image(picture) for picture in self.pictures())
        table = self.table().to_html(border=0, escape=True, index=False, justify="left")
        return f"<div>{shown}</div>{table.replace('<table', SPACED, 1)}"


def _label(run: Record) -> str:
    return f"{run.moment:%m-%d %H:%M} {run.run.rsplit('-', 1)[-1][:12]}"


def _image(picture: Picture) -> str:
    data, alt = base64.b64encode(png(picture)).decode(), html.escape(picture.alt)
    return f'<img src="data:image/png;base64,{data}" alt="{alt}" width="520" style="max-width:100%;margin:4px">'


class Explorer:
    """The widgets over a view. ``box`` holds them; ``pane`` is the HTML that follows every choice."""

    def __init__(self, view: View) -> None:
        import ipywidgets as w

        self.view, self._settling = view, False
        wide: dict[str, Any] = {"style": {"description_width": "6.5em"}, "layout": {"width": "26em"}}
        self.choices = {
            name: w.Dropdown(
                description=name.capitalize(), options=view.options(name), value=getattr(view, name), **wide
            )
            for name in ("benchmark", "tier", "machine")
        }
        self.choices["curve"] = w.Dropdown(description="Curve", options=list(history.CURVES), value=view.curve, **wide)
        tall = wide | {"layout": {"width": "29em", "height": "9.5em"}}
        self.metrics = w.SelectMultiple(description="Metrics", **tall)
        self.runs = w.SelectMultiple(description="Runs", **tall)
        for widget in (*self.choices.values(), self.metrics, self.runs):
            widget.tooltip = (
                f"{widget.description}: arrow keys choose; Ctrl or Shift picks several where a list is shown"
            )
        self.pane = w.HTML()
        left, right = (
            w.VBox(list(self.choices.values())),
            w.HBox([self.metrics, self.runs], layout={"flex_flow": "row wrap"}),
        )
        self.box = w.VBox([w.HBox([left, right], layout={"flex_flow": "row wrap"}), self.pane])
        self._fill()
        for name, widget in self.choices.items():
            widget.observe(lambda change, name=name: self._choose(name, change["new"]), names="value")
        self.metrics.observe(lambda change: self._choose("metrics", change["new"]), names="value")
        self.runs.observe(lambda change: self._choose("picked", change["new"]), names="value")

    def _choose(self, name: str, value: Any) -> None:
        if self._settling:  # a list that is being filled again reports its own change
            return
        setattr(self.view, name, value)
        self._fill()

    def _fill(self) -> None:
        """Bring lists and pane in line with the view."""
        self._settling = True
        try:
            self.view.settle()
            _offer(self.metrics, _named(self.view.known_metrics()), self.view.metrics)
            runs = [
                (f"{_label(run)} {run.word}, {run.tier}, {run.ranks} rank{'s' * (run.ranks != 1)}", run.path)
                for run in self.view.runs()
            ]
            _offer(self.runs, runs, self.view.picked)
            self.pane.value = self.view.html()
        finally:
            self._settling = False


def _named(metrics: list[str]) -> list[tuple[str, str]]:
    """Return (label, metric) pairs; the metric's own name where two would read the same."""
    labels = [trends.label(name) for name in metrics]
    return [(words if labels.count(words) == 1 else name, name) for words, name in zip(labels, metrics, strict=True)]


def _offer(widget: Any, options: Sequence[tuple[str, str]], value: tuple[str, ...]) -> None:
    if list(widget.options) != list(options):
        widget.options = options
    if tuple(widget.value) != value:
        widget.value = value


def explore(past: History) -> None:
    """Display the explorer of a past, or its first state where nobody can use it."""
    from IPython.display import display

    view = View(past)
    if not interactive():
        for picture in view.pictures():
            if not picture.empty:  # a benchmark without steps has no curve
                show(picture)
        display(view.table().set_index("run") if view.picked else view.table())  # type: ignore[no-untyped-call]
        return
    box = Explorer(view).box
    live = {"version_major": 2, "version_minor": 0, "model_id": box.model_id}
    words = " ".join(picture.alt for picture in view.pictures())
    forms = {"application/vnd.jupyter.widget-view+json": live, "text/html": view.html(), "text/plain": words}
    display(forms, raw=True)  # type: ignore[no-untyped-call]
