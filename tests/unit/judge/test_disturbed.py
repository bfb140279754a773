"""A speed whose level shifts within a run: at which time, and what the sensors saw meanwhile."""

import re

import numpy as np
import pytest
from make_run import START

from benchlib.core.stats import thinned
from benchlib.judge import disturbed
from benchlib.judge.change import reading
from benchlib.judge.regression import RegressionLimit, shift_text
from benchlib.results.metrics import measured
from benchlib.results.record import Record
from benchlib.results.run import Result


@pytest.fixture
def run(monkeypatch):
    """Training steps of a second each, of which the 42nd to the 77th are a third slower; a neighbour comes at the same time."""

    def make(neighbour=True, timed=True, others=0.1):
        rates = [(66.0 if 42 <= step < 78 else 100.0) * (1 + 0.01 * (-1) ** (step // 2)) for step in range(120)]
        events = [{"kind": "step", "step": step, "t": START + step} for step in range(120) if timed]
        events += [
            {"kind": "sensor", "t": START + t, "temperature_c": 61.0, "others_percent": 95.0 if 42 <= t < 78 and neighbour else 3.0}
            for t in range(120)
        ]  # fmt: skip
        metric = measured("rate", rates, "samples/s", "higher")
        monkeypatch.setattr(disturbed, "read_events", lambda folder: events)
        common = {"benchmark": "squad", "tier": "smoke", "backend": "cpu"}
        return Record(
            **common, run="r", result=Result(**common, world_size=1, metrics=[metric]), samples={"rate": rates}, others=others,
            limits=[RegressionLimit(metric="rate", share=0.2)],
        )  # fmt: skip

    return make


def test_a_neighbour_is_shown_at_its_time_with_what_the_sensors_saw(run):
    (sentence,) = disturbed.disturbances(run())
    assert "its level shifted by -34% from 35% to 65% of the samples" in sentence
    first, last = (int(text[-2:]) + 60 * int(text[-5:-3]) for text in re.findall(r"\d\d:\d\d:\d\d", sentence))
    assert (last - first) % 3600 == 35
    assert sentence.startswith("rate: ") and "processor time of others 95% instead of 3%" in sentence
    assert "temperature" not in sentence


def test_others_that_were_there_all_the_time_are_told_beside_the_shift(run):
    first, second = disturbed.disturbances(run(others=0.7))
    assert first.startswith("Others took 70% of the processors") and "its level shifted" in second


def test_what_stayed_the_same_is_said_and_samples_without_a_time_have_a_place(run):
    (sentence,) = disturbed.disturbances(run(neighbour=False))
    assert "Meanwhile temperature and processor time of others stayed the same." in sentence
    (sentence,) = disturbed.disturbances(run(timed=False))
    assert "65% of the samples." in sentence and "Meanwhile" not in sentence


def test_of_many_samples_it_shows_the_shift_that_the_gate_sees(run):
    rates = np.random.default_rng(1).normal(100, 12, 320)
    rates[100:180] *= 0.8
    recorded = run(timed=False)
    recorded.samples["rate"] = list(rates)
    shift = reading(tuple(thinned(list(rates), 200)), "ratio", "higher").disturbed
    (sentence,) = disturbed.disturbances(recorded)
    assert shift_text(shift) in sentence
