"""Measure what serving itself costs: the dispatcher's processor time, scaling over workers, and what a lost worker costs.

Questions: does a query cost the dispatcher at most 0.3 ms of CPU in bursts? Does a second worker add 0.95 of what it does
alone, do four add 0.88? Does LoadGen lose a query, or get another answer, when a worker is killed, hangs, comes back, answers
garbage, half or slowly? Do our client and aiperf agree on the
medians of first token and end to end within 20% at the same worker?
Method: workers are processes on loopback; ``sim`` computes nothing, so what is left is client, network and dispatcher. Each
worker alone and all together, in turns, at equal concurrency per worker; the efficiency is the median over rounds. CPU is
that of the dispatcher's thread, which does not depend on who else uses the machine as wall time does.

    python scripts/bench_inference.py                       # all parts
    python scripts/bench_inference.py kill --engine static  # the table of failures alone, with the kit's own small model
    python scripts/bench_inference.py peer --realtime       # beside aiperf, before all other programs (needs root)
"""

import argparse
import asyncio
import contextlib
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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from aiohttp import web

from benchlib.benchmarks.inference import loadgen, logs, rules
from benchlib.benchmarks.inference.config import InferenceConfig
from benchlib.core.files import PACKAGE
from benchlib.workloads.llm.dispatch import WARM_UP, Dispatcher, Policy
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
    """Dispatcher's CPU per streamed query, in bursts of 2,000: tokens after the first together, and each one by one."""
    good = True
    for each_token in (False, True):
        values, tokens = [], 0.0
        with (
            workers(1, engine="sim", slots=1024, step_ms=1, each_token=each_token) as pool,
            client(pool, pool.urls, 8, cap=256) as (load, dispatcher),
        ):
            load.at_once(500)
            for _burst in range(5):
                before = dispatcher.cpu_s()
                table = load.at_once(2000)
                values.append(1e3 * (dispatcher.cpu_s() - before) / 2000)
                assert not table["failed"].any()
                tokens = float(table["tokens"].mean())
        how = f"{tokens:.1f} tokens one by one" if each_token else "the first token and the rest"
        print(
            f"dispatcher  {statistics.median(values):.3f} ms of CPU per streamed query, {how} ({min(values):.3f} to {max(values):.3f}, "
            f"5 bursts of 2,000); load {os.getloadavg()[0]:.1f}",
            flush=True,
        )
        good &= statistics.median(values) <= MOST_CPU_MS
    return good


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
    """What LoadGen sees when one of two workers fails, as Offline, Server and accuracy run: what is lost, twice, sent again, other."""
    sim, good = options.engine == "sim", True
    rate, count, max_new = (80.0, 200, 16) if sim else (12.0, 64, 32)
    if sim:
        asked = prompts(count)
    else:
        from benchlib.workloads.llm import articles

        asked = articles.load("mininews", "", count, 0, "tiny").prompts
    print(
        f"two workers, engine {options.engine}, {count} queries, Server at {rate:g}/s; load {os.getloadavg()[0]:.1f}\n"
        "case        test      queries  lost  twice  sent again  lost and back      answers as undisturbed      s"
    )
    undisturbed: dict[int, list[int]] = {}
    threads = {} if sim else {"threads": 1}
    with (
        tempfile.TemporaryDirectory() as place,
        workers(2, engine=options.engine, slots=8, step_ms=15, **threads) as pool,
        proxy(pool.urls[0]) as between,
    ):
        for case in ("none", *SIGNALS, *FAULTS, "all killed"):
            for name in ("Offline", "Server", "accuracy"):
                urls = (between.url if case in FAULTS else pool.urls[0], pool.urls[1])
                between.fault = case
                test = plan(name, urls, pool.token, asked, max_new, rate, Path(place) / f"{case}-{name}")
                outcome, seconds = disturbed(test, pool, case)
                if outcome.reason or outcome.table is None:
                    print(f"{case:11} {name:8} DID NOT END: {outcome.reason}")
                    good = False
                    continue
                table, lost = outcome.table, int(outcome.table["failed"].sum())
                again = int((table["attempt"] > 1).sum())
                twice = outcome.repeated + len(table) - len(set(table["query"]))
                same = "-"
                if name == "accuracy":
                    answers = logs.answers(test.folder)
                    undisturbed = undisturbed or answers
                    equal = sum(answers.get(row) == ids for row, ids in undisturbed.items())
                    same = f"{equal} of {len(undisturbed)}"
                    good &= equal == len(undisturbed) or case == "all killed"
                good &= not twice and bool(lost) == (case == "all killed")
                good &= bool(again) == (case not in ("none", "slow", "all killed")) or case == "all killed"
                moved = [row for row in outcome.facts["dispatch"]["losses"] if row["event"] != "requeued"]
                words = [f"{row['event']} {row['t_s']:.1f}" for row in moved]
                seen = " ".join([*words[:2], f"+{len(words) - 2}" if len(words) > 2 else ""])
                print(
                    f"{case:11} {name:8}  {len(table):7}  {lost:4}  {twice:5}  {again:10}  {seen:17}  {same:26}  {seconds:.1f}",
                    flush=True,
                )
    print(f"load {os.getloadavg()[0]:.1f}")
    return good


