"""The list of runs: everything that lies there, in the right order, whatever its state."""

import re
import time

import pytest
from make_run import START, _metric, make_run
from test_report import EVIL, Page, assert_self_contained_and_accessible

from benchlib import index

DAY = 86_400


def f1(value):
    return [_metric("f1_minisquad_tiny", value, "", "higher", 1)]


def place(outputs, moment, *, benchmark="squad", tier="quick", clock="101500", **changes):
    day = time.strftime("%Y%m%d", time.localtime(moment))
    folder = outputs / f"{tier}-{day}" / f"{benchmark}-cpu-{clock}-{abs(hash(moment)) % 16**6:06x}"
    return make_run(folder, started_at=moment, config={"tier": tier}, with_samples=False, **changes)


def rows_of(page):
    return re.findall(r"<tr role=\"row\"><th scope=\"row\".*?</tr>", page.source, re.DOTALL)


def test_runs_are_listed_by_day_the_newest_first(tmp_path):
    for age, value in ((0, 91.0), (1, 90.0), (2, 80.0)):
        place(tmp_path, START - age * DAY, metrics=f1(value))
    page = Page(index.render(tmp_path))
    assert_self_contained_and_accessible(page)
    days = re.findall(r"<summary>(\S+)", page.source)
    assert days == sorted(days, reverse=True)
    assert len(days) == 3
    assert [re.search(r"F1</span> ([\d.]+)", row)[1] for row in rows_of(page)] == ["91.00", "90.00", "80.00"]
    assert "from 80.00 to 91.00, lowest 80.00, highest 91.00" in page.source


def test_trends_keep_tiers_and_metric_names_apart(tmp_path):
    for age, value in ((0, 91.0), (1, 90.0)):
        place(tmp_path, START - age * DAY, metrics=f1(value))
    place(tmp_path, START - 2 * DAY, metrics=[_metric("f1", 60.0, "", "higher", 1)])
    place(tmp_path, START - 3 * DAY, tier="nightly", metrics=f1(70.0))
    rows = sorted(
        (index.read_row(folder, tmp_path) for folder in index.run_folders(tmp_path)), key=lambda row: -row.started
    )
    found = {trend.last.tier: trend for trend in index.trends(rows)}
    assert found["quick"].runs == 3
    assert "last 2 runs: from 90.00 to 91.00" in found["quick"].line
    assert found["nightly"].line == ""


def test_damaged_folders_are_marked(tmp_path):
    whole = place(tmp_path, START)
    for age, name, content in (
        (1, "verdict.json", '{"cut'),
        (2, "result.json", "[]"),
        (3, "result.json", '{"benchmark": 3}'),
        (4, "verdict.json", "\xff"),
    ):
        folder = place(tmp_path, START - age * DAY)
        (folder / name).write_bytes(content.encode("latin-1"))
    (tmp_path / "quick-20260101" / "squad-cpu-000000-empty0").mkdir(parents=True)
    (tmp_path / "quick-20260102" / "what is this").mkdir(parents=True)
    (tmp_path / "quick-20260103").write_text("a file, no folder")
    (tmp_path / ".cache").mkdir()
    (tmp_path / "notes.txt").write_text("x")
    page = Page(index.render(tmp_path))
    assert_self_contained_and_accessible(page)
    assert len(rows_of(page)) == 7
    assert sum("DAMAGED" in row for row in rows_of(page)) == 6
    assert "the folder has no config.json" in page.text
    assert whole.name.rsplit("-", 1)[-1] in page.text


def test_states_links_and_foreign_text(tmp_path):
    place(tmp_path, START, verdict={"verdict": "FAIL", "sentence": f"1 check failed: {EVIL}."})
    place(tmp_path, START - DAY, outcome="failed", reason="rank 1 raised ValueError")
    place(tmp_path, START - 2 * DAY, outcome="skipped", reason="no device")
    place(tmp_path, START - 3 * DAY, with_verdict=False, with_result=False)
    linked = place(tmp_path, START - 4 * DAY, clock="#1?%")
    (linked / "report.html").write_text("x")
    page = Page(index.render(tmp_path))
    assert "script" not in [tag for tag, _ in page.elements]
    assert EVIL in page.text
    for word in ("FAIL", "BROKEN", "SKIPPED", "UNFINISHED", "PASS"):
        assert word in page.text
    links = {attrs["href"] for attrs in page.all("a")}
    assert len(links) == 1
    assert "%231%3F%25" in links.pop()


@pytest.mark.parametrize("exists", [True, False])
def test_no_runs(tmp_path, exists):
    outputs = tmp_path / "outputs"
    if exists:
        outputs.mkdir()
    assert "No runs yet" in Page(index.render(outputs)).text


def test_every_file_is_read_once(tmp_path, monkeypatch):
    for age in range(3):
        place(tmp_path, START - age * DAY)
    read = []
    original = index._read
    monkeypatch.setattr(index, "_read", lambda path: read.append(path) or original(path))
    index.render(tmp_path)
    assert sorted(path.name for path in read) == ["result.json"] * 3 + ["verdict.json"] * 3
    assert len(set(read)) == 6
