"""What a training states of its steps: throughput is work over time, and steps of many ranks add up to the time that passed."""

from types import SimpleNamespace

import numpy as np
import pytest

from benchlib.core.events import Moment
from benchlib.judge.regression import RegressionLimit, Side, regression_check
from benchlib.runtime.group import World
from benchlib.runtime.steps import COLUMNS, wall_s
from benchlib.spec.tables import Rows
from benchlib.workloads import training, training_spec

RUN = training_spec.run_of_training()
METRICS = {metric.name.split("{")[0]: metric for metric in training_spec.metrics(RUN, "", 0.1)}
PEAK = 1e12


def stated(name, **row):
    """Return a metric of counted steps."""
    steps = {"scope": "", "drift": "", "why": {}, **row}
    rows = Rows(None, 1, {"steps": [steps], "run": [{"peak_flops": PEAK}]})
    return METRICS[name].state(name, steps, rows)


def test_throughput_by_hand():
    """Samples 10 + 20 + 30 over 1 + 2 + 1 s; of the tokens of the last step half is padding."""
    row = {"step_s": [1.0, 2.0, 1.0], "samples": [10, 20, 30], "flops": [1e11, 2e11, 3e11]}
    row |= {"tokens": [100, 200, 150], "padded_tokens": [100, 200, 300]}
    assert stated("train_samples_per_s", **row).value == pytest.approx(60 / 4)
    assert stated("train_tokens_per_s", **row).value == pytest.approx(450 / 4)
    assert stated("flops_per_s", **row).value == pytest.approx(6e11 / 4)
    assert stated("mfu", **row).value == pytest.approx((1e11 + 2e11 + 1.5e11) / 4 / PEAK)
    assert stated("step_s", **row).value == 1.0  # the typical one


def test_stalls_of_every_third_step_are_seen_and_fail():
    noise = np.random.default_rng(5).lognormal(0.0, 0.03, 300)
    old, new = 0.25 * noise, 0.25 * noise * np.where(np.arange(300) % 3, 1.0, 2.0)
    before, after = (stated("train_samples_per_s", step_s=times.tolist(), samples=[8] * 300) for times in (old, new))
    assert (before.value, after.value) == (pytest.approx(2400 / old.sum()), pytest.approx(2400 / new.sum()))
    assert after.value == pytest.approx(24.0, rel=0.01)
    assert after.n == 40 and after.ci_low < after.value < after.ci_high < 26
    limit = RegressionLimit(metric="train_samples_per_s", share=0.2)
    sides = [Side.of(metric, metric.samples) for metric in (after, before)]
    assert regression_check(limit, *sides).status == "FAIL"


def jittered(ranks, steps=200):
    """Return the own times of ranks that end each step together but for 0.5% of it, (K, W), and the wall time."""
    ends = np.arange(1, steps + 1)[:, None] + np.random.default_rng(0).normal(0.0, 0.005, (steps, ranks))
    return np.diff(ends, axis=0, prepend=0.0), ends[-1].max()


@pytest.mark.parametrize("ranks", [1, 8, 512])
def test_steps_add_up_to_the_wall_time_on_any_number_of_ranks(ranks):
    own, wall = jittered(ranks)
    assert wall_s(own).sum() == pytest.approx(wall, abs=1e-9) and (wall_s(own) > 0).all()
    assert (own.max(axis=1).sum() / wall > 1.009) == (ranks > 1)  # what the slowest ranks of the steps add up to


def rows_of(monkeypatch, folder, own, nodes=1, events=(), **columns):
    """Return the tables of a training whose ranks took ``own`` seconds for their steps, as rank 0 of ``nodes`` makes them."""
    steps, ranks = own.shape
    columns = {"loss": 1.0, "samples": 4, "tokens": 10, "padded_tokens": 10, "step_s": own, **columns}
    table = np.stack([np.broadcast_to(columns.get(name, 0.1), own.shape) for name in COLUMNS], 2)
    monkeypatch.setattr(training, "peak", lambda rank, precision: (PEAK, "measured"))
    monkeypatch.setattr(training, "all_gather_objects", lambda value: [value] * nodes)
    monkeypatch.setattr(training, "read_events", lambda *_: list(events))
    here = World(0, ranks, 0, ranks // nodes, SimpleNamespace(type="cpu"), "gloo")
    rank = SimpleNamespace(config=SimpleNamespace(backend="cuda"), world=here, run_dir=folder, began=Moment(0.0, 0.0))
    plan = training.Plan(steps, 4 * ranks * steps, steps, 4 * ranks * steps)
    trained = training.Trained(plan, [1e-3] * steps, Moment(100.2, 1.0), table, train_s=float(own.sum(axis=0).max()))
    return training.rows(trained, rank, "fp32", (PEAK, "measured"), warm=10)


def test_the_counted_steps_take_the_time_after_the_warm_up(monkeypatch, tmp_path):
    own, wall = jittered(64)
    (steps,) = rows_of(monkeypatch, tmp_path, own)["steps"]
    warm_s = own[:10].sum(axis=0).max()
    assert (len(steps["step_s"]), sum(steps["step_s"])) == (190, pytest.approx(wall - warm_s))


def test_the_wait_for_data_is_that_of_the_rank_that_waits_most_in_all(monkeypatch, tmp_path):
    waits = np.full((40, 2), 0.1)
    waits[::2, 0] = waits[1::3, 1] = 0.4
    (steps,) = rows_of(monkeypatch, tmp_path, np.ones((40, 2)), data_s=waits)["steps"]
    assert sum(steps["data_wait_s"]) == pytest.approx(15 * 0.4 + 15 * 0.1)


@pytest.mark.parametrize("nodes", [1, 4])
def test_energy_is_that_of_all_nodes_over_the_samples_of_the_training(monkeypatch, tmp_path, nodes):
    """10.5 s at 300 W on each node: 3,150 J; the readings between the ends say 3,000."""
    read = {"kind": "sensor", "power_w": 300.0, "rss_bytes_per_pid": {}}
    events = [read | {"t": 99.9 + second, "energy_j": 300.0 * second} for second in range(40)]
    (run,) = rows_of(monkeypatch, tmp_path, np.full((21, 4), 0.5), nodes, events)["run"]
    rows = Rows(None, 4, {"run": [run]})
    assert (run["energy_j"], run["power_w"]) == (pytest.approx(nodes * 3150), pytest.approx(nodes * 300))
    assert RUN["energy_per_sample_j"].number(run, rows) == pytest.approx(nodes * 3150 / (21 * 16))


def test_what_one_node_does_not_know_is_not_known_of_all():
    known = {"energy_j": 5.0, "power_w": 1.0, "temperature_c": [40.0], "utilization": [90.0], "why": {}}
    lacking = known | {"energy_j": None, "why": {"energy_j": "no counter"}}
    row = training._of_nodes([known, lacking])
    assert (row["energy_j"], row["why"], row["power_w"]) == (None, {"energy_j": "node 1: no counter"}, 2.0)
    assert row["temperature_c"] == [40.0, 40.0]
