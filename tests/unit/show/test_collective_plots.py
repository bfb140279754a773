"""Pictures and tables of collectives: what is drawn is what was recorded, and what is missing is said."""

import io
import math
import re
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from make_collectives import (
    ALPHA_US,
    BUS_GBPS,
    CLAIMED,
    MIB,
    RATIOS,
    SIZES,
    SOCKET_ALL,
    records,
    row,
    tables,
    time_us,
)
from PIL import Image

from benchlib.benchmarks.collectives import figures as collective_plots
from benchlib.benchmarks.collectives import figures as latency_plots
from benchlib.benchmarks.collectives import figures_ranks
from benchlib.benchmarks.collectives import tables as collective_series
from benchlib.benchmarks.collectives import tables as collective_tables
from benchlib.config.schema import build, save_config
from benchlib.core.errors import UserError
from benchlib.results.frames import row_dicts
from benchlib.results.run import Run, save_result
from benchlib.show import figures
from benchlib.show.figures import DARK, LIGHT, png
from benchlib.show.report import html

DRAWN = {
    "bandwidth": collective_plots.bandwidth,
    "rooted bandwidth": collective_plots.rooted_bandwidth,
    "shares": collective_plots.shares,
    "latency": latency_plots.latency,
    "small messages": latency_plots.small_messages,
    "fit": latency_plots.fit,
    "pairs": figures_ranks.heat_map,
    "crossover": figures_ranks.crossover,
    "overlap": figures_ranks.overlap,
    "last rank": figures_ranks.last_rank,
    "rounds": figures_ranks.rounds,
}
NEEDED = {
    "bandwidth": "No bandwidth between ranks", "rooted bandwidth": "No bandwidth between ranks", "shares": "beside a limit",
    "latency": "No time of a collective", "small messages": "No time of a collective", "fit": "were fitted",
    "pairs": "No pair of ranks", "crossover": "No algorithm", "overlap": "No exchange", "last rank": "several ranks",
    "rounds": "No times of each rank",
}  # fmt: skip


def names(axes):
    return [text.get_text() for text in axes.texts]


def line_of(axes, marker):
    return [line for line in axes.lines if line.get_marker() == marker]


def test_bandwidth_draws_every_operation_by_size_beside_its_limits():
    found = tables()  # of an older run: copies of all ranks together are no limit of one
    found["bounds"] += [
        {"bound": "memory copy", "bytes": size, "gbps": 80.0, "provenance": "measured"} for size in SIZES
    ]
    assert "memory copy" not in set(collective_series.shares(records(found))["bound"])
    axes = collective_plots.bandwidth(records(found)).axes[0]
    # Two ranks: the factor of the all-reduce is 1, so its bus bandwidth is S/t by hand.
    expected = [8e-3 * size / (60.0 + 8e-3 * size / 18.0) for size in SIZES]
    assert axes.lines[0].get_xdata() == pytest.approx(SIZES)
    assert axes.lines[0].get_ydata() == pytest.approx(expected)
    assert set(names(axes)) == {
        "all-reduce", "all-gather", "all-gather, direct", "reduce-scatter", "reduce-scatter, direct", "all-to-all",
        "TCP socket all ranks", "claimed link",
    }  # fmt: skip
    claimed = next(line for line in axes.lines if list(line.get_ydata()) == [CLAIMED, CLAIMED])
    assert tuple(claimed.get_xdata()) == pytest.approx(axes.get_xlim())
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert axes.get_xticklabels()[0].get_text() == "64 MiB"


def test_a_speed_of_wrong_results_is_called_so():
    found = tables()
    found["series"].append(row("all_gather", 4096, 2, dtype="int64", wrong_elements=2))
    found["wrong"] = [
        {"case": "all-gather int64", "wrong_elements": 2, "checked_elements": 1024, "first": "element 5 on rank 1"}
    ]
    figure = collective_plots.bandwidth(records(found))
    assert "all-gather, wrong" in names(figure.axes[0])
    assert "1 operation with wrong results" in figure.alt
    assert collective_tables.wrong_table(records(found)).loc["all-gather int64", "first"] == "element 5 on rank 1"
    assert "Wrong results" in collective_tables.report(records(found))


