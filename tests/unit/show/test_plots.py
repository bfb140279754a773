"""Pictures: axes with ticks, no trace in pyplot, and an alt text."""

import pytest
from make_run import make_run

from benchlib.benchmarks import BENCHMARKS
from benchlib.results.run import Run
from benchlib.show import figures
from tests.fixtures.make_smoke import unpack

FIGURES = {
    f"{benchmark.name} {name}": draw
    for benchmark in BENCHMARKS.values()
    for name, draw in benchmark.spec.figures().items()
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


def test_shown_picture_carries_its_alt_text(tmp_path, monkeypatch):
    import IPython.display

    calls = []
    monkeypatch.setattr(IPython.display, "display", lambda data, **more: calls.append((data, more)))
    figures.show(BENCHMARKS["squad"].spec.figures()["loss-curve"](unpack("squad", tmp_path / "run")))
    data, more = calls[0]
    assert data["text/plain"].startswith("The smoothed loss goes from")
    assert more["metadata"]["image/png"]["alt"] == data["text/plain"]