SIGNALS = {"killed": signal.SIGKILL, "hung": signal.SIGSTOP, "restarted": signal.SIGKILL}
FAULTS = ("garbage", "half", "slow")  # of every third answer of the first worker, put in between
KILLED_S = 0.4  # after LoadGen began


def plan(
    name: str, urls: tuple[str, ...], token: str, asked: list[list[int]], max_new: int, rate: float, folder: Path
) -> loadgen.Test:
    """Return a LoadGen test of servers."""
    scenario, count = "Offline" if name == "accuracy" else name, len(asked)
    config = InferenceConfig(samples=count, min_queries=count, min_duration_s=0.1, server_qps=rate, expected_qps=rate)
    return loadgen.Test(
        name, scenario, rules.model_key(scenario), "AccuracyOnly" if name == "accuracy" else "PerformanceOnly", "http",
        Settings(urls=urls, token=token, slots=8), rules.user_conf(config, scenario, count),
        rules.expected_settings(config, scenario, count), asked, [], [], max_new, folder, 60.0, 120.0,
    )  # fmt: skip


def disturbed(test: loadgen.Test, pool: Pool, case: str) -> tuple[loadgen.Outcome, float]:
    """Run a test, and do to its workers what the case says; they are as before when this returns. Also returns its seconds.

    The test runs in another thread: workers live as long as the thread that starts them.
    """
    outcomes: list[loadgen.Outcome] = []
    thread = threading.Thread(target=lambda: outcomes.append(loadgen.perform(test, lambda done, rss: None)))
    began = time.monotonic()
    thread.start()
    while thread.is_alive() and not (test.folder / "mlperf_log_detail.txt").exists():
        time.sleep(0.01)
    time.sleep(KILLED_S)
    hit = [0, 1] if case == "all killed" else [0] if case in SIGNALS else []
    for index in hit:
        pool.signal(index, SIGNALS.get(case, signal.SIGKILL))
    if case == "restarted":
        pool.start(0)
        pool.wait(0)
    thread.join()
    seconds = time.monotonic() - began
    for index in hit:
        if case == "hung":
            pool.signal(index, signal.SIGCONT)
        elif case != "restarted":
            pool.start(index)
            pool.wait(index)
    return outcomes[0], seconds


class Between:
    """Stands before a worker, hands on what both say, and spoils every third answer as ``fault`` says."""

    def __init__(self, url: str) -> None:
        self.behind, self.fault, self.url, self._asked = url, "", "", 0

    async def serve(self) -> None:
        """Open a port of loopback."""
        application = web.Application(client_max_size=2**24)
        application.router.add_route("*", "/{path:.*}", self._hand_on)
        runner = web.AppRunner(application, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))

    async def close(self) -> None:
        """Close the connections to the worker."""
        await self._session.close()

    async def _hand_on(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        asked = (
            request.path.endswith("completions") and json.loads(body)["prompt"] != WARM_UP
        )  # the greeting is let through
        self._asked += asked
        spoiled = self.fault if asked and self._asked % 3 == 2 else ""
        headers = {name: request.headers[name] for name in ("Authorization", "Content-Type") if name in request.headers}
        async with self._session.request(
            request.method, self.behind + request.path, data=body, headers=headers
        ) as answer:
            response = web.StreamResponse(status=answer.status)
            await response.prepare(request)
            with contextlib.suppress(ConnectionError):
                async for line in answer.content:
                    await response.write(line)
                    if spoiled == "slow":
                        await asyncio.sleep(0.05)
                    elif spoiled == "garbage" and line.startswith(b"data:"):
                        await response.write(b"data: <html>502</html>\n\n")
                    elif spoiled == "half" and line.startswith(b"data:") and request.transport:
                        request.transport.abort()
                        return response
                await response.write_eof()
            return response


@contextmanager
def proxy(url: str) -> Iterator[Between]:
    """Run ``Between`` in a thread."""
    between, loop = Between(url), asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    asyncio.run_coroutine_threadsafe(between.serve(), loop).result(10)
    yield between
    asyncio.run_coroutine_threadsafe(between.close(), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)


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