def test_operations_with_one_end_stand_beside_the_socket_one_way():
    axes = collective_plots.rooted_bandwidth(records()).axes[0]
    assert {"broadcast", "reduce", "gather", "scatter", "send/recv", "TCP socket one way"} < set(names(axes))
    assert "TCP socket all ranks" not in names(axes)


def test_results_of_nccl_tests_are_lines_of_their_own_and_called_claimed():
    found = tables()
    found["nccl_tests"] = [
        {"operation": "all_reduce", "placement": placement, "bytes": size, "ranks": 8, "time_us": 1.0, "algbw_gbps": 1.0,
         "busbw_gbps": rate, "wrong_elements": 0, "provenance": "claimed", "source": "a.txt"}
        for placement, rate in (("out of place", 3000.0), ("in place", 3200.0)) for size in (MIB, 256 * MIB)
    ]  # fmt: skip
    run = records(found)
    figure = collective_plots.bandwidth(run)
    (line,) = line_of(figure.axes[0], "x")
    assert list(line.get_ydata()) == [3200.0, 3200.0]
    assert "all-reduce\nnccl-tests (claimed)" in names(figure.axes[0])
    assert figure.axes[0].get_xlim()[1] > 256 * MIB
    table = collective_tables.others(run)
    here = 8e-3 * MIB / time_us("all_reduce", MIB, 2)
    assert table["here / claimed"].iloc[0] == f"{here / 3000:.3g}"
    assert (table["here"].iloc[1], table["ranks"].iloc[1]) == ("–", "8")


def test_shares_are_bars_with_their_targets():
    figure = collective_plots.shares(records())
    axes = figure.axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()][:3] == ["send/recv", "broadcast", "all-reduce"]
    widths = [bar.get_width() for bar in axes.patches]
    # All-reduce at 64 MiB: measured against 20 Gbps of the sockets at 64 MiB / (64 MiB + 64 KiB), and 100 of the claimed link.
    rate = 8e-3 * 64 * MIB / time_us("all_reduce", 64 * MIB, 2)
    reached = 64 * MIB / (64 * MIB + 65536)
    assert pytest.approx(rate / (SOCKET_ALL * reached)) in widths
    assert pytest.approx(rate / CLAIMED) in widths
    marks = [list(line.get_xdata()) for line in axes.lines]
    assert [0.8, 0.8] in marks
    assert [0.9, 0.9] in marks
    assert "2 of 2 targets met" in figure.alt


def test_a_share_above_one_is_marked_in_picture_and_table():
    found = tables()
    found["shares"] = [item for item in found["shares"] if "tcp" in item["bound"] and item["operation"] == "all_reduce"]
    found["bounds"] = []
    for share, told in ((6.2, "620% (no limit)"), (1.04, "104%")):
        found["shares"][0]["share"] = share
        run = records(found)
        picture = collective_plots.shares(run)
        assert told in [text.get_text() for text in picture.axes[0].texts]
        assert ("which is no limit here" in picture.alt) is (share > 1.05)
        assert collective_tables.shares_table(run).loc["all-reduce", "share (in turns: median of ratios)"] == told


def test_shares_of_claims_follow_where_only_sockets_were_measured_in_turns():
    found = tables()
    table = collective_series.shares(records(found))
    rate = 8e-3 * 64 * MIB / time_us("all_reduce", 64 * MIB, 2)
    share = {row["bound"]: row for row in row_dicts(table) if row["operation"] == "all_reduce"}
    assert share["claimed link"]["share"] == pytest.approx(rate / CLAIMED)
    assert math.isnan(share["claimed link"]["target"])
    assert set(share) == {"tcp socket all ranks", "claimed link"}
    # Where one operation has no series at its size, the bars of the claimed link are left out.
    found["shares"].append(found["shares"][0] | {"operation": "reduce", "bytes": 16 * MIB, "variant": "direct"})
    legend = collective_plots.shares(records(found)).legends[0]
    assert [text.get_text() for text in legend.get_texts()] == ["TCP socket", "target"]


