"""An external benchmark that cannot be imported costs only what needs it."""

import pytest
from stores import command, no_pictures, place  # noqa: F401

from benchlib.benchmarks import BENCHMARKS, Benchmark
from benchlib.core.files import read_json, write_json
from benchlib.results.run import Run
from benchlib.show import report

FAULTS = {
    "SyntaxError": {"__init__": "", "config": "class TallyConfig(:"},
    "ModuleNotFoundError": {"__init__": "import nowhere_at_all"},
    "AttributeError": {"__init__": "", "config": "", "judge": ""},
}


@pytest.fixture(params=FAULTS)
def fault(request, tmp_path, monkeypatch):
    """Join a benchmark that cannot be imported; return the name of its error."""
    package = f"faulty_{request.param}"
    (tmp_path / package).mkdir()
    for name, text in FAULTS[request.param].items():
        (tmp_path / package / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(BENCHMARKS, "tally", Benchmark("tally", package, external=True))
    return request.param


@pytest.mark.usefixtures("no_pictures")
def test_only_what_needs_it_fails_and_in_one_sentence(fault, tmp_path):
    out = tmp_path / "out"
    run = place(out)
    write_json(run / "config.json", read_json(run / "config.json") | {"benchmark": "tally"})
    code, listed = command("list")
    assert code == 0
    assert "not loadable: benchmark tally cannot be loaded, faulty_" in " ".join(listed.split())
    for words in (
        ["--help"],
        ["references"],
        ["list", "--runs", "--out", out],
        ["export", "--to", "csv", "--out", out],
    ):
        assert command(*words)[0] == 0
    for words in (["run", "tally", "--dry-run"], ["report", run]):
        code, said = command(*words)
        assert code == 2
        assert fault in said and "fix or uninstall its package" in said
    assert read_json(run / "verdict.json")["verdict"] == "PASS"  # what cannot be judged is not called broken
    assert "PASS</h1>" in report.html(Run(run))
