"""What serving itself costs, and what continuous batching gains over static batches.

callbacks  queries/s of an engine that computes nothing, in LoadGen's Offline, through our callbacks (at least 100,000) and through
           LoadGen's binding alone, whose callback completes each query and records nothing
first      continuous batching's share of static batches' median time to the first token at 10 queries/s (at most 0.3)
cpu        CPU of the dispatcher per streamed query of 5 tokens in bursts (at most 0.3 ms)
scaling    efficiency of two (at least 0.95) and four workers (at least 0.88) at equal concurrency per worker

Method: what is compared is interleaved; a figure is the median over the rounds. Each LoadGen test is a process; workers are processes
on loopback. ``sim`` computes nothing, so what is left is client, network and dispatcher. The dispatcher's CPU is that of its thread.

``first`` is judged with answers of 128 tokens, MLPerf's limit: an answer of its set has 8,167,644 / 13,368 = 611 characters, about
128 tokens. A query that arrives while a static batch is computed waits for its end, so the gain grows with the length of answers.
The embedded model's own answers (15 tokens) and random weights at the shape of Llama-3.1-8B divided by ``--shrink`` stand beside it
and are not judged. Where an engine cannot keep up, its queue grows; the rate that it reached is printed.

    python scripts/bench_inference.py                 # all parts
    python scripts/bench_inference.py cpu scaling
"""

import argparse
import array
import gc
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from measuring import interleaved, machine, options_of, spread

from benchlib.benchmarks.inference import loadgen
from benchlib.benchmarks.inference.config import RANDOM_MODEL, InferenceConfig
from benchlib.core.stats import percentile
from benchlib.workloads.llm.dispatch import Dispatcher
from benchlib.workloads.llm.engines import ENGINES, Policy, Query, Settings, Sim
from benchlib.workloads.llm.load import Client, completed, each_s, measure, span_s
from benchlib.workloads.llm.server import Pool

NULL, BARE = "null", "bare"  # engines that answer at once
ANSWER = [1, 2]
MIN_PER_S, CALLS = 100_000, 100_000  # queries/s through the callbacks, and how many are sent
MAX_SHARE, ANSWER_TOKENS = 0.3, 128  # of static batches' time to the first token; MLPerf's limit of an answer
MAX_CPU_MS = 0.3
MIN_EFFICIENCY = {2: 0.95, 4: 0.88}  # by workers
PROMPT_TOKENS = 100


class Null(Sim):
    """Answers at once."""

    def submit(self, query: Query) -> None:
        query.on_done(query.rid, ANSWER, "")


class Bare(loadgen.Sut):
    """Completes queries in the callback itself and records nothing: LoadGen and its binding alone."""

    def issue(self, ids: Sequence[int], samples: Sequence[int]) -> None:
        data = array.array("i", ANSWER)
        address, count = data.buffer_info()
        complete, response = self.lg.QuerySamplesComplete, self.lg.QuerySampleResponse
        for rid in ids:
            complete([response(rid, address, count * data.itemsize, count)])


class BareNull(Null):
    """``Null`` with ``Bare`` callbacks, which it sets in the process of the test."""

    def start(self) -> None:
        loadgen.Sut = Bare  # type: ignore[misc]


ENGINES[NULL] = "bench_inference:Null"
ENGINES[BARE] = "bench_inference:BareNull"  # LoadGen's binding alone


def run(
    engine: str, scenario: str, config: InferenceConfig, prompts: list[list[int]], folder: Path, fixed: bool = False
) -> loadgen.Outcome:
    """One LoadGen test; ``fixed``: every answer has ``max_new`` tokens."""
    settings = Settings(model=config.model, shrink=config.shrink, fixed_length=fixed, slots=config.slots, threads=1)
    config = config.model_copy(update={"samples": len(prompts), "engine": engine})
    warm_up = [] if engine in (NULL, BARE) else prompts[:2]
    test = loadgen.Test(scenario, config, settings, prompts, warm_up, folder, 120.0)
    return loadgen.perform(test, lambda _: None)


def callbacks(options: argparse.Namespace) -> bool:
    config = InferenceConfig(samples=1000, min_queries=CALLS, min_duration_s=0.1, expected_qps=CALLS)
    rates: dict[str, list[float]] = {NULL: [], BARE: []}
    for engine in interleaved(list(rates), options.rounds):
        with tempfile.TemporaryDirectory() as folder:
            log = run(engine, "Offline", config, [[1, 2, 3]] * 1000, Path(folder) / engine).log
        assert not log["num_errors"], log["errors"]
        rates[engine].append(float(log["result_samples_per_second"]))
    print(f"callbacks   {spread(rates[NULL], ',.0f')} queries/s; the bare binding {spread(rates[BARE], ',.0f')}")
    return statistics.median(rates[NULL]) >= MIN_PER_S