def test_latency_keeps_to_small_messages_and_shows_the_barrier():
    axes = latency_plots.latency(records()).axes[0]
    assert max(axes.lines[0].get_xdata()) == MIB
    assert axes.lines[0].get_ydata()[0] == pytest.approx(time_us("all_reduce", 1024, 2))
    assert [90.0, 90.0] in [list(line.get_ydata()) for line in axes.lines]


def test_small_messages_are_ordered_and_reach_to_p99():
    axes = latency_plots.small_messages(records()).axes[0]
    dots = line_of(axes, "o")
    medians = [line.get_xdata()[0] for line in dots]
    assert medians == sorted(medians)
    assert medians[1] == pytest.approx(time_us("send_recv", 1024, 2))
    reach = axes.lines[3].get_xdata()
    assert reach[1] / reach[0] == pytest.approx(1.9)


def test_the_fit_is_the_line_of_its_formula_and_its_points_lie_on_it():
    figure = latency_plots.fit(records(ranks=4), operation="reduce_scatter")
    line, points = figure.axes[0].lines
    sizes = np.asarray(line.get_xdata(), dtype=float)
    alpha, rate = ALPHA_US["reduce_scatter"], BUS_GBPS["reduce_scatter"]
    assert line.get_ydata() == pytest.approx(alpha + sizes * 0.75 * 8 / (rate * 1e9) * 1e6)  # (n-1)/n = 3/4
    assert points.get_ydata() == pytest.approx([time_us("reduce_scatter", size, 4) for size in SIZES])
    assert names(figure.axes[0]).count("+0%") + names(figure.axes[0]).count("-0%") == len(SIZES)
    assert "55 µs to start, then 5 Gbps" in figure.alt


def test_pairs_are_a_matrix_with_numbers_and_its_slowest_pair():
    found = {"pairs": [{"source": s, "target": t, "bytes": MIB, "gbps": 10.0 * s + t + 1, "latency_us": 1.0}
                       for s in range(3) for t in range(3) if s != t]}  # fmt: skip
    figure = figures_ranks.heat_map(records(found, 3))
    grid = figure.axes[0].collections[0].get_array().reshape(3, 3)
    assert grid[2, 1] == 22
    assert np.ma.getmaskarray(grid).diagonal().all()
    assert sorted(names(figure.axes[0])) == sorted(["2.0", "3.0", "11.0", "13.0", "21.0", "22.0"])
    assert figure.axes[0].patches[0].get_xy() == (1, 0)  # from rank 0 to rank 1
    assert "Rank 0 to 1 is the slowest pair: 2 Gbps" in figure.alt


@pytest.mark.parametrize(("ranks", "numbers"), [(2, 2), (8, 56), (16, 240), (64, 0)])
def test_pairs_can_be_read_at_any_number_of_ranks(ranks, numbers):
    figure = figures_ranks.heat_map(records(tables(ranks), ranks))
    assert len(names(figure.axes[0])) == numbers
    assert len(figure.axes[0].get_xticks()) <= 16
    assert png(figure)


def test_algorithms_are_ratios_to_the_library_with_the_crossing_marked():
    figure = figures_ranks.crossover(records())
    axes = figure.axes[0]
    drawn = {tuple(round(value, 6) for value in line.get_ydata()) for line in line_of(axes, "o")}
    assert drawn == {RATIOS["ring"], RATIOS["tree"], RATIOS["rs_ag"]}
    assert {"4 MiB", "64 KiB"} <= set(names(axes))
    assert [4 * MIB, 4 * MIB] in [list(line.get_xdata()) for line in axes.lines]
    assert "Ring takes 0.75 × the library's time at 64 MiB" in figure.alt
    assert "reduce-scatter + all-gather: slower at every size" in figure.alt


