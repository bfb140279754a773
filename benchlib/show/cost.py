"""What people see of a comparison by price: the words of its table, its pictures, its page, and what its notebook shows."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes

import benchlib
from benchlib.core.text import quantity
from benchlib.judge.cost import Offers, Row, Value, Worth, amount_text
from benchlib.show import markup
from benchlib.show.figures import (
    DASHED,
    LIGHT,
    WIDTH_IN,
    End,
    Picture,
    blank,
    data_url,
    finish,
    head,
    label_rows,
    name_ends,
    note,
    plain_numbers,
    styled,
)

MUTED, (USUAL, PRICE, BEST) = LIGHT.muted, LIGHT.series[:3]
LETTERS = 26  # of a machine's label in a picture
WIDE = 20.0  # ratio of the largest to the smallest value from which an axis is logarithmic
REACH = 3.0  # times the longest bar that intervals are drawn to, then an arrow: a longer one would leave nothing of the bars
TIME_UNITS = ((3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"))


class Cell(NamedTuple):
    """A machine in a row as words: the sign of the best, the value, and its interval or why it has none."""

    mark: str
    value: str
    below: str
    why: str = ""


def rows(item: Worth) -> list[tuple[str, list[Cell]]]:
    """Return the table of a comparison: for each row its name and a cell for each machine."""
    machines = item.machines
    prices = [Cell("", quantity(machine.usd_per_device_hour), machine.price_from) for machine in machines]
    devices = [Cell("", str(machine.devices), machine.device) for machine in machines]
    others = [(row_text(row), [cell(row, index) for index in range(len(machines))]) for row in item.rows]
    return [("Price (USD per device hour)", prices), ("Devices", devices), *others]


def cell(row: Row, index: int) -> Cell:
    """Write a machine in a row: ✓ is the best, ≈ the best by its value in an open order. Only times carry their unit."""
    value, unit = row.values[index], "s" if row.unit == "s" else ""
    if value.value is None:
        return Cell("", "–", "not available", value.reason)
    mark = "" if index != row.best else "✓" if row.certain else "≈"
    return Cell(mark, amount_text(value.value, unit), value.ends(unit) or value.reason)


def row_text(row: Row) -> str:
    """Write what a row is, with its unit: ``Cost per epoch (USD)``; times carry theirs themselves."""
    return row.label if row.unit == "s" or row.unit.endswith("/s") else f"{row.label} ({row.unit})"


def _short(label: str) -> str:
    """Cut a label in its middle: names of runs of one day differ at their ends."""
    half = (LETTERS - 1) // 2
    return label if len(label) <= LETTERS else f"{label[: LETTERS - 1 - half]}…{label[-half:]}"


def _errors(values: Sequence[Value], scale: float = 1.0) -> Any:
    """Return how far the intervals reach below and above the values, an array of (2, n); 0 where there is none."""
    ends = np.array([(value.low, value.value or 0.0, value.high) for value in values], dtype=float).T / scale
    return np.nan_to_num(np.diff(ends, axis=0))


@styled
def bars(item: Worth, row: Row) -> Picture:
    """A quantity of all machines as bars with their intervals, the best one in green where the order is certain.

    Beside break-even prices stand those that are paid.
    """
    figure, axes = blank(row.name, of_many=True)
    cells, places = [cell(row, index) for index in range(len(row.values))], range(len(row.values))
    figure.set_size_inches(WIDTH_IN, 1.15 + 0.42 * len(cells))
    values = np.array([value.value or 0.0 for value in row.values])
    below, above = _errors(row.values)
    cut = values + above > REACH * max(values)
    ends = np.minimum(values + above, REACH * max(values))
    axes.barh(places, values, 0.55, color=[BEST if words.mark == "✓" else USUAL for words in cells], alpha=0.85)
    axes.errorbar(values, places, xerr=(below, ends - values), fmt="none", ecolor=LIGHT.text, elinewidth=1.1, capsize=3)
    written = ["not available" if words.value == "–" else f"{words.value} {words.mark}".strip() for words in cells]
    if row.name == "break_even":
        prices = [machine.usd_per_device_hour for machine in item.machines]
        axes.plot(prices, places, "D", color=PRICE, markersize=6, label="price")
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0.2)
        ends = np.maximum(ends, prices)
        paid = [f"{quantity(price)} → {words.value}" for price, words in zip(prices, cells, strict=True)]
        written = [
            words.below if words.below == "the cheapest" else text for words, text in zip(cells, paid, strict=True)
        ]
    for place, words in enumerate(written):
        note(axes, f"→ {words}" if cut[place] else words, (ends[place], place), (9, 0), fontsize=8.5)
    label_rows(axes, [_short(machine.label) for machine in item.machines])
    axes.set_xlim(0, 1.4 * max(ends))
    axes.locator_params(axis="x", nbins=5)
    axes.set_xlabel(row.unit + ("" if row.direction == "none" else f", {row.direction} is better"))
    intervals = [f" ({words.below})" * bool(words.below) for words in cells]
    alt = [f"{item.machines[place].label} {cells[place].value}{intervals[place]}" for place in places]
    return head(figure, LIGHT, row_text(row), "; ".join(alt))


@styled
def front(item: Worth) -> Picture:
    """Time against cost: the machines that nothing beats, joined by the Pareto front, and those that something does."""
    figure, axes = blank("front", of_many=True)
    times, costs = [machine.seconds for machine in item.machines], [machine.usd for machine in item.machines]
    longest = max(value.value or 0.0 for value in times)
    scale, unit = next((unit for unit in TIME_UNITS if longest >= unit[0]), TIME_UNITS[-1])
    ends = [
        End((time.value or 0.0) / scale, usd.value or 0.0, _short(machine.label), BEST if machine.front else MUTED)
        for machine, time, usd in zip(item.machines, times, costs, strict=True)
    ]
    for end, time, usd in zip(ends, times, costs, strict=True):
        looks: Any = {"fmt": "o", "color": end.colour, "elinewidth": 1, "capsize": 2.5, "markersize": 7}
        axes.errorbar(end.x, end.y, xerr=_errors([time], scale), yerr=_errors([usd]), **looks)
    best = sorted((end.x, end.y) for end, machine in zip(ends, item.machines, strict=True) if machine.front)
    if len(best) > 1:
        axes.step(*zip(*best, strict=True), where="post", color=BEST, linewidth=1.2, linestyle=DASHED)
    _scale(axes, "x", times, scale)
    _scale(axes, "y", costs, 1.0)
    axes.grid(visible=True, axis="both")
    name_ends(axes, LIGHT, ends)
    words = [
        f"{machine.label} {amount_text(time.value or 0.0, 's')}, {amount_text(usd.value or 0.0, 'USD')}"
        + ", on the front" * machine.front
        for machine, time, usd in zip(item.machines, times, costs, strict=True)
    ]
    title, x = f"Time and cost of {item.amount}", f"time of {item.amount} ({unit})"
    return finish(figure, axes, LIGHT, title, x, "USD", "; ".join(words))


def _scale(axes: Axes, axis: str, values: Sequence[Value], scale: float) -> None:
    """Let an axis begin at zero, or make it logarithmic where the values lie far apart, with room for the names."""
    low = min((value.low or value.value or 0.0) / scale for value in values)
    high = max(max(value.value or 0.0, value.high or 0.0) / scale for value in values)
    if high > WIDE * low:
        getattr(axes, f"set_{axis}scale")("log")
        plain_numbers(getattr(axes, f"{axis}axis"))
        getattr(axes, f"set_{axis}lim")(0.6 * low, 1.8 * high)
    else:
        getattr(axes, f"set_{axis}lim")(0, 1.22 * high)


def pictures(item: Worth) -> list[Picture]:
    """Return all pictures of a comparison: time against cost first; quantities that no machine has are left out."""
    shown = [row for row in item.rows if any(value.value is not None for value in row.values)]
    return [front(item), *(bars(item, row) for row in shown)]


def page(items: Sequence[Worth], notes: Sequence[str]) -> str:
    """Return the comparison as one page that needs nothing else, with the policy and the style of the reports."""
    drawn = [(item, pictures(item)) for item in items]
    return markup.page("cost.html.j2", items=drawn, notes=notes, rows=rows, data_url=data_url)


# What the notebook shows, by `session`.


def asked(offers: Offers) -> dict[str, str]:
    """Return the parameters as they were understood."""
    given = [f"{usd:g}" for usd in offers.asked.plain] + [f"{name} {usd:g}" for name, usd in offers.asked.named.items()]
    runs, prices = ", ".join(offers.runs), ", ".join(given) or f"price sheet, {offers.asked.kind}"
    if offers.demo:
        runs, prices = "the demo runs of the kit", f"{prices}: assumed for the demo runs, no offer"
    deadline = "none" if offers.deadline_s is None else amount_text(offers.deadline_s, "s")
    return {"runs": runs, "USD per device hour": prices, "deadline": deadline}


def tables(offers: Offers) -> dict[str, list[dict[str, Any]]]:
    """Return the comparison of the first benchmark, and those of the others: machines in columns, the best marked."""
    others = [{"benchmark": item.benchmark} | row for item in offers.items[1:] for row in _table(item)]
    return {"comparison": _table(offers.items[0]), "other benchmarks": others}


def _table(item: Worth) -> list[dict[str, str]]:
    labels, written = [machine.label for machine in item.machines], dict[str, Sequence[str]]()
    for name, cells in rows(item):
        written[name] = [
            " ".join(filter(None, (words.value, f"({words.below})" * bool(words.below), words.mark))) for words in cells
        ]
    written |= {f"Differs: {difference.name}": difference.values for difference in item.differences}
    return [{"": name} | dict(zip(labels, cells, strict=True)) for name, cells in written.items()]


def figures(offers: Offers) -> dict[str, Callable[[], list[Picture]]]:
    """Return the pictures of the first benchmark."""
    return {"comparison": lambda: pictures(offers.items[0])}


def reading(offers: Offers) -> list[str]:
    """Return the answers to a buyer's questions and what limits them."""
    answers = [f"**{answer.question}** {answer.sentence}" for item in offers.items for answer in item.answers]
    return [*answers, *dict.fromkeys(words for item in offers.items for words in item.notes)]


def provenance(offers: Offers) -> list[dict[str, str]]:
    """Return the runs, machines and prices that the comparison rests on."""
    return [
        {
            "machine": machine.label,
            "benchmark": item.benchmark,
            "runs": ", ".join(machine.runs),
            "hardware": machine.hardware,
            "price from": machine.price_from,
            "read by": f"benchlib {benchlib.__version__}",
        }
        for item in offers.items
        for machine in item.machines
    ]
