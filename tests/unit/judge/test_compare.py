"""Comparing: a table by hand, the words that may be said, and none of them between what cannot be compared."""

import json
import math

import numpy as np
import pytest
from click.testing import CliRunner
from make_run import START
from make_run import make_run as write_run
from scipy.stats import t
from series import on_machine, record
from stores import without_pictures

from benchlib.cli import main
from benchlib.commands import compare as comparing
from benchlib.commands import output
from benchlib.core.errors import UserError
from benchlib.judge import baselines
from benchlib.judge.calibration import Calibration, save_calibration
from benchlib.judge.compare import Contrast, Factor, Row, RunSet, compare, read_argument
from benchlib.judge.compare import line as line_of
from benchlib.judge.regression import RegressionLimit
from benchlib.results.record import load
from benchlib.results.run import Run

REFUSED = ("regression", "worse", "better")


def metric(name, value, unit="", direction="higher", **more):
    return {"name": name, "value": value, "unit": unit, "direction": direction, "provenance": "measured", "n": 1} | more


def speed(value):
    return metric("train_samples_per_s_minisquad_tiny", value, "samples/s")


@pytest.fixture(autouse=True)
def own_baselines(tmp_path, monkeypatch):
    """No baseline and no calibration of this checkout plays a part."""
    monkeypatch.setattr(baselines, "folder", lambda: tmp_path / "baselines")
    without_pictures(monkeypatch)
    monkeypatch.setattr(output.console, "width", 250)


@pytest.fixture
def make(tmp_path):
    """Write runs of the metrics given, one a run, below a folder of their day; return the folder or the one run."""

    def make(day, *runs, machine=None, **options):
        for index, metrics in enumerate(runs):  # no two runs begin at once: only copies do
            folder = write_run(
                tmp_path / f"quick-{day}" / f"squad-cpu-10000{index}-run{day[-2:]}{index}",
                metrics=metrics if isinstance(metrics, list) else [speed(metrics)],
                with_samples=False,
                started_at=START + 60 * index,
                **options,
            )
            on_machine(folder, **(machine or {}))
        return folder if len(runs) == 1 else folder.parent

    return make


def only(reference, other):
    contrasts, notes = compare([str(reference), str(other)])
    assert (len(contrasts), notes) == (1, [])
    return contrasts[0]


def row(contrast, name="train_samples_per_s_minisquad_tiny"):
    return next(row for row in contrast.rows if row.metric == name)


def run(*arguments):
    return CliRunner().invoke(main, ["compare", *(str(argument) for argument in arguments)])


def test_a_table_by_hand(make):
    old, new = (100.0, 104.0, 102.0), (70.0, 72.8, 71.4)
    contrast = only(make("20261120", *old), make("20261121", *new))
    logs = [[math.log(value) for value in side] for side in (old, new)]
    means = [sum(side) / 3 for side in logs]
    squares = sum((x - m) ** 2 for side, m in zip(logs, means, strict=True) for x in side)
    s = math.sqrt((squares + 2 * 0.05**2) / 6)  # four degrees of freedom from the runs, two from the default
    half = t.ppf(0.99, 6) * s * math.sqrt(2 / 3)
    line = row(contrast)
    assert line.change == pytest.approx(0.7)  # 70/100, 72.8/104 and 71.4/102
    assert (line.low, line.high) == pytest.approx((0.7 * math.exp(-half), 0.7 * math.exp(half)))
    band = math.exp(1.959964 * math.sqrt(2) * s)
    assert line.written[2] == f"{1 / band - 1:.1%} to +{band - 1:.1%}"
    assert (line.reference, line.other, line.limit) == ("102.0 samples/s", "71.39 samples/s", "-20%")
    assert line.word == "regression"
    assert contrast.comparable
    assert contrast.sentence == "1 regression: train_samples_per_s_minisquad_tiny."


@pytest.mark.parametrize(
    ("old", "new", "word", "gate", "tone"),
    [
        ((100, 101, 99), (70, 71, 69), "regression", "FAIL", "bad"),
        ((100, 101, 99), (90, 91, 89), "worse", "PASS", "good"),
        ((100, 101, 99), (100, 99, 101), "no difference found", "PASS", "good"),
        ((100, 150, 70), (75, 60, 85), "undecided", "AMBIGUOUS", "warn"),  # noise leaves the limit undecided
        ((100,), (99,), "no difference found", "PASS", "good"),
        ((100,), (70,), "regression", "FAIL", "bad"),
    ],
)  # fmt: skip
def test_what_is_said_of_a_rate(make, old, new, word, gate, tone):
    contrast = only(make("20261120", *old), make("20261121", *new))
    line = row(contrast)
    assert (line.word, line.gate, contrast.tone) == (word, gate, tone)
    assert f'<p class="note {tone}">' in comparing.html([contrast], [])


