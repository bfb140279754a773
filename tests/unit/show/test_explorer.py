"""The explorer: every choice redraws, lists follow the filters, and its first state is there without widgets; pictures of a past."""

import html
import re

import pytest
from make_run import START, _metric, make_run
from series import DAY, STEADY, on_machine, place, speed

from benchlib.config.schema import build, save_config
from benchlib.judge import trends
from benchlib.show import explorer, history
from benchlib.show.explorer import Explorer, View
from benchlib.show.figures import png


def read(store, **asked):
    return trends.read_history(str(store), **asked)


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


def alts(widgets):
    pane = widgets if isinstance(widgets, str) else widgets.pane.value
    return [html.unescape(alt) for alt in re.findall(r'alt="([^"]*)"', pane)]


def test_every_choice_redraws(store):
    widgets = Explorer(View(read(store)))
    first = alts(widgets)
    assert [alt.split(":")[0].split(".")[0] for alt in first] == ["Training throughput", "Loss of 3 runs"]
    widgets.choices["curve"].value = "step times"
    assert alts(widgets)[0] == first[0] and alts(widgets)[1].startswith("Step times of 3 runs")
    widgets.runs.value = (widgets.runs.options[0][1],)
    assert alts(widgets)[1].startswith("Step times of 1 run.")
    assert widgets.pane.value.count("<td>PASS</td>") == 1, "and the table follows"
    widgets.runs.value = ()
    assert len(widgets.view.picked) == 3, "nothing picked would be nothing to see"
    before = widgets.pane.value
    widgets.choices["machine"].value = "Other CPU × 8"
    assert widgets.pane.value != before and len(widgets.runs.options) == 1


def test_it_is_shown_live_with_its_static_form_and_without_anybody_looking_on_as_pictures_and_a_table(
    store, monkeypatch
):
    shown, displayed = [], []
    monkeypatch.setattr(explorer, "show", shown.append)
    monkeypatch.setattr("IPython.display.display", lambda item, raw=False: displayed.append(item))
    explorer.explore(read(store))
    assert [picture.alt.split(" ")[0] for picture in shown] == ["Training", "Loss"]
    assert len(displayed.pop()) == 3
    monkeypatch.setattr(explorer, "interactive", lambda: True)
    explorer.explore(read(store))
    (forms,) = displayed
    assert set(forms) == {"application/vnd.jupyter.widget-view+json", "text/html", "text/plain"}
    assert forms["text/plain"] in " ".join(alts(forms["text/html"]))


def test_pictures_of_the_past_say_their_finding(tmp_path):
    for age, value in enumerate(reversed([*STEADY, *(value * 0.8 for value in STEADY[:4])])):
        place(tmp_path, START - age * DAY, metrics=speed(value))
    past = read(tmp_path)
    picture = history.trend(past.trends[0])
    assert picture.axes[0].get_title(loc="left").startswith("Training throughput: worse, × 0.801")
    assert "nothing recorded changed with it" in picture.alt
    assert png(picture) == png(history.trend(past.trends[0]))
    assert history.overlay("loss", []).alt == "No run is picked."
