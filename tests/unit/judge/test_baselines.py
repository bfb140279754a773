"""Baselines: what may be accepted, what is comparable, what is told when it is not."""

import json
import math
import shutil

import pytest

from benchlib.config import schema
from benchlib.config.schema import build, parse_overrides, save_config
from benchlib.core.errors import UserError
from benchlib.core.files import PACKAGE, write_json
from benchlib.core.machine import is_virtual
from benchlib.judge import baselines
from benchlib.judge.checks import Verdict, save_verdict
from benchlib.judge.regression import LEVEL, RegressionLimit, save_repeats
from benchlib.results.metrics import measured
from benchlib.results.record import load
from benchlib.results.run import Result, Run, save_result

LIMITS = [RegressionLimit(metric="rate", share=0.2), RegressionLimit(metric="f1", amount=1.0)]
MACHINE = {
    "cpu": {"model": "Z80", "usable_cores": 2, "logical_cores": 2},
    "memory_bytes": 2**34,
    "versions": {"torch": "2.13.0", "transformers": "5.1.0", "benchlib": "0.1.0"},
}


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch):
    monkeypatch.setattr(baselines, "folder", lambda: tmp_path / "baselines")
    return tmp_path / "baselines"


@pytest.fixture
def make_run(tmp_path):
    def make(
        name, rate=100.0, f1=88.0, status="complete", verdict="PASS", torch="2.13.0", samples=(), more=(), **config
    ):
        path = tmp_path / name
        path.mkdir()
        resolved = build("squad", {"benchmark": "squad", **config})
        save_config(resolved, path)
        write_json(path / "machine.json", MACHINE | {"versions": MACHINE["versions"] | {"torch": torch}})
        metrics = [measured("rate", samples or [rate, rate * 1.01], "samples/s", "higher"), *more]
        metrics += [] if f1 is None else [measured("f1", f1, "", "higher")]
        save_result(path, Result.of(resolved, status=status, metrics=metrics))
        save_verdict(path, Verdict(verdict=verdict, sentence="stopped", checks=[]))
        return Run(path)

    return make


def checks_of(run, limits=LIMITS):
    """Return the regression checks of a run by the metric that they are of, or by their name."""
    checks = baselines.regression_checks(run, limits, baselines.find(run))
    return {check.name.removesuffix(" vs baseline"): check for check in checks}


def statuses(run, limits=LIMITS):
    return {name: check.status for name, check in checks_of(run, limits).items()}


def watched(run, own, others):
    """Let the supervisor have seen what ranks and others took of two cores, in per cent of one."""
    event = {"t": 1.0, "source": "supervisor", "kind": "sensor", "cpu_percent": own, "others_percent": others}
    (run.path / "events-supervisor.jsonl").write_text(json.dumps(event) + "\n")
    return run


@pytest.mark.parametrize(
    ("own", "others", "status", "source"),
    [
        (190.0, 10.0, "FAIL", "spread between runs 5.0%, from default"),
        (60.0, 140.0, "AMBIGUOUS", "spread between runs 40.1%, from default where others take 70% of the processors"),
        (60.0, 70.0, "FAIL", "from default"),  # 35% were idle: whoever wanted a core had one
    ],
)
def test_a_single_accepted_run_decides_less_where_others_take_the_processors(make_run, own, others, status, source):
    """A loss of 35% on two cores. With 70% taken a run is 1 / (1 - 0.7) times slower: a third of ln 3.33 is 0.401."""
    old, new = (watched(make_run(name, rate=rate), own, others) for name, rate in (("old", 100.0), ("new", 65.0)))
    assert (load(new.path).sensed, load(make_run("alone").path).sensed) == (True, False)
    baselines.accept(old, "first", LIMITS)
    check = checks_of(new)["rate"]
    assert check.status == status and source in check.source


