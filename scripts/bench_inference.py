"""Measure what serving itself costs: the dispatcher's processor time, scaling over workers, and what a lost worker costs.

Questions: does a query cost the dispatcher at most 0.3 ms of CPU in bursts? Does a second worker add 0.95 of what it does
alone, do four add 0.88? Is any query lost when workers are killed, hang or come back?
Method: workers are processes on loopback; ``sim`` computes nothing, so what is left is client, network and dispatcher. Each
worker alone and all together, in turns, at equal concurrency per worker; the efficiency is the median over rounds. CPU is
that of the dispatcher's thread, which does not depend on who else uses the machine as wall time does.

    python scripts/bench_inference.py                       # all parts
    python scripts/bench_inference.py kill --engine static  # one part, with the kit's own small model
"""

import argparse
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchlib.workloads.llm.dispatch import Dispatcher, Policy
from benchlib.workloads.llm.engines import Settings
from benchlib.workloads.llm.load import POISSON, Client, measure, schedule
from benchlib.workloads.llm.pool import Pool

MOST_CPU_MS = 0.3
LEAST = {2: 0.95, 4: 0.88}  # efficiency by workers
PROMPT_TOKENS = 100


def prompts(count: int = 256) -> list[list[int]]:
    """Return random prompts."""
    rng = np.random.default_rng(0)
    return [rng.integers(3, 500, PROMPT_TOKENS).tolist() for _ in range(count)]


@contextmanager
def workers(count: int, **options: Any) -> Iterator[Pool]:
    """Start workers."""
    with tempfile.TemporaryDirectory() as folder, Pool(Path(folder), [options] * count) as pool:
        yield pool


@contextmanager
def client(pool: Pool, urls: list[str], max_new: int, **policy: Any) -> Iterator[tuple[Client, Dispatcher]]:
    """Open a client to some workers of a pool."""
    dispatcher = Dispatcher(Settings(urls=tuple(urls), token=pool.token), Policy(**policy))
    dispatcher.start()
    try:
        yield Client(dispatcher, prompts(), max_new, 30), dispatcher
    finally:
        dispatcher.stop()


def cpu(_: argparse.Namespace) -> bool:
    """Dispatcher's CPU per streamed query, in bursts of 2,000."""
    values = []
    with (
        workers(1, engine="sim", slots=1024, step_ms=1) as pool,
        client(pool, pool.urls, 8, cap=256) as (load, dispatcher),
    ):
        load.at_once(500)
        for _burst in range(5):
            before = dispatcher.cpu_s()
            failed = int(load.at_once(2000)["failed"].sum())
            values.append(1e3 * (dispatcher.cpu_s() - before) / 2000)
            assert not failed
    print(
        f"dispatcher  {statistics.median(values):.3f} ms of CPU per streamed query ({min(values):.3f} to {max(values):.3f}, 5 bursts of 2,000)"
    )
    return statistics.median(values) <= MOST_CPU_MS


def scaling(options: argparse.Namespace) -> bool:
    """Efficiency at 2 and 4 workers of a step of 10 ms, at equal concurrency."""
    good, count = True, 240
    with workers(4, engine="sim", slots=4, step_ms=10, fixed_length=True) as pool:
        shares: dict[int, list[float]] = {2: [], 4: []}
        for _ in range(options.rounds):
            alone: list[float] = []
            for size in (1, 1, 1, 1, 2, 4):
                urls = [pool.urls[len(alone)]] if size == 1 else pool.urls[:size]
                with client(pool, urls, 32, cap=8) as (load, _dispatcher):
                    rate = measure(load.at_once(count // 4 * size), {}, 0.99)["samples_per_s"]
                if size == 1:
                    alone.append(rate)
                else:
                    shares[size].append(rate / sum(alone[:size]))
        for size, values in shares.items():
            value = statistics.median(values)
            good &= value >= LEAST[size]
            print(
                f"scaling     {size} workers: {value:.3f} of the sum of each alone ({min(values):.3f} to {max(values):.3f}, {len(values)} rounds)"
            )
    return good


def kill(options: argparse.Namespace) -> bool:
    """What is lost when a worker is killed, halted, killed and restarted, and when all are killed."""
    good = True
    sim = options.engine == "sim"
    rate, count, max_new = (60.0, 180, 16) if sim else (20.0, 60, 16)
    print("case                   load     queries  lost  again  twice  same answers  s")
    with workers(2, engine=options.engine, slots=8, step_ms=15) as pool:
        policy = {"cap": 16, "gone_s": 3, "stall_s": 10, "probe_limit_s": 0.5}
        with client(pool, pool.urls, max_new, **policy) as (load, _):
            load.at_once(count)
            expected = load.answers
        for case in ("none", "killed", "halted", "restarted", "all killed"):
            for name in ("at once", "open loop"):
                row = _one(pool, policy, case, name, rate, count, max_new, expected)
                good &= row["twice"] == 0 and row["same"] and (row["lost"] == 0) == (case != "all killed")
                print(
                    f"{case:22} {name:9}  {row['queries']:6}  {row['lost']:4}  {row['again']:5}  {row['twice']:5}  {'yes' if row['same'] else 'NO':12}  {row['s']:.1f}"
                )
    return good


def _one(
    pool: Pool,
    policy: dict[str, Any],
    case: str,
    name: str,
    rate: float,
    count: int,
    max_new: int,
    expected: dict[int, list[int]],
) -> dict[str, Any]:
    with client(pool, pool.urls, max_new, **policy) as (load, dispatcher):
        tables: list[np.ndarray] = []
        send: dict[str, Callable[[], np.ndarray]] = {
            "at once": lambda: load.at_once(count),
            "open loop": lambda: load.open_loop(schedule(POISSON, rate, count, 1)),
        }
        began = time.monotonic()
        thread = threading.Thread(target=lambda: tables.append(send[name]()))
        thread.start()
        time.sleep(0.5)
        hit = {"none": [], "all killed": [0, 1]}.get(case, [0])
        for index in hit:
            pool.signal(index, signal.SIGSTOP if case == "halted" else signal.SIGKILL)
        if case == "restarted":
            pool.start(0)
            pool.wait(0)
        thread.join()
        seconds = time.monotonic() - began
        for index in hit:
            if case == "halted":
                pool.signal(index, signal.SIGCONT)
            elif case != "restarted":
                pool.start(index)
                pool.wait(index)
        table = tables[0]
        assert len(set(table["query"])) == len(table) == count
        same = all(expected[sample] == ids for sample, ids in load.answers.items())
        again = sum(row["outcome"] != "ok" for row in dispatcher.attempts)
        return {
            "queries": count,
            "lost": int(table["failed"].sum()),
            "again": again,
            "twice": load.log.repeated,
            "same": same,
            "s": seconds,
        }


PARTS = {"cpu": cpu, "scaling": scaling, "kill": kill}


def main() -> None:
    """Run the parts; exit with 1 where one misses its limit."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="only these [all]")
    parser.add_argument("--engine", default="sim", help="kill: engine of the workers")
    parser.add_argument("--rounds", type=int, default=3, help="scaling: repetitions")
    options = parser.parse_args()
    missed = [name for name in options.parts or PARTS if not PARTS[name](options)]
    print(f"missed: {', '.join(missed)}" if missed else "all within their limits")
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
