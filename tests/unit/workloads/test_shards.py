"""Synthetic pairs: sample i against a second writing of its definition; from a disk, whatever happened to the shards between."""

import dataclasses
import os
import shutil
import subprocess
import threading
import time

import numpy as np
import pytest
import torch

from benchlib.workloads import shards
from benchlib.workloads.shards import Pairs, Shards, Source, entropy, generate, residency

PAIRS = Pairs(samples=1000, sequence=16, vocabulary=64, seed=3)  # 256 bytes a sample: pages hold parts of samples


@pytest.fixture(autouse=True)
def _small_shards(monkeypatch):
    """Shards of 250 samples: four of them."""
    monkeypatch.setattr(shards, "SHARD_BYTES", 250 * PAIRS.sample_bytes)


def prepared(folder, pairs=PAIRS, **options):
    source = Shards(pairs, folder, **options)
    source.prepare()
    return source


def whole(source):
    return np.array_equal(source.read(np.arange(1000)), generate(PAIRS, np.arange(1000)))


def splitmix(counter, seed):
    """SplitMix64 as its authors print it, in Python's whole numbers."""
    mask = (1 << 64) - 1

    def mixed(state):
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & mask
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & mask
        return state ^ (state >> 31)

    golden = 0x9E3779B97F4A7C15
    return mixed((mixed(seed * golden & mask) + (counter + 1) * golden) & mask)


def test_a_sample_is_what_its_definition_says():
    samples = generate(PAIRS, np.array([7, 999]))
    for row, index in enumerate((7, 999)):
        for token in range(PAIRS.sequence):
            draw = splitmix(index * PAIRS.sequence + token, PAIRS.seed)
            for part, uniform in enumerate((draw >> 32, draw & 0xFFFFFFFF)):
                assert samples[row, part, token] == (uniform * uniform >> 32) * PAIRS.vocabulary >> 32
    assert samples.dtype == np.int64 and samples.shape == (2, 2, 16)


def test_the_entropy_is_that_of_the_tokens():
    """A token k of V has the share sqrt((k + 1) / V) - sqrt(k / V), here of 2 million tokens."""
    tokens = generate(dataclasses.replace(PAIRS, samples=10**6), np.arange(62500))
    shares = np.bincount(tokens.ravel(), minlength=64) / tokens.size
    assert shares == pytest.approx(np.diff(np.sqrt(np.arange(65) / 64)), abs=1e-3)
    assert entropy(64) == pytest.approx(-(shares * np.log(shares)).sum(), abs=2e-3)
    assert entropy(1) == 0


@pytest.mark.parametrize("read_ahead", [0, 1, 3])
def test_batches_come_in_order_no_further_than_the_read_ahead_and_their_threads_end(read_ahead):
    asked = []

    def orders():
        for step in range(100):
            asked.append(step)
            yield np.arange(step, 1000, 100) if step < 10 else np.array([1000])

    batches = Source(PAIRS, read_ahead=read_ahead).batches(orders())
    for step in range(10):
        assert np.array_equal(next(batches).numpy(), generate(PAIRS, np.arange(step, 1000, 100)))
        assert len(asked) == step + 1 + read_ahead
    with pytest.raises(IndexError, match="samples 1000 to 1000 of 1000"):
        list(batches)
    left = Source(PAIRS, read_ahead=read_ahead).batches([np.arange(9)] * 7)
    next(left)
    left.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("batches")]


@pytest.mark.parametrize("token_bytes", [8, 2])
@pytest.mark.parametrize("read_ahead", [0, 1, 4])
def test_disk_and_memory_give_the_same_samples(tmp_path, token_bytes, read_ahead):
    source = prepared(tmp_path, dataclasses.replace(PAIRS, token_bytes=token_bytes), read_ahead=read_ahead)
    order = np.random.default_rng(0).permutation(1000)
    orders = [np.arange(100, 400), order[:128], np.array([999]), np.arange(0), order[128:]]
    batches = list(source.batches(orders))
    for tokens, indices in zip(batches, orders, strict=True):  # read on threads, kept while later ones are read
        assert torch.equal(tokens, torch.from_numpy(generate(PAIRS, indices)))


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


def flip(path):
    """Change one bit, and leave size and time of change as they are."""
    status, content = path.stat(), bytearray(path.read_bytes())
    content[-17] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda path: path.unlink(), False),
        (lambda path: os.truncate(path, 12_345), False),
        (flip, True),
        (lambda path: shutil.copyfile(path.with_name("shard_0000.bin"), path), True),
    ],
)
def test_a_missing_cut_or_changed_shard_is_written_again_and_the_others_are_left_alone(tmp_path, damage, told):
    parts = prepared(tmp_path).paths
    before = written(parts)
    damage(parts[1])
    source = Shards(PAIRS, tmp_path)
    assert source.prepare(part=0, parts=2) == [], "the other of two processes compares this one"
    assert source.prepare(part=1, parts=2) == [parts[1]] * told
    assert whole(source) and source.prepare() == []
    assert [old == new for old, new in zip(before, written(parts), strict=True)] == [True, False, True, True]


@pytest.mark.parametrize("count", [1, 3, 64])
def test_a_set_has_as_many_shards_as_it_is_told_to(tmp_path, count):
    """Whole shares of 16 samples would be 63 shards, not 64."""
    source = prepared(tmp_path, num_shards=count)
    assert len(source.paths) == len(list(tmp_path.glob("pairs-*/*.bin"))) == count and whole(source)
    assert sum(source.samples) == 1000 and max(source.samples) - min(source.samples) <= 1
    beginning = prepared(tmp_path, dataclasses.replace(PAIRS, samples=500), num_shards=count, set_samples=1000)
    assert beginning.paths == source.paths[: len(beginning.paths)] and sum(beginning.samples) == 500


@pytest.mark.skipif(not shutil.which("fincore"), reason="fincore of util-linux is not installed")
def test_the_page_cache_is_as_asked_for_and_as_fincore_says(tmp_path):
    def fincore(paths):
        done = subprocess.run(["fincore", "-nrbo", "RES", *paths], capture_output=True, text=True, check=True)
        return sum(map(int, done.stdout.split())) / 4096 / sum(-(-path.stat().st_size // 4096) for path in paths)

    for page_cache, expected in (("warm", 1), ("cold", 0)):
        source = prepared(tmp_path, page_cache=page_cache)
        assert whole(source)  # maps the pages, and a mapped page is not evicted
        share = source.settle()
        if expected == 0 and share == 1:
            pytest.skip("this file system is memory: nothing can be evicted")
        assert share == fincore(source.paths) == expected
    with source.paths[0].open("rb", buffering=0) as handle:
        os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        handle.read(4096)
    assert residency(source.paths) == pytest.approx(fincore(source.paths)) and 0 < residency(source.paths) < 0.2


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
