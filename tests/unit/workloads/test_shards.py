"""Samples from a disk are those from memory, whatever happened to the shards between."""

import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch

from benchlib.workloads import shards
from benchlib.workloads.shards import Pairs, Shards, disk_rates, generate, raw_rate, residency

PAIRS = Pairs(samples=1000, sequence=16, vocabulary=64, seed=3)  # 256 bytes a sample: pages hold parts of samples


@pytest.fixture(autouse=True)
def _small_shards(monkeypatch):
    """Shards of 250 samples: four of them."""
    monkeypatch.setattr(shards, "SHARD_BYTES", 250 * PAIRS.sample_bytes)


def prepared(folder, pairs=PAIRS, **options):
    source = Shards(pairs, folder, **options)
    source.prepare()
    return source


@pytest.fixture
def data(tmp_path):
    return prepared(tmp_path / "data").folder.parent


def whole(source):
    return np.array_equal(source.read(np.arange(1000)), generate(PAIRS, np.arange(1000)))


@pytest.mark.parametrize("token_bytes", [8, 2])
@pytest.mark.parametrize("read_ahead", [0, 1, 4])
def test_disk_and_memory_give_the_same_samples(tmp_path, token_bytes, read_ahead):
    source = prepared(tmp_path, dataclasses.replace(PAIRS, token_bytes=token_bytes), read_ahead=read_ahead)
    order = np.random.default_rng(0).permutation(1000)
    orders = [np.arange(100, 400), order[:128], np.array([999]), np.arange(0), order[128:]]
    batches = list(source.batches(orders))
    for tokens, indices in zip(batches, orders, strict=True):  # read on threads, kept while later ones are read
        assert torch.equal(tokens, torch.from_numpy(generate(PAIRS, indices)))


def test_shards_have_the_stated_sizes(monkeypatch):
    """Of the full size: 3,750,000 samples of 4,096 bytes, 32,768 of them in a shard of 128 MiB."""
    monkeypatch.setattr(shards, "SHARD_BYTES", 1 << 27)
    full = Shards(Pairs(3_750_000, 256, 8192, 0), "/data")
    assert full.samples == [32_768] * 114 + [14_448]
    assert [path.name for path in full.paths[::114]] == ["shard_0000.bin", "shard_0114.bin"]
    changes = ({}, {"vocabulary": 65}, {"seed": 4}, {"token_bytes": 2}, {"samples": 999})
    folders = [Shards(dataclasses.replace(PAIRS, **change), "/data").folder for change in changes]
    assert folders[0] == folders[4] and len(set(folders)) == 4  # fewer samples are the beginning of more


def written(paths):
    return [path.stat().st_mtime_ns for path in paths]


def test_a_smaller_set_is_the_beginning_of_a_larger_one(tmp_path):
    """700 samples fill two shards and a part of the third, which 1,000 need whole."""
    files = []
    for samples in (700, 1000, 700, 1000):
        pairs = dataclasses.replace(PAIRS, samples=samples)
        source = prepared(tmp_path, pairs)
        assert np.array_equal(source.read(np.arange(samples)), generate(pairs, np.arange(samples)))
        files.append(written(source.paths))
    assert files[0][:2] == files[1][:2] and files[0][2] != files[1][2]
    assert files[1][:3] == files[2] and files[1] == files[3]
    assert len(list(tmp_path.glob("pairs-*"))) == 1


@pytest.mark.parametrize("damage", [lambda path: path.unlink(), lambda path: os.truncate(path, 12_345)])
def test_a_missing_or_cut_shard_is_written_again_and_the_others_are_left_alone(data, damage):
    parts = Shards(PAIRS, data).paths
    before = written(parts)
    damage(parts[1])
    assert whole(prepared(data))
    assert [old == new for old, new in zip(before, written(parts), strict=True)] == [True, False, True, True]


def test_the_page_cache_is_as_asked_for_also_after_the_shards_were_read(data):
    for page_cache, expected in (("warm", 1), ("cold", 0)):
        source = prepared(data, page_cache=page_cache)
        source.settle()
        assert whole(source)  # maps the pages, and a mapped page is not evicted
        share = source.settle()
        if expected == 0 and share == 1:
            pytest.skip("this file system is memory: nothing can be evicted")
        assert share == expected


@pytest.mark.skipif(not shutil.which("fincore"), reason="fincore of util-linux is not installed")
def test_the_page_cache_is_what_fincore_says(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(os.urandom(4 << 20) + b"tail")

    def fincore():
        done = subprocess.run(["fincore", "-nrbo", "RES", str(path)], capture_output=True, text=True, check=True)
        return int(done.stdout) / 4096 / -(-path.stat().st_size // 4096)

    raw_rate([path], np.inf)
    assert residency([path]) == fincore() == 1
    shards.evict([path])
    if fincore() == 1:
        pytest.skip("this file system is memory: nothing can be evicted")
    with path.open("rb", buffering=0) as handle:
        os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        handle.read(4096)
    assert residency([path]) == pytest.approx(fincore()) and 0 < fincore() < 0.2


def test_a_writing_that_was_killed_is_taken_up_again(tmp_path):
    """SIGKILL while the third shard is being written: the first two stay, nothing else counts, nothing is left over."""
    code = f"""
import os, signal
from benchlib.workloads import shards
shards.SHARD_BYTES = 250 * {PAIRS.sample_bytes}
entire, calls = shards.generate, []
def generate(which, indices):
    calls.append(len(indices))
    if calls.count(250) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return entire(which, indices)
shards.generate = generate
shards.Shards(shards.{PAIRS!r}, {str(tmp_path)!r}).prepare()
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == -signal.SIGKILL
    parts = Shards(PAIRS, tmp_path).paths
    folder = parts[0].parent
    assert list(folder.glob(".shard_0002.bin.*.tmp"))
    assert [path.exists() for path in parts] == [True, True, False, False]
    before = written(parts[:2])
    assert whole(prepared(tmp_path)) and written(parts[:2]) == before and not list(folder.glob("*.tmp"))


def test_of_three_at_once_one_writes_and_the_others_wait(tmp_path, monkeypatch):
    entire, calls = shards.generate, []

    def slow(pairs, indices):
        calls.append(len(indices))
        time.sleep(0.02)
        return entire(pairs, indices)

    monkeypatch.setattr(shards, "generate", slow)
    threads = [threading.Thread(target=Shards(PAIRS, tmp_path).prepare) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(calls) == 1000 and whole(prepared(tmp_path))


def test_ranks_measure_a_disk_together_and_a_slow_reader_is_seen(data, monkeypatch):
    """One reads raw while the other waits, both load at once, and every pass begins and ends at a barrier.

    A batch of 50 samples, 12,800 bytes, takes at least 10 ms.
    """
    meeting, rates, entire = threading.Barrier(2, timeout=120), {}, shards.Shards.read
    monkeypatch.setattr(shards.Shards, "read", lambda self, indices: time.sleep(0.01) or entire(self, indices))

    def rank(number):
        source = prepared(data, read_ahead=1)
        rates[number] = disk_rates(source, 50, np.arange(1000), 2.0, number == 0, meeting.wait)

    threads = [threading.Thread(target=rank, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [(len(raw), len(loader)) for raw, loader in (rates[0], rates[1])] == [(3, 3), (0, 3)]
    assert all(0 < rate <= 1.28e6 for _, loader in rates.values() for rate in loader)
