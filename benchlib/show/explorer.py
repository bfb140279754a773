"""An explorer of stored runs: pick benchmark, tier, machine, metrics and runs; trends, curves and numbers follow.

In JupyterLab and in Voila it is made of ipywidgets, and every choice draws the pictures again. It is published together
with an HTML form of its first state, which is what a stored notebook and a report show. Where nobody looks on
(``BENCHLIB_HEADLESS``, no kernel, no ipywidgets) the pictures and the table of that state are displayed as they are.
"""

from typing import Any

import pandas as pd

from benchlib.benchmarks import spec_of
from benchlib.core.text import counted
from benchlib.judge import trends
from benchlib.judge.trends import History
from benchlib.results.record import Record
from benchlib.results.run import Run
from benchlib.show import history, markup
from benchlib.show.figures import Picture, data_url, show
from benchlib.show.widgets import interactive

ALL = "all"
LISTED = 300  # runs that can be picked, the newest of those that pass the filters
DRAWN = 3  # metrics with a picture
PICKED = 3  # runs at the beginning
SPEED = "train_samples_per_s"  # the metric at the beginning, where a benchmark has it
FILTERS = {"benchmark": "benchmark", "tier": "tier", "machine": "hardware"}  # and the field of a run


class View:
    """What is picked and what it shows; knows nothing of widgets. Assign to the fields, then ask."""

    def __init__(self, past: History) -> None:
        self.past = past
        self.tier, self.machine, self.curve = ALL, ALL, next(iter(history.CURVES))
        # A benchmark that records steps has curves to show; among those the one with the most runs.
        steps = [run.benchmark for run in past.runs if run.headline("step_s") and not trends.exclusion(run)]
        names = sorted(steps or [run.benchmark for run in past.runs])
        self.benchmark = max(names, key=names.count, default=ALL)
        self.metrics, self.picked = tuple[str, ...](), tuple[str, ...]()
        self.settle()

    def options(self, name: str) -> list[str]:
        return [ALL, *sorted({getattr(run, FILTERS[name]) for run in self.past.runs} - {""})]

    def runs(self) -> list[Record]:
        asked = {field: value for name, field in FILTERS.items() if (value := getattr(self, name)) != ALL}
        passed = [run for run in self.past.runs if all(getattr(run, field) == asked[field] for field in asked)]
        return passed[: -LISTED - 1 : -1]

    def available_metrics(self) -> list[str]:
        members = [run for run in self.runs()[::-1] if run.measured]
        names = [metric.name for run in members for metric in run.measured]
        return list(dict.fromkeys([*(trends.key_metrics(members) if members else []), *names]))

    def words(self, metric: str) -> str:
        """Return a metric's name for a reader, in the words of the newest run that has it."""
        benchmark = next((run.benchmark for run in self.runs() if run.metric(metric)), self.benchmark)
        return str(spec_of(benchmark).label(metric))

    def settle(self) -> None:
        """Drop picks that the filters no longer allow, and pick something where nothing is left."""
        runs, available = self.runs(), self.available_metrics()
        self.picked = tuple(path for path in self.picked if path in [run.path for run in runs])
        self.metrics = tuple(name for name in self.metrics if name in available)
        if not self.metrics:
            self.metrics = tuple([*(name for name in available if name.startswith(SPEED)), *available][:1])
        if not self.picked:
            # The newest runs of the longest series that have the metric: they have a trend to lie in.
            measured = [run for run in runs if any(run.headline(name) for name in self.metrics)] or runs
            longest = max(trends.series(measured).values(), key=len, default=measured)
            self.picked = tuple(run.path for run in longest[:PICKED])

    def chosen(self) -> list[Record]:
        return [run for run in self.runs() if run.path in self.picked]

    def pictures(self) -> list[Picture]:
        chosen = self.chosen()
        series = next((run.series for run in chosen if not trends.exclusion(run)), "")
        members = trends.series(self.past.runs).get(series, [])
        shown = [trends.trend(name, members) for name in self.metrics[:DRAWN]]
        overlay = history.overlay(self.curve, [(_label(run), Run(run.folder)) for run in chosen])
        return [*(history.trend(trend, chosen) for trend in shown if trend), overlay]

    def rows(self) -> list[dict[str, Any]]:
        rows = []
        for run in self.chosen():
            facts = {"run": _label(run), "verdict": run.word, "machine": run.hardware, "ranks": run.ranks}
            metrics = {self.words(name): run.headline(name) for name in self.metrics}
            values = {label: metric.text if metric else "" for label, metric in metrics.items()}
            rows.append(facts | {"torch": run.setup.get("torch", "")} | values)
        return rows or [{"run": "no run is picked"}]

    def html(self) -> str:
        return markup.page("explorer.html.j2", pictures=self.pictures(), rows=self.rows(), data_url=data_url)


