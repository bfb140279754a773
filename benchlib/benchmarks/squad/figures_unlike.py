"""Pictures of unlike ranks: who worked and waited when, who got what, where the optimum lies, and when it moved."""

from collections.abc import Callable

import numpy as np
import pandas as pd

from benchlib.benchmarks.squad import shares
from benchlib.benchmarks.squad.shares import Rank, longest
from benchlib.core.text import seconds
from benchlib.results import frames
from benchlib.results.frames import Records
from benchlib.show.figures import DASHED, LIGHT, Picture, Theme, blank, finish, label_rows, leave_empty, note, styled

_NOTHING = "The ranks shared evenly: balance=auto plans."
SHOWN = 4  # steps after the even one in the timeline
MOST = 8  # ranks by rows or lines


def _steps(run: Records) -> pd.DataFrame:
    kinds = {"step": 0.0, "rank": 0.0, "own_s": 0.0, "expected_s": 0.0, "step_s": 0.0, "samples": 0.0}
    return frames.typed(run, "unlike_steps", kinds).query(f"rank < {MOST}")


@styled
def timeline(run: Records, theme: Theme = LIGHT) -> Picture:
    """The even step before the training and the last steps of it, rank by rank: own work, then exchange and waiting."""
    figure, axes = blank("unlike-timeline", theme)
    frame = _steps(run)
    if frame.empty:
        return leave_empty(figure, axes, theme, _NOTHING)
    numbers = sorted(frame["step"].unique())
    chosen = [step for step in numbers if step < 0] + [step for step in numbers if step >= 0][-SHOWN - 1 : -1]
    left = 0.0
    for step in chosen:
        part = frame[frame["step"] == step]
        length = float(part["step_s"].max())
        for row in part.itertuples():
            axes.barh(row.rank, length, left=left, height=0.6, color=theme.muted, alpha=0.25)
            axes.barh(row.rank, row.own_s, left=left, height=0.6, color=theme.series[0])
        axes.axvline(left, color=theme.card, linewidth=2)
        note(axes, "even" if step < 0 else f"step {step + 1:.0f}", (left + length / 2, -0.42), (0, 2), fontsize=8)
        left += length
    ranks = sorted(int(rank) for rank in frame["rank"].unique())
    label_rows(axes, [f"rank {rank}" for rank in ranks])
    axes.set_ylim(len(ranks) - 0.4, -0.95)
    busy = [frame[frame["step"] == step] for step in chosen]
    shares = [float((part["own_s"] / part["step_s"].max()).mean()) for part in busy]
    title = f"Ranks work {shares[-1]:.0%} of a step"
    title += f", with even shares {shares[0]:.0%}" if chosen[0] < 0 else ""
    alt = "Blue: own work. Grey: exchange and waiting for other ranks."
    return finish(figure, axes, theme, title, "seconds (grey: exchange and waiting)", "", alt)


@styled
def split(run: Records, theme: Theme = LIGHT) -> Picture:
    """Samples of a step by rank, of each plan."""
    figure, axes = blank("unlike-shares", theme)
    frame = frames.typed(run, "unlike_plans", {"from_step": 0.0, "shares": ""})
    if frame.empty:
        return leave_empty(figure, axes, theme, _NOTHING)
    counts = [[int(part) for part in text.split("+") if part.isdigit()][:MOST] for text in frame["shares"]]
    left = np.zeros(len(counts))
    for rank in range(len(counts[0])):
        own = np.array([shares[rank] for shares in counts], float)
        axes.barh(np.arange(len(counts)), own, left=left, height=0.62, color=theme.series[rank % len(theme.series)], alpha=0.85, label=f"rank {rank}")  # fmt: skip
        for row, value in enumerate(own):
            if value:
                axes.text(
                    left[row] + value / 2, row, f"{value:.0f}", ha="center", va="center", color=theme.card, fontsize=9
                )
        left += own
    label_rows(axes, ["first" if not step else f"from step\n{step + 1:.0f}" for step in frame["from_step"]])
    axes.legend(ncols=4, loc="upper left", bbox_to_anchor=(0, -0.18), handlelength=1)
    first, last = frame["shares"].iloc[0], frame["shares"].iloc[-1]
    title = f"The split is {last}" + (f", at first {first}" if len(frame) > 1 else "")
    return finish(figure, axes, theme, title, "samples of a global batch", "", f"{len(frame)} plans.")


