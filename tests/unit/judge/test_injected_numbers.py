"""A run of the kit whose result was edited does not pass its own checks, whatever class of mistake was injected."""

import json
import statistics

import pandas as pd
import pytest
from click.testing import CliRunner
from make_smoke import unpack

from benchlib.cli import main
from benchlib.core.run_folder import record_files
from benchlib.judge.foreign.readers import read_claims
from benchlib.judge.impossible.rules import judge_claims
from benchlib.judge.verdict import judge
from benchlib.results import shared as embedded
from benchlib.results.record import load
from benchlib.results.run import save_result


@pytest.fixture
def stored(tmp_path):
    """Return a function that copies a recorded run into a folder, changes its result and judges it."""

    def make(change=None):
        folder = tmp_path / "squad-run"
        packed = unpack("squad", folder)
        samples = packed.samples | packed.row_samples
        result = json.loads((folder / "result.json").read_text())
        if change:
            change(Edit(result, samples))
        rows = [(metric, index, value) for metric, values in samples.items() for index, value in enumerate(values)]
        pd.DataFrame(rows, columns=["metric", "index", "value"]).to_parquet(folder / "samples.parquet", index=False)
        (folder / "result.json").write_text(json.dumps(result))
        return folder

    return make


class Edit:
    """A result and its raw samples, to be changed by hand."""

    def __init__(self, result, samples):
        self.result, self.facts, self.tables, self.samples = result, result["facts"], result["tables"], samples
        self.metrics = {metric["name"].removesuffix("_minisquad_tiny"): metric for metric in result["metrics"]}

    def scale(self, name, factor, raw=True):
        """Multiply a metric, with its raw samples unless only the result was edited."""
        metric = self.metrics[name]
        metric["value"] *= factor
        if raw:
            full = next(known for known in self.samples if known.removesuffix("_minisquad_tiny") == name)
            self.samples[full] = [factor * value for value in self.samples[full]]

    def set(self, column, change):
        """Change each raw number of a column of a row, and the median that the row holds of them."""
        table, _, name = column.rpartition(".")
        row, key = (self.tables[table][0], f"{table}[0].{name}") if table else (self.facts, f"run[0].{name}")
        self.samples[key] = [change(value) for value in self.samples[key]]
        row[name] = statistics.median(self.samples[key])


def verdict(folder, tmp_path):
    judged = judge(folder, tmp_path / "no-baselines")
    return judged.verdict, {check.name: check for check in judged.checks}


SQUAD = [
    ("numbers agree", "its row says", lambda run: run.scale("train_samples_per_s", 10, raw=False)),
    ("possible speed", "of the measured peak", lambda run: run.set("steps.flops", lambda value: 20 * value)),
    ("numbers agree", "its row says", lambda run: run.tables["steps"][0].update(step_s=9.0)),
    ("all-reduce right", "wrong elements 3, not = 0", lambda run: run.facts.update(wrong_elements=3)),
    ("sample count", "160 planned", lambda run: run.facts.update(samples_seen=[80, 70])),
    ("learning rate", "nothing is trained at zero", lambda run: run.facts.update(learning_rate_min=-1e-6)),
    ("learning rate", "nothing is trained at zero", lambda run: run.facts.update(learning_rate_min=0.0)),
    ("loss decreases", "nothing was learnt", lambda run: run.set("loss", lambda _: 5.9)),
    ("possible quality", "not within 0 and 100", lambda run: run.facts.update(f1=152.5)),
    ("ranks equal", "they differ", lambda run: run.facts.update(checksums=[["a", "a"], ["b", "c"]])),
]


def test_a_result_that_was_edited_by_hand_misses_its_checksum(stored, tmp_path):
    """Also where nothing else of the run contradicts it."""
    folder = stored()
    record_files(folder)
    result = json.loads((folder / "result.json").read_text())
    (folder / "result.json").write_text(json.dumps(result | {"world_size": 8}))
    word, checks = verdict(folder, tmp_path)
    assert word == "FAIL"
    assert any(check.reason.startswith("result.json was ") for check in checks.values() if check.status == "FAIL")
    answer = CliRunner().invoke(main, ["judge", str(folder)])
    assert (answer.exit_code, "result.json was " in answer.output) == (2, True)
    metric = next(item for item in result["metrics"] if item["name"].startswith("train_samples_per_s"))
    metric["value"] *= 3  # and the list of files with it
    (folder / "result.json").write_text(json.dumps(result))
    record_files(folder)
    answer = CliRunner().invoke(main, ["judge", str(folder)])
    assert (answer.exit_code, "its row says" in answer.output) == (2, True)


@pytest.mark.parametrize(("name", "reason", "change"), SQUAD, ids=[f"{row[0]}: {row[1]}" for row in SQUAD])
def test_planted_numbers_fail_the_run(stored, tmp_path, name, reason, change):
    word, checks = verdict(stored(change), tmp_path)
    assert (word, checks[name].status) == ("FAIL", "FAIL") and reason in checks[name].reason


@pytest.mark.parametrize(
    ("name", "table", "column", "factor"),
    [
        ("possible scaling", "products", "best_flops", 0.25),
        ("possible scaling", "products", "best_flops", 0.8),
        ("numbers agree", "copies", "gbytes_per_s", 2.0),
    ],
)
def test_planted_peaks_fail_the_machine(tmp_path, name, table, column, factor):
    run = unpack("machine", tmp_path / "run")
    run.result.tables[table][0][column] *= factor
    save_result(run.path, run.result, run.samples | run.row_samples)
    failed = [check.name for check in judge(run.path, tmp_path / "no-baselines").checks if check.status == "FAIL"]
    assert name in failed


def test_the_kit_s_own_files_are_read_alone_and_as_a_folder(stored, tmp_path):
    folder = stored()
    verdict(folder, tmp_path)
    alone = tmp_path / "alone.json"
    alone.write_text((folder / "result.json").read_text())
    # Without raw samples and config fewer rules apply.
    for path, name, rules in ((folder, "run", 10), (folder / "result.json", "result", 10), (alone, "result", 5)):
        kind, claims = read_claims(path)
        judged = judge_claims(claims)
        assert (kind, [judgement.failures for judgement in judged if judgement.failures]) == (name, [])
        assert len(judged) >= rules
    result = json.loads(alone.read_text())
    Edit(result, {}).scale("step_s", -1, raw=False)
    alone.write_text(json.dumps(result))
    assert CliRunner().invoke(main, ["judge", str(alone)]).exit_code == 1


def test_a_shared_report_is_read_by_the_run_it_carries(stored, tmp_path):
    folder = stored(lambda run: run.set("steps.flops", lambda value: 20 * value))
    data = embedded.link(load(folder))
    path = tmp_path / "report.html"
    link = f'<a {embedded.ATTRIBUTE}="{data["version"]}" href="{data["href"]}">data</a>'
    path.write_text(f"<!doctype html><html><body>{link}</body></html>")
    name, claims = read_claims(path)
    statuses = {judgement.rule.name: judgement.status for judgement in judge_claims(claims)}
    assert name == "report"
    assert {rule for rule, status in statuses.items() if status == "FAIL"} == {"share of the peak", "below the peak"}
