"""Measure what serving itself costs, and what continuous batching gains over static batches.

callbacks  how many queries/s does an engine that computes nothing answer under LoadGen's Offline, through our callbacks (at least
           100,000), and how many does LoadGen's binding alone, whose callback completes each query and keeps nothing?
first      what share of static batches' median time to the first token does continuous batching need at 10 queries/s (at most 0.3)?
cpu        does a streamed query cost the dispatcher at most 0.3 ms of CPU in bursts, with each token on its own?
scaling    does a second worker add 0.95 of what it does alone, do four add 0.88?
kill       does LoadGen lose a query, or get another answer, when a worker is killed, hangs, comes back, answers garbage, half or slowly?
peer       do our client and aiperf agree on the medians of first token and end to end within 20% at the same worker?

Method: what is compared takes turns, so that both see the same load of the machine; a figure is the median over the rounds. LoadGen's
tests are processes of their own; workers are processes on loopback. ``sim`` computes nothing, so what is left is client, network and
dispatcher; its CPU is that of its thread, which does not depend on who else uses the machine as wall time does. Scaling is at equal
concurrency per worker.

``first`` is judged with answers of 128 tokens, MLPerf's limit: an answer of its set has 8,167,644 / 13,368 = 611 characters, which
is about what 128 tokens hold. A query that comes while a static batch is computed waits for its end, so the gain grows with the
answers' length; where batches are over before the next query comes, both wait for little but the prompt itself. So the embedded
model's own answers (15 tokens) and random weights at the shape of Llama-3.1-8B divided by ``--shrink`` stand beside it and are not
judged. Where an engine cannot keep up with the rate, its queue grows and the times are those of the queue: the rate that it reached
stands beside them.

    python scripts/bench_inference.py                       # all parts
    python scripts/bench_inference.py kill --engine static  # the table of failures alone, with the kit's own small model
    python scripts/bench_inference.py peer --realtime       # beside aiperf, before all other programs (needs root)
"""

import argparse
import array
import asyncio
import contextlib
import itertools
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
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from aiohttp import web

from benchlib.benchmarks.inference import loadgen, logs
from benchlib.benchmarks.inference.config import RANDOM_MODEL, InferenceConfig
from benchlib.core.files import PACKAGE
from benchlib.core.imports import loaded
from benchlib.core.stats import percentile
from benchlib.workloads.llm import queries
from benchlib.workloads.llm.dispatch import Dispatcher
from benchlib.workloads.llm.engines import ENGINES, Kind, OnDone, OnFirst, OnMore, Policy, Settings, Sim
from benchlib.workloads.llm.load import POISSON, Client, measure, schedule
from benchlib.workloads.llm.pool import Pool
from benchlib.workloads.llm.wire import WARM_UP

NULL, BARE = "null", "bare"  # engines that answer at once
ANSWER = [1, 2]
LEAST_PER_S, CALLS = 100_000, 100_000  # queries/s through the callbacks, and how many are sent
MOST_SHARE, MOST_TOKENS = 0.3, 128  # of static batches' time to the first token; MLPerf's limit of an answer
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
    loaded()
    try:
        yield Client(dispatcher, prompts(), max_new, 30), dispatcher
    finally:
        dispatcher.stop()


class Null(Sim):
    """Answers at once."""

    def submit(
        self, rid: int, ids: Sequence[int], max_new: int, on_first: OnFirst, on_done: OnDone, on_more: OnMore = None
    ) -> None:
        """Complete the query before returning."""
        on_done(rid, ANSWER, "")


class Bare(loadgen.Sut):
    """Completes queries in the callback itself, and notes nothing: what is left is LoadGen and its binding."""

    def issue(self, ids: Sequence[int], samples: Sequence[int]) -> None:
        """Complete the queries."""
        data = array.array("i", ANSWER)
        address, count = data.buffer_info()
        complete, response = self.lg.QuerySamplesComplete, self.lg.QuerySampleResponse
        for rid in ids:
            complete([response(rid, address, count * data.itemsize, count)])


