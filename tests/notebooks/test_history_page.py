"""``benchlib history`` as a user meets it: the notebook executed on a store, the page, the exit code."""

import pytest
from make_run import START, _metric, make_run

from benchlib.commands import history
from benchlib.core.files import outputs

DAY = 86_400


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setenv("BENCHLIB_OUTPUTS", str(tmp_path / "outputs"))
    for age in range(12):
        speed = _metric("train_samples_per_s", (60.0 if age > 4 else 45.0) + 0.2 * (age % 3), "samples/s", "higher", 1)
        folder = tmp_path / "runs" / f"quick-202609{30 - age}" / f"squad-cpu-101500-{age:06x}"
        make_run(folder, started_at=START - age * DAY, steps=10, metrics=[speed])
    return tmp_path / "runs"


def test_the_page_says_what_changed(store, capsys):
    assert history.make(store, ["benchmark=squad"]) == 1
    page = (store / "history.html").read_text()
    assert not outputs().exists(), "a page of other runs does not belong there"
    assert "1 check failed: level of squad quick" in page
    assert "Training throughput: worse, × 0.75" in page
    assert "only benchmark squad" in page
    assert "<script" not in page
    said = capsys.readouterr().out
    assert "FAIL" in said and "history.html" in said
