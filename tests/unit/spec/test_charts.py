"""Every picture of a spec draws a whole run, a broken one, one without rows and one of a single rank, and says what it shows."""

import math
from dataclasses import replace

import pytest
from make_smoke import unpack
from matplotlib.figure import Figure

from benchlib.benchmarks import BENCHMARKS
from benchlib.show import figures
from benchlib.spec.spec import Spec
from benchlib.spec.tables import Rows

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
