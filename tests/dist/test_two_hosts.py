"""Two hosts with nothing in common but a cable: what is said when one of them is gone."""

import pytest
from harness import at_step, none_left, prepare, status
from hosts import two_hosts, why_not
from waiting import END_S

MISSING = why_not()
pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)


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
