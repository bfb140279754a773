"""What does the network carry between two hosts, and does a training run across it?

Question: how close does an all-reduce come to what iperf3 carries over the same cable, and does the SQuAD benchmark run
over it to its end?

Method: two network namespaces joined by a virtual cable of a given speed (tests/dist/hosts.py; Linux, root, iproute2,
iperf3), torchrun with a c10d rendezvous across them, one rank on each. iperf3 and the all-reduce take turns, ROUNDS
times over; medians and their ratio are printed, with the range. A token bucket lets its burst of 256 KiB pass at once and
so flatters small messages: judge by those of 16 MiB and more.

    sudo .venv/bin/python scripts/measure_two_hosts.py
    sudo .venv/bin/python scripts/measure_two_hosts.py --rate 10gbit --sizes 1,16,64 --rounds 5 --no-squad
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "dist")]

from hosts import Host, iperf3_gbps, two_hosts, why_not  # noqa: E402

from benchlib.config import resolve, save_config  # noqa: E402
from benchlib.files import read_json, write_json  # noqa: E402
from benchlib.results import load_result  # noqa: E402

MIB = 2**20
PORT = 29511
END_S = 600


def run(hosts: tuple[Host, Host], folder: Path, values: dict[str, Any], benchmark: str = "") -> list[Path]:
    """Run a benchmark with a rank on each host and return the run folders; a failure ends the script with its reason."""
    meet = {"launcher": "torchrun", "nproc": 1, "nnodes": 2, "rdzv_endpoint": f"{hosts[0].address}:{PORT}"}
    run_dirs = [folder / name for name in ("first", "second")]
    for run_dir in run_dirs:
        run_dir.mkdir(parents=True)
        if benchmark:
            write_json(run_dir / "config.json", {"benchmark": "cable", "budget_s": END_S, **values, **meet})
        else:
            save_config(resolve("squad", overrides={**values, **meet}).config, run_dir)
    for process in [host.execute(path, benchmark) for host, path in zip(hosts, run_dirs, strict=True)]:
        process.communicate(timeout=END_S)
    for run_dir in run_dirs:
        status = read_json(run_dir / "status.json")
        if status["outcome"] != "complete":
            raise SystemExit(f"{run_dir}: {status['reason']}")
    return run_dirs


def network(hosts: tuple[Host, Host], folder: Path, sizes_bytes: list[int], rounds: int) -> dict[str, Any]:
    """Measure iperf3 and the all-reduce in turns; return Gbps by name and size, each a list."""
    found: dict[str, Any] = {"iperf3": [iperf3_gbps(*hosts)], "all_reduce": {size: [] for size in sizes_bytes}}
    for number in range(rounds):
        values = {"sizes_bytes": sizes_bytes, "rounds": 1, "seconds": 1.0, "threads": 1}
        first, _ = run(hosts, folder / f"round{number}", values, "cable:run")
        for row in read_json(first / "rows.json")["rows"]:
            if row["wrong"]:
                raise SystemExit(f"{row['wrong']} sums were wrong")
            found["all_reduce"][row["bytes"]].append(statistics.median(row["busbw_gbps"]))
        found["iperf3"].append(iperf3_gbps(*hosts))
    return found


def squad(hosts: tuple[Host, Host], folder: Path) -> dict[str, Any]:
    """Run the smoke tier of the SQuAD benchmark over the cable; return its key figures."""
    run_dirs = run(hosts, folder / "squad", {"threads": 1})
    result = next(load_result(path) for path in run_dirs if (path / "result.json").exists())
    names = (
        "f1_minisquad_tiny",
        "train_samples_per_s_minisquad_tiny",
        "allreduce_gbps",
        "exchange_exposed_s",
        "total_s",
    )
    return {name: result.value(name) for name in names} | {"checksums_equal": result.facts["checksums_equal"]}


def said(values: list[float]) -> str:
    """Return a median with its range."""
    return f"{statistics.median(values):.3f} Gbps ({min(values):.3f} to {max(values):.3f}, n = {len(values)})"


def main() -> None:
    """Run the command line of the module's docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rate", default="1gbit", help="speed of the cable as tc takes it; '' for as fast as it goes")
    parser.add_argument("--sizes", default="1,16,64", help="sizes of the all-reduce in MiB")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-squad", action="store_true", help="leave the training out")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    if missing := why_not("iperf3"):
        raise SystemExit(f"SKIPPED: {missing}")
    sizes_bytes = [int(float(part) * MIB) for part in options.sizes.split(",")]
    with tempfile.TemporaryDirectory() as name, two_hosts(options.rate) as hosts:
        found = network(hosts, Path(name), sizes_bytes, options.rounds)
        carried = statistics.median(found["iperf3"])
        print(f"cable {options.rate or 'unshaped'}, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
        print(f"iperf3, one way        {said(found['iperf3'])}")
        for size, values in found["all_reduce"].items():
            print(
                f"all-reduce {size / MIB:5g} MiB   {said(values)}, {statistics.median(values) / carried:.3f} of iperf3"
            )
        if not options.no_squad:
            found["squad"] = squad(hosts, Path(name))
            print("SQuAD smoke over it    " + ", ".join(f"{key} {value}" for key, value in found["squad"].items()))
    if options.json:
        write_json(options.json, json.loads(json.dumps(found)))
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    print("left over: " + (left.strip() or "nothing"))


if __name__ == "__main__":
    main()
