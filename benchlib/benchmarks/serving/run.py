"""The serving benchmark: one process that sends queries to workers, started here or elsewhere, and never loads torch.

First rates at equal concurrency per worker: each alone, all together, interleaved. Then load: closed loops, and open loops at
rising rates until a limit is missed. Last a worker is killed and started again while queries are under way.
"""

import contextlib
import gc
import itertools
import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import psutil

from benchlib.benchmarks.serving.config import ServingConfig
from benchlib.benchmarks.serving.spec import SPEC
from benchlib.config import addresses
from benchlib.core.errors import BackendUnavailable
from benchlib.core.events import EventWriter, Moment, keep_alive
from benchlib.core.files import atomic_path, write_json
from benchlib.core.machine import BACKENDS
from benchlib.core.stats import average
from benchlib.core.text import counted
from benchlib.results.run import Run
from benchlib.workloads.llm import served
from benchlib.workloads.llm.dispatch import Dispatcher
from benchlib.workloads.llm.engines import Policy, Settings
from benchlib.workloads.llm.load import Client, find_knee, measure, schedule
from benchlib.workloads.llm.server import Pool

VOCABULARY = (3, 500)  # token ids of random prompts: every tokenizer has them
CPU = "process_cpu_seconds_total"  # of a worker's /metrics
NOTHING = "no query was completed in one of the rounds"
KILLED_AT = 0.25  # of the expected time of that many queries: when a worker is killed
Row = dict[str, Any]


@dataclass
class Bench:
    """What a run has so far: its tables, and in ``sums`` what is counted over all of it."""

    config: ServingConfig
    events: EventWriter
    urls: list[str]
    token: str
    prompts: list[list[int]]
    pool: Pool | None = None
    tables: dict[str, list[Row]] = field(default_factory=lambda: {table.name: [] for table in SPEC.tables})
    sums: Counter[str] = field(default_factory=Counter)
    errors: dict[str, None] = field(default_factory=dict)
    cpu_ms: list[float] = field(default_factory=list)
    numbers: dict[str, int] = field(default_factory=dict)  # of all workers, by address: a lost one keeps its number
    queries: list[pd.DataFrame] = field(default_factory=list)  # raw samples, with the name of their measurement

    @property
    def rate(self) -> float:
        """The joint rate of all workers in queries/s: all queries over all time. Raises ``BackendUnavailable`` if none was completed."""
        if not (rates := self.tables["scaling"][-1]["samples_per_s"]):
            raise BackendUnavailable(f"{NOTHING}: there is no rate to raise the load from")
        return average(rates, "harmonic")

    @contextlib.contextmanager
    def client(self, urls: list[str], start_s: float = 0.0) -> Iterator[tuple[Client, Dispatcher]]:
        """Open a dispatcher to some workers, and a client that drives it.

        A worker that was there before has ``gone_s`` to answer; one that does not is not asked again.
        """
        config = self.config
        limits_s, start_s = (config.deadline_s, config.stall_s, config.gone_s), start_s or config.gone_s
        policy = Policy(config.concurrency, *limits_s, start_s=start_s, partial=True)
        dispatcher = Dispatcher(Settings(model=config.model, urls=tuple(urls), token=self.token, policy=policy))
        try:
            with keep_alive(self.events, start_s):
                dispatcher.start()
        except BackendUnavailable:
            self.note_losses(dispatcher, time.monotonic())
            raise
        finally:
            gone = [worker.url for worker in dispatcher.workers if not worker.ready]
            self.urls = [url for url in self.urls if url not in gone]
        beat, limit_s, began_s = partial(self.events.emit, "heartbeat"), config.deadline_s + 1, time.monotonic()
        try:
            yield Client(dispatcher, self.prompts, config.max_new, limit_s, beat), dispatcher
        finally:
            self.sums.update(dispatcher.counts)
            self.note_losses(dispatcher, began_s)
            dispatcher.stop()

    def numbers_of(self, dispatcher: Dispatcher) -> list[int]:
        """Return the numbers of a dispatcher's workers in its order, which is that of the workers that it got."""
        return [self.numbers.setdefault(worker.url, len(self.numbers)) for worker in dispatcher.workers]

    def note_losses(self, dispatcher: Dispatcher, began_s: float) -> None:
        """Add the losses of a dispatcher to the table, by the workers' numbers in this run; a run kills its own workers."""
        numbers = self.numbers_of(dispatcher)
        for row in dispatcher.losses(began_s):
            self.tables["losses"].append(row | {"worker": numbers[row["worker"]]})
            if row["event"] == "down" and not self.pool:
                self.events.emit("log", message=f"worker {numbers[row['worker']]} is lost: {row['because']}")

    def measure(self, client: Client, table: np.ndarray, name: str) -> Row:
        """Return the row of a measurement, add it to the sums and keep its raw samples under ``name``."""
        numbers = [*self.numbers_of(client.engine), -1]  # a query that was not sent has the worker -1
        own = [numbers[index] for index in table["worker"]]
        self.queries.append(pd.DataFrame(table).assign(worker=own, measurement=name))
        row = measure(table, self.config.limits_s, self.config.percentile / 100, client.log.repeated)
        self.sums.update(issued=len(table), failed=row["failed"], repeated=row["repeated"])
        self.errors |= dict.fromkeys(client.log.errors.values())
        return row


