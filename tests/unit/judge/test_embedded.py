"""The data that a report carries: the same run comes out again, and nothing that was cut, altered or made up."""

import base64
import gzip
import json
import re

import numpy as np
import pytest
from make_run import make_run
from stores import without_pictures

from benchlib.core.errors import UserError
from benchlib.results import shared as embedded
from benchlib.results.record import Record, load
from benchlib.results.shared import link, load_runs, read_html, read_report
from benchlib.show import report


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch):
    without_pictures(monkeypatch)


@pytest.fixture
def folder(tmp_path):
    folder = make_run(tmp_path / "quick-20261121" / "squad-cpu-101010-abcdef", notebook="x", steps=500)
    report.render(folder)
    return folder


def page(href: str, version: str = embedded.VERSION) -> str:
    """A document with one link, as a stranger would write it."""
    return f'<html><body><a download="x" data-benchlib-run="{version}" href="{href}">x</a></body></html>'


def packed(data: bytes) -> str:
    """A document that carries compressed data."""
    return page(embedded.PREFIX + base64.b64encode(data).decode())


def test_the_report_carries_the_run(folder, tmp_path):
    whole, carried = load(folder), read_report(folder / "report.html")
    assert carried.model_dump() == whole.thin(200, embedded.KEPT_BYTES).model_dump()
    assert carried.complete
    assert carried.result.metrics == whole.result.metrics
    assert carried.verdict == whole.verdict
    assert len(carried.samples["loss"]) <= 200 < len(whole.samples["loss"]) == 500
    assert np.median(carried.samples["loss"]) == pytest.approx(np.median(whole.samples["loss"]), rel=0.01)
    assert load_runs(folder / "report.html")[0].run == folder.name


def test_a_report_that_is_cut_altered_or_huge_is_refused(folder):
    path, source = folder / "report.html", (folder / "report.html").read_text()
    data = re.search('href="data:application/gzip;base64,([^"]+)"', source)
    for at in (0, data.start(1), data.end(1) - 1):
        path.write_text(source[:at])
        with pytest.raises(UserError, match=r"report\.html: carries the data of 0 runs"):
            read_report(path)
    for at in range(data.start(1) + 30, data.end(1), 100):
        with pytest.raises(UserError, match="altered or damaged"):
            read_html(source[:at] + ("0" if source[at] != "0" else "1") + source[at + 1 :])
    with path.open("wb") as handle:
        handle.truncate(embedded.REPORT_BYTES + 1)
    with pytest.raises(UserError, match="the limit is"):
        read_report(path)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("<html><body>hello</body></html>", "the data of 0 runs"),
        (page("x") + page("x"), "the data of 2 runs"),
        (page("x", version="7"), "have version '7'"),
        (page("https://example.invalid/run.json"), "altered"),
        (page(embedded.PREFIX + "&&&"), "altered"),
        (packed(gzip.compress(b"{}")), "not a run of this version"),
        (packed(gzip.compress(b"{}")[:-4]), "altered"),
    ],
    ids=range(7),
)
def test_what_benchlib_did_not_write_is_refused(source, words):
    with pytest.raises(UserError, match=words):
        read_html(source)


def test_a_cell_cannot_smuggle_a_second_run_in(tmp_path):
    smuggled = link(Record(run="x", benchmark="squad", tier="quick", backend="cpu"))
    html = page(smuggled["href"])
    folder = make_run(tmp_path / "run", notebook=html, notes=[html])
    notebook = json.loads((folder / "notebook.ipynb").read_text())
    notebook["cells"][-1]["outputs"][0]["data"]["text/html"] = html
    (folder / "notebook.ipynb").write_text(json.dumps(notebook))
    assert read_report(report.render(folder)).run == "run"
