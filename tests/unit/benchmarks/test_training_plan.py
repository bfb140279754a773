"""The number of steps, the learning rate, the FLOPs and the metrics that come from step tables."""

import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchlib.benchmarks.squad import metrics, run
from benchlib.benchmarks.squad.config import SquadConfig
from benchlib.benchmarks.squad.steps import Trained, learning_rate, make_plan
from benchlib.core.definitions import encoder_train_flops
from benchlib.core.errors import BackendUnavailable
from benchlib.core.events import EventWriter, Moment
from benchlib.runtime.step_metrics import device_rows, sensor_metrics
from benchlib.runtime.steps import COLUMNS
from benchlib.runtime.timing import union


@pytest.mark.parametrize("planned", [1, 2, 3, 10, 1000])
@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.9])
def test_no_step_has_the_rate_zero(planned: int, ratio: float) -> None:
    rates = [learning_rate(step, planned, 3e-5, ratio) for step in range(planned)]
    assert min(rates) > 0
    assert max(rates) == pytest.approx(3e-5)
    peak = rates.index(max(rates))
    assert rates[:peak] == sorted(rates[:peak])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)


def test_the_whole_training_when_it_fits() -> None:
    plan = make_plan(SquadConfig(nproc=2, epochs=2), 100, step_s=1.0, left_s=20)
    assert (plan.total_steps, plan.planned_steps, plan.samples, plan.epoch_share) == (14, 14, 200, 1.0)


def test_a_training_that_does_not_fit_is_cut_and_says_why() -> None:
    plan = make_plan(SquadConfig(nproc=2, epochs=2), 100, step_s=2.0, left_s=20)
    assert plan.planned_steps == 9
    assert plan.samples == 132
    assert plan.epoch_share == pytest.approx(132 / 200)
    assert "cut to 9" in plan.reason


def test_max_steps_and_a_spent_budget() -> None:
    assert make_plan(SquadConfig(max_steps=3), 100, 1.0, 1e9).planned_steps == 3
    assert make_plan(SquadConfig(), 100, 1.0, -5.0).planned_steps == 2


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"precision": "bf16"}, "engine = compiled trains in fp32"),
        ({"compile": True}, "engine = compiled trains in fp32"),
        ({"hidden_dropout": 0.1}, "hidden_dropout = 0.1: engine = compiled trains without dropout"),
    ],
)
def test_xla_refuses_what_it_would_not_do(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SquadConfig(engine="compiled", **fields)
    SquadConfig(**fields)


def test_xla_without_jax_says_what_to_install_before_any_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "jax", None)
    monkeypatch.setattr(run, "load_data", lambda _: pytest.fail("data were read"))
    with pytest.raises(BackendUnavailable, match=r"pip install 'benchlib\[xla\]'"):
        run.run(SquadConfig(engine="compiled"), tmp_path, EventWriter(tmp_path, "rank0"))


def test_flops_of_bert_base_are_the_published_ones() -> None:
    # 212.0 GFLOP a sequence of 384 tokens for BERT-base, 739.3 for BERT-large (training).
    assert encoder_train_flops(12, 768, 3072, [(1, 384)]) == pytest.approx(212.0e9, rel=1e-3)
    assert encoder_train_flops(24, 1024, 4096, [(2, 384)]) == pytest.approx(2 * 739.3e9, rel=1e-3)


def test_union_of_intervals() -> None:
    assert union([]) == 0
    assert union([(1, 3), (2, 4), (6, 7), (6.2, 6.5)]) == pytest.approx(4)


def _trained(steps: int = 40) -> Trained:
    """Two ranks; the second works 3 s a step, the first 2 s and waits 1 s."""
    row = {
        "loss": 0.5,
        "samples": 4,
        "tokens": 300,
        "padded_tokens": 400,
        "flops": 1e9,
        "data_s": 0.1,
        "forward_s": 0.8,
        "optimizer_s": 0.1,
    }
    ranks = [
        row | {"step_s": 3.1, "backward_s": 1.0, "exchange_s": 2.0, "exchange_exposed_s": 1.0},
        row | {"step_s": 3.2, "backward_s": 2.0, "exchange_s": 1.0, "exchange_exposed_s": 0.0},
    ]
    table = np.array([[[rank[name] for name in COLUMNS] for rank in ranks]] * steps)
    table[:, :, 0] *= np.linspace(2, 1, steps)[:, None]
    plan = make_plan(SquadConfig(nproc=2), steps * 16, 1.0, 1e9)
    return Trained(plan, table, [1e-3] * steps, [160, 160], [1000], Moment(0.0, 0.0), 124.0)


