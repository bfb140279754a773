"""Reports: self-contained, escaped, readable by everyone, and there for every run, however it ended."""

import itertools
import json
import re
import shlex
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from make_run import config_of, make_run
from nbformat import v4
from pages import EVIL, Page, assert_self_contained_and_accessible

from benchlib.benchmarks import BENCHMARKS
from benchlib.config.schema import build, command, parse_overrides, resolve
from benchlib.results.run import Run
from benchlib.show import figures, markup, notebook, report
from benchlib.show.digest import metrics
from benchlib.spec.spec import Spec


@pytest.fixture(autouse=True)
def few_pictures(monkeypatch, request):
    """Most of a report's time goes into pictures; two that are drawn and not painted do for the tests of everything else."""
    if request.node.name != "test_whole_run":
        pictures = {name: BENCHMARKS["squad"].spec.figures()[name] for name in ("loss-curve", "memory")}
        monkeypatch.setattr(Spec, "figures", lambda own, report=None: pictures)
        monkeypatch.setattr(figures, "png", lambda figure: figure.alt.encode())


def rendered(folder):
    page = Page(report.render(folder))
    assert_self_contained_and_accessible(page)
    return page


def test_whole_run(tmp_path):
    page = rendered(make_run(tmp_path / "run", notebook="Does it learn?"))
    order = ["Does BERT fine-tuning on SQuAD learn what it should", "made-up-host; Imaginary 3000 CPU × 2", "3 checks passed; 1 not compared",
             "never for the target of the real benchmark", "The largest timed part of a step is backward", "Training throughput",
             "Failed and undecided checks", "Results", "Other checks", "The worst misses", "Measured", "Derived", "Claimed", "Not available", "The machine", "Run it again", "The notebook"]  # fmt: skip
    places = [page.text.index(words) for words in order]
    assert places == sorted(places)
    cut = "120 of 300 steps, 40.0% of the training: 31.2 s of the budget were left, a step takes 260 ms"
    for words in (cut, "59.36 to 63.04", "≥ 88"):
        assert words in page.text
    assert len(page.all("img")) == 5, "one of each that a training has; the peaks belong to another benchmark"
    tiles = dict(re.findall(r'<dt title="([^"]*)">(.*?)</div>', page.source, re.DOTALL))
    assert "✓ target ≥ 88" in tiles["f1_minisquad_tiny"]
    assert "✓ budget ≤ 300 s" in tiles["total_s"]
    assert "≈ baseline +20% of 0.242 s" in tiles["step_s_minisquad_tiny"]
    assert "target" not in tiles["allreduce_gbps"], "a target that was not evaluated is none"


def test_mean_deviation_and_coefficient_of_variation_stand_below_the_median(tmp_path):
    result = Run(make_run(tmp_path / "run")).result
    named = {
        row["name"]: row["mean"] for _, _, rows in metrics(result, {"step_s_minisquad_tiny": [1, 2, 6]}) for row in rows
    }
    assert named.pop("step_s_minisquad_tiny") == "mean 3 s ± 2.65 s (88.2%)"  # sqrt((4 + 1 + 9) / 2) = 2.646
    assert set(named.values()) == {""}


def test_text_from_data_parameters_and_errors_is_escaped(tmp_path):
    error = {"type": "ValueError", "message": EVIL, "traceback": f"Traceback\nValueError: {EVIL}"}
    miss = {"id": EVIL, "question": EVIL, "prediction": EVIL, "answers": [EVIL], "f1": 0.0, "context": EVIL}
    config = {"data": "files", "train_file": EVIL, "eval_file": "e.json", "model": EVIL}
    said = {"misses": [miss], "notes": [EVIL], "facts": {EVIL: EVIL}, "notebook": EVIL}
    whole = make_run(tmp_path / "<b>run&", config=config, **said)
    broken = make_run(tmp_path / "broken", outcome="failed", culprit=0, reason=EVIL, error=error, config=config)
    for folder, least in ((whole, 9), (broken, 5)):
        page = rendered(folder)
        assert page.text.count(EVIL) >= least
        assert "alert" not in "".join(str(attrs) for _, attrs in page.elements)