@styled
def optimum(run: Records, theme: Theme = LIGHT) -> Picture:
    """Time of a step by the samples of the rank that gets most, the others at their best split; plan, even split, optimum."""
    figure, axes = blank("unlike-optimum", theme)
    ranks = _ranks(run)
    frame = _steps(run)
    if len(ranks) < 2 or frame.empty:
        return leave_empty(figure, axes, theme, _NOTHING)
    total = sum(rank.samples for rank in ranks)
    tokens = float(frames.typed(run, "unlike_ranks", {"tokens": 0.0})["tokens"].iloc[0])
    place = max(range(len(ranks)), key=lambda number: ranks[number].samples)
    one, others = ranks[place], ranks[:place] + ranks[place + 1 :]
    if not any(rank.most for rank in others):
        return leave_empty(figure, axes, theme, "One rank alone has memory for samples.")
    times = []
    for share in range(total + 1):
        rest = shares.optimum(others, total - share, tokens)
        times.append(longest([one, *others], [share, *rest], tokens))
    axes.plot(range(total + 1), times, color=theme.series[0])
    best = shares.optimum(ranks, total, tokens)[place]
    even = [total // len(ranks) + (number < total % len(ranks)) for number in range(len(ranks))]
    chosen_s, even_s = (longest(ranks, counts, tokens) for counts in ([rank.samples for rank in ranks], even))
    axes.plot(one.samples, chosen_s, "o", color=theme.series[1], markersize=7)
    note(axes, f"plan: {one.samples} samples, {seconds(chosen_s)}", (one.samples, chosen_s), (0, -9))
    axes.plot(even[place], even_s, "s", color=theme.muted, markersize=5)
    note(axes, f"even: {seconds(even_s)}", (even[place], even_s), (8, 4))
    axes.set_ylim(0, 1.15 * max(times))
    title = f"The best split gives rank {place} {best} of {total} samples"
    alt = f"Line: time of the slowest rank by the samples of rank {place}, from the speeds of the last plan."
    return finish(figure, axes, theme, title, f"samples of rank {place}", "own work of the slowest rank (s)", alt)


def _ranks(run: Records) -> list[Rank]:
    names = ("step_s", "batch_s", "sample_s", "token_s", "most", "samples")
    frame = frames.typed(run, "unlike_ranks", dict.fromkeys(names, 0.0)).dropna()
    return [
        Rank(device="", threads=1, precision="", **{name: row[name] for name in names[:4]}, most=int(row["most"]), samples=int(row["samples"]))
        for row in frame.to_dict("records")
    ]  # fmt: skip


@styled
def drift(run: Records, theme: Theme = LIGHT) -> Picture:
    """Measured over expected own work of each rank by step, and the steps from which a new plan holds."""
    figure, axes = blank("unlike-drift", theme)
    frame = _steps(run).query("step >= 0").copy()
    if frame.empty:
        return leave_empty(figure, axes, theme, _NOTHING)
    frame["ratio"] = frame["own_s"] / frame["expected_s"]
    for rank in sorted(frame["rank"].astype(int).unique()):
        line, colour = frame[frame["rank"] == rank], theme.series[rank % len(theme.series)]
        axes.plot(line["step"] + 1, line["ratio"], color=colour, label=f"rank {rank}", linewidth=1.4)
    plans = frames.typed(run, "unlike_plans", {"from_step": 0.0, "shares": ""}).iloc[1:]
    for step, text in zip(plans["from_step"], plans["shares"], strict=True):
        axes.axvline(step + 1, color=theme.text, linewidth=1, linestyle=DASHED)
        note(axes, text, (step + 1, 0.99), (4, 0), xycoords=("data", "axes fraction"), va="top", fontsize=8)
    axes.axhline(1, color=theme.muted, linewidth=1)
    axes.set_ylim(0, 1.15 * float(frame["ratio"].quantile(0.99)))
    axes.legend(ncols=4, loc="upper left", bbox_to_anchor=(0, -0.18), handlelength=1)
    count = len(plans)
    title = (
        f"The training planned again {count} time{'s' * (count != 1)}" if count else "No drift called for another plan"
    )
    alt = f"Lines: measured over expected own work. Dashed: new plans at steps {', '.join(f'{step + 1:.0f}' for step in plans['from_step']) or 'none'}."
    return finish(
        figure, axes, theme, title, "step (dashed: another split from here on)", "measured / expected own work", alt
    )


FIGURES: dict[str, Callable[..., Picture]] = {
    "unlike-timeline": timeline,
    "unlike-shares": split,
    "unlike-optimum": optimum,
    "unlike-drift": drift,
}
