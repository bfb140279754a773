"""Reports: self-contained, escaped, readable by everyone, and there for every run, however it ended."""

import base64
import itertools
import json
import re
import shlex
import shutil
import subprocess

import nbformat
import pytest
from make_run import CHECKS, config_of, make_run
from pages import EVIL, Page, assert_self_contained_and_accessible, contrast

from benchlib.benchmarks import BENCHMARKS
from benchlib.config.schema import build, command, parse_overrides, resolve
from benchlib.core.files import home
from benchlib.core.text import MARKS, cell, column, look
from benchlib.results.record import load
from benchlib.results.run import Run
from benchlib.show import figures, index, markup, report, training
from benchlib.show.exports import junit, openmetrics
from benchlib.show.figures import png
from benchlib.spec.unported import Unported


@pytest.fixture(autouse=True)
def few_pictures(monkeypatch, request):
    """Most of a report's time goes into pictures; two that are drawn and not painted do for the tests of everything else."""
    if request.node.name not in ("test_whole_run", "test_a_print_takes_few_pages", "test_huge_outputs_are_cut"):
        kept = {name: BENCHMARKS["squad"].spec.figures()[name] for name in ("loss-curve", "memory")}
        monkeypatch.setattr(Unported, "figures", lambda own, report=None: kept)
        if request.node.name != "test_picture_of_the_records_is_not_shown_twice":
            monkeypatch.setattr(figures, "png", lambda figure: figure.alt.encode())


def rendered(folder):
    page = Page(report.render(folder))
    assert_self_contained_and_accessible(page)
    return page


def test_whole_run(tmp_path):
    page = rendered(make_run(tmp_path / "run", notebook="Does it learn?"))
    order = ["PASS", "never for the target of the real benchmark", "The largest part of a step goes to backward", "Training throughput",
             "Failed and undecided checks", "Results", "Other checks", "The worst misses", "Measured", "Derived", "Claimed", "Not available", "The machine", "Run it again", "The notebook"]  # fmt: skip
    places = [page.text.index(words) for words in order]
    assert places == sorted(places)
    assert "covered 40.0% of the whole training, 120 of 300 steps: 300 steps would take 410 s" in page.text
    assert "59.36 to 63.04" in page.text
    assert "a CPU has no device memory of its own" in page.text
    assert "≥ 88" in page.text
    assert len(page.all("img")) == 6, "one of each that a training has; the peaks belong to another benchmark"


def test_checks_that_need_a_reader_come_first_and_passed_ones_are_folded(tmp_path):
    folder = make_run(tmp_path / "run")
    verdict = json.loads((folder / "verdict.json").read_text())
    checks = verdict["checks"]
    checks.append({**checks[0], "name": "slow at the end", "kind": "regression", "status": "FAIL", "gates": True})
    (folder / "verdict.json").write_text(json.dumps(verdict))
    html = rendered(folder).text
    text = html[html.index("Failed and undecided checks") :]
    passed = [check["name"] for check in checks if check["status"] == "PASS"]
    assert text.index("slow at the end") < text.index(f"{len(passed)} checks passed") < text.index(passed[0])
    page = (folder / "report.html").read_text()
    assert re.search(rf"<details class=\"more\"><summary>{len(passed)} checks passed", page), (
        "closed until it is opened"
    )


def test_the_head_names_question_and_hardware_and_tiles_have_their_limits(tmp_path):
    page = rendered(make_run(tmp_path / "run", steps=5, with_samples=False))
    head = page.text[: page.text.index("PASS", page.text.index("quick tier"))]
    assert "Does BERT fine-tuning on SQuAD learn what it should" in head
    assert "made-up-host; Imaginary 3000 CPU × 2" in head
    tiles = dict(re.findall(r'<dt title="([^"]*)">(.*?)</div>', page.source, re.DOTALL))
    assert "✓ target ≥ 88" in tiles["f1_minisquad_tiny"]
    assert "✓ budget ≤ 300 s" in tiles["total_s"]
    assert "≈ baseline +20% of 0.242 s" in tiles["step_s_minisquad_tiny"]
    assert "target" not in tiles["allreduce_gbps"], "a target that was not evaluated is none"