def test_a_crossing_at_the_last_size_is_named_beside_its_line_and_not_on_the_names_of_the_lines():
    made = tables()
    for crossing in made["crossover"]:
        crossing["bytes"] = crossing["bytes"] and 60.4 * MIB
    figure = figures_ranks.crossover(records(made))
    figure.canvas.draw()
    boxes = [(text.get_text(), text.get_window_extent()) for text in figure.axes[0].texts]
    marked = [box for words, box in boxes if words == "60 MiB"]
    assert marked
    for box in marked:  # the names of the lines stand right of the axes
        assert box.x1 <= figure.axes[0].get_window_extent().x1
        assert not any(box.overlaps(other) for _, other in boxes if other is not box)


def test_the_axis_of_ratios_has_more_than_one_tick():
    made = tables()
    for series in made["series"]:  # every algorithm takes as long as the library
        series["median_us"] = 100.0
    axes = figures_ranks.crossover(records(made)).axes[0]
    assert len(axes.get_yticks()) >= 2


def test_overlap_shows_both_orders_and_what_is_hidden():
    figure = figures_ranks.overlap(records())
    bars = [bars[0] for bars in figure.axes[0].containers]  # computation, exchange, together
    assert [bar.get_width() for bar in bars] == pytest.approx([3.0, 1.0, 3.4])
    assert bars[1].get_x() == pytest.approx(3.0)
    assert figure.alt.startswith("60% of the all-reduce of 16 MiB is hidden")
    found = {
        "overlap": [
            {
                "operation": "all_reduce",
                "bytes": MIB,
                "alone_us": 5.0,
                "compute_us": 5.0,
                "together_us": 11.0,
                "hidden_share": -0.2,
            }
        ]
    }
    assert figures_ranks.overlap(records(found)).alt.startswith("Nothing of the all-reduce")
    found["overlap"][0] |= {"together_us": 1.0, "hidden_share": 1.8}
    assert figures_ranks.overlap(records(found)).alt.startswith("Exchange and computation, one after the other")


def test_the_rank_that_is_last_is_named_beside_the_even_share():
    figure = figures_ranks.last_rank(records(tables(4), 4))
    assert [bar.get_width() for bar in figure.axes[0].patches] == pytest.approx([10, 10, 10, 70])
    assert list(figure.axes[0].lines[0].get_xdata()) == [25, 25]
    assert "Rank 3 is the last in 70% of the rounds; an even share is 25%" in figure.alt
    many = figures_ranks.last_rank(records(tables(64), 64))
    assert len(many.axes[0].patches) == 16
    assert many.axes[0].get_yticklabels()[0].get_text() == "rank 63"


def test_rounds_are_the_percentiles_of_the_ledger(tmp_path):
    times = np.random.default_rng(7).uniform(1e-4, 2e-4, (50, 3))
    frame = pd.DataFrame({
        "operation": "all_reduce", "variant": "library", "dtype": "fp32", "reduction": "sum", "in_place": False, "bytes": 1024,
        "round": np.repeat(np.arange(50), 3), "rank": np.tile(np.arange(3), 50), "seconds": times.ravel(),
    })  # fmt: skip
    other = frame.assign(in_place=True, seconds=9.0)
    pd.concat([frame, other]).to_parquet(tmp_path / "ledger.parquet")
    run = records(ranks=3, path=tmp_path)
    found = collective_series.apart(run, "all_reduce").iloc[0]
    gaps = 1e6 * np.ptp(times, axis=1)
    for q in (5, 25, 50, 75, 95):
        assert found[f"p{q:02d}"] == pytest.approx(np.percentile(gaps, q))
    assert found["time_us"] == pytest.approx(1e6 * np.median(times.max(axis=1)))
    figure = figures_ranks.rounds(run)
    assert not figure.empty
    assert f"{100 * np.median(gaps) / found['time_us']:.0f}% of its time" in figure.alt
    (tmp_path / "ledger.parquet").write_bytes(b"PAR1 cut")
    assert figures_ranks.rounds(records(ranks=3, path=tmp_path)).empty


@pytest.mark.parametrize("name", DRAWN)
def test_a_picture_without_its_table_says_what_is_missing(name):
    figure = DRAWN[name](records({}), DARK)
    assert figure.empty
    assert NEEDED[name] in figure.alt
    assert png(figure)


