"""What people see of a comparison by price: the words of its table, its pictures, its page, and what its notebook shows."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from matplotlib.axes import Axes

import benchlib
from benchlib.core.text import quantity
from benchlib.judge.cost import Estimate, Offers, Row, Worth, amount_text
from benchlib.show import markup
from benchlib.show.figures import (
    DARK,
    DASHED,
    LIGHT,
    WIDTH_IN,
    End,
    Picture,
    Theme,
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
    prices = [Cell("", quantity(machine.price.usd_per_device_hour), machine.price.origin) for machine in machines]
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


def _errors(values: Sequence[Estimate]) -> tuple[list[float], list[float]]:
    """Return how far the intervals reach below and above the values; 0 where there is none."""
    ends = [(item.value or 0.0, item.low, item.high) for item in values]
    below = [0.0 if low is None else middle - low for middle, low, _ in ends]
    return below, [0.0 if high is None else high - middle for middle, _, high in ends]


@styled
def bars(item: Worth, row: Row, theme: Theme = LIGHT) -> Picture:
    """A quantity of all machines as bars with their intervals, the best one in green where the order is certain.

    Beside break-even prices stand those that are paid.
    """
    figure, axes = blank(row.name, theme, of_many=True)
    cells, places = [cell(row, index) for index in range(len(row.values))], range(len(row.values))
    figure.set_size_inches(WIDTH_IN, 1.15 + 0.42 * len(cells))
    values = [value.value or 0.0 for value in row.values]
    colours = [theme.series[2 if words.mark == "✓" else 0] for words in cells]
    axes.barh(places, values, height=0.55, color=colours, alpha=0.85)
    looks: Any = {"fmt": "none", "ecolor": theme.text, "elinewidth": 1.1, "capsize": 3}
    reach = REACH * max(values)
    below, above = _errors(row.values)
    above = [min(error, reach - value) for error, value in zip(above, values, strict=True)]
    axes.errorbar(values, places, xerr=(below, above), **looks)
    ends = [value + error for value, error in zip(values, above, strict=True)]
    if row.name == "break_even":
        prices = [machine.price.usd_per_device_hour for machine in item.machines]
        axes.plot(prices, places, "D", color=theme.series[1], markersize=6, label="price")
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0.2)
        ends = [max(end, price) for end, price in zip(ends, prices, strict=True)]
    label_rows(axes, [_short(machine.label) for machine in item.machines])
    for place, (end, words, item_value) in enumerate(zip(ends, cells, row.values, strict=True)):
        written = "not available" if words.value == "–" else f"{words.value} {words.mark}".strip()
        if row.name == "break_even":
            price = quantity(item.machines[place].price.usd_per_device_hour)
            written = f"{price} → {words.value}" if words.below != "the cheapest" else words.below
        cut = (item_value.high or 0.0) > reach
        note(axes, f"→ {written}" if cut else written, (end, place), (9, 0), fontsize=8.5)
    axes.set_xlim(0, 1.4 * max(ends))
    axes.locator_params(axis="x", nbins=5)
    axes.set_xlabel(row.unit + ("" if row.direction == "none" else f", {row.direction} is better"))
    ends_of = [f" ({words.below})" if words.below else "" for words in cells]
    alt = [f"{item.machines[place].label} {cells[place].value}{ends_of[place]}" for place in places]
    return head(figure, theme, row_text(row), "; ".join(alt))


@styled
def front(item: Worth, theme: Theme = LIGHT) -> Picture:
    """Time against cost: the machines that nothing beats, joined by the Pareto front, and those that something does."""
    figure, axes = blank("front", theme, of_many=True)
    longest = max(time.value or 0.0 for time in item.seconds)
    scale, unit = next((unit for unit in TIME_UNITS if longest >= unit[0]), TIME_UNITS[-1])
    ends, words = list[End](), list[str]()
    for place, (time, usd) in enumerate(zip(item.seconds, item.usd, strict=True)):
        x, y, label, on_front = (
            (time.value or 0.0) / scale,
            usd.value or 0.0,
            item.machines[place].label,
            place in item.front,
        )
        colour = theme.series[2] if on_front else theme.muted
        looks: Any = {"fmt": "o", "color": colour, "elinewidth": 1, "capsize": 2.5, "markersize": 7}
        wide = [[part / scale for part in side] for side in _errors([time])]
        axes.errorbar(x, y, xerr=wide, yerr=_errors([usd]), **looks)
        ends.append(End(x, y, _short(label), colour))
        amounts = f"{label} {amount_text(time.value or 0.0, 's')}, {amount_text(y, 'USD')}"
        words.append(amounts + ", on the front" * on_front)
    best = sorted((ends[place].x, ends[place].y) for place in item.front)
    if len(best) > 1:
        axes.step(*zip(*best, strict=True), where="post", color=theme.series[2], linewidth=1.2, linestyle=DASHED)
    _scale(axes, "x", item.seconds, scale)
    _scale(axes, "y", item.usd, 1.0)
    axes.grid(visible=True, axis="both")
    name_ends(axes, theme, ends)
    title = f"Time and cost of {item.amount}"
    return finish(figure, axes, theme, title, f"time of {item.amount} ({unit})", "USD", "; ".join(words))


def _scale(axes: Axes, axis: str, values: Sequence[Estimate], scale: float) -> None:
    """Let an axis begin at zero, or make it logarithmic where the values lie far apart, with room for the names."""
    highs = [max(value.value or 0.0, value.high or 0.0) / scale for value in values]
    lows = [(value.low or value.value or 0.0) / scale for value in values]
    if max(highs) > WIDE * min(lows):
        getattr(axes, f"set_{axis}scale")("log")
        plain_numbers(getattr(axes, f"{axis}axis"))
        getattr(axes, f"set_{axis}lim")(0.6 * min(lows), 1.8 * max(highs))
    else:
        getattr(axes, f"set_{axis}lim")(0, 1.22 * max(highs))


def pictures(item: Worth, theme: Theme = LIGHT) -> list[Picture]:
    """Return all pictures of a comparison: time against cost first; quantities that no machine has are left out."""
    shown = [row for row in item.rows if any(value.value is not None for value in row.values)]
    return [front(item, theme), *(bars(item, row, theme) for row in shown)]


def page(items: Sequence[Worth], notes: Sequence[str]) -> str:
    """Return the comparison as one page that needs nothing else, with the policy and the style of the reports."""
    drawn = [
        [
            {"alt": light.alt, "light": data_url(light), "dark": data_url(dark)}
            for light, dark in zip(pictures(item, LIGHT), pictures(item, DARK), strict=True)
        ]
        for item in items
    ]
    pairs = list(zip(items, drawn, strict=True))
    return markup.page("cost.html.j2", items=pairs, notes=notes, rows=rows)


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
    written |= {f"Differs: {name}": values for name, values in item.differences.items()}
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
            "runs": ", ".join(run.run for run in machine.runs.runs),
            "hardware": machine.hardware,
            "price from": machine.price.origin,
            "read by": f"benchlib {benchlib.__version__}",
        }
        for item in offers.items
        for machine in item.machines
    ]
