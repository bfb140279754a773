"""Every picture of a spec draws a whole run, a broken one, one without rows and one of a single rank, and says what it shows."""

import hashlib
import math
import os
import subprocess
import sys
from dataclasses import replace

import matplotlib
import pytest
from make_smoke import unpack
from matplotlib import pyplot
from matplotlib.figure import Figure

from benchlib.benchmarks import BENCHMARKS
from benchlib.core.stats import summary
from benchlib.show import figures, light
from benchlib.spec import paint
from benchlib.spec.spec import Spec
from benchlib.spec.tables import Col, Rows, Table, cols

CHARTS = [(name, chart) for name, own in BENCHMARKS.items() if isinstance(own.spec, Spec) for chart in own.spec.charts]
NAMED = [f"{name} {chart.name}" for name, chart in CHARTS]


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    names = {name for name, _ in CHARTS}
    return {name: Rows.of(unpack(name, tmp_path_factory.mktemp("smoke") / name)) for name in names}


def broken(run):
    """Return the rows of a run with every second number gone or not finite."""

    def damage(row, place):
        faults, cells = (None, math.nan, math.inf, []), enumerate(row.items())
        wrong = {
            name: faults[(place + at) % 4]
            for at, (name, value) in cells
            if at % 2 and not isinstance(value, (str, dict, bool))
        }
        return {**row, **wrong}

    return replace(run, tables={name: list(map(damage, rows, range(len(rows)))) for name, rows in run.tables.items()})


@pytest.mark.parametrize(("name", "chart"), CHARTS, ids=NAMED)
def test_a_picture_has_its_numbers_in_its_alt_text_and_is_drawn_of_any_run(smoke, name, chart):
    picture = chart.draw(smoke[name])
    assert "damaged" not in picture.alt
    assert chart.frame(smoke[name]).empty == picture.empty
    if not picture.empty:
        assert any(sign.isdigit() for sign in picture.alt), picture.alt
        assert "nan" not in picture.alt and "None" not in picture.alt, picture.alt
    data = figures.png(picture)
    assert len(data) < 60_000
    assert data == figures.png(chart.draw(smoke[name])), "the same run gives the same bytes"
    empty = chart.draw(Rows(None, 1, {}))
    assert empty.empty and empty.alt.endswith(".")
    for run in (broken(smoke[name]), replace(smoke[name], world=1)):
        picture = chart.draw(run)
        assert picture.alt and figures.png(picture)
    assert pyplot.get_fignums() == []


@pytest.mark.parametrize(("low", "high"), [(120, 130), (110, 4600), (300, 980), (0.004, 1000)])
def test_a_logarithmic_axis_has_more_than_one_tick(low, high):
    figure = Figure()
    axes = figure.subplots()
    axes.plot([1, 2], [low, high])
    figures.log_values(axes)
    figure.canvas.draw()
    bottom, top = axes.get_ylim()
    inside = [tick for tick in axes.get_yticks() if bottom <= tick <= top]
    assert 2 <= len(inside) <= 10
    assert len({axes.yaxis.get_major_formatter()(tick, 0) for tick in inside}) == len(inside)


EXECUTORS = Table("executors", "{executor}", [Col("executor"), Col("wall_ms", "ms", "latency", samples=True)])
LATENCIES = [
    {"executor": "xla", "wall_ms": [1.0, 1.5, 1.25, 9.0, 1.75, 1.5]},
    {"executor": "eager", "wall_ms": [3.0, 2.5]},
]
MEASURED = Rows(None, 2, {"executors": LATENCIES})


def painted(drawing):
    """Return the axes that a drawing is painted on."""
    return figures.draw(drawing, "title").axes


def test_the_frame_of_a_picture_has_the_samples_of_the_run(tmp_path):
    run = unpack("squad", tmp_path / "run")
    frames = BENCHMARKS["squad"].spec.drawn_from()
    loss, times = frames["loss-curve"](run), frames["step-times"](run)
    assert loss["loss"].tolist() == run.samples["loss"]
    assert loss["step"].tolist() == list(range(1, len(loss) + 1))
    assert times["step (s)"].tolist() == run.row_samples["steps[0].step_s"]


