"""What the history notebook calls: choose a store, read it once, judge it, and show trends, machines and tables."""

import html
from typing import TYPE_CHECKING, Any

import benchlib
from benchlib import session
from benchlib.core.text import quantity
from benchlib.judge.checks import Verdict
from benchlib.judge.trends import Filter, History, Trend, choose_store, label, read_history
from benchlib.judge.trends import judge_history as judge
from benchlib.session import verdict_text, whole
from benchlib.show import history
from benchlib.show.figures import show
from benchlib.show.lines import describe_change

if TYPE_CHECKING:
    import pandas

__all__ = ["Choice", "judge", "open_store", "verdict_text"]

PICTURES = 6  # trends drawn, those with changes first
DESCRIBED = 5  # changes described in words
ROWS = 200  # of a table


class Choice:
    """A store and a filter that were checked; nothing is read yet."""

    def __init__(self, store: str, **asked: str) -> None:
        self.store, self.demo, self.asked = choose_store(store, **asked)

    def table(self) -> "pandas.DataFrame":
        """Return the filters, one row each."""
        import pandas as pd

        rows = {name: getattr(self.asked, name) or "all" for name in Filter.__dataclass_fields__}
        rows["metric"] = self.asked.metric or "key numbers"
        rows["store"] = "the demo runs of the kit, since no run is stored yet" if self.demo else self.store.name
        return pd.DataFrame({"asked for": rows})


def open_store(store: str, **asked: str) -> Choice:
    """Return the choice that a notebook's parameters make. Raises ``UserError`` for a wrong one."""
    session.refuse_unknown_parameters()
    session.format_tables()
    return Choice(store, **asked)


def run(choice: Choice) -> History:
    """Read the store, once."""
    return read_history(choice.store, choice.demo, choice.asked)


def summary(past: History) -> "pandas.DataFrame":
    """Return the series: how many runs, from when to when, and how their runs ended."""
    import pandas as pd

    rows = [
        {
            "series": f"{members[-1].benchmark}, {members[-1].tier}, {members[-1].backend}",
            "machine": members[-1].hardware, "ranks": members[-1].ranks, "runs": len(members),
            "first": members[0].moment.strftime("%Y-%m-%d %H:%M"), "last": members[-1].moment.strftime("%Y-%m-%d %H:%M"),
            "newest verdict": members[-1].word,
        }
        for members in past.series
    ]  # fmt: skip
    return whole(pd.DataFrame(rows).set_index("series") if rows else pd.DataFrame({"series": []}))


def checks_table(verdict: Verdict) -> "pandas.DataFrame":
    """Return the checks with status, reason and limit, one row each."""
    import pandas as pd

    return session.checks_table(verdict) if verdict.checks else pd.DataFrame()


def show_trends(past: History, most: int = PICTURES) -> None:
    """Display the trends: those with changes first, then one of each series in turn."""
    for trend in _informative(past)[:most]:
        show(history.trend(trend))


def _informative(past: History) -> list[Trend]:
    seen: dict[str, int] = {}
    ranked: list[tuple[bool, bool, int, int, Trend]] = []
    for trend in past.trends:
        turn = seen[trend.last.series] = seen.get(trend.last.series, 0) + 1
        # Quality hardly ever moves; where nothing changed, the numbers that scatter tell more.
        ranked.append((not trend.changes, trend.levels.spread < 0.002, turn, len(ranked), trend))
    return [item[-1] for item in sorted(ranked, key=lambda item: item[:-1])]


def show_machines(past: History) -> None:
    """Display the machines as lanes."""
    show(history.machines(past.runs))


