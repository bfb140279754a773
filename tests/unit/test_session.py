"""What a notebook shows at its end, in its tables and for errors, without a kernel."""

import contextlib
import json
from unittest import mock

import pytest
from IPython.core.interactiveshell import InteractiveShell
from make_run import make_run
from make_smoke import unpack
from stores import without_pictures

from benchlib import session
from benchlib.core.errors import BackendUnavailable, Stopped, UserError, VerdictFailed
from benchlib.judge.checks import Verdict
from benchlib.launch import launch
from benchlib.results.run import Run
from benchlib.show import widgets

STATUS = '{"outcome": "complete", "reason": "why", "culprit": null, "ranks": []}'


@pytest.fixture
def shown(monkeypatch, tmp_path):
    """By hand, in a store of its own: what is displayed, as Markdown."""
    monkeypatch.delenv("BENCHLIB_HEADLESS", raising=False)
    monkeypatch.setenv("BENCHLIB_OUTPUTS", str(tmp_path / "outputs"))
    without_pictures(monkeypatch)
    said = []
    monkeypatch.setattr("IPython.display.display", lambda item: said.append(getattr(item, "data", item)))
    return said


def stored(tmp_path, number):
    return Run(make_run(tmp_path / "outputs" / "quick-20260921" / f"squad-cpu-10150{number}-abcde{number}"))


def demo(folder):
    """A copy of a recorded run, complete and not judged yet."""
    unpack("machine", folder)
    (folder / "status.json").write_text(STATUS)
    return Run(folder)


@pytest.mark.parametrize(("verdict", "raises"), [("PASS", False), ("AMBIGUOUS", False), ("FAIL", True)])
def test_only_a_failed_verdict_raises_and_only_where_asked(shown, tmp_path, monkeypatch, verdict, raises):
    monkeypatch.setenv("BENCHLIB_HEADLESS", "1")
    run, judged = stored(tmp_path, 1), Verdict(verdict=verdict, sentence="The sentence.", checks=[])
    session.conclude(run, judged)
    with pytest.raises(VerdictFailed, match=r"The sentence\.") if raises else contextlib.nullcontext():
        session.conclude(run, judged, fail_on_verdict=True)
    assert len(shown) == 2 and not (run.path / "report.html").exists(), "the command line writes it"


@pytest.fixture
def ended(monkeypatch):
    """The folders of launches, which have ended as soon as they are watched."""
    folders = []
    monkeypatch.setattr(launch, "Launch", lambda folder, config: folders.append(folder) or mock.Mock(folder=folder))
    monkeypatch.setattr(widgets, "watch", lambda _: {"outcome": "complete", "reason": ""})
    return folders


def test_the_run_cell_again_is_a_new_run_with_the_same_config(shown, ended, tmp_path):
    first = stored(tmp_path, 1)
    again = session.execute(first)
    assert again.path != first.path
    assert again.config == first.config
    assert again.path.parents[1] == tmp_path / "outputs"
    assert session.execute(again).path == again.path, "nothing was started in it yet"
    assert ended == [again.path, again.path]


@pytest.mark.usefixtures("ended")
def test_the_run_cell_alone_leaves_verdict_report_folder_and_comparison(shown, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    earlier = demo(tmp_path / "outputs" / "smoke-20260921" / "machine-cpu-101501-abcde1")
    monkeypatch.setattr(
        widgets, "watch", lambda launched: json.loads((demo(launched.folder).path / "status.json").read_text())
    )
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


@pytest.mark.parametrize("error", [UserError("tier = 'x': wrong"), Stopped("by the user"), BackendUnavailable("none")])
def test_an_error_that_a_user_can_act_on_is_one_line(error, monkeypatch):
    lines = []
    shell = InteractiveShell()
    monkeypatch.setattr(shell, "_showtraceback", lambda _etype, _value, shown: lines.extend(shown))
    shell.user_ns["error"] = error
    shell.run_cell("def deep():\n    raise error\ndeep()")
    assert lines == [f"{type(error).__name__}: {error}"]


def test_the_frame_of_a_picture_is_named_like_it_and_only_runs_have_one(tmp_path):
    run = Run(unpack("compiled", tmp_path / "compiled").path)
    frame = session.frame(run, "latency")
    assert frame.groupby("executor")["latency (ms)"].count().min() > 1
    with pytest.raises(UserError, match="no picture 'latencies' here: did you mean latency"):
        session.frame(run, "latencies")
    with pytest.raises(UserError, match="only the pictures of a run have a frame"):
        session.frame(mock.Mock(), "trends")


@pytest.mark.parametrize(
    ("given", "config"),
    [
        ({}, {"slow": True, "seed": 7}),
        ({"slow": None, "seed": None, "model": ""}, {"slow": True, "seed": 7}),
        ({"slow": False, "seed": 0}, {"slow": False, "seed": 0}),
    ],
    ids=["nothing", "left to the tier", "0 and False"],
)
def test_a_parameter_is_left_to_the_tier_only_by_none_and_an_empty_text(tmp_path, monkeypatch, given, config):
    monkeypatch.setenv("BENCHLIB_OUTPUTS", str(tmp_path / "outputs"))
    tier = tmp_path / "mine.yaml"
    tier.write_text("parity: {slow: true, seed: 7}")
    run = session.open_run("parity", "", str(tier), "cpu", {}, **given)
    assert {name: getattr(run.config, name) for name in config} == config
    squad = session.open_run("squad", "", "smoke", "cpu", {}, nproc=0)
    assert squad.config.nproc >= 1, "0 leaves the number of ranks to the machine"