def test_a_virtual_machine_does_not_see_who_slows_it(make_run, tmp_path):
    run = watched(make_run("guest", rate=100.0), 190.0, 0.0)
    assert load(run.path).sensed
    machine = json.loads((run.path / "machine.json").read_text())
    machine["cpu"]["virtual"] = True
    (run.path / "machine.json").write_text(json.dumps(machine))
    assert not load(run.path).sensed
    for flags, virtual in (("fpu vme hypervisor", True), ("fpu vme", False)):
        (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nflags\t\t: {flags}\n")
        assert is_virtual(tmp_path / "cpuinfo") is virtual


def test_accept_find_and_compare(make_run, root):
    first = make_run("first")
    assert set(statuses(first).values()) == {"NO_BASELINE"}
    path = baselines.accept(first, "first run", LIMITS)
    assert path.parent == root / "squad" / "smoke"
    for name, changes, expected in (
        ("same", {}, {"rate": "PASS", "f1": "PASS"}),
        ("worse", {"rate": 65.0, "f1": 86.0}, {"rate": "FAIL", "f1": "FAIL"}),
        ("without", {"f1": None}, {"rate": "PASS", "f1": "NOT_COMPARABLE"}),
        ("slowed", {"rate": 60.0, "planted_slowdown": 0.6}, {"rate": "FAIL", "f1": "PASS"}),
    ):
        assert statuses(make_run(name, **changes)) == expected
    assert set(statuses(first).values()) == {"NO_BASELINE"}, "with itself a run would always pass"
    baselines.accept(make_run("b", rate=200.0), "second", LIMITS, add=True)
    assert "201.0 samples/s: ratio 0.500" in checks_of(first)["rate"].reason


def test_another_fingerprint_is_not_comparable_and_says_why(make_run):
    baselines.accept(make_run("first"), "first run", LIMITS)
    comparison = baselines.find(make_run("other", torch="2.14.0", batch_size=16))
    assert comparison.status == "NOT_COMPARABLE"
    assert {name for name, *_ in comparison.factors} == {"torch", "config.batch_size"}
    assert "torch is 2.14 here, 2.13 there" in comparison.reason
    # Patch versions, targets and limits do not change the work.
    assert baselines.find(make_run("patch", torch="2.13.1", target_f1=1.0, budget_s=9)).baseline


REFUSED = {  # what cannot be accepted, after a first run was
    "partial": ([{"status": "partial"}], {}, "not a complete run"),
    "skipped": ([{"status": "skipped", "verdict": "SKIPPED"}], {}, "not a complete run"),
    "failed": ([{"verdict": "FAIL"}], {}, "did not pass"),
    "slowed on purpose": ([{"planted_slowdown": 0.6}], {}, "on purpose"),
    "of two kinds": ([{}, {"batch_size": 3}], {}, "config.batch_size is 3 here, 8 there"),
    "without a reason": ([{}], {"reason": "  "}, "--reason"),
    "worse in one metric": ([{"rate": 200.0, "f1": 87.9}], {"if_improved": True}, "worse than the baseline in f1"),
    "both ways": ([{}], {"if_improved": True, "add": True}, "choose one"),
    "added to nothing": ([{"batch_size": 4}], {"add": True}, "run0 has no baseline .*, the nearest baseline differs"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_leaves_the_baseline_as_it_was(make_run, root, case):
    changes, options, words = REFUSED[case]
    path = baselines.accept(make_run("first"), "first", LIMITS)
    before = path.read_text()
    runs = [make_run(f"run{number}", **change) for number, change in enumerate(changes)]
    with pytest.raises(UserError, match=words):
        baselines.accept(runs, **{"reason": "because", "limits": LIMITS} | options)
    assert path.read_text() == before and [*root.rglob("*.json")] == [path]


def test_a_run_counts_once_under_whatever_name(make_run, tmp_path, root):
    first = make_run("a")
    shutil.copytree(first.path, tmp_path / "copy")
    copy = Run(tmp_path / "copy")
    with pytest.raises(UserError, match="copy is a copy of a"):
        baselines.accept([first, copy], "both", LIMITS)
    assert not root.exists()
    baselines.accept(first, "first", LIMITS)
    for run, words in ((copy, "copy is a copy of a"), (first, "in the baseline already")):
        with pytest.raises(UserError, match=words):
            baselines.accept(run, "again", LIMITS, add=True)


def test_if_improved_replaces_by_what_is_better_and_finds_a_run_no_worse_than_itself(make_run):
    first = make_run("first")
    baselines.accept(first, "first", LIMITS)
    baselines.accept(first, "itself", LIMITS, if_improved=True)
    baselines.accept(make_run("better", rate=200.0), "faster", LIMITS, if_improved=True)
    assert baselines.stored()[0][0].latest.metric("rate").value == pytest.approx(201.0)


def without(name):
    def change(record):
        record["result"]["metrics"] = [metric for metric in record["result"]["metrics"] if metric["name"] != name]

    return change


def metric(**values):
    return lambda record: record["result"]["metrics"][0].update(values)


LOST = {  # what happens to the last of two accepted runs, and what is said of it
    "null": (metric(value=None), "rate of b is missing"),
    "NaN": (metric(value="NaN"), "rate of b is nan"),
    "infinity": (metric(value="-Infinity"), "rate of b is -inf"),
    "bare NaN": (metric(value=math.nan), "not valid JSON"),
    "a text": (metric(value="fast"), "not a baseline"),
    "no value": (lambda record: record["result"]["metrics"][0].pop("value"), "not a baseline"),
    "an end of the interval": (metric(ci_low="NaN"), "rate of b is nan"),
    "another name": (metric(name="rates"), "b has samples of rate without the metric"),
    "a metric": (without("rate"), "b has samples of rate without the metric"),
    "all metrics": (lambda record: record["result"].update(metrics=[]), "b has no metrics"),
    "the result": (lambda record: record.pop("result"), "b has no metrics"),
    "a null result": (lambda record: record.update(result=None), "b has no metrics"),
    "null samples": (lambda record: record["samples"].update(rate=[None]), "not a baseline"),
    "NaN samples": (lambda record: record["samples"].update(rate=["NaN"]), "a sample of rate of b is not finite"),
    "the fingerprint": (lambda record: record.pop("fingerprint"), "its name is not the key of its fingerprints"),
    "a factor": (lambda record: record["fingerprint"].update(cpu="?"), "its name is not the key of its fingerprints"),
}


@pytest.mark.parametrize("case", LOST)
def test_a_baseline_that_lost_a_number_is_damaged_and_not_absent(make_run, case):
    change, words = LOST[case]
    runs = [make_run("a"), make_run("b")]
    path = baselines.accept(runs, "night", LIMITS)
    run, content = make_run("new"), json.loads(path.read_text())
    assert baselines.find(run).baseline
    change(content["runs"][1])
    path.write_text(json.dumps(content))
    assert words in baselines.find(run).refused
    with pytest.raises(UserError, match="refused"):
        baselines.accept(run, "one more", LIMITS, add=True)


def test_a_baseline_of_which_all_runs_lost_a_metric_is_damaged(make_run):
    path = baselines.accept(make_run("a"), "first", LIMITS)
    content = json.loads(path.read_text())
    without("rate")(content["runs"][0])
    content["runs"][0].pop("samples")
    path.write_text(json.dumps(content))
    assert "rate has a limit, and no run has it" in baselines.find(make_run("new")).refused


# The spread between runs


def test_add_keeps_the_runs_and_their_spread_counts(make_run):
    """rate: medians 100.5, 103.515 and 97.485; t of 6 degrees of freedom at 0.075% is 5.5: 5.5 * 0.044 * sqrt(4/3) = 0.28."""
    for name, rate in (("a", 100.0), ("b", 103.0), ("c", 97.0)):
        baselines.accept(make_run(name, rate=rate), "again", LIMITS, add=name != "a")
    (stored,), _ = baselines.stored()
    assert [item.run for item in stored.runs] == ["a", "b", "c"]
    for name, rate, status in (("new", 74.0, "FAIL"), ("near", 81.0, "PASS")):
        check = checks_of(make_run(name, rate=rate))["rate"]
        assert (check.status, "3 runs" in check.limit) == (status, True)
        assert "spread between runs 4.4%, from the compared runs, default" in check.source
    assert "surely worse, but within the limit" in check.reason


def test_a_spread_wider_than_the_limit_leaves_the_gate_open_and_passes_what_is_better(make_run):
    """Of 60, 100 and 160, ln's deviation is 0.49: no loss of less than half is found for sure."""
    runs = [make_run(name, rate=rate) for name, rate in (("a", 60.0), ("b", 100.0), ("c", 160.0))]
    path = baselines.accept(runs, "night", LIMITS)
    (rate, f1) = [row.cells for row in baselines.widths(baselines.load_baseline(path), LIMITS, {})]
    assert rate["limit"] == "-20%" and "(3 runs)" in rate["accepted"]
    assert int(rate["smallest loss found"].strip("-%")) > 50
    assert f1["limit"] == "-1" and 1.2 < float(f1["smallest loss found"].strip("-")) < 1.6
    for speed, status, why in (
        (70.0, "AMBIGUOUS", "noise may explain it"), (90.0, "AMBIGUOUS", "too noisy to gate"), (110.0, "PASS", ""),
    ):  # fmt: skip
        check = checks_of(make_run(f"new{speed}", rate=speed))["rate"]
        assert check.status == status and why in check.reason


def test_stored_runs_of_the_same_kind_tell_the_spread_accepted_or_not(make_run, tmp_path):
    """Six runs that differ by 1%, one of them odd; runs of another config, slowed or later ones do not count."""
    day = "store/smoke-20261120/squad-cpu"
    (tmp_path / "store" / "smoke-20261120").mkdir(parents=True)
    rates = (100.0, 101.0, 99.0, 100.5, 60.0, 99.5)
    speeds = [measured("speed", [rate, rate / 2] * 20, "samples/s", "higher", average="harmonic") for rate in rates]
    first, *_ = [
        make_run(f"{day}-10000{number}-abcdef", rate=rate, more=[speeds[number]]) for number, rate in enumerate(rates)
    ]
    make_run(f"{day}-200000-abcdef", rate=50.0, batch_size=4)
    make_run(f"{day}-200001-abcdef", rate=50.0, planted_slowdown=0.5)
    run = make_run(f"{day}-300000-abcdef")
    make_run(f"{day}-400000-abcdef", rate=10.0)
    limits = [*LIMITS, RegressionLimit(metric="speed", share=0.2)]
    spreads = baselines.known_spreads(load(run.path), limits, None, [load(run.path).kept(LIMITS)])
    assert spreads.keys() == {"rate", "f1", "speed", f"speed{LEVEL}"}
    for name in ("rate", "speed", f"speed{LEVEL}"):
        assert spreads[name].source == "6 stored runs"
        assert 0.004 < spreads[name].s < 0.015
    baselines.accept(first, "first", LIMITS)
    assert "from 5 stored runs, default" in checks_of(run)["rate"].source


# Repetitions


def test_earlier_repetitions_count_unless_the_latest_has_no_number(make_run):
    baselines.accept(make_run("a"), "first", LIMITS)
    run, broken = make_run("second", rate=95.0), make_run("broken", rate=float("nan"))
    earlier = [load(make_run(name, rate=rate).path).kept(LIMITS) for name, rate in (("x", 96.0), ("y", 97.0))]
    save_repeats(run.path, earlier)
    save_repeats(broken.path, earlier)
    assert checks_of(run)["rate"].value == pytest.approx((95.475 * 96.48 * 97.485) ** (1 / 3))
    assert checks_of(broken)["rate"].status == "FAIL"
    (run.path / "repeats.json").write_text("[{}]")
    with pytest.raises(UserError, match=r"repeats\.json"):
        checks_of(Run(run.path))


# Limits of the user's own


def test_limits_of_the_user_count_and_one_that_fits_no_metric_is_noticed(make_run):
    baselines.accept([make_run(name) for name in "abcdefgh"], "first", LIMITS)

    def limited(name, **limits):
        return checks_of(make_run(name, rate=88.0, limits=limits))

    tight, wrong = limited("tight", rate=0.1), limited("wrong", rat=0.1)["limits apply"]
    assert (limited("usual")["rate"].status, tight["rate"].status, tight["rate"].limit[:4]) == ("PASS", "FAIL", "-10%")
    assert wrong.status == "SKIPPED" and wrong.gates and "rate" in wrong.reason
    with pytest.raises(UserError, match="a share of the baseline from 0 to 1"):
        limited("large", rate=3.0)


def test_limits_are_set_by_metric_and_add_up_over_files_and_command_line(monkeypatch):
    read, own = schema.read_params, {"squad": {"limits": {"f1": 0.5, "loss_final": 0.3}}}
    monkeypatch.setattr(schema, "read_params", lambda *of: read(*of) | (own if of[0] == "backends" else {}))
    config = schema.resolve(
        "squad", "smoke", "cpu", parse_overrides(["limits.train_samples_per_s=0.1", "limits.f1=2"])
    ).config
    assert config.limits == {"f1": 2.0, "loss_final": 0.3, "train_samples_per_s": 0.1}
    assert "limits" not in config.work() and "--set limits.train_samples_per_s=0.1" in schema.command(config)
    for wrong in ("limits.f1=-1", "limits.f1=x", "limits=3"):
        with pytest.raises(UserError, match="limits"):
            schema.resolve("squad", "smoke", "cpu", parse_overrides([wrong]))


def test_the_recordings_that_the_kit_ships_are_no_baselines():
    assert baselines.stored(PACKAGE.parent / "baselines") == ([], {})
