"""Pictures of how collectives are made: algorithms of the kit beside the library's, and exchange beside computation."""

from benchlib import collective_series as series
from benchlib.byte_axis import End, name_ends, size_axis
from benchlib.collective_series import VARIANTS, words
from benchlib.collectives.sizes import size_text
from benchlib.curves import Records
from benchlib.labels import seconds
from benchlib.picture import LIGHT, Picture, Theme, blank, finish, leave_empty

MOST_ROWS = 6
STEPS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)


def crossover(run: Records, theme: Theme = LIGHT) -> Picture:
    """Time of each algorithm's all-reduce over the library's by size; below 1 it is faster, and where it crosses is marked."""
    figure, axes = blank("crossover", theme, of_many=True)
    found = series.ratios(run)
    if not found:
        return leave_empty(figure, axes, theme, "No algorithm was timed beside the library's all-reduce.")
    size_axis(axes, [size for frame in found.values() for size in frame["bytes"]])
    axes.set_yscale("log")
    axes.axhline(1, color=theme.text, linewidth=1.4)
    ends = [End(axes.get_xlim()[1], 1.0, "library", theme.text)]
    for number, (name, frame) in enumerate(found.items()):
        colour = theme.series[number]
        axes.plot(frame["bytes"], frame["ratio"], color=colour, linewidth=1.8, marker="o", markersize=4)
        ends.append(
            End(
                float(frame["bytes"].iloc[-1]),
                float(frame["ratio"].iloc[-1]),
                VARIANTS[name].replace(" + ", "\n+ "),
                colour,
            )
        )
    values = [value for frame in found.values() for value in frame["ratio"]]
    low, high = min([*values, 0.8]) / 1.25, max([*values, 1.25]) * 1.25
    axes.set_ylim(low, high)
    kept = [step for step in STEPS if low <= step <= high]
    axes.set_yticks(kept, [f"{step:g} ×" for step in kept])
    axes.minorticks_off()
    crossings = series.table(run, "crossover").query("against == 'library'")
    crossings = crossings[crossings["algorithm"].isin(list(found))]
    told: list[str] = []
    for number, name in enumerate(found):
        for size in crossings.loc[crossings["algorithm"] == name, "bytes"].dropna():
            if not axes.get_xlim()[0] <= size <= axes.get_xlim()[1]:
                continue
            axes.axvline(size, color=theme.series[number], linewidth=1, linestyle=(0, (2, 2)))
            axes.annotate(_about(size), (size, 0.02 + 0.07 * number), (3, 0), xycoords=("data", "axes fraction"), textcoords="offset points",
                          color=theme.series[number], fontsize=8)  # fmt: skip
            told.append(f"the {VARIANTS[name]} crosses the library at {_about(size)}")
    name_ends(axes, theme, ends)
    reasons = [f"{VARIANTS[row['algorithm']]}: {row['reason']}" for row in series.rows(crossings) if row["reason"]]
    name, best = min(
        ((name, row) for name, frame in found.items() for row in series.rows(frame)), key=lambda item: item[1]["ratio"]
    )
    if best["ratio"] < 1:
        title = f"{_upper(VARIANTS[name])} takes {best['ratio']:.2f} × the library's time at {size_text(best['bytes'])}"
    else:
        title = f"The library is fastest at every size; {VARIANTS[name]} comes nearest ({best['ratio']:.2f} ×)"
    alt = "; ".join([*told, *reasons]) or "No crossing was found"
    return finish(
        figure, axes, theme, title, "bytes of the all-reduce", "time / time of the library", f"{_upper(alt)}."
    )


def _about(size: float) -> str:
    """Write a size that lies between two measured ones with two digits: the rest is not known."""
    number, unit = size_text(size).split()
    return f"{float(number):.0f} {unit}" if float(number) >= 10 else f"{float(number):.2g} {unit}"


def overlap(run: Records, theme: Theme = LIGHT) -> Picture:
    """Exchange and computation one after the other and together: what is hidden is time that training does not wait for."""
    figure, axes = blank("overlap", theme, of_many=True)
    frame = series.table(run, "overlap").dropna(subset=["alone_us", "compute_us", "together_us"])
    if frame.empty:
        return leave_empty(figure, axes, theme, "No exchange was timed beside a computation.")
    items = series.rows(frame.sort_values(["operation", "bytes"]).tail(MOST_ROWS))
    longest = max(max(item["alone_us"] + item["compute_us"], item["together_us"]) for item in items)
    scale, unit = (1e-6, "s") if longest >= 1e6 else (1e-3, "ms") if longest >= 1e3 else (1.0, "µs")
    for row, item in enumerate(items):
        first = row == 0
        axes.barh(
            row - 0.2,
            item["compute_us"] * scale,
            height=0.34,
            color=theme.muted,
            alpha=0.6,
            label="computation" if first else None,
        )
        axes.barh(row - 0.2, item["alone_us"] * scale, left=item["compute_us"] * scale, height=0.34, color=theme.series[1],
                  label="exchange" if first else None)  # fmt: skip
        axes.barh(
            row + 0.2,
            item["together_us"] * scale,
            height=0.34,
            color=theme.series[0],
            label="together" if first else None,
        )
        for place, value in ((row - 0.2, item["compute_us"] + item["alone_us"]), (row + 0.2, item["together_us"])):
            axes.annotate(seconds(1e-6 * value), (value * scale, place), (3, 0), textcoords="offset points", va="center",
                          color=theme.text, fontsize=8.5)  # fmt: skip
    names = [f"{words(item['operation'])}\n{size_text(item['bytes'])}" for item in items]
    axes.set_yticks(range(len(items)), names)
    axes.set_ylim(len(items) - 0.45, -0.55)
    axes.set_xlim(0, 1.18 * longest * scale)
    axes.grid(False)
    axes.grid(axis="x", color=theme.grid, linewidth=0.8)
    figure.legend(*axes.get_legend_handles_labels(), frameon=False, fontsize=9, labelcolor=theme.text, ncols=3,
                  loc="outside lower center", handlelength=1)  # fmt: skip
    known = [item for item in items if item["hidden_share"] == item["hidden_share"]]
    if not known:
        title = "Exchange and computation, one after the other and together"
    else:
        best = max(known, key=lambda item: item["hidden_share"])
        hidden = f"{100 * best['hidden_share']:.0f} %" if best["hidden_share"] > 0 else "Nothing"
        title = f"{hidden} of the {words(best['operation'])} of {size_text(best['bytes'])} is hidden"
    told = "; ".join(
        f"{words(item['operation'])} of {size_text(item['bytes'])}: computation {seconds(1e-6 * item['compute_us'])}, "
        f"exchange {seconds(1e-6 * item['alone_us'])}, together {seconds(1e-6 * item['together_us'])}"
        for item in items
    )
    return finish(figure, axes, theme, title, f"time ({unit}), medians", "", f"{told}.", 46)


def _upper(text: str) -> str:
    return text[:1].upper() + text[1:]