@pytest.mark.parametrize(
    ("changes", "word", "said"),
    [
        ({"outcome": "failed", "culprit": 1, "reason": "rank 1 raised ValueError in the phase train",
          "error": {"type": "ValueError", "message": "bad batch", "traceback": "File x.py\nValueError: bad batch"}},
         "BROKEN", ["Rank 1 raised ValueError in the phase train", "raised ValueError: bad batch", "File x.py"]),
        ({"outcome": "stalled", "culprit": 1, "reason": "rank 1 gave no sign of life for 60 s"},
         "BROKEN", ["Rank 1 gave no sign of life", "line 41 in exchange", "Python stacks of rank 1"]),
        ({"outcome": "stopped", "reason": "the user stopped the run"}, "STOPPED", ["The user stopped the run", "was ended with the run (SIGTERM)", "train, step 17"]),
        ({"outcome": "timeout", "reason": "the run took longer than 900 s"}, "BROKEN", ["The run took longer than 900 s"]),
        ({"outcome": "skipped", "reason": "torch reports no cuda device"}, "SKIPPED", ["Nothing ran: torch reports no cuda device"]),
        ({"with_result": False, "with_status": False, "with_verdict": False}, "UNFINISHED", ["Nothing says how this run ended"]),
    ],
    ids=["failed", "stalled", "stopped", "timeout", "skipped", "killed"],
)  # fmt: skip
def test_run_that_did_not_end_well_says_who_did_what(tmp_path, changes, word, said):
    folder, message = make_run(tmp_path / "run", steps=30, **changes), "shard_0002.bin was made again"
    with (folder / "events-rank0.jsonl").open("a") as events:
        events.write(json.dumps({"t": 1_790_000_009.0, "source": "rank0", "kind": "log", "message": message}) + "\n")
    page = rendered(folder)
    banner, ran = page.text.partition("Run it again")[0], changes.get("outcome") != "skipped"
    assert word in banner and said[0] in banner
    assert all(words in page.text for words in (*said, message)), "and what the ranks said of their work"
    assert ("The smoothed loss goes from" in page.source) == ran, "what was kept is shown"


def test_command_line_gives_the_same_config_again():
    changed = {"model": "my model's folder", "limits": {"allreduce_gbps": 0.25}, "target_f1": 80.5, "epochs": 0.5}
    config = build("squad", config_of(**changed, target_f1_embedded=None))
    words = shlex.split(command(config))
    assert words[:3] == ["benchlib", "run", "squad"]
    pairs = parse_overrides(after for before, after in itertools.pairwise(words) if before == "--set")
    named = [words[words.index(option) + 1] for option in ("--tier", "--backend")]
    assert resolve("squad", *named, pairs).config == config


HOSTILE = [
    EVIL, "<svg onload=alert(1)><script>alert(1)</script></svg>", "<a href=' JaVaScRiPt:alert(1)'>x</a>", "<img src='http://example.invalid/x.png'>",
    "<img src='data:image/svg+xml;base64,PHN2Zz4='>", "<div style='background:url(http://x)'>x</div>", "<iframe srcdoc='<script>alert(1)</script>'></iframe>",
    "<math><mtext><script>alert(1)</script></mtext></math>", "<noscript><p title='</noscript><img src=x onerror=alert(1)>'></noscript>",
    "<table><tr><td></table></div></details><p>after", "<!--><script>alert(1)</script>-->", "<table><tbody><tr><th title='> scope='>x",
    "<style>@import url(http://x)</style><object data='x'></object><embed src='x'><base href='http://x'><form action='http://x'><input></form>",
]  # fmt: skip


@pytest.mark.parametrize("source", HOSTILE)
def test_html_of_cells_is_cleaned(source, tmp_path):
    (tmp_path / "page.html").write_text(f"<div>{markup.clean(source)}</div>")
    page = Page(tmp_path / "page.html")
    assert page.all("script", "style", "svg", "iframe", "object", "embed", "base", "form", "link", "input") == []
    for name, value in ((name, str(value).lower()) for _, attrs in page.elements for name, value in attrs.items()):
        assert not (name.startswith("on") or name == "style" or "javascript" in value or "http://" in value)


def test_markdown_keeps_formulas_and_shows_raw_html_as_text():
    formulas = f"# Title\n\n$a^2$ costs {EVIL}\n\n$$\\frac{{1}}{{n}} \\text{{<script>}}$$\n\n| a |\n|---|\n| 1 |\n"
    page = converted([v4.new_markdown_cell(formulas)])
    parts = ("<h1>Title</h1>", "<msup><mi>a</mi><mn>2</mn></msup>", "<mfrac>", '<th scope="col">a</th>')
    assert [part for part in parts if part not in page] == []
    assert "<script" not in page and "&lt;script&gt;alert" in page


def converted(cells):
    page, _ = report.PageExporter().from_notebook_node(v4.new_notebook(cells=cells))
    return page


def code_cell(*outputs):
    return v4.new_code_cell("1", execution_count=1, outputs=list(outputs))


