"""What a disk gives, beside tools of the system, and when it limits, by hand."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from benchlib.core import disk
from benchlib.core.errors import UserError


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "a:b.bin"  # fio separates names by colons
    path.write_bytes(os.urandom(4 << 20) + b"tail")
    return path


def fincore(path):
    run = subprocess.run(["fincore", "-nrbo", "RES", str(path)], capture_output=True, text=True, check=True)
    return int(run.stdout) / disk.PAGE / -(-path.stat().st_size // disk.PAGE)


@pytest.mark.skipif(not shutil.which("fincore"), reason="fincore of util-linux is not installed")
def test_the_page_cache_is_what_fincore_says_warm_and_cold(path):
    disk.fill([path])
    assert disk.residency([path]) == fincore(path) == 1
    disk.evict([path])
    if fincore(path) == 1:
        pytest.skip("this file system is memory: nothing can be evicted")
    assert disk.residency([path]) == fincore(path) == 0
    with path.open("rb", buffering=0) as handle:
        os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        handle.read(disk.PAGE)
    assert disk.residency([path]) == pytest.approx(fincore(path))
    assert 0 < fincore(path) < 0.2


@pytest.mark.parametrize("direct", [True, False])
def test_ranges_are_read_wherever_they_begin_and_end(path, direct):
    content = path.read_bytes()
    file = disk.DirectFile(path, direct)
    for offset, length in ((0, 1), (4095, 2), (1 << 20, 1 << 20), (123_457, 654_321), ((4 << 20) - 5, 9)):
        assert bytes(file.read(offset, length)) == content[offset : offset + length]
    os.truncate(path, 5000)
    with pytest.raises(UserError, match="ends at byte 5,000: it was cut while it was read"):
        file.read(4096, 4096)
    file.close()


def test_without_direct_reads_a_file_is_dropped_from_the_page_cache_behind_them(path, monkeypatch):
    monkeypatch.delattr(os, "O_DIRECT")
    file = disk.DirectFile(path)
    assert not file.direct and bytes(file.read(5, 9)) == path.read_bytes()[5:14]
    disk.evict([path])
    file.read(0, 1 << 20)
    assert disk.residency([path]) in (1, pytest.approx(0, abs=0.5))  # 1: a file system that is memory
    file.close()


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("tool", ["fio", "own"])
def test_the_raw_rate_is_of_all_bytes_and_names_its_tool(path, direct, tool, monkeypatch):
    if tool == "own":
        monkeypatch.setattr(disk.shutil, "which", lambda name: None)
    elif not shutil.which("fio"):
        pytest.skip("fio is not installed")
    os.truncate(path, 4 << 20)
    monkeypatch.setattr(disk, "LEAST_BYTES", 8 << 20)
    other, small = (shutil.copy(path, path.with_name(name)) for name in ("other", "small"))
    os.truncate(small, 1000)
    rate = disk.raw_sequential_rate([path, Path(other), Path(small)], direct)
    assert rate.bytes_per_s > 0
    assert rate.tool.startswith("fio 3") if tool == "fio" else rate.tool == "benchlib's own reader"
    assert rate.read_bytes == (8 << 20) + (1000 if tool == "own" else 0)  # fio reads whole blocks


def test_the_raw_rate_stops_in_time_and_small_files_are_not_for_the_clock_of_fio(path):
    planted = disk.Planted(8e6)
    rate = disk.raw_sequential_rate([path], True, depth=1, seconds=0.2, planted=planted)
    assert 0 < rate.read_bytes < 4 << 20
    assert 0.4e6 < rate.bytes_per_s < 8.1e6  # a machine at other work makes it slower, nothing makes it faster
    assert disk.raw_sequential_rate([path], True).tool == "benchlib's own reader"


def test_where_fio_fails_the_kit_reads_and_says_why(path, monkeypatch, tmp_path):
    fio = tmp_path / "fio"
    fio.write_text("#!/bin/sh\necho no engine >&2; exit 1\n")
    fio.chmod(0o755)
    monkeypatch.setattr(disk.shutil, "which", lambda name: str(fio))
    monkeypatch.setattr(disk, "LEAST_BYTES", 1)
    rate = disk.raw_sequential_rate([path], True)
    assert rate.tool == "benchlib's own reader (fio failed: no engine)"
    assert rate.read_bytes == path.stat().st_size


@pytest.mark.parametrize(
    ("loader", "raw", "limit"),
    [(2e6, 3e6, ""), (1e6, 3e6, ""), (0.5e6, 3e6, "loader"), (0.5e6, 0.6e6, "disk"), (0.5e6, None, "disk or loader")],
)
def test_the_limit_is_named_and_turns_where_both_rates_are_equal(loader, raw, limit):
    """100 samples of 1,000 bytes in 0.1 s ask for 1 MB/s."""
    result = disk.data_limit(1000, 100, 0.1, loader, raw, flops_per_sample=7e9)
    assert (result.limit, result.asked_bytes_per_s) == (limit, pytest.approx(1e6))
    assert result.asked_share == pytest.approx(1e6 / loader)
    assert result.turn_samples_per_s == loader / 1000
    # The same FLOP/s on a model of these FLOPs takes as long for a sample as the loader does.
    assert result.turn_flops_per_sample / (7e9 * 1000) == pytest.approx(1 / result.turn_samples_per_s)


@pytest.mark.parametrize(("fixed_s", "each_s"), [(0.1, 0.0), (0.05, 0.0005), (0.02, 0.0008)])
@pytest.mark.parametrize("turn", [400, 900, 1100, 1200])
def test_no_batch_between_this_one_and_the_stated_one_turns(fixed_s, each_s, turn):
    """Steps of a + b batch seconds, 0.1 s at 100 samples: the batch that turns lies at the stated one or beyond it."""
    result = disk.data_limit(1000, 100, 0.1, turn * 1000)

    def held_back(batch):
        return batch / (fixed_s + each_s * batch) > turn

    between = range(*sorted((100, result.turn_batch)))
    assert all(held_back(batch + 1) for batch in between) if turn < 1000 else not any(map(held_back, between))


def test_rates_that_are_not_above_zero_are_refused():
    with pytest.raises(ValueError, match="compute_s 0"):
        disk.data_limit(1000, 100, 0.0, 1e6)