class Damaged(SimpleNamespace):
    @property
    def result(self):
        raise UserError("result.json: cut")


@pytest.mark.parametrize("name", DRAWN)
@pytest.mark.parametrize("kind", ["one rank", "one size", "nulls", "foreign", "damaged"])
def test_every_run_of_collectives_can_be_drawn(name, kind):
    if kind == "one rank":
        run = records(tables(1), 1)
    elif kind == "one size":
        run = records(tables(2, SIZES[:1]))
    elif kind == "nulls":  # values that were not available
        found = tables(2)
        text = ("operation", "variant", "dtype", "reduction", "bound", "algorithm", "against", "bytes", "in_place")
        found = {
            key: [{column: value if column in text else None for column, value in item.items()} for item in rows]
            for key, rows in found.items()
        }
        run = records(found)
    elif kind == "foreign":
        run = records({key: [{"something": "else"}, {"bytes": "many", "gbps": math.pi}] for key in tables()})
    else:
        run = Damaged(events=[], samples={}, path=None)
    figure = DRAWN[name](run)
    assert figure.alt
    assert png(figure)
    if kind == "one rank":
        # What one rank does beside nobody takes time and has no bandwidth.
        assert figure.empty == (name not in ("latency", "small messages", "fit", "overlap"))


@pytest.mark.parametrize("view", collective_tables.TABLES.values(), ids=collective_tables.TABLES)
def test_every_table_can_be_made_of_any_run(view):
    for run in (records(), records({}), records(tables(1), 1), records({key: [{"something": 1}] for key in tables()})):
        assert len(view(run)) >= 1


def test_tables_say_what_was_verified_and_reached():
    found = tables(4)
    found["series"].append(row("all_reduce", 4096, 4, dtype="bf16", reduction="max", wrong_elements=3, in_place=True))
    run = records(found, 4)
    verified = collective_tables.verified(run).loc["all-reduce"]
    assert (verified["types"], verified["reductions"], verified["wrong"]) == ("fp32, bf16", "sum, max", "3")
    assert verified["variants"].startswith("library, ") and "reduce-scatter + all-gather" in verified["variants"]
    table = collective_tables.bandwidth(run)
    rate = 8e-3 * MIB * 1.5 / time_us("all_reduce", MIB, 4)
    assert table.loc["all-reduce", "1 MiB"] == f"{rate:.2f}"
    assert table.loc["claimed link", "64 MiB"] == "100.0"
    assert list(table.columns) == ["1 KiB", "32 KiB", "1 MiB", "16 MiB", "64 MiB"]
    assert collective_tables.times(run).loc["send/recv", "1 KiB"] == "20.4 µs"
    # What is beside the series (limits, turns, pairs) has a row of its own: the table adds up to the sentence.
    run.result.facts |= {"checked_elements": 2 * 10**9, "wrong_elements": 3}
    counts = [int(text.replace(",", "")) for text in collective_tables.verified(run)["elements compared"]]
    assert sum(counts) == 2 * 10**9
    assert set(collective_tables.report(run)) == set(collective_tables.TABLES) - {
        "Wrong results", "Results of nccl-tests beside it", "The same gradients over each library",
    }  # fmt: skip


def test_the_spread_of_times_is_shown_at_three_sizes():
    shown = collective_tables.spread(records())
    # 30 us + 8e-3 S / 22 us of S bytes: 411.3 us at 1 MiB; interval, p95 and p99 are 0.97, 1.03, 1.4 and 1.9 of it.
    times = shown.loc["broadcast"]
    assert list(times["size"]) == ["1 KiB", "1 MiB", "64 MiB"]
    assert list(times.iloc[1][1:6]) == ["200", "411 µs", "399 µs to 424 µs", "576 µs", "781 µs"]
    assert (times.iloc[1]["algbw"], times.iloc[1]["busbw"]) == ("20.40 Gbps", "20.40 Gbps")  # 2^20 * 8e-3 / 411.3
    barrier = shown.loc["barrier"]
    assert (barrier["size"], barrier["median"], barrier["busbw"]) == ("–", "90 µs", "–")


