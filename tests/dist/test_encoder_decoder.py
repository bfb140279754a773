"""The encoder-decoder on two ranks against one, and from a disk against memory: the same losses to the last digits of fp64."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import worlds

from benchlib.benchmarks.seq2seq.config import Seq2seqConfig
from benchlib.benchmarks.seq2seq.train import Engine, Task, compare, train
from benchlib.core.events import EventWriter
from benchlib.runtime.group import World
from benchlib.runtime.steps import COLUMNS
from benchlib.workloads.pairs import Pairs
from benchlib.workloads.shards import open_source

# 27 samples in batches of 8: the last has 3, so that the shares of two ranks differ.
SHAPE = {"d_model": 16, "nhead": 2, "encoder_layers": 1, "decoder_layers": 1, "dim_feedforward": 32, "vocabulary": 50}
SAMPLES, EPOCHS = 27, 2


def trained(rank: int, size: int, folder: Path, data_dir: str = "", engine: str = "tuned") -> dict[str, Any]:
    config = Seq2seqConfig(**SHAPE, sequence=6, samples=SAMPLES, epochs=EPOCHS, nproc=size, seed=4, learning_rate=1e-2)
    here = World(rank, size, rank, size, torch.device("cpu"), "gloo")
    task = Task(config, here, EventWriter(folder, f"rank{rank}"), "fp32", 8 // size, torch.float64)
    source = open_source(Pairs(SAMPLES, 6, 50, 4), data_dir, num_shards=3 if data_dir else 0)
    made = Engine(engine, task)
    compared = compare(task, [made], source, 2)
    made.restart()
    outcome = train(task, made, source, 1.0)
    return {
        "losses": outcome.table[:, :, 0].sum(axis=1).tolist(),
        "samples": outcome.table[:, :, 1].sum(axis=0).tolist(),
        "compared": compared.losses[engine],
        "equal": [len(set(row)) == 1 for row in outcome.checksums],
        "weights": {name: value.tolist() for name, value in made.model.state_dict().items() if value.ndim == 1},
    }


class Ranks:
    """What each of two ranks does; picklable."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, rank: int, size: int) -> None:
        found = trained(rank, size, self.folder)
        if rank == 0:
            (self.folder / "found.json").write_text(json.dumps(found))


def test_two_ranks_compute_what_one_does(group: None, tmp_path: Path) -> None:
    worlds.in_world(2, tmp_path, Ranks(tmp_path))
    two, one = json.loads((tmp_path / "found.json").read_text()), trained(0, 1, tmp_path)
    assert len(one["losses"]) == (EPOCHS + 1) * 4
    np.testing.assert_allclose(two["losses"], one["losses"], rtol=1e-12)
    np.testing.assert_allclose(two["compared"], one["compared"], rtol=1e-12)
    for name, values in one["weights"].items():
        np.testing.assert_allclose(two["weights"][name], values, rtol=1e-9, atol=1e-10, err_msg=name)  # of a key, whose gradient is 0, Adam makes rounding
    assert two["equal"] == [True] * (EPOCHS + 1)
    assert sum(two["samples"]) == sum(one["samples"]) == (EPOCHS + 1) * SAMPLES
    assert two["samples"][1] < two["samples"][0]
    assert one["losses"][-1] < one["losses"][0] - 0.1


def test_a_disk_gives_the_losses_of_memory(group: None, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    from_disk, from_memory = trained(0, 1, tmp_path, str(tmp_path / "data")), trained(0, 1, tmp_path)
    assert from_disk["losses"] == from_memory["losses"]
    assert len(list(tmp_path.glob("data/*/shard_*.bin"))) == 3


def test_plain_learns_what_tuned_does(group: None, tmp_path: Path) -> None:
    plain, tuned = (trained(0, 1, tmp_path, engine=engine)["losses"] for engine in ("plain", "tuned"))
    np.testing.assert_allclose(tuned, plain, rtol=1e-9)


def test_a_rank_without_samples_takes_part(group: None, tmp_path: Path) -> None:
    from benchlib.benchmarks.seq2seq.train import share

    config = Seq2seqConfig(**SHAPE, sequence=6, samples=9, nproc=2)
    events = EventWriter(tmp_path, "rank0")
    parts = [
        list(share(Task(config, World(rank, 2, rank, 2, torch.device("cpu"), "gloo"), events, "fp32", 4), 9, [(1, 0), (1, 1)]))
        for rank in range(2)
    ]
    assert sorted(np.concatenate([part[0][0] for part in parts] + [parts[0][1][0]]).tolist()) == list(range(9))
    assert parts[1][1][1] == 0.0 and parts[0][1][1] == pytest.approx(1 / 6)


def test_a_slow_disk_is_measured_and_named_as_the_limit(group: None, tmp_path: Path) -> None:
    """Eight samples of 96 bytes take at least 0.19 s at 4 kB/s, and a step 10 ms beside its data, by the injected clock."""
    from benchlib.benchmarks.seq2seq.judge import data_sentence
    from benchlib.benchmarks.seq2seq.run import _disk
    from benchlib.core.disk import Planted

    config = Seq2seqConfig(**SHAPE, sequence=6, samples=8, epochs=1, budget_s=10, data_dir=str(tmp_path))
    task = Task(config, World(0, 1, 0, 1, torch.device("cpu"), "gloo"), EventWriter(tmp_path, "rank0"), "fp32", 8)
    source = open_source(Pairs(8, 6, 50, 4), tmp_path, planted=Planted(4e3))
    outcome = train(task, Engine("tuned", task), source, 1.0)
    data_s, step_s = (outcome.table[:, :, COLUMNS.index(name)] for name in ("data_s", "step_s"))
    assert (data_s >= 0.19).all() and (data_s <= step_s).all()
    step_s[:] = data_s + 0.01
    rates, limit = _disk(config, source, outcome, task.world, task)
    assert limit.limit == "disk" and max(rates.loader_bytes_per_s) < 4.08e3
    assert limit.asked_bytes_per_s == pytest.approx(8 * 96 / 0.01)
    assert "the disk limits this model" in data_sentence({"data_limit": asdict(limit)}, 0.9)
