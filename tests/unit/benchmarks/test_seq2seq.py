"""Parameters, the search for a batch, the cut to the budget, and what a run is judged by: each check can fail."""

import json
import math
import time

import numpy as np
import pytest

from benchlib.benchmarks.seq2seq import auto, judge, metrics, train
from benchlib.benchmarks.seq2seq.config import Seq2seqConfig
from benchlib.benchmarks.seq2seq.judge import checks, data_sentence, reading, undecided
from benchlib.benchmarks.seq2seq.run import _to_measure, _unmeasured
from benchlib.config.schema import build, resolve, save_config, tier_names
from benchlib.core.disk import data_limit
from benchlib.core.errors import UserError
from benchlib.core.events import Moment
from benchlib.judge.baselines import Comparison
from benchlib.judge.checks import verdict_of
from benchlib.judge.impossible.training import rate_from_steps
from benchlib.judge.numbers import judged_view
from benchlib.results.metrics import derived, measured
from benchlib.results.run import Result, Run, save_result
from benchlib.runtime import largest
from benchlib.runtime.steps import COLUMNS
from benchlib.workloads.pairs import Pairs

NONE = Comparison(status="NO_BASELINE")
FLOOR = math.log(8192) - 0.304


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"nhead": 5}, "nhead = 5 does not divide d_model = 128.*set nhead=4"),
        ({"d_model": 96, "nhead": 7}, "set nhead=6"),
        ({"size": "huge"}, "size"),
        ({"vocabulary": 70000, "token_bytes": 2}, "token_bytes = 2.*set token_bytes=8"),
        ({"num_shards": 3}, "num_shards = 3 is about shards: set data_dir"),
        ({"page_cache": "cold"}, "page_cache = cold is about shards: set data_dir"),
        ({"data_dir": __file__}, "is a file: name a folder"),
        ({"memory_gb": 2}, "memory_gb = 2 is the limit of batch=auto"),
        ({"data_dir": "/", "token_bytes": "4"}, "token_bytes.*Input should be 8 or 2"),
        ({"single": True, "nproc": 2}, "single = true with nproc = 2"),
    ],
)
def test_what_does_not_fit_is_refused(values, message):
    with pytest.raises(UserError, match=message):
        build("seq2seq", {"benchmark": "seq2seq", **values})


def test_sizes_and_sets(tmp_path):
    overrides = {"token_bytes": "2", "data_dir": str(tmp_path)}  # texts, as of the command line
    assert resolve("seq2seq", "smoke", overrides=overrides).config.token_bytes == 2
    config = build("seq2seq", {"benchmark": "seq2seq", "size": "xl", "sequence": 256, "single": "true", "full": True})
    assert (config.d_model, config.batch_size, config.sequence, config.nproc) == (2048, 8, 256, 1)
    assert config.epoch_samples == 7_500_000 and config.scope(7_500_000) == ""
    assert Seq2seqConfig(samples=0).epoch_samples == 3_750_000 and config.scope(1000) == "_subset"
    assert "3,527,168 parameters" in Seq2seqConfig().expected_work()
    with pytest.raises(UserError, match="fewer than the 4 ranks"):
        Seq2seqConfig(samples=3, nproc=4).check_whole()


@pytest.mark.parametrize("tier", tier_names())
def test_every_tier_runs_it(tier):
    assert resolve("seq2seq", tier).config.parameters == 3_527_168


