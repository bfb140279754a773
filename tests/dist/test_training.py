"""Training by two ranks, alike and unlike, against one rank, against itself and against transformers alone."""

import os
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import training_cases as cases
import transformers
from accelerate.state import AcceleratorState
from worlds import in_ranks

from benchlib.benchmarks.squad import run as squad
from benchlib.benchmarks.squad import trainer
from benchlib.benchmarks.squad.config import SquadConfig
from benchlib.config.schema import save_config
from benchlib.core.errors import RunBroken, UserError
from benchlib.core.events import EventWriter, Moment, read_events
from benchlib.results.run import Run
from benchlib.runtime import checkpoint
from benchlib.runtime.group import World
from benchlib.runtime.measurement import Rank


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return cases.make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def two_ranks(model, tmp_path_factory):
    """Run all cases in two processes, once; return the run folder."""
    run_dir = tmp_path_factory.mktemp("two")
    save_config(cases.config_of(model, 2), run_dir)
    in_ranks(2, run_dir, cases.run)
    return run_dir


@pytest.fixture(scope="module")
def outcomes(two_ranks):
    return cases.read(two_ranks)


@pytest.fixture(scope="module")
def gradients(two_ranks):
    return torch.load(two_ranks / "gradients.pt", weights_only=True)


@pytest.fixture(scope="module")
def one_rank(model, tmp_path_factory):
    return cases.alone(cases.config_of(model, 1, **cases.without_dropout()), tmp_path_factory.mktemp("one") / "run")[0]


@pytest.mark.parametrize("case", ["plain", "accumulated", "compiled"])
def test_two_ranks_follow_the_curve_of_one(outcomes, one_rank, case):
    # 33 questions in batches of 16: the last batch has one sample, so that one of two ranks has none.
    assert len(one_rank["losses"]) == 3
    np.testing.assert_allclose(outcomes[case]["losses"], one_rank["losses"], rtol=1e-4)
    np.testing.assert_allclose(outcomes[case]["biases"], one_rank["biases"], rtol=1e-2)
    first, second = np.sum(outcomes[case]["samples"], axis=0)
    assert first + second == outcomes[case]["expected"] == np.sum(one_rank["samples"]) == one_rank["expected"]
    assert second < first


def furthest(gradients, expected):
    """Return the largest difference, as a share of the largest gradient where that is above 1."""
    assert gradients.keys() == expected.keys()
    largest = max(1.0, *(float(gradient.abs().max()) for gradient in expected.values()))
    return max(float((gradient - expected[name]).abs().max()) for name, gradient in gradients.items()) / largest


def test_gradients_are_those_of_transformers_alone(gradients, model):
    expected = cases.single_gradients(cases.config_of(model, 2, **cases.ONE_BATCH))
    assert furthest(gradients["one batch"][0], expected) < 2e-6


def test_splits_that_change_every_step_give_the_curve_of_one_process(outcomes, gradients, model, tmp_path):
    config = cases.config_of(model, 1, **cases.without_dropout(**cases.UNLIKE))
    one, expected = cases.alone(config, tmp_path / "run", exact=True)
    uneven, samples = outcomes["unlike"], np.array(outcomes["unlike"]["samples"])
    assert (samples.sum(axis=1) == np.array(one["samples"]).sum(axis=1)).all()
    assert (samples[:, 0] == 0).any()  # without work
    assert len(set(map(tuple, samples.tolist()))) >= 5
    assert all(uneven["equal"])
    np.testing.assert_allclose(uneven["losses"], one["losses"], rtol=1e-12)
    assert len(gradients["unlike"]) == len(expected) == len(samples)
    # Steps later than the first also carry what AdamW makes of rounding in gradients near zero.
    for step, limit in ((0, 1e-12), (-1, 1e-9)):
        assert furthest(gradients["unlike"][step], expected[step]) < limit


def test_a_drift_in_the_middle_is_answered_within_8_steps(outcomes):
    """By the injected clock rank 1 takes four times as long as rank 0, from step 8 on a quarter of it."""
    samples, tables = np.array(outcomes["drift"]["samples"]), outcomes["drift"]["tables"]
    moment = next(row for row in tables["splits"] if row["from_step"] > 8)
    assert moment["from_step"] <= 8 + 8
    whole = samples[samples.sum(axis=1) == 12]
    assert whole[:6].tolist() == [[10, 2]] * 6  # up to step 8
    assert whole[-1, 0] < whole[-1, 1]
    assert all(row["even_s"] > 0 for row in tables["shares"])


@pytest.mark.parametrize(
    ("name", "whole", "step"),
    # The last one across the moment of a new split, which follows from steps that the first part took.
    [("resumed", "first", 4), ("compiled resumed", "compiled", 2), ("drift resumed", "drift", 4)],
)
def test_an_interrupted_run_ends_with_the_same_bits(outcomes, name, whole, step):
    assert outcomes["first"]["losses"][:3] != outcomes["plain"]["losses"], "dropout was on"
    assert outcomes[name]["resumed"] == step
    for same in ("losses", "weights", "samples"):
        assert outcomes[name][same] == outcomes[whole][same], same


def test_ranks_are_compared_and_step_times_have_parts(outcomes):
    """XLA computes forward and backward in one piece, and tells only what it can."""
    assert outcomes["first"]["equal"] == [True, True] and outcomes["compiled"]["equal"] == [True]
    assert len(set(outcomes["perturbed"])) == 2
    row, compiled = outcomes["plain"]["columns"], outcomes["compiled"]["columns"]
    parts = ("data_s", "forward_s", "backward_s", "exchange_exposed_s", "optimizer_s")
    assert all(row[name] > 0 for name in ("step_s", "forward_s", "backward_s", "optimizer_s", "exchange_s"))
    assert sum(row[name] for name in parts) <= row["step_s"] * 1.001
    assert compiled["forward_s"] is None and compiled["backward_s"] is None
    exchange_s, exposed_s, step_s = (compiled[name] for name in ("exchange_s", "exchange_exposed_s", "step_s"))
    assert 0 < exchange_s <= exposed_s * 1.001 and exposed_s <= step_s * 1.001


