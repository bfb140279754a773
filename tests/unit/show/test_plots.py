"""Pictures: what is drawn is what was recorded, the bytes do not change, and colours can be told apart and read."""

import io
import json
import math

import numpy as np
import pytest
from make_run import make_run
from pages import contrast
from PIL import Image

from benchlib.benchmarks import BENCHMARKS
from benchlib.results import frames
from benchlib.results.run import Run
from benchlib.show import figures, training

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


def test_loss_curve_draws_every_step_and_the_mean_of_the_window(run):
    raw, smooth = training.loss_curve(run).axes[0].lines[:2]
    losses = recorded(run, "loss")
    assert raw.get_ydata() == pytest.approx(losses)
    assert smooth.get_ydata()[0] == pytest.approx(losses[:5].mean())
    assert smooth.get_ydata()[-1] == pytest.approx(losses[-5:].mean())
    assert smooth.get_xdata()[[0, -1]] == pytest.approx([5, 50])


def test_loss_curve_says_how_much_is_missing(run, tmp_path):
    assert training.loss_curve(run).axes[0].get_xlabel() == "step (50 of 300 in the whole training)"
    broken = make_run(tmp_path / "broken", outcome="failed", steps=20, planned=90)
    assert training.loss_curve(Run(broken)).axes[0].get_xlabel() == "step (20 of 90 planned)"


def test_throughput_counts_the_steady_steps_only(run):
    frame = frames.throughput(run)
    assert frame["samples_per_s"].to_numpy() == pytest.approx(16 / recorded(run, "step_s"))
    assert frame["steady"].tolist() == [False, False] + [True] * 48
    median = np.median(16 / recorded(run, "step_s")[2:])
    assert f"{median:.2f} samples/s" in training.throughput(run).alt


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


def test_only_a_steady_speed_is_called_a_steady_state(tmp_path):
    noise = np.tile([0.98, 1.0, 1.02, 1.01, 0.99], 8)
    rising = np.repeat([63, 97, 94, 114], 10) * noise
    assert (
        "Throughput rose from 63 to 114 samples/s: no steady state"
        in training.throughput(at_speeds(tmp_path / "a", rising)).alt
    )
    assert "94.00 samples/s in the steady state" in training.throughput(at_speeds(tmp_path / "b", 94 * noise)).alt
    two = at_speeds(tmp_path / "c", [90, 98])
    assert "94.00 samples/s, median of 2 steps" in training.throughput(two).alt
    assert "Median of 2 steps" in training.step_times(two).alt and "p95" not in training.step_times(two).alt


def test_time_split_adds_up_to_the_step(run):
    parts = frames.split(run)
    assert sum(parts.values()) == pytest.approx(np.median(recorded(run, "step_s")[2:]))
    assert parts["exchange"] == pytest.approx(np.median(recorded(run, "exchange_exposed_s")[2:]))
    widths = [bar.get_width() for bar in training.time_split(run).axes[0].patches]
    assert widths == pytest.approx([1e3 * value for value in parts.values()])


def test_step_time_histogram_holds_every_counted_step(run):
    heights = [bar.get_height() for bar in training.step_times(run).axes[0].patches]
    assert sum(heights) == 48


def test_rank_skew_shows_own_work_within_the_step(run):
    steps, own = training.rank_skew(run).axes[0].containers
    assert [bar.get_width() for bar in steps] == pytest.approx([276, 276])
    assert [bar.get_width() for bar in own] == pytest.approx([244, 240])
    assert "Rank 1 has the most work: 1.7% above rank 0" in training.rank_skew(run).alt


def test_memory_names_the_rank_with_the_peak(run):
    frame = frames.memory(run)
    assert set(frame["rank"]) == {0, 1}
    assert frame["gb"].max() == pytest.approx(1.14)
    assert "1.14 GB on rank 1" in training.memory(run).alt


@pytest.mark.parametrize(
    ("peak", "words"), [("1.3", "peaks at 1.3 GB."), ("1.0", "peaks at 1 GB, and at 1.14 GB while")]
)
def test_memory_has_the_peak_of_the_key_numbers(tmp_path, peak, words):
    folder = make_run(tmp_path / "run")
    path = folder / "result.json"
    path.write_text(path.read_text().replace('"value": 1.14', f'"value": {peak}'))
    assert words in training.memory(Run(folder)).alt


def test_memory_of_devices_is_drawn_where_a_sensor_gave_it(tmp_path):
    folder = make_run(tmp_path / "run")
    path = folder / "events-supervisor.jsonl"
    path.write_text(path.read_text().replace('"cpu_percent"', '"device_memory_bytes": 9000000000, "cpu_percent"'))
    assert "devices at 9 GB" in training.memory(Run(folder)).alt


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


def test_loss_that_is_not_finite_leaves_a_gap(tmp_path):
    folder = make_run(tmp_path / "run", steps=9)
    path = folder / "events-rank0.jsonl"
    loss = str(recorded(Run(folder), "loss")[4])
    path.write_text(path.read_text().replace(f'"loss": {loss}', '"loss": "nan"'))
    raw = training.loss_curve(Run(folder)).axes[0].lines[0]
    assert 5 not in raw.get_xdata().tolist()
    assert all(math.isfinite(value) for value in raw.get_ydata())


@pytest.mark.parametrize(("low", "high"), [(120, 130), (110, 4600), (300, 980), (0.004, 1000)])
def test_a_logarithmic_axis_has_more_than_one_tick(low, high):
    figure, axes = figures.blank("x", figures.LIGHT)
    axes.plot([1, 2], [low, high])
    figures.log_values(axes)
    figure.canvas.draw()
    bottom, top = axes.get_ylim()
    inside = [tick for tick in axes.get_yticks() if bottom <= tick <= top]
    assert 2 <= len(inside) <= 10
    assert len({axes.yaxis.get_major_formatter()(tick, 0) for tick in inside}) == len(inside)


def test_values_written_beside_the_loss_lie_on_no_title(tmp_path):
    picture = training.loss_curve(Run(make_run(tmp_path / "run", steps=10)))
    axes = picture.figure.axes[0]
    renderer = picture.figure.canvas.get_renderer()
    title = axes.title if axes.title.get_text() else axes._left_title
    assert title.get_text().startswith("Loss fell")
    assert len(axes.texts) == 2
    assert not any(text.get_window_extent(renderer).overlaps(title.get_window_extent(renderer)) for text in axes.texts)


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
    assert seen(figures.LIGHT.card) == CARD[page], "the paper is that of the card"
    assert contrast(seen(figures.LIGHT.text), CARD[page]) >= 7
    assert contrast(seen(figures.LIGHT.muted), CARD[page]) >= 4.5
    assert min(contrast(seen(colour), CARD[page]) for colour in figures.LIGHT.series) >= 3


def test_shown_picture_carries_its_alt_text(run, monkeypatch):
    import IPython.display

    calls = []
    monkeypatch.setattr(IPython.display, "display", lambda data, **more: calls.append((data, more)))
    figures.show(training.loss_curve(run))
    data, more = calls[0]
    assert data["text/plain"].startswith("Loss fell from")
    assert more["metadata"]["image/png"]["alt"] == data["text/plain"]
