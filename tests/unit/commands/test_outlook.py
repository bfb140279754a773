"""`benchlib power`: recorded or stated noise, and how many runs to accept; the simulation itself has tests of its own."""

import json

import pytest
from click.testing import CliRunner
from make_run import make_run

from benchlib.cli import main
from benchlib.judge import baselines


@pytest.fixture
def power(tmp_path, monkeypatch):
    monkeypatch.setattr(baselines, "folder", lambda: tmp_path / "baselines")

    def call(*words):
        result = CliRunner().invoke(main, ["power", *words, "--out", str(tmp_path / "out")])
        return result.exit_code, " ".join(result.output.split())

    return call


def test_a_stated_noise_says_how_many_runs_it_takes(power):
    """With 4% between runs one accepted run finds 30%. With 15% no number of them does: one new run in a hundred is by 2.3 x 15%
    better than the level, which hides a loss of 29%, and the loss has to exceed the limit of 20% beside that."""
    code, text = power("--spread", "0.04", "--loss", "0.3")
    assert code == 0 and "a loss of 30% is found with 1 accepted run." in text
    _, text = power("--spread", "0.15", "--loss", "0.3")
    assert "20 accepted runs, the most that a baseline holds, find" in text
    _, text = power("--spread", "0.04", "--loss", "0.15")
    assert "within the limit of 20% and passes" in text


def test_the_noise_of_stored_runs_is_that_of_their_values(power, tmp_path):
    """Memory of 1.14 GB times 0.9, 1 and 1.1: the logarithms scatter by 0.1003; a default of 2% fills up 4 of 6 degrees."""
    for number, factor in enumerate((0.9, 1.0, 1.1)):
        path = make_run(tmp_path / "out" / "quick-20260701" / f"squad-cpu-12000{number}-abcdef")
        result = json.loads((path / "result.json").read_text())
        result["started_at"] += 1000 * number
        for metric in result["metrics"]:
            if metric["name"] == "resident_memory_gb":
                metric["value"] *= factor
        (path / "result.json").write_text(json.dumps(result))
    code, text = power("squad")
    assert code == 0 and "3 stored runs" in text
    assert "resident_memory_gb +25% 6.0%, from" in text  # sqrt((2 x 0.1003² + 4 x 0.02²) / 6)


def test_without_runs_it_says_what_to_do(power):
    code, text = power("squad")
    assert code == 2 and "nothing was recorded of it: run it here once" in text
    code, text = power()
    assert code == 2 and "--spread 0.05" in text
    code, text = power("--spread", "0.1", "--noise", "neighbor")
    assert code == 2 and "neighbour" in text
