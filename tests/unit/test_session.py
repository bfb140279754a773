"""What a notebook shows at its end, in its tables and for errors, without a kernel."""

import json
import re
import statistics

import pandas as pd
import pytest
from IPython.core.interactiveshell import InteractiveShell
from make_run import _metric, make_run
from make_smoke import unpack
from stores import without_pictures

from benchlib import session
from benchlib.core.errors import BackendUnavailable, Stopped, UserError, VerdictFailed, nearest
from benchlib.judge.baselines import accept
from benchlib.judge.checks import Check, Verdict
from benchlib.judge.regression import RegressionLimit
from benchlib.launch import launch
from benchlib.results.run import Run
from benchlib.show import notebook, widgets

STATUS = '{"outcome": "complete", "reason": "why", "culprit": null, "ranks": []}'


@pytest.fixture
def shown(monkeypatch, tmp_path):
    """By hand, in a store of its own: what is displayed, as Markdown."""
    monkeypatch.delenv("BENCHLIB_HEADLESS", raising=False)
    monkeypatch.setenv("BENCHLIB_OUTPUTS", str(tmp_path / "outputs"))
    without_pictures(monkeypatch)
    said = []
    monkeypatch.setattr("IPython.display.display", lambda item: said.append(item.data))
    return said


def stored(tmp_path, number):
    return Run(make_run(tmp_path / "outputs" / "quick-20260921" / f"squad-cpu-10150{number}-abcde{number}"))


def demo(folder):
    """A copy of a recorded run, complete and not judged yet."""
    unpack("machine", folder)
    (folder / "status.json").write_text(STATUS)
    return Run(folder)


def test_intervals_have_the_unit_of_their_value(tmp_path):
    run = stored(tmp_path, 1)
    for metric in run.result.metrics:
        if metric.unit == "FLOP/s" and metric.ci_low:
            low = session.metrics_table(run).loc[metric.name, "95% interval"].split()[0]
            assert float(low) == pytest.approx(metric.ci_low / 1e9, rel=0.01)
            break
    else:
        pytest.fail("the run has no rate of operations")


def test_the_bounds_before_a_run_are_those_accepted_for_its_own_fingerprint(tmp_path, monkeypatch):
    """Of two accepted machines only the own one judges the run."""
    monkeypatch.setattr("benchlib.judge.baselines.folder", lambda: tmp_path / "baselines")
    step_s = statistics.median(Run(make_run(tmp_path / "first", steps=98)).samples["step_s_minisquad_tiny"])
    metrics = [_metric("step_s_minisquad_tiny", step_s, "s", "lower", 96)]
    own, other = (Run(make_run(tmp_path / name, steps=98, metrics=metrics)) for name in ("own", "other"))
    machine = json.loads((other.path / "machine.json").read_text())
    (other.path / "machine.json").write_text(json.dumps(machine | {"memory_bytes": 2**40}))
    limit = RegressionLimit(metric="step_s_minisquad_tiny", share=0.2)
    paths = [accept(Run(run.path), "first", [limit]) for run in (own, other)]
    assert paths[0] != paths[1]
    shown = session.expectation(stored(tmp_path, 3))
    assert shown.loc["step_s_minisquad_tiny", "source"] == f"accepted as {paths[0].stem}, the latest of 1"


def test_under_the_command_line_the_notebook_leaves_report_and_list_to_it(shown, tmp_path, monkeypatch):
    monkeypatch.setenv("BENCHLIB_HEADLESS", "1")
    run = stored(tmp_path, 1)
    (run.path / "report.html").unlink(missing_ok=True)
    session.conclude(run, session.judge(run))
    assert len(shown) == 1
    assert not (run.path / "report.html").exists()


@pytest.mark.parametrize(("verdict", "raises"), [("PASS", False), ("AMBIGUOUS", False), ("FAIL", True)])
def test_only_a_failed_verdict_raises_and_only_where_asked(shown, tmp_path, monkeypatch, verdict, raises):
    monkeypatch.setenv("BENCHLIB_HEADLESS", "1")
    run, judged = stored(tmp_path, 1), Verdict(verdict=verdict, sentence="The sentence.", checks=[])
    session.conclude(run, judged)
    if raises:
        with pytest.raises(VerdictFailed, match=r"The sentence\."):
            session.conclude(run, judged, fail_on_verdict=True)
    else:
        session.conclude(run, judged, fail_on_verdict=True)


class Ended:
    """A launch whose run has ended, in a folder of which the test keeps account."""

    folders = ()
    outcome = "complete"

    def __init__(self, folder, config):
        self.folder = folder
        Ended.folders = (*Ended.folders, folder)

    def start(self):
        pass

    def raise_for_status(self):
        pass

    def close(self):
        pass


@pytest.fixture
def ended(monkeypatch):
    monkeypatch.setattr(Ended, "folders", ())
    monkeypatch.setattr(launch, "Launch", Ended)
    monkeypatch.setattr(widgets, "watch", lambda _: {"outcome": Ended.outcome, "reason": "stopped by the user"})
    return Ended


def test_the_run_cell_again_is_a_new_run_with_the_same_config(shown, ended, tmp_path):
    first = stored(tmp_path, 1)
    again = session.execute(first)
    assert again.path != first.path
    assert again.config == first.config
    assert again.path.parents[1] == tmp_path / "outputs"
    assert session.execute(again).path == again.path, "nothing was started in it yet"
    assert ended.folders == (again.path, again.path)