def first(options: argparse.Namespace) -> bool:
    common = {"samples": 60, "min_queries": 60, "server_qps": 10, "min_duration_s": 0.1}
    share = first_token_share(InferenceConfig(**common, max_new=ANSWER_TOKENS), options.rounds, True)
    first_token_share(InferenceConfig(**common), options.rounds, False)
    if options.shrink:
        random = {"model": RANDOM_MODEL, "shrink": options.shrink, "max_new": ANSWER_TOKENS}
        first_token_share(InferenceConfig(**common, **random), options.rounds, True)
    return share <= MAX_SHARE


def first_token_share(config: InferenceConfig, rounds: int, fixed: bool) -> float:
    from benchlib.workloads.llm import articles  # imports transformers, which the other parts do not need

    prompts = articles.load("mininews", "", config.samples, 0, config.model, config.vocabulary).prompts
    medians_s: dict[str, list[float]] = {"static": [], "continuous": []}
    rates: dict[str, list[float]] = {"static": [], "continuous": []}
    for engine in interleaved(list(medians_s), rounds):
        with tempfile.TemporaryDirectory() as folder:
            done = completed(run(engine, "Server", config, prompts, Path(folder) / engine, fixed).table)
        medians_s[engine].append(percentile(each_s(done)["ttft"], 0.5))
        rates[engine].append(len(done) / span_s(done))
    shares = [a / b for a, b in zip(medians_s["continuous"], medians_s["static"], strict=True)]
    print(f"first       {config.model}, {np.median(done['tokens']):.0f} tokens: share {spread(shares)}")
    for engine, seconds in medians_s.items():
        print(
            f"            {engine}: {1e3 * statistics.median(seconds):.1f} ms at {spread(rates[engine], '.1f')} queries/s"
        )
    return statistics.median(shares)


@contextmanager
def workers(count: int, **options: Any) -> Iterator[Pool]:
    with tempfile.TemporaryDirectory() as folder, Pool(Path(folder), [options] * count) as pool:
        yield pool


@contextmanager
def client(pool: Pool, urls: Sequence[str], max_new: int, cap: int) -> Iterator[tuple[Client, Dispatcher]]:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 500, PROMPT_TOKENS).tolist() for _ in range(256)]
    dispatcher = Dispatcher(Settings(urls=tuple(urls), token=pool.token, policy=Policy(cap=cap)))
    dispatcher.start()
    gc.freeze()
    try:
        yield Client(dispatcher, prompts, max_new, 30), dispatcher
    finally:
        dispatcher.stop()


def cpu(options: argparse.Namespace) -> bool:
    """In bursts of 2,000 queries of 5 tokens: the first, and those after it together."""
    cpu_ms = []
    with (
        workers(1, engine="sim", slots=1024, step_ms=1, fixed_length=True) as pool,
        client(pool, pool.urls, 5, cap=256) as (load, dispatcher),
    ):
        load.at_once(500)
        for _burst in range(5):
            before = dispatcher.cpu_s()
            assert not load.at_once(2000)["failed"].any()
            cpu_ms.append(1e3 * (dispatcher.cpu_s() - before) / 2000)
    print(f"cpu         {spread(cpu_ms, '.3f')} ms of CPU per streamed query", flush=True)
    return statistics.median(cpu_ms) <= MAX_CPU_MS


def scaling(options: argparse.Namespace) -> bool:
    """With steps of 10 ms."""
    efficiency: dict[int, list[float]] = {2: [], 4: []}
    with workers(4, engine="sim", slots=4, step_ms=10, fixed_length=True) as pool:

        def rate(urls: Sequence[str]) -> float:
            with client(pool, urls, 32, cap=8) as (load, _):
                return float(measure(load.at_once(60 * len(urls)), {}, 0.99)["samples_per_s"])

        for _ in range(options.rounds):
            alone = [rate([url]) for url in pool.urls]
            for size, values in efficiency.items():
                values.append(rate(pool.urls[:size]) / sum(alone[:size]))
    for size, values in efficiency.items():
        print(f"scaling     {size} workers: {spread(values, '.3f')} of the sum of each alone")
    return all(statistics.median(values) >= MIN_EFFICIENCY[size] for size, values in efficiency.items())


PARTS = {"callbacks": callbacks, "first": first, "cpu": cpu, "scaling": scaling}


def main() -> None:
    """Exit with 1 where a part misses its limit."""
    parser = options_of(__doc__)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="only these [all]")
    parser.add_argument("--rounds", type=int, default=3, help="callbacks, first, scaling: repetitions [3]")
    parser.add_argument("--shrink", type=int, default=16, help="first: divisor of the random model's shape; 0: none")
    options = parser.parse_args()
    print(machine(), flush=True)
    missed = [name for name in options.parts or PARTS if not PARTS[name](options)]
    print(f"missed: {', '.join(missed)}" if missed else "all within their limits")
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