@pytest.mark.parametrize(
    ("old", "new", "kind", "word"),
    [
        (metric("startup_s", 4.0, "s", "lower"), metric("startup_s", 5.0, "s", "lower"), "ratio", "worse"),
        (metric("startup_s", 5.0, "s", "lower"), metric("startup_s", 4.0, "s", "lower"), "ratio", "better"),
        (metric("parameters", 5.0, "", "none"), metric("parameters", 4.0, "", "none"), "ratio", "differs"),
        (metric("padding", 0.0, "", "lower"), metric("padding", 0.5, "", "lower"), "difference", "worse"),
        (metric("f1_minisquad_tiny", 90.0), metric("f1_minisquad_tiny", 88.5), "difference", "regression"),
    ],
)
def test_the_direction_decides(make, old, new, kind, word):
    # Three equal runs a side: the spread is known to be nothing, so the smallest change is one.
    line = row(only(make("20261120", [old], [old], [old]), make("20261121", [new], [new], [new])), old["name"])
    assert (line.kind, line.word) == (kind, word)


@pytest.mark.parametrize(
    ("changes", "factor"),
    [
        ({"config": {"batch_size": 16}}, ("config.batch_size", "8", "16")),
        ({"machine": {"versions": {"torch": "2.14.0", "transformers": "5.0.0", "benchlib": "0.1.0"}}}, ("torch", "2.13", "2.14")),
        ({"machine": {"cpu": {"model": "Z80", "usable_cores": 2}}}, ("cpu", "Imaginary 3000 CPU x 2", "Z80 x 2")),
    ],
    ids=["work", "version", "hardware"],
)  # fmt: skip
def test_between_what_is_not_comparable_no_difference_is_called_a_regression(make, changes, factor):
    folders = make("20261120", 100, 101, 99), make("20261121", 10, 10.1, 9.9, **changes)
    contrast = only(*folders)
    assert not contrast.comparable
    assert [(f.name, f.reference, f.other) for f in contrast.factors if f.decides and f.name == factor[0]] == [factor]
    line = row(contrast)
    assert line.change == pytest.approx(0.1, rel=1e-3)
    assert line.word == ("lower" if factor[0] in ("torch", "cpu") else ""), "the same work elsewhere is high or low"
    done = run(*folders)
    assert done.exit_code == 0
    table = done.output[: done.output.index("Not comparable because of")]
    assert not any(word in table for word in REFUSED)
    assert "ratios are shown, no verdict" in done.output
    assert run(*folders, "--strict").exit_code == 3


def test_a_baseline_is_a_side_by_file_or_key(make, tmp_path):
    folder = make("20261120", 100, 101, 99)
    limits = [RegressionLimit(metric="train_samples_per_s_minisquad_tiny", share=0.2)]
    for index, path in enumerate(sorted(folder.iterdir())):
        file = baselines.accept(Run(path), "first", limits, add=index > 0)
    new = make("20261121", 70, 71, 69)
    by_folder = row(only(folder, new))
    for name in (file, file.stem[:6]):
        contrast = only(name, new)
        assert row(contrast) == by_folder
        assert contrast.comparable
        assert row(contrast).word == "regression"


def test_a_folder_of_several_fingerprints_is_refused_with_what_differs(make, tmp_path):
    folder = make("20261120", 100, 101)
    write_run(folder / "squad-cpu-090000-other", config={"batch_size": 16})
    words = "holds squad runs of several kinds: config.batch_size is 8 in squad-cpu-100000-run200, 16 in squad-cpu-090000-other"
    with pytest.raises(UserError, match=words):
        read_argument(str(folder))


def test_broken_runs_of_a_folder_are_left_out_and_named(make, tmp_path):
    folder = make("20261120", 100, 101)
    write_run(folder / "squad-cpu-110000-broken", outcome="failed", culprit=0, reason="rank 0 raised ValueError")
    cut = write_run(folder / "squad-cpu-120000-cut") / "result.json"
    cut.write_text(cut.read_text()[:90])
    contrasts, notes = compare([str(folder), str(make("20261121", 100))])
    assert contrasts[0].reference.names == ["squad-cpu-100000-run200", "squad-cpu-100001-run201"]
    assert [note.split("excluded: ")[1][:24] for note in notes] == [
        "squad-cpu-110000-broken:",
        "squad-cpu-120000-cut: DA",
    ]
    for name, words in (("broken", "Rank 0 raised ValueError"), ("cut", "result.json: not valid JSON")):
        path = next(folder.glob(f"*-{name}"))
        with pytest.raises(UserError, match=rf"{name} has no complete run to compare: .*{words}"):
            compare([str(path), str(folder)])


