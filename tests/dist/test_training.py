"""Training by two ranks against one rank, against itself and against transformers alone."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import training_cases as cases
from worlds import in_ranks

from benchlib.benchmarks import BENCHMARKS
from benchlib.benchmarks.squad.config import SquadConfig
from benchlib.config.schema import save_config
from benchlib.core.errors import UserError
from benchlib.core.events import EventWriter, read_events
from benchlib.results.run import load_result
from benchlib.runtime import checkpoint
from benchlib.runtime.measurement import executed
from benchlib.workloads import training


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return cases.make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def two_ranks(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run all cases in two processes, once; return the run folder."""
    run_dir = tmp_path_factory.mktemp("two")
    save_config(cases.config_of(model, 2), run_dir)
    in_ranks(2, run_dir, cases.run)
    return run_dir


@pytest.fixture(scope="module")
def found(two_ranks: Path) -> dict[str, Any]:
    return cases.read(two_ranks)


@pytest.fixture(scope="module")
def one_rank(model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return cases.alone(cases.config_of(model, 1, **cases.without_dropout()), tmp_path_factory.mktemp("one") / "run")


@pytest.mark.parametrize("case", ["plain", "accumulated", "compiled"])
def test_two_ranks_follow_the_curve_of_one(found: dict[str, Any], one_rank: dict[str, Any], case: str) -> None:
    # 33 questions in batches of 16: the last batch has one sample, so that one of two ranks has none.
    assert len(one_rank["losses"]) == 3
    np.testing.assert_allclose(found[case]["losses"], one_rank["losses"], rtol=1e-4)
    assert sum(found[case]["samples"]) == found[case]["expected"] == sum(one_rank["samples"]) == one_rank["expected"]
    assert found[case]["samples"][1] < found[case]["samples"][0]


def test_gradients_are_those_of_transformers_alone(two_ranks: Path, model: str) -> None:
    expected = cases.single_gradients(cases.config_of(model, 2, train_questions=16, **cases.without_dropout()))
    gradients = torch.load(two_ranks / "gradients.pt", weights_only=True)
    assert gradients.keys() == expected.keys()
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in gradients.items():
        assert float((gradient - expected[name]).abs().max()) < 2e-6 * max(1.0, largest), name


def test_the_same_seed_gives_the_same_bits(found: dict[str, Any]) -> None:
    assert found["first"]["losses"] == found["second"]["losses"]
    assert found["first"]["weights"] == found["second"]["weights"]
    assert found["first"]["losses"] != found["plain"]["losses"][: len(found["first"]["losses"])]  # dropout was on


@pytest.mark.parametrize(("name", "whole", "step"), [("resumed", "first", 4), ("compiled resumed", "compiled", 2)])
def test_an_interrupted_run_ends_with_the_same_bits(found: dict[str, Any], name: str, whole: str, step: int) -> None:
    assert found[name]["resumed"] == step
    for same in ("losses", "weights", "samples"):
        assert found[name][same] == found[whole][same], same


def test_ranks_are_compared_at_every_epoch(found: dict[str, Any]) -> None:
    assert found["first"]["equal"] == [True, True]
    assert len(set(found["perturbed"])) == 2


def test_step_times_have_parts(found: dict[str, Any]) -> None:
    row = found["plain"]["columns"]
    parts = ("data_s", "forward_s", "backward_s", "exchange_exposed_s", "optimizer_s")
    assert all(row[name] > 0 for name in ("step_s", "forward_s", "backward_s", "optimizer_s", "exchange_s"))
    assert sum(row[name] for name in parts) <= row["step_s"] * 1.001


def test_xla_trains_all_ranks_alike_and_tells_only_what_it_can(found: dict[str, Any]) -> None:
    row = found["compiled"]["columns"]
    assert found["compiled"]["equal"] == [True]
    assert row["forward_s"] is None and row["backward_s"] is None
    assert 0 < row["exchange_s"] <= row["exchange_exposed_s"] * 1.001
    assert row["exchange_exposed_s"] <= row["step_s"] * 1.001


def test_events_tell_of_every_step(two_ranks: Path, found: dict[str, Any]) -> None:
    steps = read_events(two_ranks, {"step"})
    losses = [event["loss"] for event in steps if event["source"] == "rank0"]
    # Who resumes tells of its own steps; the training whose gradients were looked at comes last.
    names = ("plain", "accumulated", "compiled", "first", "second", "resumed", "compiled resumed")
    told = [loss for name in names for loss in found[name]["losses"][found[name]["resumed"] :]]
    assert losses[:-1] == told
    assert all(event["lr"] > 0 for event in steps)


def test_resume_refuses_other_settings(model: str, two_ranks: Path, tmp_path: Path) -> None:
    config = cases.config_of(model, 1, epochs=2, resume=str(two_ranks / "first"))
    with pytest.raises(UserError, match=r"that run had nproc = 2, this one has 1"):
        cases.alone(config, tmp_path / "run")


def test_a_checkpoint_is_a_model_folder(two_ranks: Path, found: dict[str, Any]) -> None:
    import transformers

    newest = checkpoint.newest(two_ranks / "resumed" / "checkpoints")
    assert newest.step == 6
    loaded = transformers.AutoModelForQuestionAnswering.from_pretrained(newest.path, use_safetensors=True)
    for name, tensor in newest.tensors("model").items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


@pytest.fixture(scope="module")
def by_the_trainer(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the benchmark by transformers' Trainer in two processes, once with each padding; return the folder."""
    folder = tmp_path_factory.mktemp("trainer")
    for padding in cases.PADDINGS:
        (folder / padding).mkdir()
    save_config(cases.config_of(model, 2, engine="trainer", max_length=256), folder)
    in_ranks(2, folder, cases.trainer, BENCHLIB_OUTPUTS=str(folder))
    return folder


@pytest.mark.parametrize("padding", cases.PADDINGS)
def test_the_trainer_runs_the_same_benchmark(by_the_trainer: Path, padding: str) -> None:
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


def test_xla_reaches_the_f1_of_autograd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BENCHLIB_OUTPUTS", str(tmp_path))
    monkeypatch.setenv("NPROC", "1")
    monkeypatch.setattr(training, "PEAK_S", 0.02)
    curves, results = [], []
    for engine in ("native", "compiled"):
        folder = tmp_path / engine
        folder.mkdir()
        values = {
            "engine": engine,
            "threads": 1,
            "train_questions": 32,
            "eval_questions": 16,
            "max_length": 128,
            "doc_stride": 32,
        }
        events = EventWriter(folder, "rank0")
        config = SquadConfig.model_validate(values | {"checkpoint_every": -1, "budget_s": 86400.0})
        save_config(config, folder)
        executed(BENCHMARKS["squad"])(config, folder, events)
        events.close()
        curves.append([event["loss"] for event in read_events(folder, {"step"})])
        results.append(load_result(folder))
    assert curves[0][-1] < 0.9 * curves[0][0]  # it learns
    np.testing.assert_allclose(curves[1], curves[0], rtol=1e-3)
    by_torch, by_xla = (
        next(metric.value for metric in result.metrics if metric.name.startswith("f1_")) for result in results
    )
    assert by_torch > 5 and abs(by_xla - by_torch) <= 1
    assert any("dropout is off" in event["message"] for event in read_events(tmp_path / "compiled", {"log"}))
