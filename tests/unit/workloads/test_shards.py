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

from benchlib.core import disk
from benchlib.core.errors import StorageError, UserError
from benchlib.workloads import shards
from benchlib.workloads.pairs import Pairs, generate
from benchlib.workloads.shards import Prepared, disk_rates, layout, open_source, prepare

PAIRS = Pairs(samples=1000, sequence=16, vocabulary=64, seed=3)  # 256 bytes a sample: pages hold parts of samples


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A folder with the set in 4 shards."""
    folder = tmp_path_factory.mktemp("data")
    prepare(PAIRS, layout(PAIRS, folder, 4))
    return folder


@pytest.fixture
def data(written, tmp_path):
    shutil.copytree(written, tmp_path / "data", copy_function=shutil.copy2)  # with the times of change
    return tmp_path / "data"


def flip(path, place):
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("read", ["mmap", "direct"])
@pytest.mark.parametrize("token_bytes", [8, 2])
@pytest.mark.parametrize("num_shards", [0, 1, 7])
def test_disk_and_memory_give_the_same_samples(tmp_path, read, token_bytes, num_shards):
    pairs = dataclasses.replace(PAIRS, token_bytes=token_bytes)
    source = open_source(pairs, tmp_path, num_shards, read=read)
    order = np.random.default_rng(0).permutation(1000)
    orders = [np.arange(100, 400), order[:128], np.array([999]), np.arange(0), order[128:]]
    for batch, indices in zip(source.batches(orders), orders, strict=True):
        assert torch.equal(batch.tokens, torch.from_numpy(generate(PAIRS, indices)))
    with pytest.raises(IndexError, match="of 1000"):
        source.read(np.array([1000]))
    source.shards.close()


def test_two_ranks_together_read_what_one_does(data):
    batches = np.arange(1000).reshape(-1, 50)
    alone = open_source(PAIRS, data, 4).batches(batches)
    shares = [open_source(PAIRS, data, 4, read="direct").batches(half) for half in np.split(batches, 2, axis=1)]
    for whole, *parts in zip(alone, *shares, strict=True):
        assert torch.equal(whole.tokens, torch.cat([part.tokens for part in parts]))


def test_shards_have_the_stated_sizes():
    """Of the full size: 3,750,000 samples of 4,096 bytes, 32,768 of them in a shard of 128 MiB."""
    whole = layout(Pairs(3_750_000, 256, 8192, 0), "/data")
    assert [shard.samples for shard in whole[:-1]] == [32_768] * 114 and whole[-1].samples == 14_448
    assert {shard.size_bytes for shard in whole[:-1]} == {128 << 20}
    assert whole[0].path.name == "shard_0000.bin" and whole[-1].path.name == "shard_0114.bin"
    chosen = layout(PAIRS, "/data", 7)
    assert len(chosen) == 7 and sum(shard.samples for shard in chosen) == 1000
    folders = {
        layout(dataclasses.replace(PAIRS, **change), "/data", number)[0].path.parent
        for change in ({}, {"vocabulary": 65}, {"seed": 4}, {"token_bytes": 2}, {"samples": 999})
        for number in (1, 7)
    }
    assert len(folders) == 9  # fewer samples in one shard are the beginning of more
    with pytest.raises(UserError, match="num_shards = 1001: there are 1,000 samples"):
        layout(PAIRS, "/data", 1001)


def test_what_is_whole_is_left_alone_and_only_a_new_time_of_change_costs_a_reading(data):
    parts = layout(PAIRS, data, 4)
    times = [part.path.stat().st_mtime_ns for part in parts]
    assert dataclasses.replace(prepare(PAIRS, parts), seconds=0) == Prepared(4, 0, 0, (), 0)
    assert prepare(PAIRS, parts, "always").checked == 4
    os.utime(parts[2].path)
    assert prepare(PAIRS, parts).checked == 1
    assert prepare(PAIRS, parts).checked == 0
    assert [part.path.stat().st_mtime_ns for part in parts][:2] == times[:2]


def test_a_smaller_set_is_the_beginning_of_a_larger_one(tmp_path, monkeypatch):
    """300 samples in a shard: 700 of them fill two and a part of the third, which 1,000 need whole."""
    monkeypatch.setattr(shards, "SHARD_BYTES", 300 * PAIRS.sample_bytes)
    written = []
    for samples in (700, 1000, 700, 1000):
        pairs = dataclasses.replace(PAIRS, samples=samples)
        source = open_source(pairs, tmp_path)
        written.append(source.shards.prepared.written)
        assert not source.shards.prepared.mended and not source.shards.prepared.checked
        assert np.array_equal(source.read(np.arange(samples)), generate(pairs, np.arange(samples)))
    assert written == [3, 2, 0, 0]
    assert len(list(tmp_path.glob("pairs-*"))) == 1


def damage(parts, kind):
    path, elsewhere = parts[1].path, parts[1].path.parents[2] / "other"
    if kind == "flipped":
        flip(path, 100 * PAIRS.sample_bytes)
    elif kind == "cut":
        os.truncate(path, 12_345)
    elif kind == "missing":
        path.unlink()
    elif kind == "foreign":  # of the same size: the same set with another vocabulary
        other = layout(dataclasses.replace(PAIRS, vocabulary=65), elsewhere, 4)
        prepare(dataclasses.replace(PAIRS, vocabulary=65), other)
        shutil.copy(other[1].path, path)


def test_a_whole_folder_of_another_vocabulary_is_made_again(data, tmp_path):
    other = dataclasses.replace(PAIRS, vocabulary=65)
    parts, foreign = layout(PAIRS, data, 4), layout(other, tmp_path / "other", 4)
    prepare(other, foreign)
    shutil.rmtree(parts[0].path.parent)
    shutil.copytree(foreign[0].path.parent, parts[0].path.parent)
    source = open_source(PAIRS, data, 4)
    assert source.shards.prepared.written == len(source.shards.prepared.mended) == 4
    assert np.array_equal(source.read(np.arange(1000)), generate(PAIRS, np.arange(1000)))


def test_the_page_cache_is_as_asked_for_also_after_the_shards_were_read(data):
    for page_cache, expected in (("warm", 1), ("cold", 0)):
        source = open_source(PAIRS, data, 4, page_cache=page_cache)
        assert source.shards.settle() in (1, expected)
        source.read(np.arange(1000))  # maps the pages, and a mapped page is not evicted
        share = source.shards.settle()
        source.shards.close()
        disk.evict(source.shards.paths)
        if expected == 0 and disk.residency(source.shards.paths) == 1:
            pytest.skip("this file system is memory: nothing can be evicted")
        assert share == expected


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("flipped", "its checksum is not that of its writing"),
        ("cut", "it has 12,345 bytes of 64,000"),
        ("missing", None),
        ("foreign", "its sample 0 is not sample 250 of this set"),
    ],
)
def test_a_damaged_shard_is_made_again_and_named(data, kind, reason):
    parts = layout(PAIRS, data, 4)
    others = [part.path.stat().st_ino for part in parts if part is not parts[1]]
    damage(parts, kind)
    source = open_source(PAIRS, data, 4)
    prepared = source.shards.prepared
    assert (prepared.written, prepared.checked) == (1, 0)
    assert prepared.mended == (() if reason is None else (f"shard_0001.bin was made again: {reason}",))
    assert np.array_equal(source.read(np.arange(1000)), generate(PAIRS, np.arange(1000)))
    assert [part.path.stat().st_ino for part in parts if part is not parts[1]] == others
    assert prepare(PAIRS, parts).written == 0


def test_a_flip_that_leaves_the_time_of_change_needs_verify_always(data):
    """What a disk does to itself changes no time: it is found where every checksum is compared, and only there."""
    part = layout(PAIRS, data, 4)[1]
    status = part.path.stat()
    flip(part.path, 100 * PAIRS.sample_bytes)
    os.utime(part.path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert open_source(PAIRS, data, 4).shards.prepared.written == 0
    assert open_source(PAIRS, data, 4, verify="always").shards.prepared.written == 1


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"content": {}, "shards": {}}'])
def test_shards_without_their_manifest_do_not_count(data, content):
    parts = layout(PAIRS, data, 4)
    (parts[0].path.parent / "manifest.json").write_bytes(content)
    prepared = prepare(PAIRS, parts)
    assert prepared.written == 4 and "shard_0000.bin was made again: no manifest names it" in str(prepared)
    assert "1 more were made again" in str(prepared)


def test_too_little_space_is_an_error_before_the_first_byte(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shards.shutil, "disk_usage", lambda folder: usage._replace(free=255_999))
    with pytest.raises(UserError, match=r"250 KiB free and needs 250 KiB for 4 shards of samples: free some space"):
        open_source(PAIRS, tmp_path, 4)
    assert not list(tmp_path.rglob("*.bin")) and not list(tmp_path.rglob("*.tmp"))
    monkeypatch.setattr(shards.shutil, "disk_usage", lambda folder: usage._replace(free=256_000))
    assert open_source(PAIRS, tmp_path, 4).shards.prepared.written == 4


@pytest.mark.skipif(os.geteuid() != 0, reason="a file system can be mounted by root only")
def test_a_small_disk_is_too_small_and_takes_what_fits(tmp_path):
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(tmp_path)], capture_output=True
    ).returncode:
        pytest.skip("a file system cannot be mounted here")
    try:
        with pytest.raises(UserError, match=r"free and needs 2\.4 MiB for 1 shard of"):
            open_source(dataclasses.replace(PAIRS, samples=10_000), tmp_path)
        source = open_source(PAIRS, tmp_path, read="direct", page_cache="cold")
        assert np.array_equal(source.read(np.arange(1000)), generate(PAIRS, np.arange(1000)))
        assert source.shards.settle() == 1  # nothing can be evicted from a file system that is memory, and it is said
        source.shards.close()
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_folder_that_cannot_be_is_an_error(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageError, match="not a directory"):
        open_source(PAIRS, tmp_path / "file")
    with pytest.raises(UserError, match="page_cache = 'hot': choose warm or cold"):
        open_source(PAIRS, tmp_path, page_cache="hot")


def test_a_writing_that_was_killed_is_taken_up_again(tmp_path):
    """SIGKILL while the third shard is being written: the first two stay, nothing else counts, nothing is left over."""
    code = f"""
