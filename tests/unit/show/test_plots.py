"""Pictures: axes with ticks, and an alt text."""

import pytest

from benchlib.benchmarks import BENCHMARKS
from benchlib.show import figures
from tests.fixtures.make_smoke import unpack


@pytest.mark.parametrize(("low", "high"), [(120, 130), (110, 4600), (300, 980), (0.004, 1000)])
def test_a_logarithmic_axis_has_more_than_one_tick(low, high):
    figure, axes = figures.blank()
    axes.plot([1, 2], [low, high])
    figures.log_values(axes)
    figure.canvas.draw()
    bottom, top = axes.get_ylim()
    inside = [tick for tick in axes.get_yticks() if bottom <= tick <= top]
    assert 2 <= len(inside) <= 10
    assert len({axes.yaxis.get_major_formatter()(tick, 0) for tick in inside}) == len(inside)


def test_shown_picture_carries_its_alt_text(tmp_path, monkeypatch):
    import IPython.display

    calls = []
    monkeypatch.setattr(IPython.display, "display", lambda data, **more: calls.append((data, more)))
    figures.show(BENCHMARKS["squad"].spec.figures()["loss-curve"](unpack("squad", tmp_path / "run")))
    data, more = calls[0]
    assert data["text/plain"].startswith("The smoothed loss goes from")
    assert more["metadata"]["image/png"]["alt"] == data["text/plain"]