@pytest.mark.skipif(not shutil.which("chromium"), reason="chromium is not installed: apt-get install chromium")
def test_a_print_takes_few_pages(tmp_path):
    checks = [{**CHECKS[0], "name": f"check {number}"} for number in range(25)]
    misses = [
        {"id": f"id-{i}", "question": f"Which river is {i}?", "prediction": "x", "answers": ["y"], "f1": 0.0, "context": "words " * 60}
        for i in range(20)
    ]  # fmt: skip
    page = report.render(make_run(tmp_path / "run", steps=60, checks=checks, misses=misses, notebook="x"))
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
    ]
    pdf = tmp_path / "report.pdf"
    command = ["chromium", *flags, f"--user-data-dir={tmp_path / 'profile'}", f"--print-to-pdf={pdf}", page.as_uri()]
    subprocess.run(command, check=True, capture_output=True)
    assert 1 <= len(re.findall(rb"/Type /Page\b", pdf.read_bytes())) <= 5


def test_text_from_data_parameters_and_errors_is_escaped(tmp_path):
    error = {"type": "ValueError", "message": EVIL, "traceback": f"Traceback\nValueError: {EVIL}"}
    miss = {"id": EVIL, "question": EVIL, "prediction": EVIL, "answers": [EVIL], "f1": 0.0, "context": EVIL}
    config = {"data": "files", "train_file": EVIL, "eval_file": "e.json", "model": EVIL}
    whole = make_run(
        tmp_path / "<b>run&", config=config, misses=[miss], notes=[EVIL], facts={EVIL: EVIL}, notebook=EVIL
    )
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
    page = rendered(make_run(tmp_path / "run", steps=30, **changes))
    banner, results, _ = page.text.partition("These results")
    ran = changes.get("outcome") != "skipped"
    assert bool(results) == ran, "of results that there are none"
    assert word in banner
    assert said[0] in banner
    assert all(words in page.text for words in said)
    assert ("Loss fell from" in page.source) == ran, "what was kept is shown"


def test_what_ranks_said_of_their_work_is_in_the_report_of_a_broken_run_too(tmp_path):
    path = make_run(tmp_path / "run", outcome="failed", reason="rank 1 was killed by SIGKILL", steps=5)
    words = "4 shards: 1 written; shard_0002.bin was made again: it has 4 bytes of 8"
    with (path / "events-rank0.jsonl").open("a") as events:
        events.write(json.dumps({"t": 1_790_000_009.0, "source": "rank0", "kind": "log", "message": words}) + "\n")
    assert words in rendered(path).text


def test_words_of_verdicts_carry_the_meaning_that_the_docs_give(tmp_path):
    table = re.findall(r"^\| ([A-Z_]+) \| (.+?) \|", (home() / "docs" / "verdicts.md").read_text(), re.MULTILINE)
    documented = dict(table)
    assert set(documented) == set(MARKS)
    for word, sentence in documented.items():
        said = look(word).meaning.partition(" (exit code")[0]
        assert said and sentence.startswith(said), word
    page = rendered(make_run(tmp_path / "run", outcome="failed", reason="rank 1 died"))
    (title,) = [attrs["title"] for attrs in page.all("h1")]
    assert title.startswith("a rank or the notebook died") and title.endswith("(exit code 2)")


def test_stacks_of_ranks_in_the_same_place_are_told_once(tmp_path):
    folder = make_run(tmp_path / "run", outcome="stalled", culprit=2, ranks=30)
    status = json.loads((folder / "status.json").read_text())
    for rank in status["ranks"]:
        rank["stacks"] = "stuck here" if rank["rank"] == 2 else "waits in all_reduce"
    (folder / "status.json").write_text(json.dumps(status))
    page = rendered(folder)
    assert page.source.count("waits in all_reduce") == 1
    assert page.text.index("stuck here") < page.text.index("waits in all_reduce")


