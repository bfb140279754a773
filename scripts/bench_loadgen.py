"""What the kit's own callbacks cost LoadGen, and what continuous batching gains over static batches.

Questions: how many queries per second does an engine that computes nothing answer under Offline, through our callbacks (at least
100,000)? What share of static batches' median time to the first token does continuous batching need at 10 queries/s (at most
0.3)? On the embedded model, which is too small to queue, and on random weights at the shape of Llama-3.1-8B divided by
``--shrink``, with 64 new tokens each.

Method: each figure is a LoadGen test in a process of its own. The two engines take turns, so that both see the same load of
the machine; the share is the median over the rounds. Where an engine cannot keep up with the rate, its queue grows and the
times are those of the queue: the rate that it reached stands beside them.

    python scripts/bench_loadgen.py --rounds 3 --shrink 16
"""

import argparse
import statistics
import tempfile
from pathlib import Path

from benchlib.benchmarks.inference import loadgen, logs, rules
from benchlib.benchmarks.inference.config import RANDOM_MODEL, InferenceConfig
from benchlib.workloads.llm import articles, queries
from benchlib.workloads.llm.engines import ENGINES, Kind, OnDone, OnFirst, Settings

NULL = "null"
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


ENGINES[NULL] = Kind("bench_loadgen:Null", "answers at once", torch=False)


def test_of(
    name: str, engine: str, scenario: str, config: InferenceConfig, prompts: list[list[int]], folder: Path
) -> loadgen.Test:
    """Return a performance test."""
    return loadgen.Test(
        name, scenario, rules.model_key(scenario), "PerformanceOnly", engine,
        Settings(model=config.model, shrink=config.shrink, fixed_length=config.random, slots=config.slots),
        rules.user_conf(config, scenario, len(prompts)), rules.expected_settings(config, scenario, len(prompts)), prompts,
        [] if engine == NULL else prompts[:2], [], config.max_new, folder / name, 60.0, 120.0,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shrink", type=int, default=16, help="divides the shape of the random model; 0: without it")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        bulk = InferenceConfig(samples=1000, min_queries=100_000, min_duration_s=0.1, expected_qps=100_000)
        rates, costs = [], []
        for turn in range(options.rounds):
            test = test_of(f"null-{turn}", NULL, "Offline", bulk, [[1, 2, 3]] * 1000, folder)
            facts = loadgen.perform(test, lambda done, rss: None).facts
            costs.append(1e6 * facts["driver_cpu_share"] * facts["seconds"] / 100_000)
            rates.append(float(logs.detail(test.folder)["result_samples_per_second"]))
        print(
            "null engine, Offline: "
            + ", ".join(f"{rate:,.0f}" for rate in rates)
            + " queries/s; "
            + ", ".join(f"{cost:.1f}" for cost in costs)
            + " us of processor time a query"
        )
        common = {"samples": 60, "min_queries": 60, "server_qps": 10, "min_duration_s": 0.1}
        first_tokens(InferenceConfig(**common), options.rounds, folder)
        if options.shrink:
            random = InferenceConfig(**common, model=RANDOM_MODEL, shrink=options.shrink, max_new=64)
            first_tokens(random, options.rounds, folder)


def first_tokens(config: InferenceConfig, rounds: int, folder: Path) -> None:
    """Print the medians of the time to the first token of both engines, in turns, and continuous batching's share."""
    vocabulary = 128256 // config.shrink if config.random else 0
    prompts = articles.load("mininews", "", config.samples, 0, config.model, vocabulary).prompts
    shares = []
    for turn in range(rounds):
        medians, words = {}, []
        for engine in ("static", "continuous"):
            test = test_of(f"{config.model}-{engine}-{turn}", engine, "Server", config, prompts, folder)
            outcome = loadgen.perform(test, lambda done, rss: None)
            assert outcome.table is not None, outcome.reason
            done = queries.completed(logs.add_schedule(outcome.table, logs.schedule(test.folder)))
            medians[engine] = queries.percentile(queries.ttft_s(done), 0.5)
            rate = len(done) / queries.span_s(done)
            words.append(f"{engine} {1e3 * medians[engine]:.1f} ms at {rate:.1f} queries/s")
        size = outcome.facts["engine"]["parameters"] / 1e6
        shares.append(medians["continuous"] / medians["static"])
        print(
            f"first token, {config.model} of {size:.1f} million parameters: {', '.join(words)}; share {shares[-1]:.2f}",
            flush=True,
        )
    print(f"median share {statistics.median(shares):.2f}")


if __name__ == "__main__":
    main()
