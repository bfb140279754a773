"""Exports: each format read back by the tool it is for, from whole, broken, skipped and damaged runs."""

import csv
import datetime
import importlib.util
import io
import subprocess
import sys
from xml.etree import ElementTree

import junitparser
import pandas as pd
import pytest
from click.testing import CliRunner
from make_run import CHECKS, START, make_run
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_prometheus

from benchlib.cli import main
from benchlib.core.terminal import harmless
from benchlib.results import record
from benchlib.results.shared import load_runs as load
from benchlib.show import exports
from benchlib.show.exports import EXPORTS, export, junit, openmetrics

EVIL = 'a|b <script>alert("1")</script>\n# head `code` *x* [l](http://x) \\ _u_ &amp; @me \x1b[31m\x00'
REGRESSION = CHECKS[0] | {"name": "speed vs baseline", "status": "FAIL", "kind": "regression", "gates": True}
INFORMATIVE = CHECKS[0] | {"name": "reference", "status": "FAIL", "kind": "reference", "gates": False}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """A day of runs: whole, failed, broken, skipped, two damaged ones; nothing else decides their order but the name."""
    day = tmp_path_factory.mktemp("outputs") / "quick-20261121"
    make_run(day / "squad-cpu-100000-whole", started_at=START)
    verdict = {"verdict": "FAIL", "sentence": "1 check failed: speed vs baseline."}
    make_run(day / "squad-cpu-110000-failed", started_at=START + 60, checks=[*CHECKS, REGRESSION, INFORMATIVE], verdict=verdict)  # fmt: skip
    make_run(day / "squad-cpu-120000-broken", outcome="failed", culprit=1, reason=f"rank 1 raised {EVIL}")
    make_run(day / "squad-cuda-130000-skipped", outcome="skipped", reason="no device", config={"backend": "cuda"})
    cut = make_run(day / "squad-cpu-140000-cut") / "result.json"
    cut.write_text(cut.read_text()[:200])
    lost = make_run(day / "squad-cpu-150000-lost", with_result=False, with_verdict=False, with_status=False)
    (lost / "config.json").unlink()
    return day.parent


@pytest.fixture
def runs(store):
    return load(store)


def named(runs, name):
    return next(run for run in runs if run.run.endswith(name))


def test_junit_tells_each_check_as_a_test(runs):
    document = junitparser.JUnitXml.fromstring(junit.text(runs).encode())
    suites = {suite.name.rpartition("-")[2]: suite for suite in document}
    kinds = {
        name: {case.name: [type(item).__name__ for item in case.result] for case in suite}
        for name, suite in suites.items()
    }
    assert kinds["whole"] == {
        "loss decreases": [], "F1": [], "time budget": [], "all-reduce": ["Skipped"],
        "train_samples_per_s_minisquad_tiny vs baseline": ["Skipped"], "step_s_minisquad_tiny vs baseline": ["Skipped"],
    }  # fmt: skip
    assert kinds["failed"]["speed vs baseline"] == ["Failure"]
    assert kinds["failed"]["reference"] == ["Skipped"], "an informative difference fails nothing"
    assert kinds["broken"] == {"run completed": ["Error"]}
    assert kinds["skipped"] == {"run completed": ["Skipped"]}
    assert kinds["cut"]["run readable"] == ["Error"]
    assert kinds["lost"] == {"run readable": ["Error"]}
    ambiguous = next(case for case in suites["whole"] if case.name.startswith("step_s"))
    assert ambiguous.result[0].message.startswith("AMBIGUOUS: ratio 1.080")
    assert suites["failed"].failures == 1
    assert suites["whole"].skipped == 3
    assert (document.tests, document.failures, document.errors) == (6 + 8 + 1 + 1 + 7 + 1, 1, 3)


