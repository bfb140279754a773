"""Reference values: what is the same on any machine is compared, by the spread of what was accepted, and only there."""

import pytest

from benchlib.config.schema import build, save_config
from benchlib.core.errors import UserError
from benchlib.core.files import write_json
from benchlib.judge.reference_values import Quality, accept, path_of, reference_checks
from benchlib.results.run import Result, Run, save_result

VERSIONS = {"torch": "2.13.0", "transformers": "5.1.0", "benchlib": "0.3.0"}


@pytest.fixture
def run_of(tmp_path):
    def make(name, torch="2.13.1", **config):
        path = tmp_path / name
        path.mkdir()
        resolved = build("squad", {"benchmark": "squad", "tier": "quick", **config})
        save_config(resolved, path)
        write_json(path / "machine.json", {"cpu": {"model": name}, "versions": VERSIONS | {"torch": torch}})
        save_result(path, Result.of(resolved, status="complete", metrics=[]))
        return Run(path)

    return make


def values(loss, f1=92.6):
    return {"final loss": Quality(loss, "", 0.001), "F1": Quality(f1, "points", 0.0)}


def test_values_are_compared_within_three_times_their_spread_or_what_a_column_allows(run_of, tmp_path):
    first, second = run_of("a"), run_of("b", threads=2)
    accept([first], [values(0.2)], "one processor", root=tmp_path)
    accept([second], [values(0.21)], "two processors", add=True, root=tmp_path)  # median 0.205, spread 0.01
    cases = [
        (values(0.205), "PASS", "2 values as the reference"),
        (values(0.2349), "PASS", "final loss 0.2349 (0.205 ± 0.03)"),
        (values(0.2351), "FAIL", "final loss 0.2351, the reference is 0.205 ± 0.03"),
        (values(0.205, 92.8), "FAIL", "F1 92.8 points, the reference is exactly 92.6"),
        (
            {"final loss": Quality(0.205, "", 0.001), "first loss": Quality(9.0, "", 0.0)},
            "PASS",
            "1 value as the reference",
        ),
    ]
    (check,) = reference_checks(run_of("cut"), dict, tmp_path)
    assert (check.status, check.gates) == ("SKIPPED", False)
    for number, (seen, status, words) in enumerate(cases):
        (check,) = reference_checks(run_of(f"run{number}"), lambda seen=seen: seen, tmp_path)
        assert (check.status, check.gates, check.source) == (status, True, "2 runs: two processors"), words
        assert words in check.reason


def test_other_work_has_no_reference_other_versions_leave_it_open_and_another_backend_gates_nothing(run_of, tmp_path):
    accept([run_of("a")], [values(0.2)], "one processor", root=tmp_path)
    for name, changes in (("seed", {"seed": 8}), ("questions", {"train_questions": 3}), ("tier", {"tier": "nightly"})):
        assert reference_checks(run_of(name, **changes), lambda: values(0.9), tmp_path) == [], name
    (check,) = reference_checks(run_of("torch", "2.12.0"), lambda: values(0.9), tmp_path)
    assert (check.status, check.reason) == ("NOT_COMPARABLE", "the reference is of torch 2.13, this run of 2.12")
    (check,) = reference_checks(run_of("cuda", backend="cuda"), lambda: values(0.9), tmp_path)
    assert (check.word, check.gates) == ("DIFFERS", False)
    path_of(run_of("damaged"), tmp_path).write_text("{")
    (check,) = reference_checks(run_of("reader"), lambda: values(0.2), tmp_path)
    assert check.status == "FAIL" and "squad-quick.json" in check.reason


def test_a_reference_holds_one_work_and_something_to_compare(run_of, tmp_path):
    first = run_of("a")
    with pytest.raises(UserError, match="seed is 8 here"):
        accept([first, run_of("b", seed=8)], [values(0.2)] * 2, "two", root=tmp_path)
    with pytest.raises(UserError, match="nothing that is the same on any machine"):
        accept([first], [{}], "nothing", root=tmp_path)
    assert not path_of(first, tmp_path).exists()