@pytest.mark.parametrize("most_that_fits", [1, 2, 7, 100, 128])
def test_the_search_ends_within_a_sixteenth_below_the_limit(most_that_fits):
    def trial(batch):
        return {"batch": batch, "fits": batch <= most_that_fits, "reason": ""}

    found = auto.search(trial, 128)
    assert most_that_fits - max(1, most_that_fits // 16) < found.batch <= most_that_fits < found.below
    tried = [row["batch"] for row in found.tried]
    assert found.complete and tried == sorted(set(tried)) and len(tried) <= 10
    assert auto.search(lambda batch: {"batch": batch, "fits": False}, 8).batch == 0


def test_a_search_without_time_says_how_far_it_got(tmp_path):
    left = iter(range(5))

    def trial(batch):
        if next(left, None) is None:
            raise auto.OutOfTime
        return {"batch": batch, "fits": batch <= 50}

    found = auto.search(trial, 1000)  # 8, 16, 32, 64 (no), 48
    assert (found.batch, found.below, len(found.tried), found.complete) == (48, 64, 5, False)
    assert auto._in_a_process(tmp_path, 1, 10**9, 1, time.monotonic()) is None


def test_a_large_set_is_read_in_large_pieces():
    """Of 262,144 samples 1,024 neighbours stay together, 4 MiB on a disk; of small sets 32."""
    for samples, block in ((1000, 32), (4096, 64), (262_144, 1024), (1 << 20, 1024)):
        order = train.epoch_order(samples, 0, 1)
        assert len(np.flatnonzero(np.diff(order) != 1)) <= samples / block
        assert (np.diff(order[:block]) == 1).all() or order[0] + block > samples


def test_an_epoch_has_every_sample_once_in_an_order_of_its_own():
    orders = [train.epoch_order(1000, 3, epoch) for epoch in (1, 2)]
    assert all(sorted(order) == list(range(1000)) for order in orders)
    assert (orders[0] != orders[1]).any()
    assert (train.epoch_order(1000, 3, 1) == orders[0]).all() and (train.epoch_order(1000, 4, 1) != orders[0]).any()


def test_a_set_that_does_not_fit_the_budget_is_cut(monkeypatch):
    monkeypatch.setattr(train, "agree", lambda value, world: value)
    monkeypatch.setattr(time, "monotonic", lambda: 1000.0)
    config = Seq2seqConfig(samples=10_000, batch_size=10, epochs=3, budget_s=100)
    task = train.Task(config, type("One", (), {"size": 1})(), None, "fp32", 10)
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    assert train.fitting(task, 0.001, now + 100) == (10_000, "all samples fit the budget")
    samples, reason = train.fitting(task, 0.1, now + 105)
    assert (
        10 * int(0.9 * 100 / 0.1 / 4) == 2_250
    )  # 225 steps fit; a power of two stays the same at a somewhat other speed
    assert samples == 1_280 == train.fitting(task, 0.12, now + 105)[0] and "cut to 1,280 samples" in reason
    assert train.fitting(task, 1e9, now)[0] == 10


@pytest.fixture
def judged(tmp_path):
    """Judge a made-up run of two epochs with two steps each after ``changes``: facts and metric values by name."""

    def judge_run(
        facts=None, losses=(9.2, 9.0, 8.9, 8.8, 8.8, 8.75), engine="both", tuned=(9.20001, 9.1, 9.0), **values
    ):
        config = build(
            "seq2seq", {"benchmark": "seq2seq", "samples": 64, "batch_size": 32, "epochs": 2, "engine": engine}
        )
        known = {
            "samples_seen": [192], "samples_expected": 192, "samples_per_epoch": 64, "steps_per_epoch": 2, "planned_steps": 6,
            "epoch_tokens": 64 * 256, "token_entropy": FLOOR, "precision": "fp32", "global_batch": 32, "batch_per_rank": 32,
            "checksums": [["a"]] * 3, "learning_rates": {"min": 1e-4}, "plan_reason": "all samples fit the budget",
            "memory_limit_gb": None,
        } | (facts or {})  # fmt: skip
        found = {"rate": 16.0, "flops": 50.0, "wall": 4.0} | values
        stated = [
            measured("loss", list(losses), ""),
            derived("loss_first_subset", losses[0], "", "none"),
            derived("loss_final_subset", losses[-1], "", "lower"),
            measured("epoch_s_subset", [found["wall"]] * 2, "s", "lower"),
            derived("end_to_end_samples_per_s_subset", 16.0, "samples/s", "higher"),
            derived("train_samples_per_s_subset", [found["rate"]] * 4, "samples/s", "higher"),
            derived("train_tokens_per_s_subset", [found["rate"] * 512] * 4, "tokens/s", "higher"),
            measured("step_s_subset", [2.0] * 4, "s", "lower"),
            derived("data_wait_share_subset", [0.01] * 4, "ratio", "lower"),
            derived("tuned_over_plain_subset", [1.5, 1.6, 1.4], "×", "higher"),
            derived("plain_samples_per_s_subset", [10.0], "samples/s", "higher"),
            derived("tuned_samples_per_s_subset", [15.0], "samples/s", "higher"),
            derived("flops_per_s_subset", [found["flops"]] * 4, "FLOP/s", "higher"),
            derived("mfu_subset", [found["flops"] / 100] * 4, "ratio", "higher"),
            measured("matmul_peak_flops", 100.0, "FLOP/s", "higher"),
            measured("total_s", 30.0, "s", "lower"),
        ]
        save_config(config, tmp_path)
        rows = [
            {"step": n + 1, "plain": a, "tuned": b}
            for n, (a, b) in enumerate(zip((9.2, 9.1, 9.0), tuned, strict=False))
        ]
        save_result(
            tmp_path, Result.of(config, status="complete", metrics=stated, facts=known, tables={"engines": rows})
        )
        run, _ = judged_view(Run(tmp_path), judge.lacks, ())
        return {check.name: check for check in checks(run, NONE)}

    return judge_run


def test_a_good_run_passes_and_reads_well(judged, tmp_path):
    found = judged()
    assert verdict_of(list(found.values())).verdict == "PASS"
    assert {name for name, check in found.items() if check.status == "FAIL"} == set()
    text = " ".join(reading(Run(tmp_path)))
    assert "3,527,168 parameters" in text and "1.50 × the work of the usual loop" in text and "between the two" in text


def test_a_ratio_that_scatters_about_one_decides_nothing():
    sure, unsure, one = [1.5, 1.6, 1.4], [0.9, 1.27, 1.7], [1.27]
    found = [undecided(derived("tuned_over_plain", ratios, "×", "higher"), ratios) for ratios in (sure, unsure, one)]
    assert found == [False, True, False]
    many = [0.9, *[1.2 + 0.001 * turn for turn in range(40)]]  # one odd turn of many
    assert not undecided(derived("tuned_over_plain", many, "×", "higher"), many)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("loss decreases", {"losses": (9.0, 9.0, 9.0, 9.0, 9.0, 9.0)}),
        ("loss above entropy", {"losses": (9.2, 8.3, 8.2, 8.1, 8.0, 7.9)}),
        ("engines agree", {"tuned": (9.2, 9.1, 9.01)}),
        ("engines agree", {"tuned": (9.2, math.nan, 9.0)}),
        ("engines agree", {"tuned": ()}),
        ("ranks equal", {"facts": {"checksums": [["a"], ["a"]]}}),
        ("whole set", {"facts": {"samples_per_epoch": 128}}),
        ("sample count", {"facts": {"samples_seen": [190]}}),
        ("sample count", {"facts": {"samples_seen": [192.0]}}),
        ("sample count", {"facts": {"samples_seen": None}}),
        ("sample count", {"facts": {"samples_expected": "192"}}),
        ("learning rate", {"facts": {"learning_rates": {"min": "1e-4"}}}),
        ("learning rate", {"facts": {"learning_rates": {"min": None}}}),
        ("learning rate", {"facts": {"learning_rates": {"min": 0.0}}}),
        ("possible speed", {"flops": 120.0}),
        ("numbers agree", {"rate": 32.0}),
        ("numbers agree", {"wall": 1.0}),
    ],
)
def test_each_check_can_fail(judged, name, changes):
    assert judged(**changes)[name].status == "FAIL"


