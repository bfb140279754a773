"""Training by two ranks against one rank, against itself and against transformers alone."""

import numpy as np
import pytest
import torch
import training_cases as cases
from worlds import in_ranks

from benchlib.config.schema import save_config
from benchlib.core.errors import UserError
from benchlib.core.events import read_events
from benchlib.results.run import load_result
from benchlib.runtime import checkpoint


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
def one_rank(model, tmp_path_factory):
    return cases.alone(cases.config_of(model, 1, **cases.without_dropout()), tmp_path_factory.mktemp("one") / "run")


@pytest.mark.parametrize("case", ["plain", "accumulated", "compiled"])
def test_two_ranks_follow_the_curve_of_one(outcomes, one_rank, case):
    # 33 questions in batches of 16: the last batch has one sample, so that one of two ranks has none.
    assert len(one_rank["losses"]) == 3
    np.testing.assert_allclose(outcomes[case]["losses"], one_rank["losses"], rtol=1e-4)
    np.testing.assert_allclose(outcomes[case]["biases"], one_rank["biases"], rtol=1e-2)
    counts = [count for each in (outcomes[case], one_rank) for count in (sum(each["samples"]), each["expected"])]
    assert len(set(counts)) == 1
    assert outcomes[case]["samples"][1] < outcomes[case]["samples"][0]


def test_gradients_are_those_of_transformers_alone(two_ranks, model):
    expected = cases.single_gradients(cases.config_of(model, 2, train_questions=16, **cases.without_dropout()))
    gradients = torch.load(two_ranks / "gradients.pt", weights_only=True)
    assert gradients.keys() == expected.keys()
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in gradients.items():
        assert float((gradient - expected[name]).abs().max()) < 2e-6 * max(1.0, largest), name


@pytest.mark.parametrize(("name", "whole", "step"), [("resumed", "first", 4), ("compiled resumed", "compiled", 2)])
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


def test_a_checkpoint_is_a_model_folder(two_ranks, outcomes):
    import transformers

    newest, faults = checkpoint.search(two_ranks / "resumed" / "checkpoints")
    assert newest is not None and (newest.step, faults) == (6, [])
    loaded = transformers.AutoModelForQuestionAnswering.from_pretrained(newest.path, use_safetensors=True)
    for name, tensor in newest.tensors("model").items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


@pytest.fixture(scope="module")
def by_the_trainer(model, tmp_path_factory):
    """Run the benchmark by transformers' Trainer in two processes, once with each padding; return the folder."""
    folder = tmp_path_factory.mktemp("trainer")
    for padding in cases.PADDINGS:
        (folder / padding).mkdir()
    save_config(cases.config_of(model, 2, engine="trainer", max_length=256), folder)
    in_ranks(2, folder, cases.trainer, BENCHLIB_OUTPUTS=str(folder))
    return folder


@pytest.mark.parametrize("padding", cases.PADDINGS)
def test_the_trainer_runs_the_same_benchmark(by_the_trainer, padding):
    folder = by_the_trainer / padding
    result = load_result(folder)
    row = result.facts
    assert result.status == "complete"
    # The Trainer fills the last batch of an epoch (33 samples, 16 a step) from the epoch's start.
    assert sum(row["samples_seen"]) == row["samples_expected"] == 48
    assert {len(set(checksums)) for checksums in row["checksums"]} == {1}
    assert row["learning_rate_min"] > 0
    assert (result.value("loss_final_minisquad_random") or 0.0) > 0
    forward = result.metric("time_forward_s")
    assert forward is not None
    assert forward.provenance == "not_available"
    share = result.value("padding_share") or 0.0
    assert share > 0.3 if padding == "max_length" else share < 0.3
    assert len((folder / "predictions.json").read_text()) > 10


def test_xla_runs_the_same_benchmark(model, tmp_path, monkeypatch):
    monkeypatch.setenv("BENCHLIB_OUTPUTS", str(tmp_path))
    config = cases.config_of(model, 1, engine="compiled", max_length=128, doc_stride=32, max_steps=2)
    save_config(config, tmp_path)
    in_ranks(1, tmp_path, cases.whole)
    assert load_result(tmp_path).status == "complete" and (tmp_path / "predictions.json").exists()
    assert any("dropout is off" in event["message"] for event in read_events(tmp_path, {"log"}))
