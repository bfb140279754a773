"""Pictures: what is drawn is what was recorded, the bytes do not change, and colours can be told apart and read."""

import io
import json

import numpy as np
import pytest
from make_run import make_run
from pages import contrast
from PIL import Image

from benchlib.benchmarks import BENCHMARKS
from benchlib.results.run import Run
from benchlib.show import figures
from tests.fixtures.make_smoke import unpack

SQUAD = BENCHMARKS["squad"].spec.figures(True)
FIGURES = {
    f"{benchmark.name} {name}": draw
    for benchmark in BENCHMARKS.values()
    for name, draw in benchmark.spec.figures(True).items()
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return Run(make_run(tmp_path_factory.mktemp("runs") / "run", steps=50))


def recorded(run, key):
    return np.array([event[key] for event in run.events if event["kind"] == "step"])


def at_speeds(folder, speeds):
    """Return a run whose steps of 16 samples went at these speeds, after two steps that do not count."""
    path = make_run(folder, steps=len(speeds) + 2, with_samples=False) / "events-rank0.jsonl"
    events = [json.loads(line) for line in path.read_text().splitlines()]
    for event in events:
        if event["kind"] == "step":
            event["step_s"] = 16 / [50, 50, *speeds][event["step"] - 1]
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    result = json.loads((path.parent / "result.json").read_text())
    result["facts"]["steady_from_step"] = 3
    (path.parent / "result.json").write_text(json.dumps(result))
    return Run(path.parent)


@pytest.mark.parametrize("draw", SQUAD.values(), ids=SQUAD)
def test_same_run_gives_the_same_bytes_without_metadata(run, draw):
    first, second = figures.png(draw(run)), figures.png(draw(Run(run.path)))
    assert first == second
    image = Image.open(io.BytesIO(first))
    assert image.text == {}
    assert len(first) < 30_000


@pytest.mark.parametrize(
    "changes",
    [
        {"outcome": "skipped"},
        {"steps": 0, "with_samples": False},
        {"steps": 1, "ranks": 1},
        {"steps": 30, "cut_events": True, "with_result": False},
        {"steps": 40, "ranks": 40},
    ],
    ids=["skipped", "none", "one", "cut", "many"],
)
def test_every_run_can_be_drawn(tmp_path, changes):
    """By the figures of every benchmark; those that leave their place empty look alike in all runs and are painted once."""
    made = Run(make_run(tmp_path / "run", **changes))
    for name, draw in FIGURES.items():
        figure = draw(made)
        assert figure.alt, name
        if not figure.empty or "outcome" in changes:
            figure.canvas.draw()


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
    assert data["text/plain"].startswith("The loss goes from")
    assert more["metadata"]["image/png"]["alt"] == data["text/plain"]