IN_MEMORY = {"identity": {"data_dir": ""}, "data_limit_reason": "samples are generated in memory"}
ON_DISK = {"identity": {"data_dir": "a disk", "batch_size": 8}, "data_limit_reason": ""}


@pytest.mark.parametrize(
    ("table", "row", "columns", "legitimate"),
    [
        ("facts", IN_MEMORY, ("page_cache", "data_limit", "memory_limit_gb", "batch_limited_by"), True),
        ("facts", ON_DISK, ("page_cache", "data_limit", "memory_limit_gb", "batch_limited_by"), False),
        ("facts", IN_MEMORY, ("engine_losses", "learning_rates.min", "samples_seen"), False),
        ("batches", {"batch": 8, "fits": False, "reason": "out of memory"}, ("peak_gb", "samples_per_s"), True),
        ("batches", {"batch": 8, "fits": True, "reason": ""}, ("peak_gb", "samples_per_s"), False),
        ("devices", {"device": 0}, ("power_w", "temperature_c"), True),
        ("ranks", {"rank": 0, "step_s_p05": 0.1}, ("step_s_p95", "own_work_s_median"), False),
    ],
)
def test_a_null_has_its_reason_in_its_row(table, row, columns, legitimate):
    assert {judge.lacks(table, row, column) for column in columns} == {legitimate}


