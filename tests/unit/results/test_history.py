"""The store of runs: read once, cached, never stale; and the verdict on a past."""

import itertools
import shutil

import numpy as np
import pytest
from make_run import START, _metric, make_run
from series import DAY, STEADY, on_machine, place

from benchlib.core.errors import UserError
from benchlib.core.files import home
from benchlib.judge import trends
from benchlib.judge.changepoints import levels
from benchlib.judge.regression import RegressionLimit
from benchlib.results.record import load_all


def history_of(store, values, name="train_samples_per_s", **facts):
    for age, value in enumerate(reversed(values)):
        folder = place(store, START - age * DAY, metrics=[_metric(name, value, "samples/s", "higher", 1)])
        if age < 4 and facts:
            on_machine(folder, **facts)
    verdict = trends.judge_history(trends.read_history(str(store)))
    return verdict, {check.name.split(" of ")[0]: check for check in verdict.checks}


SLOW, WORSE = [value * 0.8 for value in STEADY[:6]], [*STEADY, *(value * 0.7 for value in STEADY[:4])]
# Found by trying 6,000 series at random: the two levels differ surely, but not by how much.
NOISY = [
    44.7,
    38.3,
    45.5,
    49.4,
    58.8,
    44.3,
    69.3,
    36.9,
    34.5,
    35.5,
    36.6,
    37.2,
    38.8,
    35.9,
    27.9,
    67.6,
    25.6,
    19.5,
    35.6,
]
PASTS = {  # values, metric and facts of the newest runs; the verdict; the check that says so and a part of its reason
    "steady": (STEADY, {}, "PASS", "level", ""),
    "worse without a cause": (WORSE, {}, "FAIL", "level", "from 60.05 to 42.07 samples/s since"),
    "worse with a new version": (WORSE, {"versions": {"torch": "2.14.0"}}, "AMBIGUOUS", "level", "with torch 2.13.0 → 2.14.0"),
    "worse by what noise may explain": (NOISY, {}, "AMBIGUOUS", "level", "which noise may explain"),
    "came back": ([*STEADY, *SLOW, *STEADY], {}, "PASS", "level", ""),
    "got better": ([*SLOW, *STEADY], {}, "PASS", "level", ""),
    "newest beyond its limit": ([*STEADY, 45.0], {}, "FAIL", "newest run", "limit -20%"),
    "newest better than its limit": ([*STEADY, 70.0], {}, "PASS", "newest run", ""),
}  # fmt: skip


@pytest.mark.parametrize("case", PASTS)
def test_a_past_is_judged_by_its_level_and_its_newest_run(tmp_path, case):
    values, options, word, name, reason = PASTS[case]
    verdict, checks = history_of(tmp_path, values, **options)
    assert verdict.verdict == checks[name].status == word
    assert reason in checks[name].reason


def test_too_few_runs_decide_nothing(tmp_path):
    verdict, checks = history_of(tmp_path, STEADY[:3])
    assert [checks[name].status for name in ("level", "newest run")] == ["SKIPPED", "SKIPPED"]
    assert verdict.verdict == "SKIPPED"  # that the records can be read is no pass
    assert verdict.sentence == "Too few runs: the longest series has 3; a change of level needs 6."
    assert trends.judge_history(trends.History(tmp_path, False, trends.Filter(), 0, [])).verdict == "SKIPPED"


def test_filters(tmp_path):
    for age in range(3):
        place(tmp_path, START - age * DAY, tier=("quick", "smoke", "smoke")[age])
    other = {"benchmark": "machine", "tier": "smoke"}
    make_run(tmp_path / "smoke-20260101" / "machine-cpu-101500-abcdef", config=other)

    def count(**asked):
        return len(trends.read_history(str(tmp_path), **asked).runs)

    asked = ({}, {"tier": "smoke"}, {"benchmark": "machine"}, {"machine": "imaginary"})
    assert [count(**names) for names in asked] == [4, 3, 1, 4]
    for name, wrong, said in (
        ("benchmark", "sqad", "did you mean squad"),
        ("machine", "H100", "none of the 4 runs"),
        ("metric", "train_sample_per_s", "did you mean train_samples_per_s_minisquad_tiny"),
    ):
        with pytest.raises(UserError, match=said):
            count(**{name: wrong})


def test_without_runs_the_demo_of_the_kit_is_shown(tmp_path, monkeypatch):
    monkeypatch.setenv("BENCHLIB_OUTPUTS", str(tmp_path))
    shutil.copy(home() / "outputs" / "README.md", tmp_path)  # as in a fresh clone
    assert load_all(tmp_path) == []
    store, demo = trends.choose_store()
    assert demo
    runs = load_all(store)
    assert len(runs) >= 10 and {run.word for run in runs} == {"PASS"} and all(run.series for run in runs)
    place(tmp_path, START)
    assert trends.choose_store() == (tmp_path, False)


LIMITS = {"m": RegressionLimit(metric="m", share=0.2)}


def declining(values, direction="higher"):
    runs, split = [object() for _ in values], levels(list(values))
    changes = [
        trends.LevelChange(runs[new.start], new.start, old.median, new.median, None, trends._word(new.median, old.median, direction))
        for old, new in itertools.pairwise(split.levels)
    ]  # fmt: skip
    item = trends.Trend("m", "m", "samples/s", direction, runs, list(values), split, changes, [])
    return trends._decline_check("series", [item], LIMITS), trends._lost(item, LIMITS)[1]


def test_a_steady_decline_is_found_by_the_tenth_run_and_steady_series_raise_no_alarm():
    source = np.random.default_rng(1)
    steady = [declining(100 * np.exp(source.normal(0, 0.015, 10)))[0].status for _ in range(500)]
    assert steady.count("FAIL") <= 5, "at most 1%"
    for share in (0.02, 0.04, 0.08):
        for direction, step in (("higher", 1 - share), ("lower", 1 + share)):
            check, level = declining(100 * step ** np.arange(10) * np.exp(source.normal(0, 0.01, 10)), direction)
            assert "FAIL" in (check.status, level), (share, direction)
    check, _ = declining(100 * 0.98 ** np.arange(10))
    assert "m degrading by 2.0% a run: 100.0 to 83.37 samples/s" in check.reason
    assert declining(100 * 1.02 ** np.arange(10))[0].status == "PASS", "better is no decline"
    step = np.repeat([100.0, 90.0], 5) * np.exp(source.normal(0, 0.01, 10))
    check, level = declining(step)
    assert (check.status, level) == ("PASS", "PASS"), "one step within the limit is no decline"
    assert declining([100.0] * 7)[0].status == "SKIPPED"
