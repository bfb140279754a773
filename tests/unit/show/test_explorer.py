"""The explorer: every choice redraws, lists follow the filters, and its first state is there without widgets."""

import base64
import html
import re
import shutil

import pytest
from make_run import START, _metric, make_run
from pages import EVIL, Page, assert_self_contained_and_accessible
from series import DAY, STEADY, on_machine, place, speed

from benchlib.config.schema import build, save_config
from benchlib.core.files import home
from benchlib.judge import trends
from benchlib.show import explorer, history
from benchlib.show.explorer import Explorer, View
from benchlib.show.figures import png


def read(store, **asked):
    return trends.read_history(*trends.choose_store(str(store), **asked))


@pytest.fixture
def store(tmp_path):
    """Six runs of squad on two machines and tiers, and one of machine."""
    for age in range(6):
        metrics = [*speed(60.0 + age), _metric("step_s_minisquad_tiny", 0.3, "s", "lower", 18)]
        folder = place(tmp_path, START - age * DAY, steps=20, metrics=metrics, tier="smoke" if age == 5 else "quick")
        if age == 4:
            on_machine(folder, cpu={"model": "Other CPU", "usable_cores": 8})
    other = make_run(tmp_path / "quick-20260101" / "machine-cpu-101500-abcdef", started_at=START - 9 * DAY)
    save_config(build("machine", {}), other)
    return tmp_path


def alts(pane):
    return [html.unescape(alt) for alt in re.findall(r'alt="([^"]*)"', pane)]


def test_every_choice_redraws(store):
    widgets = Explorer(View(read(store)))
    first = widgets.pane.value
    assert len(alts(first)) == 2
    assert alts(first)[0].startswith("Training throughput: ")
    assert alts(first)[1].startswith("Loss of 3 runs")
    widgets.choices["curve"].value = "step times"
    assert alts(widgets.pane.value)[1].startswith("Step times of 3 runs")
    assert alts(widgets.pane.value)[0] == alts(first)[0]
    widgets.runs.value = (widgets.runs.options[0][1],)
    assert alts(widgets.pane.value)[1].startswith("Step times of 1 run.")
    assert widgets.pane.value.count("<td>PASS</td>") == 1  # and the table follows
    widgets.runs.value = ()
    assert len(widgets.view.picked) == 3  # nothing picked would be nothing to see
    seen = {first, widgets.pane.value}
    widgets.choices["machine"].value = "Other CPU × 8"
    assert widgets.pane.value not in seen
    assert len(widgets.runs.options) == 1


def test_lists_follow_the_filters(store):
    widgets = Explorer(View(read(store)))
    assert (widgets.choices["benchmark"].value, len(widgets.runs.options)) == ("squad", 6)
    assert widgets.choices["tier"].options == ("all", "quick", "smoke")
    widgets.choices["tier"].value = "smoke"
    assert len(widgets.runs.options) == 1
    widgets.choices["tier"].value = "all"
    widgets.choices["benchmark"].value = "machine"
    assert [path.rsplit("-", 1)[1] for _, path in widgets.runs.options] == ["abcdef"]
    assert len(widgets.metrics.options) > 10
    widgets.metrics.value = ("total_s", "step_s_minisquad_tiny")
    assert [alt.split(":")[0] for alt in alts(widgets.pane.value)[:2]] == ["Whole run", "Step time"]


def test_pictures_are_png_and_the_form_needs_nothing_else(store, tmp_path):
    form = View(read(store)).html()
    for source in re.findall(r'src="([^"]*)"', form):
        assert base64.b64decode(source.removeprefix("data:image/png;base64,")).startswith(b"\x89PNG")
    assert "<script" not in form


def test_foreign_text_is_escaped(store):
    for folder in store.glob("quick-*/squad*"):
        on_machine(folder, cpu={"model": EVIL, "usable_cores": 2}, versions={"torch": EVIL})
    form = View(read(store)).html()
    assert "<script" not in form
    assert "<img src=x" not in form
    assert "&lt;script&gt;" in form


def test_a_run_that_went_away_leaves_a_sentence(store):
    widgets = Explorer(View(read(store)))
    shutil.rmtree(store / widgets.runs.options[0][1])
    widgets.choices["curve"].value = "throughput"
    assert "no such run folder" in widgets.pane.value


def test_without_anybody_looking_on_pictures_and_table_are_shown(store, monkeypatch):
    shown, displayed = [], []
    monkeypatch.setattr(explorer, "show", shown.append)
    monkeypatch.setattr("IPython.display.display", displayed.append)
    explorer.explore(read(store))
    assert [picture.alt.split(" ")[0] for picture in shown] == ["Training", "Loss"]
    assert len(displayed[0]) == 3


def test_live_it_is_published_with_its_static_form(store, monkeypatch):
    published = []
    monkeypatch.setattr(explorer, "interactive", lambda: True)
    monkeypatch.setattr("IPython.display.display", lambda data, raw: published.append(data))
    explorer.explore(read(store))
    assert set(published[0]) == {"application/vnd.jupyter.widget-view+json", "text/html", "text/plain"}
    assert published[0]["text/plain"] in " ".join(alts(published[0]["text/html"]))


def test_pictures_of_the_past_say_their_finding(tmp_path):
    for age, value in enumerate(reversed([*STEADY, *(value * 0.8 for value in STEADY[:4])])):
        place(tmp_path, START - age * DAY, metrics=speed(value))
    found = read(tmp_path)
    picture = history.trend(found.trends[0])
    assert picture.axes[0].get_title(loc="left").startswith("Training throughput: worse, × 0.801")
    assert "nothing recorded changed with it" in picture.alt
    assert png(picture) == png(history.trend(found.trends[0]))
    lanes = history.machines(found.runs)
    assert lanes.alt.startswith("14 runs on 1 machine. Imaginary 3000 CPU × 2, made-up-host: 14 runs, 14 PASS")
    assert history.machines([]).empty
    assert history.overlay("loss", []).alt == "No run is picked."


def test_more_hosts_than_lanes_share_one_by_hardware():
    from benchlib.results.record import Record
    from benchlib.show.lines import LANES, lanes

    runs = [
        Record(
            run=str(n), started_at=START + n, machine={"cpu": {"model": "CPU", "usable_cores": 2}, "host": f"node{n}"}
        )
        for n in range(LANES + 1)
    ]
    assert [lane.label for lane in lanes(runs)] == [f"CPU × 2, {LANES + 1} hosts"]
    assert len(lanes(runs[:LANES])) == LANES


def test_the_page_of_the_history(store, tmp_path, monkeypatch):
    import nbformat

    from benchlib.commands import history as history_page
    from benchlib.core.errors import UserError

    found = read(store, tier="quick")
    page = tmp_path / "history.html"
    notebook = nbformat.read(home() / "notebooks" / "90_history.ipynb", as_version=4)
    page.write_text(history_page.html(notebook, found, trends.judge_history(found)), encoding="utf-8")
    shown = Page(page)
    assert_self_contained_and_accessible(shown)
    assert "only tier quick" in shown.text
    assert len(shown.all("img")) >= 5
    with pytest.raises(UserError, match="did you mean metric"):
        history_page.parameters(None, ["metrc=x"])
    assert trends.label("step_s_minisquad_tiny") == "Step time"


def test_axes_have_the_units_that_readers_see():
    latency = next(trend for trend in read(home() / "notebooks/demo-runs").trends if trend.unit == "us")
    assert history.trend(latency).axes[0].get_ylabel() == "All-reduce latency (µs)"