def test_a_set_that_was_cut_is_no_pass(judged):
    found = judged(
        {"samples_per_epoch": 32, "samples_seen": [96], "samples_expected": 96, "plan_reason": "cut to 32 samples"}
    )
    assert found["whole set"].status == "SKIPPED" and found["whole set"].gates


def test_a_slow_disk_is_named_as_the_limit():
    from dataclasses import asdict

    slow = data_limit(4096, 128, 0.1, 2e6, 2.1e6, 4.63e9)
    text = data_sentence({"data_limit": asdict(slow)}, 0.6)
    assert "waits for data for 60.0% of a step" in text and "the disk limits this model" in text
    fast = data_limit(4096, 128, 0.1, 2e9, 2.1e9, 4.63e9)
    text = data_sentence({"data_limit": asdict(fast)}, 0.001)
    assert "the disk does not limit this model" in text and "a batch of more than 48,828 samples" in text


@pytest.mark.parametrize(
    ("page_cache", "shares", "status"),
    [
        ("cold", [0.0, 0.0, 0.05], "PASS"),
        ("cold", [0.0, 1.0, 0.0], "FAIL"),
        ("warm", [1.0, 0.96, 1.0], "PASS"),
        ("warm", [1.0, 0.5, 1.0], "FAIL"),
        ("warm", [1.0], "FAIL"),
        ("cold", None, "SKIPPED"),
    ],
)
def test_a_page_cache_that_is_not_as_asked_for_fails(tmp_path, page_cache, shares, status):
    config = Seq2seqConfig(data_dir=str(tmp_path), page_cache=page_cache, epochs=2)
    result = Result.of(config, facts={"page_cache": {"cached_before_each_epoch": shares}})
    assert judge._page_cache(config, result).status == status


def test_a_trial_that_runs_out_of_memory_ends_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(largest, "TRIAL_S", 3600.0)  # a busy machine takes long to import torch
    save_config(Seq2seqConfig(sequence=32), tmp_path)
    row = auto._in_a_process(tmp_path, 4096, 1_500_000_000, 1, math.inf)
    assert row and (row["batch"], row["fits"]) == (4096, False) and "memory" in row["reason"]
    assert "tried to allocate" in row["reason"]
    assert json.dumps(row) and not np.isnan(row["batch"])


def test_a_peak_above_the_limit_does_not_fit(monkeypatch):
    """What a process maps before its limit is set, and what it shares, counts as well."""
    monkeypatch.setattr(largest, "limited", lambda device, limit: None)
    config = Seq2seqConfig(
        d_model=8, nhead=2, encoder_layers=1, decoder_layers=1, dim_feedforward=8, sequence=4, vocabulary=64
    )
    peak = auto.devices.peak_resident_bytes()
    row = auto.one_trial(config, 1, int(peak / 2))
    assert not row["fits"] and row["peak_gb"] * 1e9 >= peak and "is above the limit of" in row["reason"]
    assert auto.one_trial(config, 1, int(peak * 4))["fits"]


def test_the_search_says_what_limited_it():
    values = {"benchmark": "seq2seq", "batch": "auto", "samples": 16}
    for limited_by, words in (
        ("memory", "are the largest batch"),
        ("samples", "largest batch is not known: 16 samples"),
    ):
        facts = {"memory_limit_gb": 2.0, "batch_per_rank": 16, "batch_limited_by": limited_by}
        result = Result.of(config := build("seq2seq", values), facts=facts, tables={"batches": [{}]})
        assert words in judge._batch(config, result)


