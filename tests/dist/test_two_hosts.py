"""Two hosts with nothing in common but a cable: runs across it, its speed, and what is said when one of them is gone."""

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import END_S, none_left, prepare, status, until
from hosts import ALL_REDUCE, Host, two_hosts, why_not

from benchlib.config.schema import resolve, save_config
from benchlib.core.definitions import busbw_gbps
from benchlib.core.events import read_events
from benchlib.launch import nodes
from benchlib.launch.processes import kill_marked
from benchlib.results.run import Result, Run

MISSING = why_not()
pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)
SIZE = 16 * 2**20


@pytest.fixture(scope="module")
def shaped() -> Iterator[tuple[Host, Host]]:
    with two_hosts("1gbit") as hosts:
        yield hosts
    names = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert hosts[0].name not in names
    assert hosts[1].name not in names


def _prepared(folder: Path, benchmark: str, **values: Any) -> list[Path]:
    run_dirs = [folder / name for name in "ab"]
    for run_dir in run_dirs:
        run_dir.mkdir()
        save_config(resolve(benchmark, overrides=values).config, run_dir)
    return run_dirs


def _finish(
    processes: list[subprocess.Popen[str]], run_dirs: list[Path], timeout_s: float = END_S
) -> list[dict[str, Any]]:
    for process in processes:
        process.communicate(timeout=timeout_s)
    for run_dir in run_dirs:
        none_left(run_dir)
    return [status(run_dir) for run_dir in run_dirs]


def _result(run_dirs: list[Path]) -> Result:
    """Return the result of a run, which only the node of rank 0 has."""
    (result,) = [result for path in run_dirs if (result := Run(path).result)]
    assert (result.status, result.world_size) == ("complete", 2)
    return result


def _all_reduce_gbps(hosts: tuple[Host, Host], folder: Path) -> float:
    """Run the benchmark of collectives on two hosts; return the bus bandwidth at 16 MiB."""
    folder.mkdir()
    run_dirs = _prepared(folder, "collectives", sizes="16MiB", seconds=0.01, **ALL_REDUCE, **hosts[0].nodes())
    ended = _finish([host.execute(path) for host, path in zip(hosts, run_dirs, strict=True)], run_dirs)
    assert [end["outcome"] for end in ended] == ["complete", "complete"], [end["reason"] for end in ended]
    assert sorted(node.address for node in nodes.read(run_dirs[0])) == [host.address for host in hosts]
    series = _result(run_dirs).tables["series"]
    (row,) = [row for row in series if row["operation"] == "all_reduce" and row["bytes"] == SIZE]
    assert (row["wrong_elements"], row["checked_elements"] > 0) == (0, True)
    return busbw_gbps("all_reduce", SIZE, 1e-6 * row["times_us"], 2)


def test_all_reduce_is_right_and_not_above_what_the_cable_carries(shaped: tuple[Host, Host], tmp_path: Path) -> None:
    """More than the cable of 1 Gbit/s carries would be measured wrongly; less may be a busy machine."""
    assert _all_reduce_gbps(shaped, tmp_path / "run") <= 1.05


def _at_step(run_dir: Path, step: int = 3) -> None:
    until(lambda: any(event.get("step", 0) >= step for event in read_events(run_dir, {"heartbeat"})))


@pytest.mark.parametrize("how", ["killed", "cut"])
def test_a_host_that_disappears_is_named(how: str, tmp_path: Path) -> None:
    with two_hosts() as hosts:
        values = {**hosts[0].nodes(), "stall_timeout_s": 5.0, "steps": 100_000}
        run_dirs = [prepare(tmp_path / name, **values) for name in "ab"]
        processes = [host.execute(path, "faulty:collective") for host, path in zip(hosts, run_dirs, strict=True)]
        for run_dir in run_dirs:
            _at_step(run_dir)
        if how == "killed":
            processes[1].kill()
            kill_marked(run_dirs[1])
        else:
            hosts[1].cut()
        first = _finish(processes[:1], run_dirs[:1])[0]
        rank = next(event["rank"] for event in read_events(run_dirs[1], {"start"}))
        host = first["ranks"][0]["host"]
        assert first["outcome"] == ("failed" if how == "killed" else "stalled")
        assert first["reason"].endswith(f": node {host} ({hosts[1].address}) with rank {rank}"), first["reason"]
        if how == "cut":  # the other one sees the same from its side
            second = _finish(processes[1:], run_dirs[1:])[0]
            assert second["reason"].endswith(f": node {host} ({hosts[0].address}) with rank {1 - rank}")
        else:
            processes[1].communicate(timeout=END_S)