def test_exit_codes_and_output(make, tmp_path):
    old, new, same = make("20261120", 100, 101, 99), make("20261121", 70, 71, 69), make("20261122", 100, 99, 101)
    done = run(old, same, new)
    assert done.exit_code == 1, done.output
    assert done.output.count("98% interval") == 2, "each side stands against the first"
    assert run(old, same).exit_code == 0
    document = json.loads(run(old, new, "--json").stdout)
    assert document["contrasts"][0]["rows"][0]["word"] == "regression"
    for arguments, words in (
        ((old,), "two or more"),
        ((old, tmp_path / "no"), "no such run"),
        ((old, "12345"), "0 baselines"),
    ):
        done = run(*arguments)
        assert done.exit_code == 2
        assert words in done.output


def test_the_spread_of_a_calibration_counts(make, tmp_path):
    old, new = make("20261119", 100), make("20261120", 70)
    assert row(only(old, new)).word == "regression"
    limit = RegressionLimit(metric="train_samples_per_s_minisquad_tiny", share=0.2)
    about = {"benchmark": "squad", "tier": "quick", "fingerprint": load(new).fingerprint}
    apart = [record(value, limit.metric).model_copy(update=about) for value in (100.0, 80.0, 125.0, 90.0)]
    save_calibration(baselines.folder(), Calibration(runs=apart, limits=[limit]))
    logs = np.log([100.0, 80.0, 125.0, 90.0])  # three degrees of freedom, and three of the default
    s = math.sqrt((3 * logs.var(ddof=1) + 3 * 0.05**2) / 6)
    line = row(only(old, new))
    assert line.word == "undecided" and line.written[2].endswith(f"+{math.expm1(1.959964 * math.sqrt(2) * s):.1%}")


def of_benchmark(benchmark, *rows, same_work=True):
    side = RunSet("B", ())
    factors = [] if same_work else [Factor(name="config.samples", reference="64", other="32", decides=True)]
    about = {"tier": "quick", "reference": side, "other": side, "comparable": same_work, "same_work": same_work}
    return Contrast(benchmark=benchmark, **about, sentence="", rows=rows, factors=factors)


def in_a_row(metric, unit, direction, before, after, low=None, high=None, **more):
    change = {"before": before, "after": after, "change": after / before, "low": low, "high": high, "basis": "runs"}
    return Row(
        metric=metric, unit=unit, direction=direction, reference=f"{before:g}", other=f"{after:g}", **(change | more)
    )


def test_a_tier_is_compared_in_a_line_a_benchmark():
    rate = ("train_samples_per_s_minisquad_tiny", "samples/s", "higher", 100.0)
    f1 = ("f1_minisquad_tiny", "points", "higher", 92.6)
    cases = [
        (of_benchmark("squad", in_a_row(*rate, 200.0, 1.8, 2.2), in_a_row(*f1, 92.4)), "faster", "2", "1.8 to 2.2", "the same (1 value)"),
        (of_benchmark("squad", in_a_row(*rate, 90.0, 0.8, 1.1), in_a_row(*f1, 80.0)), "no difference found", "0.9", "0.8 to 1.1", "differs: F1 92.6 → 80"),
        (of_benchmark("squad", in_a_row(*rate, 90.0, basis="none")), "no interval", "0.9", "", "not known"),
        # Twice the time is half as fast, and the ends of the interval change places.
        (of_benchmark("compiled", in_a_row("latency_ms_xla_b1_s128_tiny", "ms", "lower", 2.0, 4.0, 1.6, 2.5)), "slower", "0.5", "0.4 to 0.625", "not known"),
        (of_benchmark("seq2seq", same_work=False), "not comparable because of config.samples", "", "", "not known"),
        (of_benchmark("parity", in_a_row("total_s", "s", "lower", 9.0, 8.0)), "no speed on both sides", "", "", "not known"),
    ]  # fmt: skip
    for item, *expected in cases:
        line = line_of(item)
        assert [line.word, line.ratio, line.interval, line.computes] == expected