def test_a_batch_that_is_given_and_one_that_is_found_contradict_each_other():
    assert resolve("seq2seq", "quick", overrides={"batch": "auto", "size": "xl"}).config.batch_size == 4
    with pytest.raises(UserError, match="batch_size = 2 with batch = auto, which decides it: leave one"):
        resolve("seq2seq", "quick", overrides={"batch": "auto", "batch_size": "2"})
    assert resolve("seq2seq", "quick", overrides={"full": "true"}).config.epoch_samples == 7_500_000
    with pytest.raises(UserError, match="samples = 32 with full = True, which decides it: leave one"):
        resolve("seq2seq", "quick", overrides={"full": "true", "samples": "32"})


def test_kilobytes_say_nothing_of_a_disk(tmp_path):
    config = Seq2seqConfig(data_dir=str(tmp_path), samples=64)
    why = _unmeasured(config, 4096)
    assert "256 KiB of samples are too few" in why
    assert "set samples=32768 or more" in why
    planted = config.model_copy(update={"planted_disk_mb_per_s": 1.0})
    assert _unmeasured(planted, 4096) == "" and _to_measure(planted, Pairs(64, 256, 8192, 0)) == 64
    assert "generated in memory" in _unmeasured(Seq2seqConfig(samples=0), 4096)
    # Samples that the budget cut, of a whole set that was asked for, are measured on a whole shard.
    whole = config.model_copy(update={"samples": 32768})
    assert _unmeasured(whole, 4096) == ""
    assert [_to_measure(whole, Pairs(samples, 256, 8192, 0)) for samples in (4096, 40000)] == [32768, 40000]
    named = {metric.name: metric for metric in metrics.disk_metrics(None, None, why)}
    assert named["disk_raw_mb_per_s"].value is None and named["disk_raw_mb_per_s"].reason == why
    sentence = data_sentence({"data_limit": None, "page_cache": {}, "data_limit_reason": why}, 0.3)
    assert "is not known: 256 KiB" in sentence and "limits this model" not in sentence


def _speed(step_s, epochs=2):
    """Metrics by name of counted epochs, and one to warm up, in which one rank takes ``step_s`` for steps of 32 samples."""
    step_s = np.concatenate([np.ones(len(step_s) // epochs), step_s])
    row = dict.fromkeys(COLUMNS, 0.0) | {"samples": 32.0, "tokens": 32.0 * 512, "flops": 1e9}
    table = np.array([[[*(row | {"step_s": value}).values()]] for value in step_s])
    per_epoch = len(step_s) // (epochs + 1)
    walls = [float(part.sum()) for part in np.split(step_s, epochs + 1)]
    trained = train.Trained(32 * per_epoch, per_epoch, table, walls, [], [], Moment(0.0, 0.0), float(step_s.sum()))
    return {metric.name: metric for metric in metrics.speed_metrics(trained, "", 1, 1e10, "measured")}


def test_steps_in_bursts_have_the_rate_of_them_all():
    found = _speed([0.02, 2.0, 0.02, 2.0, 0.02, 2.0, 0.02, 2.0])  # a slow disk with read-ahead
    assert (
        found["train_samples_per_s"].value == pytest.approx(32 / 1.01)
        and "bursts" in found["train_samples_per_s"].reason
    )
    assert found["train_tokens_per_s"].value == pytest.approx(32 * 512 / 1.01)
    assert found["flops_per_s"].value == pytest.approx(1e9 / 1.01)
    agreeing = rate_from_steps(found["train_samples_per_s"].value, 32, ranks=1, step_s=found["step_s"].samples)
    assert agreeing.status == "PASS"
    steady = _speed([1.0, 1.1, 1.0, 0.9, 1.0, 4.0, 1.0, 1.0])  # one hiccup
    assert steady["train_samples_per_s"].value == pytest.approx(32.0) and steady["train_samples_per_s"].n == 8