def test_the_run_cell_alone_leaves_verdict_report_folder_and_comparison(shown, ended, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    earlier = demo(tmp_path / "outputs" / "smoke-20260921" / "machine-cpu-101501-abcde1")
    monkeypatch.setattr(Ended, "start", lambda self: demo(self.folder))
    run = session.execute(earlier)
    (places,) = shown
    folder = run.path.relative_to(tmp_path)
    assert f"- report (PASS): [report.html]({folder}/report.html)" in places
    assert f"all runs: [index.html]({folder.parents[1]}/index.html)" in places
    assert f"run folder: `{run.path}`" in places
    assert f"compare: `benchlib compare OTHER_RUN {run.path}`" in places
    assert run.path.name in (tmp_path / "outputs" / "index.html").read_text(encoding="utf-8")
    page = (run.path / "report.html").read_text(encoding="utf-8")
    assert "the run folder holds no readable <code>notebook.ipynb</code>" in page  # what is not there is said
    assert all(f"<h2>{heading}</h2>" in page for heading in ("Every number and where it comes from", "The machine"))


def test_the_later_cells_add_the_verdict_and_draw_the_report_again_only_for_another_one(shown, tmp_path, monkeypatch):
    run, drawn = demo(tmp_path / "outputs" / "smoke-20260921" / "machine-cpu-101501-abcde1"), []
    monkeypatch.setattr(
        "benchlib.show.report.render", lambda path: drawn.append(path) or (path / "report.html").touch()
    )
    verdict = session.judge(run)
    assert session.judge(run) == verdict
    assert drawn == [run.path]
    session.conclude(run, verdict)
    assert shown == [f"**PASS**: {verdict.sentence}"]
    (run.path / "status.json").write_text(STATUS.replace("complete", "failed"))
    assert session.judge(run).verdict == "BROKEN"
    assert len(drawn) == 2


def test_stop_is_said_once_in_one_line_and_leaves_a_report(shown, ended, tmp_path, monkeypatch):
    monkeypatch.setattr(Ended, "outcome", "stopped")
    with pytest.raises(Stopped, match=r"^by the user$") as stopped:
        session.execute(stored(tmp_path, 1))
    (folder,) = ended.folders
    assert (folder / "report.html").exists()
    assert len(shown) == 1 and "stopped" not in shown[0], "the line of the error says it"
    assert isinstance(stopped.value, KeyboardInterrupt)


@pytest.mark.parametrize("error", [UserError("tier = 'x': wrong"), Stopped("by the user"), BackendUnavailable("none")])
def test_an_error_that_a_user_can_act_on_is_one_line(error, monkeypatch):
    lines = []
    shell = InteractiveShell()
    monkeypatch.setattr(shell, "_showtraceback", lambda _etype, _value, shown: lines.extend(shown))
    shell.user_ns["error"] = error
    shell.run_cell("def deep():\n    raise error\ndeep()")
    assert lines == [f"{type(error).__name__}: {error}"]


def test_a_notebook_shows_the_tables_of_the_spec(tmp_path):
    run = unpack("machine", tmp_path / "run")
    assert len(session.table(run, "All-reduce by size")) == len(run.result.tables["allreduce"])
    with pytest.raises(UserError, match="no table 'All-reduce by sizes' here: did you mean All-reduce by size"):
        session.table(run, "All-reduce by sizes")
    run.result = None
    assert session.table(run, "All-reduce by size").empty


def test_tables_are_left_aligned_with_thousands():
    frame = pd.DataFrame({"n": [1234567, 8], "x": [0.123456, None], "word": ["<b>", "12345"], "sure": [True, False]})
    page = notebook.table_html(frame)
    for text in ("1,234,567", "0.123<", "&lt;b&gt;", ">12345<", ">True<"):
        assert text in page
    assert "table.left td {text-align: left !important}" in page
    assert re.search(r'<table[^>]* class="dataframe left"', page)
    assert "nan" not in page.lower()
    assert page.count("<td>") == 8
    named = notebook.table_html(frame.set_index("word"))
    heading = re.search(r"<thead>.*</thead>", named, re.DOTALL)[0]
    assert heading.count("<tr") == 1
    assert re.findall(r"<th>(.*?)</th>", heading) == ["word", "n", "x", "sure"]


def test_checks_that_need_a_reader_come_first_and_the_passed_ones_share_a_row():
    def check(name, status):
        return Check(name=name, kind="sanity", question="", status=status, reason="why")

    names = [("a", "PASS"), ("b", "SKIPPED"), ("c", "AMBIGUOUS"), ("d", "PASS"), ("e", "FAIL"), ("f", "NO_BASELINE")]
    verdict = Verdict(verdict="FAIL", sentence="", checks=[check(*name) for name in names])
    assert session.checked(verdict).data == "Checked: a; b; c; d; e; f."
    table = session.checks_table(verdict)
    assert list(table.index) == ["e", "c", "b", "2 checks", "f"]
    assert table.loc["2 checks", "status"] == "PASS"
    assert table.loc["b", "status"] == "INCOMPLETE"


def test_initials_name_a_parameter():
    assert nearest("lr", ["learning_rate", "tier", "model"]) == "did you mean learning_rate?"
    assert nearest("epoch", ["epochs", "tier"]) == "did you mean epochs?"
