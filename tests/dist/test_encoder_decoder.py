"""The encoder-decoder on two ranks against one, and from a disk against memory: the same losses in fp64."""

import functools
import json
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import worlds

from benchlib.benchmarks.seq2seq import run
from benchlib.benchmarks.seq2seq.config import Seq2seqConfig
from benchlib.benchmarks.seq2seq.run import Engine, Task, compare, share
from benchlib.core.errors import BackendUnavailable
from benchlib.core.events import EventWriter, Moment
from benchlib.runtime import devices
from benchlib.runtime.group import World
from benchlib.runtime.measurement import Rank
from benchlib.runtime.steps import COLUMNS
from benchlib.workloads import shards, training
from benchlib.workloads.shards import Pairs, Shards, Source

# 27 samples in batches of 8: the last has 3, so that the shares of two ranks differ.
SHAPE = {"d_model": 16, "nhead": 2, "encoder_layers": 1, "decoder_layers": 1, "dim_feedforward": 32, "vocabulary": 50}
SAMPLES, EPOCHS = 27, 2


class Exact(Engine):
    """In fp64."""

    def _fresh(self):
        return super()._fresh().double()


def task_of(config, folder, batch, data_dir="", rank=0):
    size = config.nproc
    here = World(rank, size, rank, size, torch.device("cpu"), "gloo")
    of_rank = Rank(config, folder, here, EventWriter(folder, f"rank{rank}"), Moment.now())
    pairs = Pairs(config.samples, 6, 50, 4)
    source = Shards(pairs, data_dir) if data_dir else Source(pairs)
    if data_dir:
        source.prepare()
    return Task(of_rank, source, "fp32", batch)


