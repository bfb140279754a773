"""Names, stored words, configs and times that would steer a terminal, a page or a path."""

import re
from pathlib import Path

import pytest
from make_run import make_run
from stores import ANSI, EVIL, command, files_of, no_pictures, place  # noqa: F401

from benchlib.commands import output
from benchlib.core.errors import UserError
from benchlib.core.terminal import harmless
from benchlib.judge import baselines, verdict
from benchlib.results.run import Run
from benchlib.show import index, report

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]")
pytestmark = pytest.mark.usefixtures("no_pictures")


@pytest.mark.parametrize(
    "name", [f"squad-cpu-101500-[red]x[bold]{ANSI}{EVIL.replace('/', '')}", "-a\nPASS  all\tfine ünï 漢"]
)
def test_names_of_folders_and_stored_words_are_harmless_everywhere(tmp_path, name, monkeypatch):
    monkeypatch.setattr(output.console, "width", 400)  # no name is folded into its neighbours' column
    out = tmp_path / f"out {name}"
    run = place(out, name, verdict={"verdict": "FAIL", "sentence": f"fine{ANSI} [bold]x[/bold]\u202e {EVIL}"})
    (run / "report.html").write_text("x")
    code, listed = command("list", "--runs", out=out)
    assert code == 0
    assert re.sub(r"\s", "", harmless(name)) in re.sub(r"\s", "", listed)
    assert "[bold]x[/bold]" in " ".join(listed.split())
    reported = command("report", "--", run)[1]
    assert not CONTROL.search(listed + reported)
    assert not re.search(r"^PASS", reported, re.MULTILINE)
    page = report.html(Run(run))
    assert "<script>alert" not in index.render(out).read_text() + page and "\x1b" not in page


def test_folders_that_are_no_runs_are_left_alone(tmp_path):
    foreign = tmp_path / "model"
    foreign.mkdir()
    (foreign / "config.json").write_text('{"architectures": ["BertModel"]}')
    before = files_of(tmp_path)
    for path in (foreign, tmp_path, Path("../../../../etc"), tmp_path / "missing"):
        code, output = command("report", path, cwd=tmp_path)
        assert code == 2 and "error" in output
    assert files_of(tmp_path) == before
    copied = make_run(tmp_path / "here" / "squad-cpu-101500-aaaaaa")
    command("report", copied)
    assert (copied / "report.html").exists()
    assert not (tmp_path / "index.html").exists()  # a copy outside a store belongs to no list


@pytest.mark.parametrize("field", ["benchmark", "tier"])
@pytest.mark.parametrize("value", ["../x", "*", "", EVIL, "x\ny"])
def test_a_stored_config_leads_nowhere_else(tmp_path, field, value):
    run = place(tmp_path / "out", config={field: value})
    with pytest.raises(UserError, match=r"unknown benchmark|tier = "):
        baselines.accept(Run(run), "x", [], root=tmp_path / "baselines" / "deep")
    assert not (tmp_path / "baselines").exists()
    assert verdict.judged(Run(run)).broken
    assert "<script>alert" not in report.html(Run(run))