JENKINS = {  # of jenkins-junit.xsd of the xUnit plugin: the attributes of an element, and its children in their order
    "testsuites": ("name time tests failures disabled errors", "testsuite"),
    "testsuite": ("name tests failures errors time disabled skipped timestamp hostname id package", "properties testcase system-out system-err"),
    "testcase": ("name assertions time classname status", "skipped error failure system-out system-err"),
    "properties": ("", "property"), "property": ("name value", ""), "system-out": ("", ""),
    "skipped": ("message", ""), "error": ("message type", ""), "failure": ("message type", ""),
}  # fmt: skip


def test_junit_keeps_to_the_schema_of_jenkins(runs):
    for element in ElementTree.fromstring(junit.text(runs)).iter():
        attributes, children = map(str.split, JENKINS[element.tag])
        assert set(element.attrib) <= set(attributes), element.tag
        tags = [child.tag for child in element]
        assert tags == sorted(tags, key=children.index), element.tag
        if "timestamp" in element.attrib:
            datetime.datetime.strptime(element.attrib["timestamp"], "%Y-%m-%dT%H:%M:%S")


@pytest.mark.parametrize(
    ("text", "parse"), [(openmetrics.openmetrics, parse_openmetrics), (openmetrics.prometheus, parse_prometheus)]
)
def test_metrics_for_prometheus_are_read_back(store, text, parse):
    # Of squad on the CPU the newest is the failed run: the damaged and the broken ones started with the first.
    chosen = [run for run in load(store) if run.run.endswith(("whole", "failed", "skipped"))]
    written = text(chosen)
    rows = [sample for family in parse(written) for sample in family.samples]
    index = {(sample.name, sample.labels.get("metric") or sample.labels.get("check"), sample.labels["backend"]): sample for sample in rows if sample.value}  # fmt: skip
    value = index["benchlib_metric_value", "train_samples_per_s_minisquad_tiny", "cpu"]
    assert value.value == 61.2
    assert value.labels["unit"] == "samples/s"
    assert value.labels["host"] == "made-up-host"
    assert ("benchlib_metric_value", "device_memory_gb", "cpu") not in index, "what is not available has no number"
    assert index["benchlib_metric_low", "train_samples_per_s_minisquad_tiny", "cpu"].value == pytest.approx(59.364)
    assert index["benchlib_verdict", None, "cpu"].labels["benchlib_verdict"] == "FAIL"
    assert index["benchlib_verdict", None, "cuda"].labels["benchlib_verdict"] == "SKIPPED"
    assert index["benchlib_check_status", "speed vs baseline", "cpu"].labels["benchlib_check_status"] == "FAIL"
    assert index["benchlib_run_start_time_seconds", None, "cpu"].value == START + 60
    assert index["benchlib_run_duration_seconds", None, "cpu"].value == 131
    assert all(sample.timestamp is None for sample in rows), "the textfile collector refuses timestamps"
    assert written.endswith("# EOF\n") == (parse is parse_openmetrics)


def test_hostile_names_stay_in_their_label(tmp_path):
    config = {"data": "files", "train_file": EVIL, "eval_file": "e"}
    metric = {"name": EVIL, "value": 1.5, "unit": EVIL, "direction": "higher", "provenance": "measured", "n": 1}
    run = record.load(make_run(tmp_path / "run", metrics=[metric], checks=[CHECKS[0] | {"name": EVIL}], config=config))
    families = {family.name: family for family in parse_openmetrics(openmetrics.openmetrics([run]))}
    assert families["benchlib_metric_value"].samples[0].labels["metric"] == harmless(EVIL)
    suite = next(iter(junitparser.JUnitXml.fromstring(junit.text([run]).encode())))
    assert next(iter(suite)).name == harmless(EVIL).replace("\n", " "), "as XML reads an attribute"


