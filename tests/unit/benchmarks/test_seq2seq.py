"""Parameters, the search for a batch, the cut to the budget, and what a run is judged by: each check can fail."""

import json
import math
import shlex
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchlib.benchmarks.seq2seq import run, spec
from benchlib.benchmarks.seq2seq.config import Seq2seqConfig
from benchlib.config.schema import build, command, parse_overrides, resolve, tier_names
from benchlib.core.errors import RunBroken, UserError
from benchlib.core.events import Moment
from benchlib.runtime.measurement import Rank
from benchlib.spec.tables import Rows
from benchlib.workloads import largest, training
from benchlib.workloads.shards import Pairs
from tests.fixtures.make_smoke import unpack

SHAPE = {"d_model": 16, "nhead": 2, "encoder_layers": 1, "decoder_layers": 1, "dim_feedforward": 32, "vocabulary": 50}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"vocabulary": 70000, "token_bytes": 2}, "token_bytes = 2.*set token_bytes=8"),
        ({"page_cache": "cold"}, "page_cache = cold is about shards: set data_dir"),
        ({"memory_gb": 2}, "memory_gb = 2 is the limit of batch=auto"),
        ({"single": "true", "nnodes": 2, "launcher": "slurm"}, "single = true is one device, nnodes = 2"),
    ],
)
def test_what_does_not_fit_is_refused(values, message):
    with pytest.raises(UserError, match=message):
        resolve("seq2seq", "quick", overrides=values)


def test_sizes_and_sets():
    config = build("seq2seq", {"benchmark": "seq2seq", "size": "xl", "sequence": 256})
    assert (config.d_model, config.batch_size, config.sequence) == (2048, 8, 256)
    assert resolve("seq2seq", "quick", overrides={"batch": "auto", "size": "xl"}).config.batch_size == 4
    assert [config.scope(samples) for samples in (3_750_000, 7_500_000, 1000)] == ["", "", "_subset"]
    assert Seq2seqConfig(samples=0).epoch_samples == 3_750_000
    switched = resolve("seq2seq", "quick", overrides={"full": "yes", "single": "yes"}).config
    assert (switched.samples, switched.nproc) == (7_500_000, 1)
    again = shlex.split(command(switched))[7:]
    assert resolve("seq2seq", "quick", overrides=parse_overrides(again[1::2])).config == switched
    # What was accepted before these fields came is still comparable.
    assert {*Seq2seqConfig().work()} & {"full", "single", "num_shards", "warmup_epochs"} == set()
    assert Seq2seqConfig(warmup_epochs=0).work()["warmup_epochs"] == 0
    assert {resolve("seq2seq", tier).config.parameters for tier in tier_names()} == {3_527_168}