import json, os, pathlib, signal, time
from benchlib.workloads import pairs, shards
os.cpu_count = lambda: 1
entire, calls = shards.generate, []
def generate(which, indices):
    calls.append(len(indices))
    if calls.count(250) == 3:
        manifest, = pathlib.Path({str(tmp_path)!r}).glob("*/manifest.json")
        while len(json.loads(manifest.read_text())["shards"]) < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    return entire(which, indices)
shards.generate = generate
shards.open_source(pairs.{PAIRS!r}, {str(tmp_path)!r}, 4)
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == -signal.SIGKILL
    parts = layout(PAIRS, tmp_path, 4)
    folder = parts[0].path.parent
    assert list(folder.glob(".shard_0002.bin.*.tmp")) and [part.path.exists() for part in parts] == [
        True,
        True,
        False,
        False,
    ]
    inode = parts[0].path.stat().st_ino
    assert dataclasses.replace(prepare(PAIRS, parts), seconds=0) == Prepared(4, 2, 0, (), 0)
    assert parts[0].path.stat().st_ino == inode and not list(folder.glob("*.tmp"))
    assert np.array_equal(open_source(PAIRS, tmp_path, 4).read(np.arange(1000)), generate(PAIRS, np.arange(1000)))


def test_of_two_at_once_one_writes_and_the_other_waits(tmp_path, monkeypatch):
    entire = shards.generate

    def slow(pairs, indices):
        time.sleep(0.02)
        return entire(pairs, indices)

    monkeypatch.setattr(shards, "generate", slow)
    prepared = []
    threads = [
        threading.Thread(target=lambda: prepared.append(prepare(PAIRS, layout(PAIRS, tmp_path, 4)))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(record.written for record in prepared) == [0, 0, 4]
    assert not any(record.mended for record in prepared)


@pytest.mark.parametrize("read", ["mmap", "direct"])
def test_a_planted_disk_is_as_slow_as_stated_for_the_loader_and_raw(data, read):
    source = open_source(PAIRS, data, 4, read=read, planted=disk.Planted(2e6))
    rates = disk_rates(source, batch=50, rounds=1, order=np.arange(1000)[::-1])
    assert rates.tool == "benchlib's own reader"  # fio would not see the delay
    for rate in (*rates.raw_bytes_per_s, *rates.loader_bytes_per_s):
        assert 0.1e6 < rate <= 2.01e6  # a machine at other work makes it slower, nothing makes it faster
    assert "slowed down on purpose to 2 MB/s" in source.description


@pytest.mark.parametrize("read", ["mmap", "direct"])
def test_batches_that_are_kept_are_not_written_over(tmp_path, monkeypatch, read):
    """Chunks of two batches of whole pages, of which some are kept while memory of the others is taken again."""
    pairs = Pairs(samples=4096, sequence=256, vocabulary=64, seed=3)
    monkeypatch.setattr(shards, "CHUNK_BYTES", 32 * pairs.sample_bytes)
    source = open_source(pairs, tmp_path, read=read)
    orders = list(np.arange(4096).reshape(-1, 16))
    kept = [(number, batch) for number, batch in enumerate(source.batches(orders)) if number % 5 == 0]
    for number, batch in kept:
        assert torch.equal(batch.tokens, torch.from_numpy(generate(pairs, orders[number])))
    source.shards.close()


def test_neighbours_in_a_memory_map_are_read_where_they_lie(tmp_path):
    pairs = Pairs(samples=64, sequence=256, vocabulary=64, seed=3)
    source = open_source(pairs, tmp_path, 2)
    mapped = source.shards
    for cached in (False, True):  # with the request to read ahead, and without
        mapped._files[1].cached = cached
        view = mapped.view(np.arange(40, 44))
        assert not view.flags.owndata and np.array_equal(view, generate(pairs, np.arange(40, 44)))
    for apart in ([0, 2], [1, 0], [31, 32], [63, 64], []):  # a gap, backwards, two shards, beyond the end, none
        assert mapped.view(np.array(apart, dtype=np.int64)) is None
    os.truncate(mapped.paths[1], 4096)
    with pytest.raises(UserError, match="was cut while it was read"):
        mapped.view(np.arange(60, 64))
    mapped.close()


def test_processes_share_a_planted_disk(data):
    """Two that read at once get half each; the raw rate is of one that reads alone."""
    source = open_source(PAIRS, data, 4, planted=disk.Planted(4e6, sharers=2))
    rates = disk_rates(source, batch=50, rounds=1)
    assert 0.5e6 < rates.loader_bytes_per_s[0] <= 2.01e6
    assert rates.raw_bytes_per_s[0] > rates.loader_bytes_per_s[0]
    assert disk.Planted(4e6, 2).alone().sharers == 1


def test_ranks_measure_a_disk_together(data):
    """One reads raw while the other waits, both load at once, and every pass begins and ends at a barrier."""
    meeting, rates = threading.Barrier(2, timeout=120), {}

    def rank(number):
        source = open_source(PAIRS, data, 4, read="direct")
        rates[number] = disk_rates(source, 50, rounds=3, raw=number == 0, barrier=meeting.wait)

    threads = [threading.Thread(target=rank, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [len(rates[number].raw_bytes_per_s) for number in (0, 1)] == [3, 0]
    assert [len(rates[number].loader_bytes_per_s) for number in (0, 1)] == [3, 3]