def test_metrics_of_a_table() -> None:
    found = {metric.name: metric for metric in metrics.speed_metrics(_trained(), "_x", 2, 1e10, "measured")}
    assert found["train_samples_per_s_x"].value == pytest.approx(
        8 / 3.2
    )  # both ranks' samples by the slower one's time
    assert found["train_tokens_per_s_x"].value == pytest.approx(600 / 3.2)
    assert found["step_s_x"].n == 35
    assert found["padding_share"].value == pytest.approx(0.25)
    assert found["exchange_overlap"].value == pytest.approx(1 - 1 / 3)
    assert found["rank_skew"].value == pytest.approx(3 / 2.5)
    assert found["mfu_x"].value == pytest.approx(2e9 / 3.2 / 1e10)
    quality = {metric.name: metric for metric in metrics.quality_metrics(_trained(), "_x")}
    assert quality["loss"].samples[0] == pytest.approx(2.0)
    assert quality["loss_final_x"].value == pytest.approx(np.linspace(2, 1, 40)[-4:].mean())


def test_what_is_unknown_is_not_available() -> None:
    trained = _trained()
    trained.table[:, :, COLUMNS.index("forward_s") :] = math.nan
    trained.table[:, :, COLUMNS.index("flops")] = math.nan
    found = {metric.name: metric for metric in metrics.speed_metrics(trained, "", 2, None, "no such precision")}
    for name in ("time_forward_s", "exchange_overlap", "rank_skew", "flops_per_s", "mfu", "matmul_peak_flops"):
        assert found[name].provenance == "not_available"
        assert found[name].reason
    assert metrics.exchange_metrics(None)[0].provenance == "not_available"


def test_devices_by_row_over_the_training() -> None:
    def reading(t: float, power_w: float) -> dict[str, Any]:
        first = {
            "power_w": power_w,
            "energy_j": 50.0 * t,
            "temperature_c": 40.0 + t,
            "utilization_percent": 80.0,
            "device_memory_bytes": 1e9 * t,
        }
        return {"kind": "sensor", "t": t, "devices": [first, dict.fromkeys(first)]}

    events = [reading(0.0, 900.0), reading(1.0, 100.0), reading(3.0, 200.0), reading(9.0, 900.0)]
    first, second = device_rows(events, 0.5, 4.0)
    assert first == {
        "device": 0, "power_w": 150.0, "energy_j": 100.0, "temperature_c": 43.0, "utilization_percent": 80.0, "memory_in_use_gb": 3.0
    }  # fmt: skip
    assert second.pop("device") == 1 and set(second.values()) == {None}
    assert device_rows([{"kind": "sensor", "t": 1.0, "power_w": 5.0}], 0.0, 9.0) == []


def test_sensors_count_only_during_the_training() -> None:
    events = [{"kind": "sensors", "t": 0.0, "availability": {"temperature_c": "no sensor"}}]
    events += [
        {
            "kind": "sensor",
            "t": float(t),
            "energy_j": 100.0 * t,
            "power_w": 100.0,
            "temperature_c": None,
            "cpu_percent": 150.0,
        }
        for t in range(20)
    ]
    found = {metric.name: metric for metric in sensor_metrics(events, 4.5, 10.0, "cpu")}
    assert found["energy_j"].value == 500.0
    assert found["power_w"].n == 6
    assert found["temperature_c"].reason == "no sensor"
    assert found["utilization"].value == 150.0
    nothing = sensor_metrics([], 0.0, 1.0, "cpu")
    assert {metric.reason for metric in nothing} == {"no supervisor sampled the sensors of this run"}