def test_samples_are_ticks_on_a_bar_of_their_median_with_the_interval_of_the_kit():
    drawing = paint.bars(MEASURED, EXECUTORS["wall_ms"], least=True)
    (axes,) = painted(drawing)
    assert [text.get_text() for text in axes.get_yticklabels()] == ["xla", "eager"]
    assert [bar.get_width() for bar in axes.patches] == [1.5, 2.75]
    median, low, high = summary(LATENCIES[0]["wall_ms"])
    assert median == 1.5
    drawn, none = (line.get_xdata().tolist() for line in axes.lines)
    assert drawn == [low, high] and all(map(math.isnan, none)), "two samples have no interval"
    ticks = sorted(x for dots in axes.collections for x, _ in dots.get_offsets())
    assert ticks == sorted(LATENCIES[0]["wall_ms"] + LATENCIES[1]["wall_ms"])
    assert "1 more beyond" in axes.get_xlabel() and axes.get_xlim()[1] < 9.0


def test_a_cumulative_curve_steps_up_at_each_sample():
    (axes,) = painted(paint.cumulative(MEASURED, EXECUTORS["wall_ms"]))
    assert len(axes.lines) == 2
    for row in LATENCIES:
        samples = sorted(row["wall_ms"])
        line = next(line for line in axes.lines if line.get_xdata()[-1] == pytest.approx(samples[-1]))
        assert sorted(set(line.get_xdata()[1:])) == pytest.approx(sorted(set(samples)))
        for x, y in list(zip(*line.get_data(), strict=True))[1:]:
            below = sum(sample < 1.001 * x for sample in samples) / len(samples)
            assert y <= below + 1e-9 and y > sum(sample < 0.999 * x for sample in samples) / len(samples)
        assert line.get_ydata()[-1] == 1.0


def test_a_field_of_a_heat_map_has_its_number():
    pairs = Table("pairs", "{source} to {target}", [*cols("source target", "number"), Col("gbps", "Gbps", "bandwidth")])
    rows = [{"source": 0, "target": 1, "gbps": 16.94}, {"source": 1, "target": 0, "gbps": 7.0}]
    axes, _ = painted(paint.grid(Rows(None, 2, {"pairs": rows}), pairs["gbps"], x="target", y="source"))
    assert {text.get_position(): text.get_text() for text in axes.texts} == {(1.5, 0.5): "16.9", (0.5, 1.5): "7"}


def test_drawing_leaves_nothing_changed_and_gives_the_same_bytes_in_another_process(smoke, tmp_path):
    """Also if that process belongs to a user with looks of another kind."""
    (tmp_path / "matplotlibrc").write_text("axes.facecolor: pink\nfont.size: 30\n")
    before, backend = dict(matplotlib.rcParams), matplotlib.get_backend()
    chart = next(chart for name, chart in CHARTS if chart.name == "limit-shares")
    digest = hashlib.sha256(figures.png(chart.draw(smoke["collectives"]))).hexdigest()
    assert dict(matplotlib.rcParams) == before
    assert matplotlib.get_backend() == backend and pyplot.get_fignums() == []
    code = """
import hashlib, sys, tempfile
from pathlib import Path
from make_smoke import unpack
from benchlib.benchmarks import BENCHMARKS
from benchlib.show import figures
run = unpack("collectives", Path(tempfile.mkdtemp()) / "collectives")
print(hashlib.sha256(figures.png(BENCHMARKS["collectives"].spec.figures()["limit-shares"](run))).hexdigest())
print(sorted({"scipy.stats", "scipy.cluster"} & set(sys.modules)))
"""
    paths = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": paths, "MATPLOTLIBRC": str(tmp_path / "matplotlibrc")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split("\n")[:2] == [digest, "[]"]


def test_seaborn_still_estimates_densities_and_clusters(smoke):
    axes = Figure().subplots()
    light.seaborn.kdeplot([1.0, 2.0, 4.0], cumulative=True, ax=axes)
    assert axes.lines[0].get_ydata()[-1] == pytest.approx(1.0, abs=0.01)
    assert light.seaborn.matrix.hierarchy.linkage([[0.0], [1.0], [5.0]]).shape == (2, 4)
