"""The list of runs: everything that lies there, in the right order, whatever its state; trends, changes and machines."""

import re
import time

from make_run import START, _metric
from pages import Page, assert_self_contained_and_accessible
from series import DAY, f1, on_machine, place, speed

from benchlib.judge import trends
from benchlib.results.record import load_all
from benchlib.show import index, lines


def rendered(folder):
    page = Page(index.render(folder))
    assert_self_contained_and_accessible(page)
    return page


def rows_of(page):
    listed = page.source[page.source.index("<h2>By day</h2>") :].partition("<h2>Trends</h2>")[0]
    return re.findall(r"<tr role=\"row\"><th scope=\"row\".*?</tr>", listed, re.DOTALL)


def test_runs_are_listed_by_day_the_newest_first_and_trends_after_them(tmp_path):
    for age, value in ((0, 91.0), (1, 90.0), (2, 80.0)):
        place(tmp_path, START - age * DAY, metrics=f1(value))
    page = rendered(tmp_path)
    days = re.findall(r"<summary>(\S+)", page.source)
    assert days == sorted(days, reverse=True) and len(days) == 3
    assert [re.search(r"F1</span> ([\d.]+)", row)[1] for row in rows_of(page)] == ["91.00", "90.00", "80.00"]
    assert "from 80.00 to 91.00, lowest 80.00, highest 91.00" in page.source
    assert re.findall(r"<h2>(.*?)</h2>", page.source) == ["By day", "Trends", "Machines and versions"]


def test_trends_keep_tiers_configs_and_metric_names_apart(tmp_path):
    for age, value in ((0, 91.0), (1, 90.0)):
        place(tmp_path, START - age * DAY, metrics=f1(value))
    place(tmp_path, START - 2 * DAY, metrics=[_metric("f1", 60.0, "", "higher", 1)])
    place(tmp_path, START - 3 * DAY, tier="nightly", metrics=f1(70.0))
    assert "batch_size" not in rendered(tmp_path).text, "no series looks like another one"
    place(tmp_path, START - 4 * DAY, metrics=f1(50.0), config={"batch_size": 16})
    groups = index.groups(load_all(tmp_path))
    seen = sorted((group["last"].tier, group["runs"], group["apart"]) for group in groups)
    assert seen == [("nightly", 1, ""), ("quick", 1, "batch_size 16"), ("quick", 3, "batch_size 8")]
    of_three = next(group for group in groups if group["runs"] == 3)
    assert "last 2 runs: from 90.00 to 91.00" in lines.describe_trend(of_three["trends"][0])


def test_a_change_is_drawn_said_and_explained(tmp_path):
    for age in range(12):
        value = (60.0 if age < 5 else 80.0) * (1 + 0.004 * (age % 3))
        folder = place(tmp_path, START - age * DAY, metrics=speed(value))
        on_machine(folder, versions={"torch": "2.13.0" if age < 5 else "2.12.1"}, host=f"node{age % 2}")
    page = rendered(tmp_path)
    day = time.strftime("%Y-%m-%d", time.localtime(START - 4 * DAY))
    said = f"▼ worse, × 0.75 on {day}: 80.32 → 60.24 samples/s; with torch 2.12.1 → 2.13.0"
    picture = next(attrs for attrs in page.all("svg") if attrs["class"] == "spark")
    assert said in picture["aria-label"] and said in page.text
    machines = lines.machines(load_all(tmp_path))
    ends = [(item["machine"][-5:], item["runs"], item["ended"]) for item in machines]
    assert ends == [("node1", "6", "6 PASS"), ("node0", "6", "6 PASS")]
    versions = {tuple(part.rpartition("torch ")[2][:6] for part in item["versions"].split("; ")) for item in machines}
    assert versions == {("2.12.1", "2.13.0")}


def test_slowed_and_broken_runs_are_listed_but_take_no_part(tmp_path):
    place(tmp_path, START, metrics=speed(90.0))
    place(tmp_path, START - DAY, metrics=speed(20.0), config={"planted_slowdown": 0.3})
    place(tmp_path, START - 2 * DAY, outcome="failed", reason="rank 1 raised ValueError", with_result=True)
    runs = load_all(tmp_path)
    assert [len(members) for members in trends.series(runs).values()] == [1]
    why = ["Rank 1 raised ValueError", "a slow-down of 30% was injected into it", ""]
    assert [trends.exclusion(run) for run in runs] == why
    page = rendered(tmp_path)
    assert len(rows_of(page)) == 3 and "injected slow-down" in page.text