def test_a_line_that_misses_its_points_is_not_told():
    found = tables()
    found["fits"][0] |= {"alpha_us": None, "bandwidth_gbps": None, "residual": 0.7}
    table = collective_tables.fits(records(found))
    assert list(table.loc["all-reduce"])[:3] == ["not on a line", "not on a line", "70.0%"]
    assert table.loc["broadcast", "α"] == "30 µs"


def test_a_damaged_ledger_is_empty_and_other_errors_are_raised(tmp_path, monkeypatch):
    run = records(path=tmp_path)
    assert collective_series.ledger(run).empty
    (tmp_path / "ledger.parquet").write_bytes(b"PAR1 cut")
    assert collective_series.ledger(run).empty

    def broken(path):
        raise AttributeError("a mistake of the program")

    monkeypatch.setattr("pandas.read_parquet", broken)
    with pytest.raises(AttributeError):
        collective_series.ledger(run)


def test_the_headline_series_is_the_one_that_was_measured_first():
    found = {"series": [row("all_reduce", size, 2, dtype="bf16", in_place=True) for size in SIZES]
             + [row("all_reduce", size, 2) for size in SIZES]
             + [row("all_reduce", SIZES[0], 2, dtype="bf16", in_place=True, scale=5.0)]}  # fmt: skip
    main = collective_series.main(records(found))
    assert len(main) == len(SIZES)
    assert set(main["dtype"]) == {"bf16"}
    assert main["in_place"].all()
    assert main["median_us"].iloc[0] == time_us("all_reduce", SIZES[0], 2)


def test_names_of_lines_are_moved_apart_as_little_as_it_takes():
    assert figures.spread([0.1, 0.5, 0.9], [0.1] * 3) == pytest.approx([0.1, 0.5, 0.9])
    assert figures.spread([0.5, 0.5], [0.1, 0.1]) == pytest.approx([0.45, 0.55])
    assert figures.spread([0.5, 0.5], [0.1, 0.3]) == pytest.approx([0.4, 0.6])
    assert figures.spread([0.97, 1.0, 1.0], [0.1] * 3) == pytest.approx([0.8, 0.9, 1.0])
    assert figures.spread([], []) == []


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
@pytest.mark.parametrize("name", ["bandwidth", "rooted bandwidth", "latency", "crossover"])
def test_lines_keep_their_colours_in_the_small_palette(name, theme):
    figure = DRAWN[name](records(), theme)
    kept = np.asarray(Image.open(io.BytesIO(png(figure))).convert("RGB")).reshape(-1, 3).astype(int)
    drawn = np.asarray(figure.canvas.buffer_rgba())[..., :3].reshape(-1, 3)
    for colour in {theme.card, *(line.get_color() for line in figure.axes[0].lines)}:
        rgb = [int(colour[place : place + 2], 16) for place in (1, 3, 5)]
        assert (drawn == rgb).all(axis=1).any()
        assert abs(kept - rgb).max(axis=1).min() == 0, colour


def test_the_report_of_a_run_shows_views_and_pictures_and_stays_small(tmp_path):
    config = build("collectives", {"benchmark": "collectives", "tier": "smoke", "nproc": 4})
    save_config(config, tmp_path)
    save_result(tmp_path, records(tables(4), 4).result)
    page = html(Run(tmp_path))
    assert len(page.encode()) < 500_000
    drawn = set(re.findall(r'<figure id="([\w-]+)"', page))
    assert drawn == {
        "collective-bandwidth",
        "rooted-bandwidth",
        "limit-shares",
        "collective-latency",
        "pairs",
        "crossover",
        "overlap",
        "last-rank",
    }
    assert {"Verified", "Bus bandwidth by size", "Unsupported"} <= set(re.findall(r"<h2>([^<]+)</h2>", page))
    assert "slowest_rank" not in page  # the raw table of series is for programs
    assert "gloo has no average" in page