def changes(past: History) -> "pandas.DataFrame":
    """Return the changes of level, the newest first."""
    import pandas as pd

    rows = [
        {
            "since": change.run.moment.strftime("%Y-%m-%d %H:%M"), "run": change.run.name, "metric": trend.label,
            "before": quantity(change.before, trend.unit), "after": quantity(change.after, trend.unit),
            "ratio": "" if change.ratio is None else f"{change.ratio:.3g}", "is": change.word,
            "what changed with it": "; ".join(f"{name}: {old} → {new}" for name, old, new in change.factors) or "nothing recorded",
        }
        for trend in past.trends
        for change in trend.changes
    ]  # fmt: skip
    return _newest(pd.DataFrame(rows), "since", "no level changed")


def regressions(past: History) -> "pandas.DataFrame":
    """Return the regressions against an accepted run that the runs themselves found, the newest first."""
    import pandas as pd

    rows = [
        {"when": run.moment.strftime("%Y-%m-%d %H:%M"), "run": run.name, "metric": label(metric), "reason": reason}
        for run in past.runs
        if not run.planted
        for metric, reason in run.regressions
    ]
    return _newest(pd.DataFrame(rows), "when", "no run failed a regression check")


def excluded(past: History) -> "pandas.DataFrame":
    """Return the runs that are excluded from the trends, the newest first, with the reason."""
    import pandas as pd

    rows = [
        {"when": run.moment.strftime("%Y-%m-%d %H:%M"), "run": run.name, "verdict": run.word, "reason": why}
        for run, why in past.excluded
    ]
    return _newest(pd.DataFrame(rows), "when", "no runs excluded")


def _newest(frame: "pandas.DataFrame", column: str, otherwise: str) -> "pandas.DataFrame":
    import pandas as pd

    if frame.empty:
        return pd.DataFrame({"": [otherwise]}).set_index("")
    ordered = frame.sort_values(column, ascending=False, kind="stable").head(ROWS)
    return whole(ordered.set_index(column))


def reading(past: History) -> Any:
    """Return what the past says, as Markdown to display."""
    from IPython.display import Markdown

    moved = [(trend, change) for trend in past.trends for change in trend.changes]
    words = [f"{len(past.runs):,} of {past.stored:,} stored runs in {len(past.series)} series."]
    if past.demo:
        words.insert(
            0, "These are the demo runs of the kit: no run is stored yet. `benchlib run quick` makes the first."
        )
    for trend in (trend for trend in past.trends if trend.levels.free >= 4 and trend.levels.spread >= 0.002):
        spread = f"{trend.levels.spread:.1%}" if trend.levels.ratio else quantity(trend.levels.spread, trend.unit)
        if trend.label in ("Training throughput", "Step time"):
            words.append(f"{trend.label} of {trend.last.benchmark}, {trend.last.tier}, {trend.last.ranks} rank{'s' * (trend.last.ranks != 1)}: one run "
                         f"scatters by {spread} about its level ({len(trend.values)} runs).")  # fmt: skip
    count = {word: sum(change.word == word for _, change in moved) for word in ("worse", "better", "other")}
    words.append(f"Changes of level: {count['worse']} worse, {count['better']} better, {count['other']} neutral.")
    newest = sorted(moved, key=lambda pair: pair[1].run.started, reverse=True)[:DESCRIBED]
    words += [
        f"{trend.label} of {trend.last.benchmark}, {trend.last.tier}: {describe_change(change, trend.unit)}."
        for trend, change in newest
    ]
    return Markdown("\n".join(f"- {html.escape(sentence, quote=False)}" for sentence in words))


def provenance(past: History) -> "pandas.DataFrame":
    """Return from what the history was made."""
    import pandas as pd

    ends = [run.moment.strftime("%Y-%m-%d %H:%M") for run in (past.runs[0], past.runs[-1])] if past.runs else ["", ""]
    facts = {
        "store": "the demo runs of the kit" if past.demo else past.store.name,
        "runs": f"{len(past.runs):,} of {past.stored:,}",
        "from": ends[0],
        "to": ends[1],
        "read by": f"benchlib {benchlib.__version__}",
        "again": "benchlib history" + "".join(f" --set {k}={v}" for k, v in vars(past.asked).items() if v),
    }
    return whole(pd.DataFrame({"value": facts}))
