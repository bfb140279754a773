"""Parameters, the plan, learning rates, and what a run is judged by: each check can fail, and a cut run cannot pass unseen."""

import math
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from make_smoke import unpack

from benchlib.benchmarks.squad import spec, train
from benchlib.benchmarks.squad.config import SquadConfig
from benchlib.benchmarks.squad.train import learning_rates, make_plan
from benchlib.config.schema import build, save_config
from benchlib.core.errors import UserError
from benchlib.core.events import Moment
from benchlib.core.files import write_json
from benchlib.runtime.group import World
from benchlib.runtime.measurement import Rank
from benchlib.runtime.steps import COLUMNS
from benchlib.spec.tables import Rows
from benchlib.workloads import training


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"engine": "compiled", "precision": "bf16"}, "engine = compiled trains in fp32"),
        ({"engine": "compiled", "hidden_dropout": 0.1}, "hidden_dropout = 0.1: engine = compiled trains without"),
        ({"balance": "auto", "engine": "trainer"}, "balance = auto with engine = trainer"),
        ({"planted_work": [1, 3], "engine": "trainer"}, "planted_work = 1,3 with engine = trainer"),
        ({"memory_limits_gb": [1, 2]}, "set balance=auto"),
        ({"planted_drift_step": 3}, "planted_drift_step turns the order of planted_work around: set both"),
        ({"planted_work": [1, 3, 1]}, "planted_work has 3 numbers for 2 ranks"),
        ({"bf16_ranks": [1]}, "squad has no bf16_ranks any more: .*set precision"),
    ],
)
def test_what_does_not_go_together_or_went_is_refused(values, message):
    with pytest.raises(UserError, match=message):
        build("squad", {"benchmark": "squad", "nproc": 2, **values}).check_whole()


def test_only_an_unfinished_run_of_squad_with_a_checkpoint_is_resumed(tmp_path):
    config = build("squad", {"benchmark": "squad", "resume": str(tmp_path)})

    def refused(words):
        with pytest.raises(UserError, match=words):
            spec.SPEC.refuse(config)

    save_config(build("machine", {"benchmark": "machine"}), tmp_path)
    refused("a run of machine")
    save_config(build("squad", {"benchmark": "squad"}), tmp_path)
    refused("left no checkpoint")
    (tmp_path / "checkpoints").mkdir()
    write_json(tmp_path / "status.json", {"outcome": "stopped"})
    spec.SPEC.refuse(config)
    write_json(tmp_path / "status.json", {"outcome": "complete"})
    refused("this run is finished")


@pytest.mark.parametrize("steps", [1, 2, 3, 10, 1000])
@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.9])
def test_no_step_has_the_rate_zero(steps, ratio):
    rates = learning_rates(SquadConfig(learning_rate=3e-5, warmup_ratio=ratio), steps)
    peak = rates.index(max(rates))
    assert min(rates) > 0 and max(rates) == pytest.approx(3e-5)
    assert rates[:peak] == sorted(rates[:peak]) and rates[peak:] == sorted(rates[peak:], reverse=True)


@pytest.mark.parametrize(
    ("values", "step_s", "left_s", "expected"),
    [
        ({"epochs": 2}, 1.0, 20, (14, 14, 200, "")),
        ({"epochs": 2}, 2.0, 20, (14, 9, 132, "budget")),  # 0.9 * 20 s / 2 s
        ({"max_steps": 3}, 1.0, 1e9, (7, 3, 48, "max_steps")),
        ({}, 1.0, -5.0, (7, 2, 32, "budget")),
    ],
)
def test_a_training_that_does_not_fit_is_cut(monkeypatch, values, step_s, left_s, expected):
    """100 windows in batches of 16; nothing is evaluated, and 5% of the budget are left for the end."""
    monkeypatch.setattr(training, "agree", lambda value, world: value)
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    config = SquadConfig(nproc=2, budget_s=100.0, **values)
    rank = Rank(config, Path(), None, None, Moment(0.0, 100.0 + left_s - 95.0))
    task = SimpleNamespace(config=config, rank=rank, eval_tokens=0)
    plan = make_plan(task, 100, step_s, 1.0)
    assert (plan.total_steps, plan.planned_steps, plan.samples, plan.cut_by) == expected


PARTS = {"data_s": 0.1, "forward_s": 0.8, "optimizer_s": 0.1}
WORK = {"loss": 0.5, "samples": 4, "tokens": 300, "padded_tokens": 400, "flops": 1e9}
RANKS = [
    WORK | PARTS | {"step_s": 3.1, "backward_s": 1.0, "exchange_s": 2.0, "exchange_exposed_s": 1.0},
    WORK | PARTS | {"step_s": 3.2, "backward_s": 2.0, "exchange_s": 1.0, "exchange_exposed_s": 0.0},
]