def display(**data):
    return v4.new_output("display_data", {name.replace("_", "/"): value for name, value in data.items()})


def test_what_a_cell_printed_and_displayed_is_shown_as_jupyter_shows_it():
    dot = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
    attached = v4.new_markdown_cell(
        "![a dot](attachment:dot.png) ![gone](attachment:none.png) ![far](http://x.invalid/x.png)"
    )
    attached["attachments"] = {"dot.png": {"image/png": dot}}
    widget = v4.new_output("display_data", {"application/vnd.jupyter.widget-view+json": {"model_id": "1"}})
    error = v4.new_output("error", ename="ValueError", evalue="bad", traceback=["\x1b[31mValueError\x1b[0m: <bad>"])
    page = converted([
        attached,
        code_cell(v4.new_output("stream", text="10 %\r20 %\r100 %\n"), error, widget),
        code_cell(display(text_latex="$x_1$", text_plain="x1"), display(image_svg="<svg/>", text_plain="a drawing")),
        code_cell(display(image_jpeg="aaaa", text_plain="<Figure size 640x480 with 1 Axes>")),
        code_cell(display(text_html="<p>" + "long " * 20_000, text_plain="short")),
        code_cell(display(image_png=dot, text_plain="a dot again"), display(image_png="x" * 1_000_000, text_plain="a map")),
    ])  # fmt: skip
    assert page.count(f"data:image/png;base64,{dot}") == 2 and 'alt="a dot again"' in page
    assert "[picture: gone]" in page and "[picture: far]" in page
    assert "100 %" in page and "20 %" not in page, "of overwritten lines the last state"
    assert '<span class="ansi-red-fg">ValueError</span>: &lt;bad&gt;' in page
    assert "<msub><mi>x</mi><mn>1</mn></msub>" in page and "a drawing" in page
    assert "long" not in page and "short" in page
    assert 'alt="picture that the code of this cell draws"' in page and "Figure size" not in page
    assert "picture left out to keep this page small; the notebook has it: a map" in page


def test_a_page_of_no_run_begins_with_its_verdict_and_ends_with_its_method(tmp_path):
    verdict = {report.VERDICT: notebook.Headline("FAIL", f"It is slow. {EVIL}", ("history", "3 runs")).__dict__}
    method = v4.new_markdown_cell("## How it was computed", metadata={"tags": ["method"]})
    cells = [v4.new_markdown_cell("# Is it slow?"), method, code_cell(v4.new_output("display_data", verdict))]
    (tmp_path / "page.html").write_text(converted(cells))
    page = Page(tmp_path / "page.html")
    assert_self_contained_and_accessible(page)
    places = [
        page.text.index(words)
        for words in ("history", "3 runs", "It is slow.", "Is it slow?", "Code [1]", "How it was computed")
    ]
    assert places == sorted(places)


def test_nbconvert_makes_the_same_page_from_a_folder_elsewhere(tmp_path):
    """As a user calls it, in a folder that has a ``benchlib`` which is none of its templates."""
    programs = Path(sys.executable).parent
    (tmp_path / "elsewhere" / "benchlib").mkdir(parents=True)
    folder = make_run(tmp_path / "run", notebook="Does it learn?")
    run = partial(subprocess.run, cwd=tmp_path / "elsewhere", check=True, capture_output=True, timeout=120)
    run([programs / "benchlib", "report", str(folder)])
    path = str(folder / "notebook.ipynb")
    run([programs / "jupyter", "nbconvert", "--to", "benchlib", path, "--output-dir", "."])
    assert (tmp_path / "elsewhere" / "notebook.html").read_text() == (folder / "report.html").read_text()


def test_a_notebook_that_cannot_be_shown_costs_nothing_else(tmp_path, monkeypatch):
    folder = make_run(tmp_path / "run", notebook="Does it learn?")
    monkeypatch.setattr(report.Renderer, "heading", lambda *_, **__: 1 / 0)
    page = rendered(folder)
    assert (
        "not a readable notebook: ZeroDivisionError" in page.text
        and "Every number and where it comes from" in page.text
    )


def test_a_notebook_beside_a_config_of_another_program_is_no_run(tmp_path):
    (tmp_path / "config.json").write_text('{"a": 1}')
    (tmp_path / "result.json").write_text("{}")
    path_of_mine = tmp_path / "notebook.ipynb"
    path_of_mine.write_text(json.dumps(v4.new_notebook(cells=[v4.new_markdown_cell("# Mine")])))
    page, _ = report.exporter().from_filename(str(path_of_mine))
    assert "<h1>Mine</h1>" in page and "DAMAGED" not in page