class BareNull(Null):
    """``Null`` in a process whose callbacks are ``Bare``."""

    def start(self) -> None:
        """Replace the callbacks, in the process of the test."""
        loadgen.Sut = Bare  # type: ignore[misc]


ENGINES[NULL] = Kind("bench_inference:Null", "answers at once", torch=False)
ENGINES[BARE] = Kind("bench_inference:BareNull", "no engine: LoadGen's binding alone", torch=False)


def engine_test(
    engine: str, scenario: str, config: InferenceConfig, asked: list[list[int]], folder: Path, fixed: bool = False
) -> loadgen.Outcome:
    """Run a performance test of an engine; ``fixed``: every answer has ``max_new`` tokens."""
    settings = Settings(model=config.model, shrink=config.shrink, fixed_length=fixed, slots=config.slots, threads=1)
    test = plan(scenario, scenario, engine, settings, config, asked, config.max_new, folder)
    outcome = loadgen.perform(test, lambda done, rss: None)
    assert outcome.table is not None and not outcome.reason, outcome.reason
    return outcome


def callbacks(options: argparse.Namespace) -> bool:
    """Rate of an engine that computes nothing through our callbacks and without them, in turns."""
    bulk = InferenceConfig(samples=1000, min_queries=CALLS, min_duration_s=0.1, expected_qps=CALLS)
    rates: dict[str, list[float]] = {NULL: [], BARE: []}
    costs: dict[str, list[float]] = {NULL: [], BARE: []}
    with tempfile.TemporaryDirectory() as place:
        for turn, engine in itertools.product(range(options.rounds), rates):
            folder = Path(place) / f"{engine}-{turn}"
            facts = engine_test(engine, "Offline", bulk, [[1, 2, 3]] * 1000, folder).facts
            log = logs.detail(folder)
            sent = int(log["result_query_count"]) * int(log["generated_samples_per_query"])
            assert not log["num_errors"] and sent >= CALLS, log["errors"]
            costs[engine].append(1e6 * facts["driver_cpu_share"] * facts["seconds"] / sent)
            rates[engine].append(float(log["result_samples_per_second"]))
    for engine, words in ((NULL, "our callbacks"), (BARE, "the bare binding")):
        every = ", ".join(f"{rate:,.0f}" for rate in rates[engine])
        cost = statistics.median(costs[engine])
        print(
            f"callbacks   {statistics.median(rates[engine]):,.0f} queries/s through {words} ({every}), {cost:.1f} us of CPU a query; "
            f"load {os.getloadavg()[0]:.1f}",
            flush=True,
        )
    return statistics.median(rates[NULL]) >= LEAST_PER_S


def first(options: argparse.Namespace) -> bool:
    """Continuous batching's share of static batches' median time to the first token, in turns: judged at ``MOST_TOKENS``."""
    common = {"samples": 60, "min_queries": 60, "server_qps": 10, "min_duration_s": 0.1}
    share = first_tokens(InferenceConfig(**common, max_new=MOST_TOKENS), options.rounds, True)
    first_tokens(InferenceConfig(**common), options.rounds, False)
    if options.shrink:
        random = {"model": RANDOM_MODEL, "shrink": options.shrink, "max_new": MOST_TOKENS}
        first_tokens(InferenceConfig(**common, **random), options.rounds, True)
    return share <= MOST_SHARE


