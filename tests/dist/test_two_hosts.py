"""Two hosts with nothing in common but a cable: runs across it, its speed, and what is said when one of them is gone."""

import json
import subprocess

import numpy as np
import pytest
import training_cases
from click.testing import CliRunner
from harness import at_step, none_left, prepare, status
from hosts import ALL_REDUCE, measured, two_hosts, why_not
from waiting import END_S
from worlds import in_ranks

from benchlib.cli import main
from benchlib.config.schema import resolve, save_config
from benchlib.core.definitions import busbw_gbps
from benchlib.results.run import Run

MISSING = why_not()
pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)
SIZE = 16 * 2**20


def test_all_reduce_is_right_and_not_above_what_the_cable_carries(tmp_path):
    """More than the cable of 1 Gbit/s carries would be measured wrongly; less may be a busy machine."""
    with two_hosts("1gbit") as hosts:
        result = measured(hosts, tmp_path, "collectives", sizes="16MiB", seconds=0.01, **ALL_REDUCE)
    rows = [row for row in result.tables["series"] if row["operation"] == "all_reduce" and row["bytes"] == SIZE]
    (row,) = [row for row in rows if not row["in_place"]]
    assert result.world_size == 2 and row["wrong_elements"] == 0 < row["checked_elements"]
    assert busbw_gbps("all_reduce", SIZE, 1e-6 * row["times_us"], 2) <= 1.05
    names = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert not [host.name for host in hosts if host.name in names]


def test_a_host_whose_cable_is_cut_is_named(tmp_path):
    with two_hosts() as hosts:
        values = {**hosts[0].nodes(), "stall_timeout_s": 5.0, "steps": 100_000}
        run_dirs = [prepare(tmp_path / name, **values) for name in "ab"]
        processes = [host.execute(path, "faulty:collective") for host, path in zip(hosts, run_dirs, strict=True)]
        for run_dir in run_dirs:
            at_step(run_dir)
        hosts[1].cut()
        for process in processes:
            process.communicate(timeout=END_S)
        for run_dir in run_dirs:
            none_left(run_dir)
        first = status(run_dirs[0])
        named = f": {first['ranks'][0]['host']} "
        assert first["outcome"] == "stalled"
        assert first["reason"].endswith(f"{named}({hosts[1].address})"), first["reason"]
        # The other one sees the same from its side.
        assert status(run_dirs[1])["reason"].endswith(f"{named}({hosts[0].address})")


def test_one_command_starts_the_hosts_of_a_profile(tmp_path):
    """They share no connection with the machine that starts them but the one of the command."""
    with two_hosts() as hosts:
        rows = [
            {
                "hosts": [host.address],
                "backend": "cpu",
                "command": " ".join(host.command()),
                "folder": str(tmp_path / host.device),
            }
            for host in hosts
        ]
        (tmp_path / "two.yaml").write_text(json.dumps({"groups": rows}))
        pairs = {
            **ALL_REDUCE,
            "cluster": tmp_path / "two.yaml",
            "sizes": "4KiB",
            "seconds": 0.01,
            "exchange_groups": "a,b",
        }
        words = [
            f"{name}={','.join(map(str, value)) if isinstance(value, list) else value}" for name, value in pairs.items()
        ]
        done = CliRunner().invoke(
            main,
            [
                "run",
                "collectives",
                "--out",
                str(tmp_path / "out"),
                *(word for pair in words for word in ("--set", pair)),
            ],
        )
        assert done.exit_code == 0, done.output
    (path,) = (tmp_path / "out").glob("*/*/result.json")
    result = Run(path.parent).result
    assert result.world_size == 2
    assert all(row["checked_elements"] > 0 == row["wrong_elements"] for row in result.tables["series"] if row["bytes"])
    assert all(list((tmp_path / host.device).iterdir()) for host in hosts)


def test_two_unlike_hosts_train_to_the_f1_of_one(tmp_path):
    values = {"train_questions": 96, "eval_questions": 48, "checkpoint_every": -1, "threads": 1, "budget_s": 86400.0}
    values |= training_cases.without_dropout()
    uneven = {"balance": "auto", "planted_work": [1, 3]}
    with two_hosts() as hosts:
        together = measured(hosts, tmp_path, "squad", "training_cases:whole", **values, **uneven)
    (tmp_path / "alone").mkdir()
    one = resolve("squad", overrides={**values, "nproc": 1, "batch_size": 16}).config
    save_config(one, tmp_path / "alone")
    in_ranks(1, tmp_path / "alone", training_cases.whole)
    assert sum(row["samples"] for row in together.tables["shares"]) == 16
    losses = [Run(path.parent).samples["loss"] for path in tmp_path.glob("*/result.json")]
    np.testing.assert_allclose(*losses, rtol=1e-3)
    first, second = (result.value("f1_minisquad_tiny") for result in (together, Run(tmp_path / "alone").result))
    assert second > 50
    assert abs(first - second) <= 100 / 48  # at most one answer, where two spans are equally good to the last digits
