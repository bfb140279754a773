"""One page for a machine: every run stands in it, what differs first, and its numbers are those of the runs."""

import contextlib
import json
from pathlib import Path

import pytest
from make_smoke import unpack
from pages import Page, assert_self_contained_and_accessible

from benchlib.benchmarks import BENCHMARKS
from benchlib.commands.baseline import accept_reference
from benchlib.judge import reference_values
from benchlib.judge.verdict import judge
from benchlib.results.run import Run
from benchlib.show import machine_page, report
from benchlib.spec.tables import Rows

NAMES = [name for name in BENCHMARKS if name != "serving"]


@pytest.fixture
def day(tmp_path, monkeypatch):
    """The smoke runs of all benchmarks but one, judged where no baseline and no reference lies."""
    monkeypatch.setattr(reference_values, "folder", lambda: tmp_path / "baselines")
    folder = tmp_path / "smoke-20261126"
    for name in NAMES:
        judge(unpack(name, folder / f"{name}-cpu-101500-aaaaaa").path)
    return folder


def rendered(day, **more):
    """The page as the command makes it: by a kernel of its own."""
    with contextlib.chdir(day.parent):  # named as a user does, while the kernel works elsewhere
        page = Page(machine_page.render(Path(day.name), **more))
    links = {attrs.get("href") for attrs in page.all("a")}
    assert {f"{name}-cpu-101500-aaaaaa/report.html" for name in NAMES} <= links
    page.elements = [(tag, attrs) for tag, attrs in page.elements if tag != "a"]
    assert_self_contained_and_accessible(page)
    return page


def metric(day, benchmark, start):
    metrics = json.loads((day / f"{benchmark}-cpu-101500-aaaaaa" / "result.json").read_text())["metrics"]
    return next(item["value"] for item in metrics if item["name"].startswith(start))


def test_every_run_stands_there_with_its_share_of_the_bound_and_its_price(day):
    page = machine_page.content(machine_page.newest(day), usd_per_hour=0.36)
    assert [row["run"].benchmark for row in page.right if row["run"].word == "PASS"] and len(page.right) == len(NAMES)
    shares = {row["run"].benchmark: row["share"] for row in page.fast if row["share"] is not None}
    assert shares["squad"] == pytest.approx(metric(day, "squad", "mfu"))
    assert shares["collectives"] == pytest.approx(metric(day, "collectives", "allreduce_socket_share"))
    worth = {row["work"]: row["usd"] for row in page.worth}
    usd = 1e-4 * 1e6 / metric(day, "squad", "train_samples_per_s")  # 0.36 USD an hour are 1e-4 a second
    assert float(worth["1 million samples, squad"].split()[0]) == pytest.approx(usd, rel=0.01)
    assert "benchlib run serving --tier smoke" in [row["command"] for row in page.undone]
    for name in NAMES:
        report.render(day / f"{name}-cpu-101500-aaaaaa")
    text = rendered(day, usd_per_hour=0.36).text
    assert text.count("no reference") == len(NAMES)
    assert worth["1 million samples, squad"] in text and "0.36 USD per hour and device, given" in text


def test_what_differs_from_its_reference_fails_the_page_and_stands_first(day):
    for name, change in (("seq2seq", 0.0), ("parallel", 0.5)):
        run = Run(day / f"{name}-cpu-101500-aaaaaa")
        values = BENCHMARKS[name].spec.quality(Rows.of(run))
        moved = {key: value._replace(value=value.value + change) for key, value in values.items()}
        reference_values.accept([run], [moved], "made up")
        judge(run.path)
    page = machine_page.content(machine_page.newest(day))
    assert page.word == "FAIL" and page.right[0]["run"].benchmark == "parallel"
    assert "1 of 2 compute what the references say" in page.sentence
    assert page.sentence.startswith("parallel: 1 check failed: reference values")
    first, *_ = machine_page.shown(page).tables["right"]
    assert str(first["benchmark"]) == "parallel" and first["verdict"].text == "FAIL"
    assert "≠" in str(first["here, and the reference"]) and "<b>≠" in first["here, and the reference"].page
    accept_reference([run.path], "another machine", add=True)  # what differs is what widens a reference
    assert {item.agrees for item in reference_values.compared(run, values)} == {True}