def test_resume_refuses_other_settings(model, two_ranks, tmp_path):
    config = cases.config_of(model, 1, epochs=2, resume=str(two_ranks / "first"))
    with pytest.raises(UserError, match=r"that run had nproc = 2, this one has 1"):
        cases.alone(config, tmp_path / "run")


def test_a_checkpoint_is_a_model_folder(two_ranks):
    newest, faults = checkpoint.search(two_ranks / "resumed" / "checkpoints")
    assert (newest.step, faults) == (6, [])
    loaded = transformers.AutoModelForQuestionAnswering.from_pretrained(newest.path, use_safetensors=True)
    for name, tensor in newest.tensors("model").items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


def test_the_trainer_runs_the_same_benchmark(model, tmp_path):
    """transformers' Trainer in two processes, once with each padding."""
    for padding in cases.PADDINGS:
        (tmp_path / padding).mkdir()
    save_config(cases.config_of(model, 2, engine="trainer", max_length=256), tmp_path)
    in_ranks(2, tmp_path, cases.trainer, BENCHLIB_OUTPUTS=str(tmp_path))
    for padding in cases.PADDINGS:
        result = Run(tmp_path / padding).result
        assert result.status == "complete"
        # The Trainer fills the last batch of an epoch (33 samples, 16 a step) from the epoch's start.
        assert sum(result.facts["samples_seen"]) == result.facts["samples_expected"] == 48
        assert {len(set(checksums)) for checksums in result.facts["checksums"]} == {1}
        assert result.facts["learning_rate_min"] > 0
        assert result.value("loss_final_minisquad_random") > 0
        assert result.metric("time_forward_s").provenance == "not_available"
        assert (result.value("padding_share") > 0.3) == (padding == "max_length")
        assert len((tmp_path / padding / "predictions.json").read_text()) > 10


@pytest.mark.parametrize("engine", ["native", "trainer"])
def test_the_peak_of_the_memory_is_that_of_the_training(group, held, model, tmp_path, monkeypatch, engine):
    """The evaluation holds 8 GB, by a stand-in."""
    predict = squad.predict

    def predicted(*arguments):
        held(8e9)
        return predict(*arguments)

    monkeypatch.setattr(squad, "predict", predicted)
    config = cases.config_of(model, 1, engine=engine, max_length=64, doc_stride=16, max_steps=2)
    rank = Rank(config, tmp_path, World(), EventWriter(tmp_path, "rank0"), Moment.now())
    tables = squad.measure(rank)
    assert tables["run"][0]["device_memory_gb"] == tables["ranks"][0]["device_gb"] == 1.0


def test_the_trainer_takes_the_device_of_its_rank_and_no_other(group, tmp_path, monkeypatch):
    """Of eight pretended GPUs, by a rank that nobody gave LOCAL_RANK, as srun does not."""
    answers = {"is_available": True, "device_count": 8, "set_device": None, "is_bf16_supported": True}
    for name, value in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value, **__: value)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    here, before = World(0, 1, 3, 4, torch.device("cuda", 3), "nccl"), dict(os.environ)
    config, plan = SquadConfig(backend="cuda", engine="trainer"), SimpleNamespace(planned_steps=3)
    try:
        with pytest.raises(RunBroken, match="takes cuda:0 of 8 devices"):
            trainer.check_place(trainer.arguments(config, str(tmp_path), plan), here)
        with trainer.placed(here):
            args = trainer.arguments(config, str(tmp_path), plan)
            trainer.check_place(args, here)
            assert (args.device, args.n_gpu) == (here.device, 1)
        # One visible device for each rank: it is number 0 whatever the rank's place.
        with trainer.placed(replace(here, device=torch.device("cuda", 0))):
            assert trainer.arguments(config, str(tmp_path), plan).device == torch.device("cuda", 0)
        assert dict(os.environ) == before
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


def test_the_trainer_counts_tokens_without_asking_the_device():
    """Nothing can be read of a tensor on the device ``meta``: an attempt is an error."""
    recorder = object.__new__(trainer.Recorder)
    loaded, world = SimpleNamespace(flops=SimpleNamespace(of=lambda rows, length: 1.0)), SimpleNamespace(size=1)
    recorder.task, recorder._loss = SimpleNamespace(loaded=loaded, rank=SimpleNamespace(world=world)), 0.0
    recorder._counts = np.zeros(4)
    tokens = torch.ones(2, 8, dtype=torch.long, device="meta")
    recorder.count({"input_ids": tokens, "attention_mask": tokens}, 11, torch.ones((), device="meta"))
    assert recorder._counts.tolist() == [2, 11, 16, 1]


def test_xla_runs_the_same_benchmark(model, tmp_path, monkeypatch):
    monkeypatch.setenv("BENCHLIB_OUTPUTS", str(tmp_path))
    config = cases.config_of(model, 1, engine="compiled", max_length=128, doc_stride=32, max_steps=2)
    save_config(config, tmp_path)
    in_ranks(1, tmp_path, cases.whole)
    assert Run(tmp_path).result.status == "complete" and (tmp_path / "predictions.json").exists()
    assert any("dropout is off" in event["message"] for event in read_events(tmp_path, {"log"}))