def run(config: ServingConfig, run_dir: Path, events: EventWriter) -> None:
    """Measure as the only rank, without a process group; leaves ``result.json`` and ``samples.parquet``."""
    began = Moment.at(psutil.Process().create_time())
    text = f"waiting for {', '.join(config.workers)}" if config.workers else "starting the workers"
    events.emit("phase", name="init", text=text)
    with contextlib.ExitStack() as stack:
        bench = _prepare(config, run_dir, events, stack)
        # Names become addresses; nobody is measured cold.
        with bench.client(bench.urls, config.startup_timeout_s) as (client, dispatcher):
            bench.urls = [worker.url for worker in dispatcher.workers if worker.ready]
            for note in dict.fromkeys(worker.note for worker in dispatcher.workers if worker.note):
                events.emit("log", message=note)
            simulated = any(worker.engine == "sim" for worker in dispatcher.workers)
            client.at_once(2 * len(bench.urls))
        gc.freeze()  # what is loaded stays for good: collections look at queries alone, and seldom
        gc.set_threshold(50_000, 20, 20)
        startup_s = began.since()
        events.emit("phase", name="measure", text="rates of the workers")
        _rates(bench)
        if config.mode != "single" and bench.urls:
            events.emit("phase", name="load", text="raising the load")
            try:
                _load(bench)
                if config.recovery and bench.pool and len(bench.urls) == config.worker_count > 1:
                    events.emit("phase", name="recovery", text="killing a worker")
                    _recovery(bench, bench.pool)
            except BackendUnavailable as error:  # the rates stay
                bench.errors[str(error)] = None
    events.emit("phase", name="write")
    pool, counts = bench.pool, served.counts(bench.sums)
    facts: Row = {**bench.sums} | {
        "startup_s": startup_s,
        "scope": "sim" if simulated else "random_prompts",
        "errors": "; ".join([*bench.errors][:2]),
        "dispatcher_cpu_ms": bench.cpu_ms,
        "project_samples": config.project_samples,
        "worker_startup_s": pool.ready_s if pool else [],
        # Own workers share what this process has; others are machines of their own, of which this one knows no more.
        "paid_devices": None if pool else len(bench.tables["workers"]),
        "why": counts.get("why", {})
        | ({"paid_devices": "they share this machine"} if pool else {"worker_startup_s": "they were there before"}),
    }
    _write_workers(bench, run_dir / "workers", began.monotonic)
    SPEC.save(config, run_dir, began, bench.tables | {"run": [facts | {"total_s": began.since()}]})


def _write_workers(bench: Bench, folder: Path, began_s: float) -> None:
    """Write a folder for each worker: ``worker.json``, its row and its losses, and ``queries.parquet``, a row per query.

    The times of queries are seconds since ``began_s``, the start of the run; ``measurement`` names what they belong to.
    """
    rows, queries = {row["worker"]: row for row in bench.tables["workers"]}, pd.concat(bench.queries)
    queries[["scheduled_s", "issued_s", "first_s", "last_s"]] -= began_s
    for url, number in bench.numbers.items():
        place = folder / f"worker-{number}"
        place.mkdir(parents=True, exist_ok=True)
        with atomic_path(place / "queries.parquet") as temporary:
            queries[queries["worker"] == number].to_parquet(temporary, index=False)
        losses = [row for row in bench.tables["losses"] if row["worker"] == number]
        write_json(place / "worker.json", {"worker": number, "url": url} | rows.get(number, {}) | {"losses": losses})


