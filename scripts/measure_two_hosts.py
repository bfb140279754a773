"""What the network carries between two hosts: how close does an all-reduce come to iperf3 over the same cable?

Method: two network namespaces joined by a virtual cable of a given speed (tests/dist/hosts.py; Linux, root, iproute2,
iperf3), torchrun with a c10d rendezvous across them, one rank on each. iperf3 and the all-reduce are
interleaved; medians and their ratio are printed, with the range. A token bucket lets its burst of 256 KiB pass at once and
so flatters small messages: judge by those of 16 MiB and more.

    sudo .venv/bin/python scripts/measure_two_hosts.py
    sudo .venv/bin/python scripts/measure_two_hosts.py --rate 10gbit --sizes 1MiB,16MiB,64MiB --rounds 5
"""

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "dist")]

from hosts import ALL_REDUCE, END_S, Host, measured, two_hosts, why_not  # noqa: E402
from measuring import machine, options_of, spread  # noqa: E402

from benchlib.core.definitions import busbw_gbps  # noqa: E402

MIN_BYTES = 64 * 2**10  # below it the times are those of a message, not of a cable


def iperf3_gbps(first: Host, second: Host, seconds: float = 1.0) -> float:
    """Return what iperf3 receives over the cable, Gbit/s of payload (TCP)."""
    server = first.start("iperf3", "-s", "-1", "-B", first.address, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        command = second.command("iperf3", "-c", first.address, "-t", str(seconds), "-J")
        for _ in range(50):  # the server needs a moment
            done = subprocess.run(command, capture_output=True, text=True, timeout=60)
            report = json.loads(done.stdout)
            if "error" not in report:
                return float(report["end"]["sum_received"]["bits_per_second"]) / 1e9
        raise RuntimeError(f"iperf3: {report['error']}")
    finally:
        server.kill()
        server.communicate()


def network(
    hosts: tuple[Host, Host], folder: Path, sizes: str, rounds: int
) -> tuple[list[float], dict[int, list[float]]]:
    """Gbps of iperf3 and, by bytes, of the all-reduce, interleaved."""
    reached: dict[int, list[float]] = {}
    carried = [iperf3_gbps(*hosts)]
    for number in range(rounds):
        values = {"sizes": sizes, "seconds": 1.0, "budget_s": END_S, **ALL_REDUCE}
        for row in measured(hosts, folder / f"round{number}", "collectives", **values).tables["series"]:
            if row["wrong_elements"]:
                raise SystemExit(f"{row['wrong_elements']} elements were wrong")
            if row["operation"] == "all_reduce" and row["bytes"] >= MIN_BYTES:
                gbps = busbw_gbps("all_reduce", row["bytes"], 1e-6 * row["times_us"], 2)
                reached.setdefault(row["bytes"], []).append(gbps)
        carried.append(iperf3_gbps(*hosts))
    return carried, reached


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--rate", default="1gbit", help="speed of the cable as tc takes it; '' for as fast as it goes")
    parser.add_argument("--sizes", default="1MiB,16MiB,64MiB", help="sizes of the all-reduce")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if missing := why_not("iperf3"):
        raise SystemExit(f"SKIPPED: {missing}")
    with tempfile.TemporaryDirectory() as name, two_hosts(options.rate) as hosts:
        iperf3, all_reduce = network(hosts, Path(name), options.sizes, options.rounds)
        print(f"{machine()}, cable {options.rate or 'unshaped'}\niperf3, one way        {spread(iperf3, '.3f')} Gbps")
        for size, values in all_reduce.items():
            share = statistics.median(values) / statistics.median(iperf3)
            print(f"all-reduce {size / 2**20:5g} MiB   {spread(values, '.3f')} Gbps, {share:.3f} of iperf3")


if __name__ == "__main__":
    main()