def metrics_of(monkeypatch, tmp_path, unknown=(), peak=1e10, steps=40):
    """Return the metrics of two ranks, of which the second works 3 s a step, the first 2 s and waits for it."""
    table = np.array([[[rank[name] for name in COLUMNS] for rank in RANKS]] * steps)
    table[:, :, 0] *= np.linspace(2, 1, steps)[:, None]
    for name in unknown:
        table[:, :, COLUMNS.index(name)] = math.nan
    monkeypatch.setattr(training, "all_gather_objects", lambda value: [value])
    config = SquadConfig(nproc=2)
    world = World(0, 2, 0, 2, SimpleNamespace(type="cpu"), "gloo")
    rank = SimpleNamespace(config=config, world=world, run_dir=tmp_path, began=Moment(0.0, 0.0))
    plan = training.Plan(steps, 8 * steps, steps, 8 * steps)
    trained = training.Trained(plan, [1e-3] * steps, Moment(0.0, 1.0), table=table, train_s=130.0)
    measured = (peak, "measured" if peak else "no such precision")
    monkeypatch.setattr(training, "peak", lambda rank, precision: measured)
    tables = training.rows(trained, rank, "fp32", measured, warm=5)
    tables["run"][0] |= {"speed_scope": "_x", "quality": "_x", "total_s": 131.0}
    rows = Rows(config, 2, {**{name: [] for name in ("shares", "splits", "balance", "misses")}, **tables})
    return {metric.name: metric for metric in spec.SPEC.stated(rows)}


def test_metrics_of_a_table_by_hand(monkeypatch, tmp_path):
    metrics = metrics_of(monkeypatch, tmp_path)
    expected = {
        "train_samples_per_s_x": 8 / 3.2,  # both ranks' samples by the slower one's time
        "train_tokens_per_s_x": 600 / 3.2,
        "padding_share": 0.25,
        "exchange_overlap": 1 - 1 / 3,
        "rank_skew": 3 / 2.5,
        "flops_per_s_x": 2e9 / 3.2,
        "mfu_x": 0.75 * 2e9 / 3.2 / 1e10,  # a quarter of the work is on padding
        "time_exchange_s": 1.5,
        "exchange_exposed_s": 0.5,
        "loss_final_x": np.linspace(2, 1, 40)[-4:].mean(),
    }
    assert {name: metrics[name].value for name in expected} == {n: pytest.approx(v) for n, v in expected.items()}
    assert (metrics["step_s_x"].n, metrics["loss"].samples[0]) == (35, pytest.approx(2.0))


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    return unpack("squad", tmp_path_factory.mktemp("smoke") / "run")


def edited(stored, config=None, **tables):
    """Return the rows of a run after changes to the first row of tables, and to its config."""
    rows = Rows.of(stored)
    changed = {name: [rows.tables[name][0] | values, *rows.tables[name][1:]] for name, values in tables.items()}
    settings = rows.config.model_dump() | (config or {})
    return Rows(type(rows.config)(**settings), rows.world, rows.tables | changed, machine=rows.machine)


CUT = {"epoch_share": 0.12, "total_steps": 83, "cut_by": "budget", "why": {"whole_f1": "after 12%"}}
REAL = {"data": "squad", "model": "bert-base-uncased", "train_questions": 0, "eval_questions": 0}
WHOLE = {"quality": "", "speed_scope": ""}
CASES = [  # beside those of tests/unit/judge/test_planted_numbers.py; generated data never count for a target of SQuAD
    ("ranks equal", "FAIL", {}, {"checksums": []}),
    ("whole training", "FAIL", {}, {"epoch_share": 5.0}),
    ("whole training", "FAIL", {}, CUT),
    ("possible quality", "FAIL", {}, {"exact_match": 77.0}),  # above F1
    ("F1 on embedded data", "FAIL", {"target_f1_embedded": 88.0}, {"f1": 87.99}),
    ("F1 on embedded data", "PASS", {"target_f1_embedded": 88.0}, {"f1": 88.0}),
    ("F1 on embedded data", "INCOMPLETE", {"target_f1_embedded": 88.0}, CUT),
    ("F1 on embedded data", "SKIPPED", {"target_f1_embedded": 88.0}, {"epoch_share": 0.2, "cut_by": "max_steps"}),
    ("final loss", "DIFFERS", {**REAL, "target_loss": 0.5}, {**WHOLE, "loss": [2.0] * 9 + [0.5]}),  # has to be under it
    ("all-reduce throughput", "FAIL", {"target_allreduce_gbps": 1000.0}, {}),
    ("device memory", "INCOMPLETE", {"target_memory_gb": 12.0}, {}),
    (
        "training time",
        "INCOMPLETE",
        {**REAL, "target_minutes": 45},
        {**WHOLE, **CUT, "why": {"whole_minutes": "after 12%"}},
    ),
    ("training time", "SKIPPED", {**REAL, "model": "bert-large-uncased"}, {**WHOLE}),
    ("newest checkpoint", "AMBIGUOUS", {"max_restarts": 1, "launcher": "torchrun"}, {"checkpoint_faults": ["step 8"]}),
]