@pytest.mark.parametrize(
    "name",
    ["config.json", "machine.json", "result.json", "verdict.json", "status.json", "samples.parquet", "notebook.ipynb"],
)
def test_damaged_part_is_named_and_costs_nothing_else(tmp_path, name):
    folder = make_run(tmp_path / "run", notebook="x")
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(data[: len(data) // 2])
    page = rendered(folder)
    heads = ["Files are unreadable or changed", "Damaged parts, left out of this report"]
    places = [page.text.index(head) for head in heads if head in page.text]
    assert len(places) == 1, "said once"
    assert name in page.text[places[0] :][:400]
    assert "Resident memory peaks" in page.source


@pytest.mark.parametrize(
    "changes",
    [
        {"steps": 1},
        {"cut_events": True},
        {"metrics": []},
        {"checks": []},
        {"misses": []},
        {"with_samples": False},
        {"metrics": [{"name": "loss_final", "value": None, "unit": "", "direction": "lower", "provenance": "measured", "n": 3, "reason": "1 of 3 samples are not finite (nan)"}]},
    ],
    ids=["one step", "cut events", "no metrics", "no checks", "no misses", "no samples", "nan"],
)  # fmt: skip
def test_partial_run_is_rendered(tmp_path, changes):
    page = rendered(make_run(tmp_path / "run", **changes))
    assert "PASS" in page.text
    assert "not finite (nan)" in page.text or "metrics" not in changes or not changes["metrics"]


def test_picture_of_the_records_is_not_shown_twice(tmp_path):
    figure = png(training.loss_curve(Run(make_run(tmp_path / "first"))))
    other = png(training.loss_curve(Run(make_run(tmp_path / "other", steps=20))))
    folder = make_run(tmp_path / "run", notebook="x", figure=figure)
    page = rendered(folder)
    assert page.source.count(base64.b64encode(figure).decode()) == 1
    assert "#loss-curve" in [attrs.get("href") for attrs in page.all("a")]
    page = rendered(make_run(tmp_path / "run2", notebook="x", figure=other))
    assert [image["alt"] for image in page.all("img")][-1] == "a picture from a cell"


def test_huge_outputs_are_cut(tmp_path):
    folder = make_run(tmp_path / "run", notebook="x")
    notebook = nbformat.read(folder / "notebook.ipynb", as_version=4)
    noise = nbformat.v4.new_output("stream", text="\n".join(f"line {i}" for i in range(200_000)))
    table = nbformat.v4.new_output("execute_result", {"text/html": "<p>long</p>" * 100_000, "text/plain": "short form"})
    broken = nbformat.v4.new_output("display_data", {"image/png": "not base64!", "text/plain": "?"})
    notebook.cells += [nbformat.v4.new_code_cell("loud()", outputs=[noise, table, broken]) for _ in range(3)]
    nbformat.write(notebook, folder / "notebook.ipynb")
    page = rendered(folder)
    assert "line 199999" in page.text
    assert "characters left out" in page.text
    assert "short form" in page.text


def test_notebook_without_its_run_is_readable(tmp_path):
    page = rendered(
        make_run(tmp_path / "run", notebook="Question", with_result=False, with_status=False, with_verdict=False)
    )
    assert page.all("math")
    assert "example.invalid" not in page.source
    assert "[1]: default parameters" in page.text


def test_command_line_gives_the_same_config_again():
    config = build(
        "squad",
        config_of(
            model="my model's folder",
            limits={"allreduce_gbps": 0.25},
            target_f1=80.5,
            epochs=0.5,
            target_f1_embedded=None,
        ),
    )
    words = shlex.split(command(config))
    assert words[:3] == ["benchlib", "run", "squad"]
    pairs = [after for before, after in itertools.pairwise(words) if before == "--set"]
    again = resolve(
        "squad", words[words.index("--tier") + 1], words[words.index("--backend") + 1], parse_overrides(pairs)
    ).config
    assert again == config


@pytest.mark.parametrize(
    "source",
    [
        EVIL, "<svg onload=alert(1)><script>alert(1)</script></svg>", "<a href='javascript:alert(1)'>x</a>", "<a href=' JaVaScRiPt:alert(1)'>x</a>",
        "<img src='http://example.invalid/x.png'>", "<img src='data:image/svg+xml;base64,PHN2Zz4='>", "<div style='background:url(http://x)'>x</div>",
        "<style>@import url(http://x)</style>", "<iframe srcdoc='<script>alert(1)</script>'></iframe>", "<math><mtext><script>alert(1)</script></mtext></math>",
        "<noscript><p title='</noscript><img src=x onerror=alert(1)>'></noscript>", "<table><tr><td></table></div></details><p>after", "<!--><script>alert(1)</script>-->", "<p title='<img src=x onerror=alert(1)><th>'>x", "<table><tbody><tr><th title='> scope='>x",
        "<object data='x'></object><embed src='x'><base href='http://x'><form action='http://x'><input></form><link rel=stylesheet href='http://x'>",
    ],
)  # fmt: skip
def test_html_of_cells_is_cleaned(source, tmp_path):
    cleaned = str(markup.clean(source))
    (tmp_path / "page.html").write_text(f"<div>{cleaned}</div>")
    page = Page(tmp_path / "page.html")
    assert page.all("script", "style", "svg", "iframe", "object", "embed", "base", "form", "link", "input") == []
    assert not any(
        name.startswith("on") or name == "style" or "javascript" in str(value).lower() or "http://" in str(value)
        for _, attrs in page.elements
        for name, value in attrs.items()
    )
    assert "".join(page.open) == ""


def test_html_of_cells_is_completed_for_screen_readers():
    table = "<table><thead><tr><th>a<tbody><tr><th>r<th scope=colgroup>c</table>"
    assert re.findall(r"<th( [^>]*)>", markup.clean(table)) == [' scope="col"', ' scope="row"', ' scope="colgroup"']
    image = "<img src='data:image/png;base64,AA==' alt='%s'>"
    alts = [re.findall('alt="([^"]*)"', markup.clean(image % words)) for words in ("a curve", "")]
    assert alts == [["a curve"], ["picture without a description"]]


def test_markdown_keeps_formulas_and_shows_raw_html_as_text():
    page = str(
        markup.markdown(
            f"# Title\n\n$a^2$ costs {EVIL}\n\n$$\\frac{{1}}{{n}} \\text{{<script>}}$$\n\n| a |\n|---|\n| 1 |\n"
        )
    )
    assert "<h3>Title</h3>" in page
    assert "<msup><mi>a</mi><mn>2</mn></msup>" in page
    assert "<mfrac>" in page
    assert '<th scope="col">a</th>' in page
    assert "<script" not in page
    assert "&lt;script&gt;alert" in page


def test_terminal_output_loses_its_control_codes():
    assert markup.plain("\x1b[31mred\x1b[0m 10%\r50%\r100%\nnext\r\n") == "100%\nnext\n"


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_colours_of_the_page_have_enough_contrast(dark):
    style = (markup.TEMPLATES / "style.css").read_text()
    roots = re.findall(r":root \{(.*?)\}", style, re.DOTALL)
    colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", roots[1 if dark else 0]))
    pairs = [
        ("text", "page"),
        ("text", "card"),
        ("text", "soft"),
        ("muted", "page"),
        ("muted", "card"),
        ("muted", "soft"),
        ("link", "card"),
        ("link", "page"),
    ]
    pairs += [(tone, f"{tone}-soft") for tone in ("good", "bad", "warn", "calm")] + [
        ("card", tone) for tone in ("good", "bad", "warn", "calm")
    ]
    pairs += [("text", f"{tone}-soft") for tone in ("good", "bad", "warn", "calm")] + [
        (word, "soft") for word in ("word", "string", "number")
    ]
    low = {pair: round(contrast(colours[pair[0]], colours[pair[1]]), 2) for pair in pairs}
    assert min(low.values()) >= 4.5, low


def test_a_fact_that_says_nothing_has_no_row(tmp_path):
    facts = {"identity": {}, "nothing": None, "empty_list": [], "data": {"train_rows": 3}, "flag": False}
    page = Page(report.render(make_run(tmp_path / "run", facts=facts, with_samples=False, steps=5)))
    table = page.source[page.source.index("<h3>Facts</h3>") :].split("</table>")[0]
    rows = dict(re.findall(r'<th scope="row">(.*?)</th><td>(.*?)</td>', table))
    assert rows["data"] == "train rows 3"
    assert rows["flag"] == "no"
    assert all(rows.values())
    assert not {"identity", "nothing", "empty list"} & rows.keys()


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("power_w", "power (W)"),
        ("asked_mb_per_s", "asked (MB/s)"),
        ("samples_per_s", "samples/s"),
        ("memory_in_use_gb", "memory in use (GB)"),
        ("batch", "batch"),
        ("median_us", "median (µs)"),
        ("busbw_gbps", "busbw (Gbps)"),
        ("together_flops", "together"),
        ("TTFT p99, ms", "TTFT p99, ms"),
    ],
)
def test_columns_are_headed_by_name_and_unit(name, shown):
    assert column(name) == shown