def first_tokens(config: InferenceConfig, rounds: int, fixed: bool) -> float:
    """Return the share with one model and length of answers."""
    from benchlib.workloads.llm import articles  # with transformers: other parts, and each test's process, need none

    asked = articles.load("mininews", "", config.samples, 0, config.model, config.vocabulary).prompts
    shares = []
    for _ in range(rounds):
        medians, words = {}, []
        for engine in ("static", "continuous"):
            with tempfile.TemporaryDirectory() as place:
                folder = Path(place) / engine
                outcome = engine_test(engine, "Server", config, asked, folder, fixed)
                assert outcome.table is not None
                done = queries.completed(logs.add_schedule(outcome.table, logs.schedule(folder)))
            medians[engine] = percentile(queries.ttft_s(done), 0.5)
            rate = len(done) / queries.span_s(done)
            words.append(f"{engine} {1e3 * medians[engine]:.1f} ms at {rate:.1f} queries/s")
        shares.append(medians["continuous"] / medians["static"])
        what = f"{config.model} ({outcome.facts['engine']['parameters'] / 1e6:.1f} M parameters), {np.median(done['tokens']):.0f} tokens"
        print(
            f"first       {what}: {', '.join(words)}; share {shares[-1]:.2f}; load {os.getloadavg()[0]:.1f}", flush=True
        )
    print(f"first       median share {statistics.median(shares):.2f}")
    return statistics.median(shares)


def cpu(_: argparse.Namespace) -> bool:
    """Dispatcher's CPU per streamed query, in bursts of 2,000: tokens after the first together, and each one by one."""
    good = True
    for each_token, tokens in ((False, 5), (True, 5), (True, 32)):
        values = []
        with (
            workers(1, engine="sim", slots=1024, step_ms=1, each_token=each_token, fixed_length=True) as pool,
            client(pool, pool.urls, tokens, cap=256) as (load, dispatcher),
        ):
            load.at_once(500)
            for _burst in range(5):
                before = dispatcher.cpu_s()
                table = load.at_once(2000)
                values.append(1e3 * (dispatcher.cpu_s() - before) / 2000)
                assert not table["failed"].any()
        how = f"{tokens} tokens, {'each on its own' if each_token else 'the first and the rest'}"
        print(
            f"cpu         {statistics.median(values):.3f} ms of CPU per streamed query, {how} ({min(values):.3f} to {max(values):.3f}, "
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
    from benchlib.workloads.llm import articles

    sim, good = options.engine == "sim", True
    rate, count, max_new = (80.0, 200, 16) if sim else (12.0, 64, 32)
    asked = prompts(count) if sim else articles.load("mininews", "", count, 0, "tiny").prompts
    config = InferenceConfig(samples=count, min_queries=count, min_duration_s=0.1, server_qps=rate, expected_qps=rate)
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
                settings = Settings(urls=urls, token=pool.token, policy=Policy(cap=16))
                scenario, folder = "Offline" if name == "accuracy" else name, Path(place) / f"{case}-{name}"
                test = plan(name, scenario, "http", settings, config, asked, max_new, folder)
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
KILLED_S = 0.2  # after LoadGen began, and then as soon as the worker has a query


def plan(
    name: str,
    scenario: str,
    engine: str,
    settings: Settings,
    config: InferenceConfig,
    asked: list[list[int]],
    max_new: int,
    folder: Path,
) -> loadgen.Test:
    """Return a LoadGen test."""
    warm_up = [] if engine in (NULL, BARE, "http") else asked[:2]
    return loadgen.Test(
        name, "AccuracyOnly" if name == "accuracy" else "PerformanceOnly", engine, settings,
        config.load(len(asked)).conf(scenario), asked, warm_up, max_new, folder, 60.0, 120.0,
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
    while thread.is_alive() and not _has_queries(pool.urls[0]):
        time.sleep(0.002)
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


def _has_queries(url: str) -> bool:
    with urllib.request.urlopen(f"{url}/health", timeout=10) as answer:
        return bool(json.load(answer)["open"])


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


PARTS = {"callbacks": callbacks, "first": first, "cpu": cpu, "scaling": scaling, "kill": kill, "peer": peer}


def main() -> None:
    """Run the parts; exit with 1 where one misses its limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="only these [all]")
    parser.add_argument("--engine", default="sim", help="kill: engine of the workers")
    parser.add_argument("--rounds", type=int, default=3, help="callbacks, first, scaling, peer: repetitions")
    parser.add_argument(
        "--shrink", type=int, default=16, help="first: divides the shape of the random model; 0: without it"
    )
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
