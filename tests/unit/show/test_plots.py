"""Pictures: what is drawn is what was recorded, the bytes do not change, and colours can be told apart and read."""

import numpy as np
import pytest
from make_run import make_run
from pages import contrast

from benchlib.benchmarks import BENCHMARKS
from benchlib.results.run import Run
from benchlib.show import figures
from tests.fixtures.make_smoke import unpack

FIGURES = {
    f"{benchmark.name} {name}": draw
    for benchmark in BENCHMARKS.values()
    for name, draw in benchmark.spec.figures(True).items()
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return Run(make_run(tmp_path_factory.mktemp("runs") / "run", steps=50))


@pytest.mark.parametrize(("low", "high"), [(120, 130), (110, 4600), (300, 980), (0.004, 1000)])
def test_a_logarithmic_axis_has_more_than_one_tick(low, high):
    figure, axes = figures.blank("x", figures.PALETTE)
    axes.plot([1, 2], [low, high])
    figures.log_values(axes)
    figure.canvas.draw()
    bottom, top = axes.get_ylim()
    inside = [tick for tick in axes.get_yticks() if bottom <= tick <= top]
    assert 2 <= len(inside) <= 10
    assert len({axes.yaxis.get_major_formatter()(tick, 0) for tick in inside}) == len(inside)


def test_pictures_leave_pyplot_alone(run):
    import matplotlib
    from matplotlib import pyplot

    before = dict(matplotlib.rcParams)
    for draw in FIGURES.values():
        if not (figure := draw(run)).empty:
            figure.canvas.draw()
    assert pyplot.get_fignums() == []
    assert dict(matplotlib.rcParams) == before


CARD = {"light": "#ffffff", "dark": "#171c24"}  # behind a picture in a page


def on_a_dark_page(colour):
    """What style.css makes of a colour: invert(1) and hue-rotate(180deg) by the matrix of the CSS filters, then screen."""
    rotate = np.array([[0.213, 0.715, 0.072]] * 3) * 2 - np.eye(3)
    values = np.clip(rotate @ [255 - int(colour[place : place + 2], 16) for place in (1, 3, 5)], 0, 255)
    card = np.array([int(CARD["dark"][place : place + 2], 16) for place in (1, 3, 5)])
    return "#" + "".join(f"{round(value):02x}" for value in 255 - (255 - values) * (255 - card) / 255)


@pytest.mark.parametrize("page", CARD)
def test_colours_of_pictures_have_enough_contrast_on_light_and_dark_pages(page):
    seen = on_a_dark_page if page == "dark" else str
    assert seen(figures.PALETTE.card) == CARD[page], "the paper is that of the card"
    assert contrast(seen(figures.PALETTE.text), CARD[page]) >= 7
    assert contrast(seen(figures.PALETTE.muted), CARD[page]) >= 4.5
    assert min(contrast(seen(colour), CARD[page]) for colour in figures.PALETTE.series) >= 3


def test_shown_picture_carries_its_alt_text(tmp_path, monkeypatch):
    import IPython.display

    calls = []
    monkeypatch.setattr(IPython.display, "display", lambda data, **more: calls.append((data, more)))
    figures.show(BENCHMARKS["squad"].spec.figures()["loss-curve"](unpack("squad", tmp_path / "run")))
    data, more = calls[0]
    assert data["text/plain"].startswith("The smoothed loss goes from")
    assert more["metadata"]["image/png"]["alt"] == data["text/plain"]
