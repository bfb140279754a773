"""What the kit's own callbacks cost LoadGen, and what continuous batching gains over static batches.

Questions: how many queries per second does an engine that computes nothing answer under Offline, through our callbacks (at least
100,000), and how many does LoadGen's binding allow, whose callback completes each query with the same two tokens and keeps nothing?
What share of static batches' median time to the first token does continuous batching need at 10 queries/s (at most 0.3)? On the
embedded model with its own answers, with answers of 64 tokens, and on random weights at the shape of Llama-3.1-8B divided by
``--shrink`` with 64.

Method: each figure is a LoadGen test in a process of its own; ours and the bare binding take turns. The two engines take turns, so that both see the same load of
the machine; the share is the median over the rounds. Where an engine cannot keep up with the rate, its queue grows and the
times are those of the queue: the rate that it reached stands beside them. Where static batches are over before the next query
comes (the embedded model, 15 tokens), both wait for little but the prompt itself, and the share has that as its floor. On a shared machine
take ``--realtime``: without it the order of both may turn within minutes.

    python scripts/bench_loadgen.py --rounds 3 --shrink 16
"""

import argparse
import array
import os
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchlib.benchmarks.inference import loadgen, logs, rules
from benchlib.benchmarks.inference.config import RANDOM_MODEL, InferenceConfig
from benchlib.workloads.llm import articles, queries
from benchlib.workloads.llm.engines import ENGINES, Kind, OnDone, OnFirst, Settings

NULL, BARE = "null", "bare"
QUERIES = 100_000
TOKENS = 64
ANSWER = [1, 2]


class Null:
    """Answers at once."""

    def __init__(self, settings: Settings) -> None:
        self.facts: dict[str, object] = {}

    def start(self) -> None:
        """Nothing to load."""

    def stop(self) -> None:
        """Nothing to end."""

    def submit(self, rid: int, ids: object, max_new: int, on_first: OnFirst, on_done: OnDone) -> None:
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


ENGINES[NULL] = Kind("bench_loadgen:Null", "answers at once", torch=False)
ENGINES[BARE] = Kind("bench_loadgen:BareNull", "no engine: LoadGen's binding alone", torch=False)


def plan(
    name: str,
    engine: str,
    scenario: str,
    config: InferenceConfig,
    prompts: list[list[int]],
    folder: Path,
    fixed: bool = False,
) -> loadgen.Test:
    """Return a performance test; ``fixed``: every answer has ``max_new`` tokens."""
    return loadgen.Test(
        name, scenario, rules.model_key(scenario), "PerformanceOnly", engine,
        Settings(model=config.model, shrink=config.shrink, fixed_length=fixed, slots=config.slots),
        rules.user_conf(config, scenario, len(prompts)), rules.expected_settings(config, scenario, len(prompts)), prompts,
        [] if engine in (NULL, BARE) else prompts[:2], [], config.max_new, folder / name, 60.0, 120.0,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("parts", nargs="*", choices=["callbacks", "first", []], help="only these [all]")
    parser.add_argument("--shrink", type=int, default=16, help="divides the shape of the random model; 0: without it")
    parser.add_argument(
        "--realtime", action="store_true", help="run before all other programs (needs root): neighbours do not count"
    )
    options = parser.parse_args()
    if options.realtime:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    parts = options.parts or ["callbacks", "first"]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        if "callbacks" in parts:
            callbacks(options.rounds, folder)
        if "first" not in parts:
            return
        common = {"samples": 60, "min_queries": 60, "server_qps": 10, "min_duration_s": 0.1}
        first_tokens(InferenceConfig(**common), options.rounds, folder)
        first_tokens(InferenceConfig(**common, max_new=TOKENS), options.rounds, folder, fixed=True)
        if options.shrink:
            random = InferenceConfig(**common, model=RANDOM_MODEL, shrink=options.shrink, max_new=TOKENS)
            first_tokens(random, options.rounds, folder, fixed=True)


def callbacks(rounds: int, folder: Path) -> None:
    """Print the rate of an engine that computes nothing through our callbacks and without them, in turns."""
    bulk = InferenceConfig(samples=1000, min_queries=QUERIES, min_duration_s=0.1, expected_qps=QUERIES)
    rates: dict[str, list[float]] = {NULL: [], BARE: []}
    costs: dict[str, list[float]] = {NULL: [], BARE: []}
    for turn in range(rounds):
        for engine in rates:
            test = plan(f"{engine}-{turn}", engine, "Offline", bulk, [[1, 2, 3]] * 1000, folder)
            outcome = loadgen.perform(test, lambda done, rss: None)
            assert not outcome.reason, outcome.reason
            log = logs.detail(test.folder)
            sent = int(log["result_query_count"]) * int(log["generated_samples_per_query"])
            assert not log["num_errors"] and sent >= QUERIES, log["errors"]
            costs[engine].append(1e6 * outcome.facts["driver_cpu_share"] * outcome.facts["seconds"] / sent)
            rates[engine].append(float(log["result_samples_per_second"]))
    for engine, words in ((NULL, "through our callbacks"), (BARE, "bare binding")):
        print(
            f"null engine, Offline, {words}: median {statistics.median(rates[engine]):,.0f} queries/s ("
            + ", ".join(f"{rate:,.0f}" for rate in rates[engine])
            + f"); {statistics.median(costs[engine]):.1f} us of processor time a query ("
            + ", ".join(f"{cost:.1f}" for cost in costs[engine])
            + f"); load {os.getloadavg()[0]:.1f}",
            flush=True,
        )


def first_tokens(config: InferenceConfig, rounds: int, folder: Path, fixed: bool = False) -> None:
    """Print the medians of the time to the first token of both engines, in turns, and continuous batching's share."""
    vocabulary = 128256 // config.shrink if config.random else 0
    prompts = articles.load("mininews", "", config.samples, 0, config.model, vocabulary).prompts
    shares = []
    for turn in range(rounds):
        medians, words = {}, []
        for engine in ("static", "continuous"):
            test = plan(f"{config.model}-{fixed}-{engine}-{turn}", engine, "Server", config, prompts, folder, fixed)
            outcome = loadgen.perform(test, lambda done, rss: None)
            assert outcome.table is not None, outcome.reason
            done = queries.completed(logs.add_schedule(outcome.table, logs.schedule(test.folder)))
            medians[engine] = queries.percentile(queries.ttft_s(done), 0.5)
            rate = len(done) / queries.span_s(done)
            words.append(f"{engine} {1e3 * medians[engine]:.1f} ms at {rate:.1f} queries/s")
        tokens = float(np.median(done["tokens"]))
        size = outcome.facts["engine"]["parameters"] / 1e6
        shares.append(medians["continuous"] / medians["static"])
        print(
            f"first token, {config.model} of {size:.1f} million parameters, {tokens:.0f} tokens: {', '.join(words)}; share {shares[-1]:.2f}; load {os.getloadavg()[0]:.1f}",
            flush=True,
        )
    print(f"median share {statistics.median(shares):.2f}")


if __name__ == "__main__":
    main()