def test_csv_and_parquet_have_a_row_a_metric_and_one_for_a_run_without(runs, tmp_path):
    export(runs, "csv", str(tmp_path / "runs.csv"))
    export(runs, "parquet", str(tmp_path / "runs.parquet"))
    rows = list(csv.DictReader(io.StringIO((tmp_path / "runs.csv").read_text())))
    frame = pd.read_parquet(tmp_path / "runs.parquet")
    assert len(rows) == len(frame) == 20 + 20 + 4
    assert frame["started_at"].iloc[0].timestamp() == START
    row = next(row for row in rows if row["metric"] == "train_samples_per_s_minisquad_tiny")
    assert (float(row["value"]), row["unit"], row["n"], row["verdict"]) == (61.2, "samples/s", "96", "PASS")
    assert row["started_at"].startswith("2026-09-21 14:13:20")
    assert next(row for row in rows if row["metric"] == "device_memory_gb")["value"] == ""
    reasons = {row["run"].rpartition("-")[2]: row["reason"] for row in rows if not row["metric"]}
    assert set(reasons) == {"broken", "skipped", "cut", "lost"} and "result.json" in reasons["cut"]


def test_all_samples_read_back_exactly(runs, tmp_path, capsys):
    whole = named(runs, "whole")
    export(runs, "parquet", str(tmp_path / "s.parquet"), samples=True)
    assert export([whole], "csv", "-", samples=True) == ""
    for frame in (pd.read_parquet(tmp_path / "s.parquet"), pd.read_csv(io.StringIO(capsys.readouterr().out))):
        own = frame[(frame["run"] == whole.run) & (frame["metric"] == "loss")]
        assert own["value"].tolist() == whole.samples["loss"]
        assert own["index"].tolist() == list(range(120))


with_mlflow = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in EXPORTS["mlflow"].needs),
    reason="MLflow is not installed: pip install -e '.[export]' (93 MB)",
)
MLFLOW_READER = """
import sys, mlflow
from mlflow.tracking import MlflowClient
from benchlib.show.exports import export
from benchlib.results.shared import load_runs as load
uri, store = sys.argv[1:]
for _ in range(2):
    print(export(load(store), "mlflow", uri.removeprefix("sqlite:///")))
client = MlflowClient(tracking_uri=uri)
experiment = client.get_experiment_by_name("benchlib-squad-quick")
runs = {run.data.tags["benchlib.run"].rpartition("-")[2]: run for run in client.search_runs([experiment.experiment_id])}
whole = runs["whole"]
print(sorted(runs), whole.info.status, runs["broken"].info.status)
print(whole.data.params["batch_size"], whole.data.metrics["f1_minisquad_tiny"], whole.data.tags["benchlib.verdict"])
print(len(client.get_metric_history(whole.info.run_id, "samples/loss")), whole.info.start_time)
print([item.path for item in client.list_artifacts(whole.info.run_id)])
"""


@with_mlflow
def test_mlflow_holds_each_run_once(store, tmp_path):
    # A process of its own: MLflow's own libraries warn of their own deprecations.
    whole = store / "quick-20261121" / "squad-cpu-100000-whole"
    (whole / "report.html").write_text("<html>")
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    done = subprocess.run([sys.executable, "-c", MLFLOW_READER, uri, str(store)], capture_output=True, text=True, cwd=tmp_path, check=False)  # fmt: skip
    (whole / "report.html").unlink()
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == f"6 runs in MLflow at {uri}"
    assert lines[1] == f"6 runs in MLflow at {uri}, 6 of them already stored"
    assert lines[2] == "['broken', 'cut', 'failed', 'skipped', 'whole'] FINISHED FAILED"
    assert lines[3:] == ["8 91.4 PASS", f"120 {int(START * 1000)}", "['report.html']"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--to", "junt"], "did you mean junit"),
        (["--to", "junit", "--samples"], "--samples is for csv and parquet"),
        (["--to", "parquet"], "name a file"),
        (["--to", "mlflow"], "needs its store"),
        (["--to", "csv", "--output", "."], "is a folder"),
        (["--to", "openmetrics"], "openmetrics needs prometheus_client: pip install -e '.[export]' in the checkout"),
    ],
)
def test_wrong_wishes_end_with_a_sentence(store, arguments, words, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    there = None if "openmetrics" in arguments else True
    monkeypatch.setattr(exports.importlib.util, "find_spec", lambda name: there)
    done = CliRunner().invoke(main, ["export", str(store), *arguments])
    assert done.exit_code == 2
    assert words in done.output and "Traceback" not in done.output