def trained(rank, size, folder, data_dir="", engine="tuned"):
    sizes = {**SHAPE, "sequence": 6, "samples": SAMPLES, "epochs": EPOCHS, "compare_steps": 2}
    config = Seq2seqConfig(**sizes, nproc=size, seed=4, learning_rate=1e-2)
    task = task_of(config, folder, 8 // size, data_dir, rank)
    worker = Exact(engine, task)
    compared = compare(task, [worker])
    worker.restart(task.source)
    steps = task.steps(SAMPLES) * (EPOCHS + 1)
    plan = training.Plan(steps, SAMPLES * (EPOCHS + 1), steps, SAMPLES * (EPOCHS + 1), 1.0)
    outcome = training.train(task.rank, worker, plan, [1e-2] * steps, task.steps(SAMPLES))
    return {
        "losses": outcome.table[:, :, 0].sum(axis=1).tolist(),
        "samples": outcome.table[:, :, 1].sum(axis=0).tolist(),
        "compared": compared[engine]["loss"],
        "equal": [len(set(row)) == 1 for row in outcome.checksums],
        "weights": {name: value.tolist() for name, value in worker.model.state_dict().items() if value.ndim == 1},
    }


def of_two(folder, rank, size):
    outcome = trained(rank, size, folder)
    if rank == 0:
        (folder / "two.json").write_text(json.dumps(outcome))


def test_ranks_disk_and_plain_engine_train_as_one_rank_from_memory_does(group, tmp_path, monkeypatch):
    worlds.in_world(2, tmp_path, functools.partial(of_two, tmp_path))
    two, one = json.loads((tmp_path / "two.json").read_text()), trained(0, 1, tmp_path)
    assert len(one["losses"]) == (EPOCHS + 1) * 4
    np.testing.assert_allclose(two["losses"], one["losses"], rtol=1e-12)
    np.testing.assert_allclose(two["compared"], one["compared"], rtol=1e-12)
    for name, values in one["weights"].items():  # of a key, whose gradient is 0, Adam makes rounding
        np.testing.assert_allclose(two["weights"][name], values, rtol=1e-9, atol=1e-10, err_msg=name)
    assert two["equal"] == [True] * (EPOCHS + 1)
    assert sum(two["samples"]) == sum(one["samples"]) == (EPOCHS + 1) * SAMPLES
    assert two["samples"][1] < two["samples"][0]
    assert one["losses"][-1] < one["losses"][0] - 0.1
    monkeypatch.setattr(shards, "SHARD_BYTES", 9 * 96)  # three shards
    assert trained(0, 1, tmp_path, str(tmp_path / "data"))["losses"] == one["losses"]
    assert len(list(tmp_path.glob("data/*/shard_*.bin"))) == 3
    np.testing.assert_allclose(trained(0, 1, tmp_path, engine="plain")["losses"], one["losses"], rtol=1e-9)


def test_a_rank_without_samples_takes_part(tmp_path):
    config = Seq2seqConfig(**SHAPE, sequence=6, samples=9, nproc=2)
    parts = [list(share(task_of(config, tmp_path, 4, rank=rank), 1, (0, 1))) for rank in range(2)]
    assert sorted(np.concatenate([part[0][0] for part in parts] + [parts[0][1][0]]).tolist()) == list(range(9))
    assert parts[1][1][1] == 0.0 and parts[0][1][1] == pytest.approx(1 / 6)


def test_the_peak_of_the_memory_is_that_of_the_training(group, held, tmp_path, monkeypatch):
    """Opening the samples before the training and the disk after it hold 8 GB, by a stand-in."""
    source = run._source
    monkeypatch.setattr(run, "_source", lambda *args, **more: held(8e9) or source(*args, **more))
    monkeypatch.setattr(run, "_epochs", lambda *args: held(8e9) or [])
    config = Seq2seqConfig(**SHAPE, sequence=6, samples=8, epochs=1, compare_steps=2)
    rank = Rank(config, tmp_path, World(), EventWriter(tmp_path, "rank0"), Moment.now())
    tables = run.measure(rank)
    assert tables["run"][0]["device_memory_gb"] == tables["ranks"][0]["device_gb"] == 1.0


def test_a_slow_disk_shows_in_the_wait_for_data_and_in_its_rate(group, tmp_path, monkeypatch):
    """A read of eight samples of 96 bytes takes at least 0.1 s, by injection, and a step 10 ms beside its data."""
    entire = shards.Shards.read
    monkeypatch.setattr(shards.Shards, "read", lambda self, indices: time.sleep(0.1) or entire(self, indices))
    config = Seq2seqConfig(**SHAPE, sequence=6, samples=8, epochs=1, budget_s=10, data_dir=str(tmp_path))
    task = task_of(config, tmp_path, 8, str(tmp_path))
    plan = training.Plan(2, 16, 2, 16, 1.0)
    outcome = training.train(task.rank, Engine("tuned", task), plan, [1e-3] * 2, 1)
    data_s, step_s = (outcome.table[:, :, COLUMNS.index(name)] for name in ("data_s", "step_s"))
    assert (data_s >= 0.1).all() and (data_s <= step_s).all()
    step_s[:] = data_s + 0.01
    row = run._disk(task, outcome, 1)
    assert SimpleNamespace(**row).compute_s == pytest.approx(0.01)
    assert row["sample_bytes"] == 96 and 0 < max(row["loader_mb_per_s"]) <= 8 * 96 / 0.1 / 1e6


def test_without_a_compiler_the_tuned_engine_runs_call_by_call_and_says_why(group, tmp_path, monkeypatch):
    config = Seq2seqConfig(**SHAPE, sequence=6, samples=SAMPLES, compare_steps=2, compile=True, engine="tuned")
    task = task_of(config, tmp_path, 8)
    monkeypatch.setattr(torch, "compile", lambda module: pytest.fail("torch.compile was called"))
    monkeypatch.setattr(devices.shutil, "which", lambda name: None)
    lack = run._uncompiled(task.rank)
    compared = compare(task, [Engine("tuned", replace(task, uncompiled=lack))])
    tuned = run._engines(config, compared, lack)[1]
    assert "install it (Debian: apt install g++" in tuned["why"]["compile_s"] and tuned["compile_s"] is None
    assert lack in (tmp_path / "events-rank0.jsonl").read_text()  # shown as a note
    monkeypatch.setattr(devices.shutil, "which", lambda name: f"/usr/bin/{name}")
    assert run._uncompiled(task.rank) == ""


@pytest.mark.parametrize(("chosen", "found"), [(None, "gcc"), ("/opt/cc", "/opt/cc")])
def test_triton_needs_a_c_compiler_and_the_headers_of_python(chosen, found, tmp_path, monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    if chosen:
        monkeypatch.setenv("CC", chosen)
    monkeypatch.setattr(devices.shutil, "which", lambda name: name if name == found else None)
    monkeypatch.setattr(devices.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(BackendUnavailable, match="install Python's header files"):
        devices.compiler(torch.device("cuda", 0))
    (tmp_path / "Python.h").touch()
    assert devices.compiler(torch.device("cuda", 0)) == found