def test_a_value_that_is_missing_is_a_dash():
    assert [cell(value, "power_w") for value in (None, 412.5)] == ["–", "412.5"]


MANY = {
    "notes": {"notes": ["x" * 5000] * 300},
    "tables": {"tables": {f"t{number}": [{f"c{i}": "q" * 400 for i in range(41)}] * 41 for number in range(41)}},
    "facts": {"facts": {f"f{number}": "y" * 900 for number in range(3000)}},
}


@pytest.mark.parametrize("part", MANY)
def test_a_report_stays_under_its_size_whatever_a_run_says(tmp_path, part):
    folder = make_run(tmp_path / "smoke-20261123" / "squad-cpu-000000-abc")
    path = folder / "result.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | MANY[part]))
    page = report.html(Run(folder))
    assert len(page.encode()) <= 500_000 and page.rstrip().endswith("</html>")
    assert ("Long texts and tables are cut to keep this report small" in page) == (
        part != "notes"
    )  # the first ones alone


@pytest.mark.parametrize("sign", ["\x1b[31m", "\x1b]0;title\x07", "\x9b", "\x07", "\x7f", "\u202e", "\x00"])
def test_no_page_and_no_export_has_control_characters(tmp_path, sign):
    folder = make_run(tmp_path / "smoke-20261123" / "squad-cpu-000000-abc")
    for name, change in (
        ("result.json", lambda part: part["notes"].append(f"a{sign}note")),
        ("verdict.json", lambda part: part.update(sentence=f"a{sign}sentence")),
    ):
        values = json.loads((folder / name).read_text())
        change(values)
        (folder / name).write_text(json.dumps(values))
    index.render(tmp_path)
    run = load(folder)
    texts = {
        "report": report.html(Run(folder)), "index": (tmp_path / "index.html").read_text(), "data": run.model_dump_json(),
        "junit": junit.text([run]), "openmetrics": openmetrics.openmetrics([run]),
    }  # fmt: skip
    bad = sign[0]
    assert [name for name, text in texts.items() if bad in text or json.dumps(bad)[1:-1] in text] == []
    assert "anote" in run.result.notes[-1] and "asentence" in texts["junit"]