@pytest.mark.parametrize(("name", "word", "config", "values"), CASES)
def test_each_check_can_fail_and_targets_hold_for_what_they_were_set(smoke, judged_rows, name, word, config, values):
    assert judged_rows(spec.SPEC, edited(smoke, config, run=values))[name].word == word


@pytest.mark.parametrize(("first", "shared"), [(8, 0), (7, 1), (0, 4)])
def test_questions_of_both_files_are_counted_whatever_the_paths_and_warned_of(smoke, tmp_path, first, shared):
    questions = [{"id": str(n), "question": "Who?", "answers": [{"text": "Ada", "answer_start": 0}]} for n in range(12)]
    for name, part in (("train", questions[:8]), ("eval", questions[first : first + 4])):
        content = {"data": [{"title": "t", "paragraphs": [{"context": "Ada wrote.", "qas": part}]}]}
        write_json(tmp_path / name, content | {"version": "1.1"})
    files = {"train_file": str(tmp_path / "train"), "eval_file": str(tmp_path / "eval"), "data": "files"}
    split = train.load_data(smoke.config.model_copy(update=files))
    assert split.shared == shared and Rows.of(smoke).run["shared_questions"] == 0
    rows = edited(smoke, run={"shared_questions": split.shared, "eval_questions": len(split.eval)})
    sentences = [text for text in spec.SPEC.warnings(rows) if "memorised" in text]
    assert [f"{shared} of 4" in text for text in sentences] == [True] * bool(shared)


def balanced(smoke, **changes):
    """Return rows of two heterogeneous ranks after changes to the first row of each table."""
    share = {"device": "cpu", "threads": 1, "work": 1, "micro_batches": 1, "most": 16, "step_s": 0.01}
    share |= {"batch_s": 0.02, "token_s": 1e-4, "expected_s": 0.3, "idle_s": 0.02}
    tables = {
        "shares": [
            share | {"rank": rank, "samples": n, "trained": [n], "sample_s": each, "own_s": own, "even_s": even}
            for rank, n, each, own, even in ((0, 12, 0.01, 0.31, 0.2), (1, 4, 0.05, 0.3, 0.6))
        ],
        "splits": [
            {"from_step": 0, "shares": [8, 8], "expected_s": 0.6, "why": {"drifted": "first", "factor": "first"}},
            {"from_step": 2, "shares": [12, 4], "expected_s": 0.3, "drifted": 1, "factor": 3.0, "why": {}},
        ],
        "balance": [
            {"best_s": 0.3, "other_split_s": 0.01, "differing_steps_s": -1e-5, "exchange_s": 0.02}
            | {"wait_shares": [0.02, 0.0], "calibration_s": 1.0, "why": {}}
        ],
    }
    for name, values in changes.items():
        tables[name][0] |= values
    rows = Rows.of(smoke)
    config = rows.config.model_copy(update={"balance": "auto"})
    return Rows(config, rows.world, rows.tables | tables, machine=rows.machine)


SPLIT = ("distance to the best split", "split as planned", "predicted times")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ("PASS", "PASS", "PASS")),
        ({"balance": {"other_split_s": 0.04}}, ("FAIL", "PASS", "PASS")),
        ({"shares": {"trained": [11, 12]}}, ("PASS", "FAIL", "PASS")),
        ({"shares": {"own_s": 0.4}}, ("PASS", "PASS", "FAIL")),
        ({"shares": {"own_s": None}}, ("PASS", "PASS", "FAIL")),
        (
            {"balance": {"status": "skipped", "reason": "few", "other_split_s": None, "best_s": None}},
            ("SKIPPED", "PASS", "PASS"),
        ),
    ],
)
def test_each_check_of_a_split_can_fail(smoke, judged_rows, changes, words):
    answers = judged_rows(spec.SPEC, balanced(smoke, **changes))
    assert tuple(answers[name].status for name in SPLIT) == words
    assert answers["predicted times"].gates == (changes.get("shares", {}).get("own_s", 1) is None)  # else it informs
    assert not set(SPLIT) & set(judged_rows(spec.SPEC, edited(smoke)))
