"""Names, stored words and configs that would steer a terminal, a page or a path."""

import io
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


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize(
    "name",
    [
        f"squad-cpu-101500-{EVIL.replace('/', '')}",
        "squad-cpu-101500-a\nPASS  all\tfine",
        "squad-cpu-101500-[red]x[bold]",
        f"squad-cpu-101500-{ANSI}",
        "-x",
        "sp ace ünï 漢",
    ],
)
def test_names_of_folders_are_harmless_everywhere(tmp_path, name, monkeypatch):
    monkeypatch.setattr(output.console, "width", 400)  # no name is folded into its neighbours' column
    out = tmp_path / f"out {name}"
    run = place(out, name)
    (run / "report.html").write_text("x")
    code, said = command("list", "--runs", out=out)
    assert code == 0
    assert re.sub(r"\s", "", harmless(name)) in re.sub(r"\s", "", said)
    code, told = command("report", "--", run)
    for text in (said, told):
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", text)
    assert not re.search(r"^PASS", told, re.MULTILINE)
    assert "<script>alert" not in index.render(out).read_text()
    page = report.html(Run(run))
    assert "<script>alert" not in page
    assert "\x1b" not in page


@pytest.mark.usefixtures("no_pictures")
def test_stored_words_cannot_steer_the_terminal(tmp_path):
    run = place(tmp_path, verdict={"verdict": "FAIL", "sentence": f"fine{ANSI} [bold]x[/bold]\u202e {EVIL}"})
    code, said = command("list", "--runs", out=tmp_path)
    assert code == 0
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", said)
    assert "[bold]x[/bold]" in " ".join(said.split())
    assert (run / "verdict.json").exists()


@pytest.mark.usefixtures("no_pictures")
def test_folders_that_are_no_runs_are_left_alone(tmp_path):
    foreign = tmp_path / "model"
    foreign.mkdir()
    (foreign / "config.json").write_text('{"architectures": ["BertModel"]}')
    before = files_of(tmp_path)
    for path in (foreign, tmp_path, Path("../../../../etc"), tmp_path / "missing"):
        code, said = command("report", path, cwd=tmp_path)
        assert code == 2
        assert "error" in said
    assert files_of(tmp_path) == before
    assert not (tmp_path / "index.html").exists()
    copied = make_run(tmp_path / "here" / "squad-cpu-101500-aaaaaa")
    command("report", copied)
    assert (copied / "report.html").exists()
    assert not (tmp_path / "index.html").exists()  # a copy outside a store belongs to no list


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize("field", ["benchmark", "tier"])
@pytest.mark.parametrize("value", ["../x", "a/b", "*", "", "..", EVIL, "x\ny"])
def test_a_stored_config_leads_nowhere_else(tmp_path, field, value):
    run = place(tmp_path / "out", config={field: value})
    with pytest.raises(UserError, match=r"unknown benchmark|tier = "):
        baselines.accept(Run(run), "x", [], root=tmp_path / "baselines" / "deep")
    assert not (tmp_path / "baselines").exists()
    assert verdict.judged(Run(run)).broken
    assert io.StringIO(report.html(Run(run))).read().count("<script>alert") == 0