@pytest.mark.parametrize("most_that_fits", [1, 2, 7, 100, 128])
def test_the_search_ends_within_a_sixteenth_below_the_limit(most_that_fits):
    result = largest.search(lambda batch: {"batch": batch, "fits": batch <= most_that_fits}, 128)
    assert most_that_fits - max(1, most_that_fits // 16) < result.batch <= most_that_fits < result.below
    tried = [row["batch"] for row in result.tried]
    assert result.complete and tried == sorted(set(tried)) and len(tried) <= 10
    assert largest.search(lambda batch: {"batch": batch, "fits": False}, 8).batch == 0


def test_a_search_without_time_says_how_far_it_got():
    left = iter(range(5))

    def trial(batch):
        if next(left, None) is None:
            raise largest.OutOfTime
        return {"batch": batch, "fits": batch <= 50}

    search = largest.search(trial, 1000)  # 8, 16, 32, 64 (no), 48
    assert (search.batch, search.below, len(search.tried), search.complete) == (48, 64, 5, False)
    assert largest.in_a_process(run.one_trial, Seq2seqConfig(), 1, 10**9, time.monotonic()) is None


def test_a_trial_that_runs_out_of_memory_ends_alone(monkeypatch):
    monkeypatch.setattr(largest, "TRIAL_S", 3600.0)  # a busy machine takes long to import torch
    row = largest.in_a_process(run.one_trial, Seq2seqConfig(sequence=32), 4096, 1_500_000_000, math.inf)
    assert row and (row["batch"], row["fits"]) == (4096, False) and "tried to allocate" in row["reason"]
    assert json.dumps(row)


@pytest.mark.parametrize(
    ("words", "fits"),
    [
        ("CUDA error: an illegal memory access was encountered", None),
        ("CUDA out of memory. Tried to allocate 2.00 GiB", False),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", False),
        ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 bytes", False),
        ("level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)", False),
        ("CUDA error: misaligned address", None),
    ],
)
def test_only_want_of_memory_is_a_batch_that_does_not_fit(words, fits, monkeypatch):
    def step():
        raise RuntimeError(words)

    monkeypatch.setattr(largest, "limited", lambda *_: None)
    if fits is None:
        with pytest.raises(RuntimeError, match=words):
            largest.tried(torch.device("cpu"), 8, 10**9, lambda: step)
    else:
        assert largest.tried(torch.device("cpu"), 8, 10**9, lambda: step)["fits"] is fits


def broken_trial(config, batch, limit_bytes):
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_an_error_that_no_smaller_batch_mends_fails_the_run(monkeypatch):
    monkeypatch.setattr(largest, "TRIAL_S", 3600.0)
    with pytest.raises(
        RunBroken, match="batch of 16 failed, and not for want of memory: RuntimeError: CUDA error: an illegal"
    ):
        largest.in_a_process(broken_trial, Seq2seqConfig(), 16, 10**9, math.inf)


@pytest.mark.parametrize(("engine", "ranks", "times"), [("both", 1, 3), ("both", 2, 4), ("tuned", 2, 0)])
def test_a_trial_holds_what_the_run_holds(engine, ranks, times, monkeypatch):
    sizes = []
    ones = torch.ones
    monkeypatch.setattr(run.torch, "ones", lambda count, **more: sizes.append(count) or ones(count, **more))
    monkeypatch.setattr(run, "tried", lambda device, batch, limit_bytes, prepare: prepare() and {})
    config = Seq2seqConfig(**SHAPE, sequence=8, engine=engine, nproc=ranks)
    run.one_trial(config, 2, 10**9)
    assert sizes[-1] == times * config.parameters


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_the_memory_of_any_device_is_its_own_without_what_the_rank_caches(kind, monkeypatch):
    calls = []
    module = SimpleNamespace(
        empty_cache=lambda: calls.append("emptied"),
        mem_get_info=lambda where: (6e9 if calls else 5e9, 8e9),
        set_per_process_memory_fraction=lambda share, where: calls.append(share),
    )
    monkeypatch.setattr(torch, "get_device_module", lambda where: module)
    assert largest.free_bytes(SimpleNamespace(device=torch.device(kind, 0), local_size=2)) == 6e9
    largest.limited(torch.device(kind, 0), 4 * 10**9)
    assert calls == ["emptied", 0.5]


def test_an_epoch_has_every_sample_once_in_an_order_of_its_own_and_large_sets_in_large_pieces():
    orders = [run.epoch_order(1000, seed, epoch) for seed, epoch in ((3, 1), (3, 2), (4, 1))]
    assert all(sorted(order) == list(range(1000)) for order in orders)
    assert (orders[0] != orders[1]).any() and (orders[0] != orders[2]).any()
    assert (run.epoch_order(1000, 3, 1) == orders[0]).all()
    for samples, block in ((1000, 32), (4096, 64), (262_144, 1024), (1 << 20, 1024)):
        order = run.epoch_order(samples, 0, 1)
        assert len(np.flatnonzero(np.diff(order) != 1)) <= samples / block
        assert (np.diff(order[:block]) == 1).all() or order[0] + block > samples


def task_of(**values):
    config = Seq2seqConfig(samples=10_000, batch_size=10, epochs=3, budget_s=105, **values)
    rank = Rank(config, Path(), SimpleNamespace(size=1, rank=0), None, Moment(0.0, 995.0), 5.0)  # launched 5 s ago
    return run.Task(rank, SimpleNamespace(pairs=Pairs(10_000, 256, 8192, 0)), "fp32", 10)


def test_a_set_that_does_not_fit_the_budget_is_cut(monkeypatch):
    monkeypatch.setattr(training, "agree", lambda value, world: value)
    monkeypatch.setattr(time, "monotonic", lambda: 1000.0)
    assert run.planned(task_of(), 0.001) == training.Plan(4000, 40_000, 4000, 40_000, 0.001, 100.0)
    # 0.9 * 100 s / 0.1 s / 4 = 225 steps fit; a power of two stays the same at a somewhat other speed.
    cut = run.planned(task_of(), 0.1)
    assert (cut.planned_steps, cut.samples, cut.cut_by) == (4 * 128, 4 * 1280, "budget")
    assert run.planned(task_of(), 0.12).samples == cut.samples
    assert run.planned(task_of(), 1e9).samples == 40


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    return unpack("seq2seq", tmp_path_factory.mktemp("smoke") / "run")


def edited(rows, table, index, **values):
    changed = [row | values if place == index else row for place, row in enumerate(rows.tables[table])]
    return Rows(rows.config, rows.world, rows.tables | {table: changed}, machine=rows.machine)


COLD = {"page_cache": "cold"}
CUT = {"epoch_share": 0.5, "planned_steps": 8, "cut_by": "budget"}
# The last step of an epoch has 150 samples: 5 standard deviations of the mean of its tokens, each of which has 1, are allowed.
SHORT = {
    "token_entropy": 9.0,
    "samples_per_epoch": 1320,
    "global_batch": 1170,
    "epoch_tokens": 64 * 1320,
    "steps_per_epoch": 2,
}
CASES = [  # those of any training: tests/unit/judge/test_planted_numbers.py
    ("loss above entropy", "FAIL", "run", 0, {"lowest_loss": 8.3}),
    ("loss above entropy", "PASS", "run", 0, SHORT | {"lowest_loss": 9 - 4.9 / math.sqrt(150 * 64)}),
    ("loss above entropy", "FAIL", "run", 0, SHORT | {"lowest_loss": 9 - 5.1 / math.sqrt(150 * 64)}),
    ("engines agree", "FAIL", "engines", 1, {"loss": [9.1556, 9.1573, 9.1464]}),
    ("engines agree", "FAIL", "engines", 1, {"loss": []}),
    ("engines agree", "SKIPPED", "engines", 1, {"loss": None, "status": "skipped", "reason": "engine = plain"}),
    ("whole set", "FAIL", "run", 0, {"planned_steps": 15}),
    ("whole set", "FAIL", "run", 0, CUT),
    ("page cache", "SKIPPED", "run", 0, COLD),
    *(
        ("page cache", status, "epochs", 1, {"cached": share, "why": {}})
        for share, status in ((0.96, "PASS"), (0.5, "FAIL"), (None, "FAIL"))
    ),
]


@pytest.mark.parametrize(("name", "word", "table", "index", "values"), CASES)
def test_each_check_can_fail(smoke, judged_rows, name, word, table, index, values):
    assert judged_rows(spec.SPEC, edited(Rows.of(smoke), table, index, **values))[name].word == word


@pytest.mark.parametrize(
    ("step_s", "whole_s"),
    [
        ([0.02, 2.0] * 4, 1.01),
        ([1.0, 1.1, 1.0, 0.9, 1.0, 4.0, 1.0, 1.0], 1.375),
    ],  # a slow disk with read-ahead; a hiccup
)
def test_steps_have_the_rate_of_them_all(step_s, whole_s):
    same = ("tokens", "padded_tokens")
    row = {"step_s": step_s, "samples": [32] * 8, "flops": [1e9] * 8, **dict.fromkeys(same, [64] * 8)}
    rows = Rows(None, 1, {"steps": [row], "run": [{"peak_flops": 1e10}]})
    assert spec.counted_steps["samples_per_s"].number(row, rows) == pytest.approx(32 / whole_s)
    assert spec.counted_steps["mfu"].number(row, rows) == pytest.approx(0.1 / whole_s)


@pytest.mark.parametrize(
    ("compute_s", "loader", "raw", "limit"),
    [(1.0, 2.0, 2.1, "nothing"), (0.1, 2.0, 2.1, "the disk"), (0.1, 2.0, 9.0, "the loader")],
)
def test_a_slow_disk_is_named_as_the_limit_and_where_it_turns(compute_s, loader, raw, limit):
    """128 samples of 4,096 bytes a step are 0.52 MB: asked for in 0.1 s that is 5.2 MB/s."""
    row = {"sample_bytes": 4096, "compute_s": compute_s, "loader_mb_per_s": [loader], "raw_mb_per_s": [raw]}
    rows = Rows(None, 1, {"disk": [row], "run": [{"global_batch": 128, "sample_flops": 4.63e9}]})
    assert spec.disk["limit"].text(row, rows) == limit
    assert spec.disk["turn_samples_per_s"].number(row, rows) == pytest.approx(1e6 * loader / 4096)
    assert spec.disk["turn_batch"].number(row, rows) == int(1e6 * loader / 4096 * compute_s)
    asked = 4096 * 128 / compute_s / 1e6
    assert spec.disk["turn_gflop"].number(row, rows) == pytest.approx(4.63 * asked / loader)
