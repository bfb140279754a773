"""What people see of a comparison by price: the words of its table, its picture, its page, and what its notebook shows."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

import benchlib
from benchlib.core.text import quantity
from benchlib.judge.cost import Offers, Worth, amount_text, interval_text, judge_worth
from benchlib.show import figures, markup
from benchlib.show.notebook import Shown

BEST = figures.SERIES[2]
MAX_LABEL = 26  # characters of a machine's label in a picture
TIME_UNITS = ((3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"))


class Cell(NamedTuple):
    """A machine in a row as words: the sign of the best, the value, and its interval."""

    mark: str
    value: str
    below: str


def rows(item: Worth) -> list[tuple[str, list[Cell]]]:
    """Return each row of the comparison: what it is, with its unit (times carry theirs themselves), and a cell a machine."""
    machines = item["machines"]
    prices = [Cell("", quantity(machine["usd_per_device_hour"]), machine["price_from"]) for machine in machines]
    devices = [Cell("", str(machine["devices"]), machine["device"]) for machine in machines]
    written = [("Price (USD per device hour)", prices), ("Devices", devices)]
    for row in item["rows"]:
        named = row["unit"] == "s" or row["unit"].endswith("/s")
        label = row["label"] if named else f"{row['label']} ({row['unit']})"
        written.append((label, [cell(row, index) for index in range(len(machines))]))
    return written


def cell(row: Mapping[str, Any], index: int) -> Cell:
    """Write a machine in a row: ✓ is the best, ≈ the best by its value in an open order. Only times carry their unit."""
    (value, low, high), unit = row["values"][index].values(), "s" if row["unit"] == "s" else ""
    if value is None:
        return Cell("", "–", "not available")
    mark = "" if index != row["best"] else "✓" if row["certain"] else "≈"
    return Cell(mark, amount_text(value, unit), "" if low is None else interval_text(low, high, unit))


def _short(label: str) -> str:
    """Cut a label in its middle: names of runs of one day differ at their ends."""
    half = (MAX_LABEL - 1) // 2
    return label if len(label) <= MAX_LABEL else f"{label[: MAX_LABEL - 1 - half]}…{label[-half:]}"


def _reach(estimate: Mapping[str, float | None], scale: float = 1.0) -> Any:
    """Return how far the interval reaches below and above a value, of shape (2, 1); 0 where there is none."""
    ends = np.array([[estimate[end]] for end in ("low", "value", "high")], float) / scale
    return np.nan_to_num(np.diff(ends, axis=0))


def front(item: Worth) -> figures.Picture:
    """Time against cost: the machines that nothing beats, joined by the Pareto front, and those that something does."""
    longest = max(time["value"] for time in item["seconds"])
    scale, unit = next((unit for unit in TIME_UNITS if longest >= unit[0]), TIME_UNITS[-1])
    x, machines = f"time of {item['amount']} ({unit})", [machine["label"] for machine in item["machines"]]
    pairs = list(zip(item["seconds"], item["usd"], strict=True))
    frame = pd.DataFrame([(time["value"] / scale, usd["value"]) for time, usd in pairs], machines, [x, "USD"])
    frame["on the front"] = frame.index.isin(item["front"])

    def paint(axes: Axes, frame: pd.DataFrame) -> None:
        colours = frame["on the front"].map({True: BEST, False: figures.MUTED})
        for (label, place), (time, usd), colour in zip(frame.iterrows(), pairs, colours, strict=True):
            looks: Any = {"fmt": "o", "color": colour, "elinewidth": 1, "capsize": 2.5, "markersize": 7}
            point, *_ = axes.errorbar(place[x], place["USD"], xerr=_reach(time, scale), yerr=_reach(usd), **looks)
            point.set_label(_short(str(label)))
        best = frame[frame["on the front"]].sort_values([x, "USD"])
        axes.step(best[x], best["USD"], where="post", color=BEST, linewidth=1.2, linestyle=figures.DASHED)
        axes.set(xscale="log", yscale="log", xlim=_room(frame[x]), ylim=_room(frame["USD"]))
        figures.plain_numbers(axes.xaxis)
        figures.plain_numbers(axes.yaxis)
        axes.grid(visible=True, axis="both")
        figures.name_ends(axes)

    words = [
        f"{label} {amount_text(time['value'], 's')}, {amount_text(usd['value'], 'USD')}"
        + ", on the front" * (label in item["front"])
        for label, (time, usd) in zip(machines, pairs, strict=True)
    ]
    drawing = figures.Drawing(frame, paint, x=x, y="USD", alt="; ".join(words))
    return figures.draw(drawing, f"Time and cost of {item['amount']}")


def _room(values: "pd.Series[float]") -> tuple[float, float]:
    return 0.5 * min(values), 2 * max(values)


def page(items: Sequence[Worth], notes: Sequence[str]) -> str:
    pictures = [(item, front(item)) for item in items]
    return markup.page("cost.html.j2", rows=rows, data_url=figures.data_url, items=pictures, notes=notes)


def shown(offers: Offers) -> Shown:
    """Return what the notebook shows."""
    others = [{"benchmark": item["benchmark"]} | row for item in offers.items[1:] for row in _table(item)]
    tables = {"comparison": _table(offers.items[0]), "other benchmarks": others}
    answers = [f"**{answer['question']}** {answer['sentence']}" for item in offers.items for answer in item["answers"]]
    origins = [
        {
            "machine": machine["label"],
            "benchmark": item["benchmark"],
            "runs": ", ".join(machine["runs"]),
            "hardware": machine["hardware"],
            "price from": machine["price_from"],
            "read by": f"benchlib {benchlib.__version__}",
        }
        for item in offers.items
        for machine in item["machines"]
    ]
    return Shown(
        asked=offers.asked,
        tables=tables,
        figures={"time and cost": lambda: [front(offers.items[0])]},
        reading=[*answers, *dict.fromkeys(words for item in offers.items for words in item["notes"])],
        provenance=origins,
        judge=lambda: judge_worth(offers.items),
        about=[
            "What the machines are worth",
            *dict.fromkeys(f"{item['benchmark']}, {item['tier']}" for item in offers.items),
        ],
    )


def _table(item: Worth) -> list[dict[str, str]]:
    labels, written = [machine["label"] for machine in item["machines"]], list[tuple[str, Sequence[str]]]()
    for name, cells in rows(item):
        parts = [(words.value, f"({words.below})" * bool(words.below), words.mark) for words in cells]
        written.append((name, [" ".join(filter(None, words)) for words in parts]))
    written += [(f"Differs: {name}", values) for name, values in item["differences"].items()]
    return [{"": name} | dict(zip(labels, cells, strict=True)) for name, cells in written]