def _prepare(config: ServingConfig, run_dir: Path, events: EventWriter, stack: contextlib.ExitStack) -> Bench:
    """Start the workers, or take those that are named, and make the prompts."""
    rng = np.random.default_rng(config.seed)
    lengths = rng.integers(max(1, config.prompt_tokens // 2), config.prompt_tokens + config.prompt_tokens // 2 + 1, 256)
    prompts = [rng.integers(*VOCABULARY, length).tolist() for length in lengths]
    if config.workers:
        return Bench(config, events, list(config.workers), addresses.bearer_token(), prompts)
    steps = [ms * (1 + config.planted_slowdown) for ms in config.sim_step_ms]
    options = config.model_dump(include={"engine", "model", "precision"})
    options["slots"] = config.worker_slots
    places = spread(config, Run(run_dir).machine, events)
    each = [options | {"step_ms": steps[index % len(steps)], "device": place} for index, place in enumerate(places)]
    pool = stack.enter_context(Pool(run_dir / "logs" / "workers", each, config.startup_timeout_s))
    return Bench(config, events, list(pool.urls), pool.token, prompts, pool)


def spread(config: ServingConfig, machine: Mapping[str, Any], events: EventWriter) -> list[str]:
    """Return the device of each worker here, in turn over those of the ``machine``; say so if several have to share one."""
    kind = BACKENDS[config.backend].device_type
    count = machine.get("devices", {}).get("backends", {}).get(config.backend, {}).get("count", 1)
    if kind == "cpu" or config.engine == "sim":
        return [kind] * config.worker_count
    if config.worker_count > count:
        shared = f"{config.worker_count} workers share {counted(count, 'device')}, up to {math.ceil(config.worker_count / count)} on one"
        events.emit("log", message=f"{shared}: their rates together say nothing of more devices")
    return [f"{kind}:{index % count}" if count > 1 else kind for index in range(config.worker_count)]


def _rates(bench: Bench) -> None:
    """Measure each worker alone and all together, interleaved: what the machine does meanwhile touches all alike.

    Without a worker that is lost meanwhile all of it is measured again; where none is left, whole rounds stay.
    """
    config, count = bench.config, len(bench.urls)
    numbers = [bench.numbers.setdefault(url, len(bench.numbers)) for url in bench.urls]
    workers: list[Row] = [
        {"worker": number, "url": url, "answered": 0} for number, url in zip(numbers, bench.urls, strict=True)
    ]
    sizes = [2**power for power in range(1, 10) if 2**power < count] if config.mode == "both" else []
    alone = [(index,) for index in range(count)] if config.mode != "distributed" else []
    joint = [tuple(range(size)) for size in (*sizes, count)] if config.mode != "single" else []
    # One worker is not compared with itself: alone and all together are then the same key.
    runs: dict[tuple[int, ...], list[Row]] = {indices: [] for indices in (*alone, *joint)}
    order = [*runs] * config.rounds
    for number, indices in enumerate(order, 1):
        try:
            runs[indices].append(_at_once(bench, [workers[index] for index in indices]))
        except BackendUnavailable as error:
            if bench.urls:
                _rates(bench)
                return
            if not (whole := min(map(len, runs.values()))):
                raise
            bench.errors[str(error)] = None  # nobody is left: the rounds that are whole stay
            runs = {indices: rows[:whole] for indices, rows in runs.items()}
            break
        bench.events.emit("progress", phase="measure", done=number, total=len(order), unit="runs")
    rates = [_rounds(runs[indices], "samples_per_s") for indices in alone]
    unmeasured = NOTHING if rates else "mode = distributed measures nobody alone"
    for index, worker in enumerate(workers):
        worker["alone_per_s"] = rates[index] if rates else []
        worker["why"] |= {} if worker["alone_per_s"] else {"alone_per_s": unmeasured}
    bench.tables["workers"] = workers
    for size in range(1, count + 1):
        if rows := runs.get(tuple(range(size))):
            row: Row = {name: _rounds(rows, name) for name in ("samples_per_s", "tokens_per_s")}
            known = count > 1 and all(rates[:size])
            row["sum_per_s"] = [sum(values) for values in zip(*rates[:size], strict=True)] if known else []
            why = dict.fromkeys((name for name, values in row.items() if not values), NOTHING)
            if "sum_per_s" in why:
                why["sum_per_s"] = unmeasured if count > 1 else "one worker: there is nothing to add up"
            bench.tables["scaling"].append(row | {"size": size, "all": size == count, "why": why})


def _rounds(rows: list[Row], name: str) -> list[float]:
    """Return the rates of all rounds; none if a round completed no query, which has no rate to compare."""
    rates = [row[name] for row in rows]
    return rates if all(rates) else []


def _at_once(bench: Bench, workers: list[Row]) -> Row:
    """Send as many queries per worker as the config says, all at once, and return what came of it.

    The prompts are the same for each worker alone as for all together, where they come as often as there are workers: answers
    differ in length, and a joint run of other prompts would be other work.
    """
    with bench.client([worker["url"] for worker in workers]) as (client, dispatcher):
        if lost := [worker for worker in dispatcher.workers if not worker.ready]:
            raise BackendUnavailable(lost[0].reason)
        client.prompts = bench.prompts[: bench.config.queries]
        before, cpu = dispatcher.counters(), dispatcher.cpu_s()
        numbers = [worker["worker"] for worker in workers]
        name = f"alone {numbers[0]}" if len(numbers) == 1 else f"together {' '.join(map(str, numbers))}"
        row = bench.measure(client, table := client.at_once(bench.config.queries * len(workers)), name)
        bench.cpu_ms.append(1e3 * (dispatcher.cpu_s() - cpu) / len(table))
        for worker, of, first, last in zip(workers, dispatcher.workers, before, dispatcher.counters(), strict=True):
            worker |= of.row(last)
            worker["answered"] += int((table["worker"] == of.index).sum()) if len(workers) > 1 else 0
            stated = CPU in first and CPU in last
            worker["cpu_share"] = (last[CPU] - first[CPU]) / client.wall_s if stated else None
            worker["why"] |= {} if stated else {"cpu_share": "the worker does not state it in its /metrics"}
    return row


def _load(bench: Bench) -> None:
    """Closed loops, then open loops up to the knee."""
    config, loads, number = bench.config, bench.tables["load"], itertools.count(1)
    most = len(config.loads) + config.refine + 1  # and more where a rate has to be sent again
    limits = {"ttft_limit_ms": config.ttft_ms, "tpot_limit_ms": config.tpot_ms, "percentile": config.percentile}
    with bench.client(bench.urls) as (client, _):
        for concurrency in config.concurrencies:
            count = max(8, 2 * concurrency, round(config.queries * concurrency / config.concurrency))
            row = bench.measure(client, client.closed_loop(concurrency, count), f"closed loop {concurrency}")
            row["why"] |= {"rate": "a closed loop has none"}
            loads.append({"phase": "closed", "concurrency": concurrency} | limits | row)

        def probe(rate: float, times: int) -> Row:
            count, place = times * max(10, round(rate * config.point_s)), next(number)
            due = schedule(config.arrivals, rate, count, config.seed + place)
            row = bench.measure(client, client.open_loop(due), f"open loop {rate:.4g}/s")
            bench.events.emit("progress", phase="load", done=place, total=max(place, most), unit="rates")
            row["why"] |= {"concurrency": "an open loop has none"}
            return limits | row

        loads += find_knee(probe, [share * bench.rate for share in config.loads], config.refine)


def _recovery(bench: Bench, pool: Pool) -> None:
    """Kill a worker while queries are under way, start it again, and compare the answers with an undisturbed run's.

    The queries are sent from another thread: workers live as long as the thread that starts them.
    """
    config, count, rate = bench.config, bench.config.queries * len(bench.urls), bench.rate
    longer = max(2 * count, round(1.5 * rate * pool.ready_s[0]))  # so that the worker is back before the end
    with bench.client(bench.urls) as (client, _):
        bench.measure(client, client.at_once(count), "undisturbed")
        undisturbed = client.answers
    with bench.client(bench.urls) as (client, dispatcher):
        began = time.monotonic()
        with ThreadPoolExecutor(1) as sender:
            sending = sender.submit(client.at_once, longer)
            time.sleep(KILLED_AT * count / rate)
            pool.kill(0)
            killed_s = time.monotonic() - began
            pool.start(0)
            pool.wait(0)
            back_s = time.monotonic() - began
        row, record = bench.measure(client, sending.result(), "recovery"), dispatcher.record(began)
    attempts, bench.tables["inflight"] = dispatcher.attempts, record["inflight"]
    recovery: Row = {name: row[name] for name in ("queries", "failed", "repeated")}
    recovery |= {
        "killed_s": killed_s,
        "back_s": back_s,
        "answers": len(undisturbed),
        "requeued": sum(bool(attempt["error"]) for attempt in attempts),
        "same_answers": sum(client.answers.get(sample) == ids for sample, ids in undisturbed.items()),
        # Elsewhere answers depend on the batch that a query is in.
        "exact": config.precision == "fp32" and config.backend == "cpu",
        "after_return": sum(item["worker"] == 0 and item["sent_s"] - began > back_s for item in attempts),
    }
    bench.tables["recovery"].append(recovery)
