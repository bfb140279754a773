"""Measure what serving itself costs: the dispatcher's processor time, scaling over workers, and what a lost worker costs.

Questions: does a query cost the dispatcher at most 0.3 ms of CPU in bursts? Does a second worker add 0.95 of what it does
alone, do four add 0.88? Is any query lost when workers are killed, hang or come back? Do our client and aiperf agree on the
medians of first token and end to end within 20 % at the same worker?
Method: workers are processes on loopback; ``sim`` computes nothing, so what is left is client, network and dispatcher. Each
worker alone and all together, in turns, at equal concurrency per worker; the efficiency is the median over rounds. CPU is
that of the dispatcher's thread, which does not depend on who else uses the machine as wall time does.

    python scripts/bench_inference.py                       # all parts
    python scripts/bench_inference.py kill --engine static  # one part, with the kit's own small model
    python scripts/bench_inference.py peer --realtime       # beside aiperf, before all other programs (needs root)
"""

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchlib.core.files import PACKAGE
from benchlib.workloads.llm.dispatch import Dispatcher, Policy
from benchlib.workloads.llm.engines import Settings
from benchlib.workloads.llm.load import POISSON, Client, measure, schedule
from benchlib.workloads.llm.pool import Pool

MOST_CPU_MS = 0.3
LEAST = {2: 0.95, 4: 0.88}  # efficiency by workers
PROMPT_TOKENS = 100
PEER_SHARE = 0.2  # by which our medians and aiperf's may differ
AIPERF = "python3 -m venv peer && peer/bin/pip install aiperf==0.13.0 && PATH=$PWD/peer/bin:$PATH python scripts/bench_inference.py peer"


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


def peer(options: argparse.Namespace) -> bool:
    """Medians of our client and of aiperf, in turns: the same prompts at the same rate to the same worker.

    Ours counts from the moment at which a query was due, aiperf from the moment at which it sent it.
    """
    program = shutil.which("aiperf")
    if program is None:
        print(f"aiperf      SKIPPED, not on the PATH: {AIPERF}")
        return True
    count, rate, max_new = 200, 20.0, 16
    asked, good = prompts(count), True
    shares: dict[str, list[float]] = {"first token": [], "end to end": []}
    with (
        workers(1, engine=options.engine, slots=16, step_ms=10) as pool,
        client(pool, pool.urls, max_new, cap=64) as (load, _),
    ):
        load.at_once(20)
        load.prompts = asked
        for turn in range(options.rounds):
            row = measure(load.open_loop(schedule(POISSON, rate, count, turn)), {}, 0.99)
            assert not row["failed"], load.log.errors
            ours = {"first token": row["ttft_p50_ms"], "end to end": row["latency_p50_ms"]}
            theirs = _aiperf(program, pool, asked, rate, max_new, turn)
            for name, values in shares.items():
                values.append(ours[name] / theirs[name])
            words = ", ".join(f"{name} {ours[name]:.1f} | {theirs[name]:.1f} ms" for name in shares)
            print(
                f"aiperf      ours | aiperf, p50 of {count} queries at {rate:g}/s: {words}; load {os.getloadavg()[0]:.1f}",
                flush=True,
            )
    for name, values in shares.items():
        share = statistics.median(values)
        good &= abs(share - 1) <= PEER_SHARE
        print(
            f"aiperf      {name}: ours / aiperf {share:.3f} ({min(values):.3f} to {max(values):.3f}, {len(values)} rounds)"
        )
    return good


def _aiperf(program: str, pool: Pool, asked: list[list[int]], rate: float, max_new: int, seed: int) -> dict[str, float]:
    """Return the medians of one run of aiperf, in ms."""
    with tempfile.TemporaryDirectory() as place:
        bodies, out = Path(place) / "bodies.jsonl", Path(place) / "out"
        # The worker reads the prompt's ids; aiperf takes no whole bodies without messages.
        body = {
            "model": "worker",
            "max_tokens": max_new,
            "stream": True,
            "messages": [{"role": "user", "content": "-"}],
        }
        bodies.write_text("".join(json.dumps(body | {"prompt": ids}) + "\n" for ids in asked))
        command = [
            program, "profile", "--model", "worker", "--url", pool.urls[0], "--api-key", pool.token, "--endpoint-type", "completions",
            "--streaming", "--use-server-token-count", "--tokenizer", str(PACKAGE / "assets" / "tiny-llama"), "--input-file", str(bodies),
            "--custom-dataset-type", "raw-payload", "--request-count", str(len(asked)), "--request-rate", str(rate),
            "--arrival-pattern", "poisson", "--random-seed", str(seed), "--ui", "none", "--output-artifact-dir", str(out),
        ]  # fmt: skip
        # A folder is no tokenizer to it while the hub is off; and its environment is its own.
        environment = {
            name: value for name, value in os.environ.items() if name not in ("HF_HUB_OFFLINE", "PYTHONPATH")
        }
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180, check=False)
        if done.returncode or not (out / "profile_export_aiperf.json").exists():
            raise SystemExit(f"aiperf ended with {done.returncode}: {(done.stdout + done.stderr)[-2000:]}")
        stated = json.loads((out / "profile_export_aiperf.json").read_text())
    answered = int(stated["request_count"]["avg"])
    if answered != len(asked) or stated.get("error_summary"):
        raise SystemExit(f"aiperf: {answered} of {len(asked)} queries were answered: {stated.get('error_summary')}")
    return {"first token": stated["time_to_first_token"]["p50"], "end to end": stated["request_latency"]["p50"]}


PARTS = {"cpu": cpu, "scaling": scaling, "kill": kill, "peer": peer}


def main() -> None:
    """Run the parts; exit with 1 where one misses its limit."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="only these [all]")
    parser.add_argument("--engine", default="sim", help="kill: engine of the workers")
    parser.add_argument("--rounds", type=int, default=3, help="scaling, peer: repetitions")
    parser.add_argument(
        "--realtime", action="store_true", help="run before all other programs (needs root): neighbours do not count"
    )
    options = parser.parse_args()
    if options.realtime:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    missed = [name for name in options.parts or PARTS if not PARTS[name](options)]
    print(f"missed: {', '.join(missed)}" if missed else "all within their limits")
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
