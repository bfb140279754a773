"""The cores and the memory that a container may use, in folders made as the kernel shows them (cgroups(7))."""

import psutil
import pytest

from benchlib.core import machine


@pytest.fixture
def contained(tmp_path, monkeypatch):
    """Make the control groups of a process: their file in /proc, and the files of the groups by name."""

    def make(groups, files):
        for name, text in files.items():
            path = tmp_path / "cgroup" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        (tmp_path / "own").write_text(groups)
        monkeypatch.setattr(machine, "CGROUPS", tmp_path / "cgroup")
        monkeypatch.setattr(machine, "OWN_GROUPS", tmp_path / "own")

    return make


@pytest.mark.parametrize(
    ("groups", "files", "cores"),
    [
        ("0::/\n", {}, 8),
        ("0::/\n", {"cpu.max": "max 100000\n"}, 8),
        ("0::/\n", {"cpu.max": "250000 100000\n"}, 2),
        ("0::/user.slice/job\n", {"user.slice/job/cpu.max": "100000 50000\n"}, 2),
        ("0::/pod/box\n", {"pod/cpu.max": "300000 100000\n", "pod/box/cpu.max": "max 100000\n"}, 3),
        ("4:cpu,cpuacct:/docker/a\n", {"cpu/cpu.cfs_quota_us": "100000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 1),
        (
            "4:cpu,cpuacct:/job\n0::/\n",
            {"cpu,cpuacct/job/cpu.cfs_quota_us": "400000\n", "cpu,cpuacct/job/cpu.cfs_period_us": "100000\n"},
            4,
        ),
        ("4:cpu,cpuacct:/\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 8),
        ("0::/../../outside\n", {"cpu.max": "50000 100000\n"}, 1),
    ],
)
def test_usable_cores_are_cut_by_every_quota_above_the_process(contained, monkeypatch, groups, files, cores):
    contained(groups, files)
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    assert machine.usable_cores() == cores


@pytest.mark.parametrize(
    ("groups", "files", "there"),
    [
        ("0::/\n", {"memory.max": "max\n"}, None),
        ("0::/pod/box\n", {"pod/memory.max": "1048576\n", "pod/box/memory.max": "max\n"}, 2**20),
        ("5:memory:/job\n", {"memory/job/memory.limit_in_bytes": "2097152\n"}, 2**21),
        ("5:memory:/\n", {"memory/memory.limit_in_bytes": "9223372036854771712\n"}, None),
    ],
)
def test_memory_is_cut_by_every_limit_above_the_process(contained, groups, files, there):
    contained(groups, files)
    assert machine.memory_bytes() == (there or psutil.virtual_memory().total)