def _label(run: Record) -> str:
    return f"{run.moment:%m-%d %H:%M} {run.run.rsplit('-', 1)[-1][:12]}"


class Explorer:
    """The widgets over a view. ``box`` holds them; ``pane`` is the HTML that follows every choice."""

    def __init__(self, view: View) -> None:
        import ipywidgets as w

        self.view, self._settling, self.pane = view, False, w.HTML()
        wide: dict[str, Any] = {"style": {"description_width": "6.5em"}, "layout": {"width": "26em"}}
        tall, wrapped = wide | {"layout": {"width": "29em", "height": "9.5em"}}, {"flex_flow": "row wrap"}
        options = {name: view.options(name) for name in FILTERS} | {"curve": list(history.CURVES)}
        self.choices = {
            name: w.Dropdown(description=name.capitalize(), options=names, value=getattr(view, name), **wide)
            for name, names in options.items()
        }
        self.metrics = w.SelectMultiple(description="Metrics", **tall)
        self.runs = w.SelectMultiple(description="Runs", **tall)
        lists = w.HBox([self.metrics, self.runs], layout=wrapped)
        self.box = w.VBox([w.HBox([w.VBox(list(self.choices.values())), lists], layout=wrapped), self.pane])
        self._fill()
        for name, widget in {**self.choices, "metrics": self.metrics, "picked": self.runs}.items():
            widget.observe(lambda change, name=name: self._choose(name, change["new"]), names="value")

    def _choose(self, name: str, value: Any) -> None:
        if not self._settling:  # a list that is being filled again reports its own change
            setattr(self.view, name, value)
            self._fill()

    def _fill(self) -> None:
        self._settling = True
        try:
            self.view.settle()
            names = [(self.view.words(name), name) for name in self.view.available_metrics()]
            runs = [
                (f"{_label(run)} {run.word}, {run.tier}, {counted(run.ranks, 'rank')}", run.path)
                for run in self.view.runs()
            ]
            for widget, options in ((self.metrics, names), (self.runs, runs)):
                if list(widget.options) != options:
                    widget.options = options
            self.metrics.value, self.runs.value = self.view.metrics, self.view.picked
            self.pane.value = self.view.html()
        finally:
            self._settling = False


def explore(past: History) -> None:
    """Display the explorer of a past, or its first state where nobody can use it."""
    from IPython.display import display

    view = View(past)
    if not interactive():
        for picture in view.pictures():
            if not picture.empty:  # a benchmark without steps has no curve
                show(picture)
        display(pd.DataFrame(view.rows()).set_index("run"))  # type: ignore[no-untyped-call]
        return
    live = {"version_major": 2, "version_minor": 0, "model_id": Explorer(view).box.model_id}
    words = " ".join(picture.alt for picture in view.pictures())
    forms = {"application/vnd.jupyter.widget-view+json": live, "text/html": view.html(), "text/plain": words}
    display(forms, raw=True)  # type: ignore[no-untyped-call]
