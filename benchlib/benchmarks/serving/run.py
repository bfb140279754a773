"""The serving benchmark: one process that sends queries to workers, started here or elsewhere, and never loads torch.

First rates at equal concurrency per worker: each alone, all together, in turns. Then load: closed loops, and open loops at
rising rates until a limit is missed. Last a worker is killed and started again while queries are under way.
"""

import contextlib
import itertools
import signal
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchlib.benchmarks.serving.bench import Bench, Row
from benchlib.benchmarks.serving.config import ServingConfig
from benchlib.benchmarks.serving.metrics import facts, metrics, predict, series
from benchlib.config import addresses
from benchlib.core.events import EventWriter, Moment
from benchlib.core.imports import loaded
from benchlib.core.machine import BACKENDS
from benchlib.results.run import Result, save_result
from benchlib.workloads.llm import queries
from benchlib.workloads.llm.dispatch import Dispatcher, in_flight, losses
from benchlib.workloads.llm.engines import MEMORY
from benchlib.workloads.llm.load import find_knee, measure, schedule
from benchlib.workloads.llm.pool import Pool

VOCABULARY = (3, 500)  # token ids of random prompts: every tokenizer has them
CPU = "process_cpu_seconds_total"  # of a worker's /metrics
KILLED_AT = 0.25  # of the expected time of that many queries: when a worker is killed


def run(config: ServingConfig, run_dir: Path, events: EventWriter) -> None:
    """Measure; leaves ``result.json`` and ``samples.parquet``."""
    began = Moment.at(psutil.Process().create_time())
    at_work = f"waiting for {', '.join(config.workers)}" if config.workers else "starting the workers"
    events.emit("phase", name="init", text=at_work)
    with contextlib.ExitStack() as stack:
        bench = _prepare(config, run_dir, events, stack)
        with bench.client(bench.urls) as client:  # names of services become addresses; nobody is measured cold
            assert isinstance(client.engine, Dispatcher)
            bench.urls = [worker.url for worker in client.engine.workers]
            bench.engines = [str(worker.says.get("engine") or "") for worker in client.engine.workers]
            client.at_once(2 * len(bench.urls))
        loaded()
        startup_s = began.since()
        events.emit("phase", name="measure", text="rates of the workers")
        _rates(bench)
        if config.mode != "single":
            events.emit("phase", name="load", text="raising the load")
            _load(bench)
            if config.recovery and bench.pool and len(bench.urls) > 1:
                events.emit("phase", name="recovery", text="killing a worker")
                _recovery(bench, bench.pool)
    events.emit("phase", name="write")
    result = Result.of(
        config, status="complete", started_at=began.wall, ended_at=began.wall + began.since(),
        metrics=metrics(bench, startup_s, began.since()), facts=facts(bench), tables=series(bench),
    )  # fmt: skip
    save_result(run_dir, result)


def _prepare(config: ServingConfig, run_dir: Path, events: EventWriter, stack: contextlib.ExitStack) -> Bench:
    """Start the workers, or take those that are named, and make the prompts."""
    rng = np.random.default_rng(config.seed)
    lengths = rng.integers(max(1, config.prompt_tokens // 2), config.prompt_tokens + config.prompt_tokens // 2 + 1, 256)
    prompts = [rng.integers(*VOCABULARY, length).tolist() for length in lengths]
    if config.workers:
        return Bench(config, events, list(config.workers), addresses.bearer_token(), prompts)
    steps = [ms * (1 + config.planted_slowdown) for ms in config.sim_step_ms]
    options: dict[str, Any] = {name: getattr(config, name) for name in ("engine", "model", "precision")}
    options |= {"slots": config.worker_slots, "device": BACKENDS[config.backend].device_type}
    each = [options | {"step_ms": steps[index % len(steps)]} for index in range(config.worker_count)]
    pool = stack.enter_context(Pool(run_dir / "logs" / "workers", each, config.startup_timeout_s))
    return Bench(config, events, list(pool.urls), pool.token, prompts, pool)


def _rates(bench: Bench) -> None:
    """Measure each worker alone and all together, in turns: what the machine does meanwhile touches all alike.

    What a joint run will take is predicted before it, from the rates of each worker alone. ``mode=distributed`` measures nobody
    alone: there the rates are those that each had in the joint run before, the first of which counts for nothing else.
    """
    config, count = bench.config, len(bench.urls)
    bench.alone = [[] for _ in bench.urls]
    bench.says = [{} for _ in bench.urls]
    groups = [2**power for power in range(1, 10) if 2**power < count] if config.mode == "both" else []
    warm = config.mode == "distributed" and count > 1
    joint = (len(groups) + 1 + (count > 1)) * (config.mode != "single")
    total = config.rounds * (count * (config.mode != "distributed") + joint) + warm
    numbers = itertools.count(1)

    def run(urls: list[str], weighted: bool = True) -> Row:
        row = _at_once(bench, urls, weighted)
        bench.events.emit("progress", phase="measure", done=next(numbers), total=total, unit="runs")
        return row

    before = run(bench.urls) if warm else {}
    for _ in range(config.rounds):
        if config.mode != "distributed":
            for index, url in enumerate(bench.urls):
                bench.alone[index].append(run([url])["samples_per_s"])
        if config.mode != "single" and count > 1:  # said before anybody knows
            own = before["each_per_s"] if warm else [rates[-1] for rates in bench.alone]
            bench.predicted.append(predict(own, config.queries * count) if all(own) else {})
            bench.events.emit("prediction", round=len(bench.predicted), splits=bench.predicted[-1])
        if config.mode != "single":
            for size in groups:
                bench.groups.setdefault(size, []).append(run(bench.urls[:size])["samples_per_s"])
            bench.together.append(before := run(bench.urls))
            if count > 1:
                bench.equal.append(run(bench.urls, weighted=False))


def _at_once(bench: Bench, urls: list[str], weighted: bool = True) -> Row:
    """Send as many queries per worker as the config says, all at once, and return what came of it.

    The prompts are the same for each worker alone as for all together, where they come as often as there are workers: answers
    differ in length, and a joint run of other prompts would be other work.
    """
    with bench.client(urls, weighted) as client:
        client.prompts = bench.prompts[: bench.config.queries]
        dispatcher = client.engine
        assert isinstance(dispatcher, Dispatcher)
        before, cpu = dispatcher.counters(), dispatcher.cpu_s()
        table = bench.count(client, client.at_once(bench.config.queries * len(urls)))
        cpu = dispatcher.cpu_s() - cpu
        after = dispatcher.counters()
        row = measure(table, bench.config.limits_s, bench.config.percentile / 100, client.log.repeated)
        done = queries.completed(table)
        for url, first, last in zip(urls, before, after, strict=True):
            says = {name: last.get(theirs) for name, theirs in MEMORY.items()}
            if CPU in first and CPU in last:
                says["cpu_share"] = (last[CPU] - first[CPU]) / client.wall_s
            bench.says[bench.urls.index(url)] = says
        bench.cpu_ms.append(1e3 * cpu / len(table))
        row["given"] = [int((done["worker"] == worker.index).sum()) for worker in dispatcher.workers]
        ends = [done["last_s"][done["worker"] == worker.index] for worker in dispatcher.workers]
        start = float(queries.start_s(table).min())
        row["end_s"] = [float(end.max()) - start if len(end) else 0.0 for end in ends]
        both = zip(row["given"], row["end_s"], strict=True)
        row["each_per_s"] = [count / end_s if count else 0.0 for count, end_s in both]
        row["idle_slot_s"] = [worker.idle_slot_s for worker in dispatcher.workers]
        return row


def _load(bench: Bench) -> None:
    """Closed loops, then open loops up to the knee."""
    config = bench.config
    capacity = statistics.median(row["samples_per_s"] for row in bench.together)
    with bench.client(bench.urls) as client:
        for concurrency in config.concurrencies:
            count = max(8, 2 * concurrency, round(config.queries * concurrency / config.concurrency))
            table = bench.count(client, client.closed_loop(concurrency, count))
            row = measure(table, config.limits_s, config.percentile / 100, client.log.repeated)
            bench.closed.append({"concurrency": concurrency, **row})
        number = 0

        def probe(rate: float, count: int) -> Row:
            nonlocal number
            number += 1
            due = schedule(config.arrivals, rate, count, config.seed + number)
            table = bench.count(client, client.open_loop(due))
            bench.knee_samples = queries.times_s(queries.completed(table))
            bench.events.emit("progress", phase="load", done=number, total=max(number, most), unit="rates")
            return measure(table, config.limits_s, config.percentile / 100, client.log.repeated)

        most = len(config.loads) + config.refine + 1  # and more where a rate has to be sent again
        rates, size = [share * capacity for share in config.loads], lambda rate: max(10, round(rate * config.point_s))
        bench.sweep, bench.knee = find_knee(probe, rates, size, refine=config.refine)


def _recovery(bench: Bench, pool: Pool) -> None:
    """Kill a worker while queries are under way, start it again, and compare the answers with an undisturbed run's.

    The queries are sent from another thread: workers live as long as the thread that starts them.
    """
    count = bench.config.queries * len(bench.urls)
    rate = statistics.median(row["samples_per_s"] for row in bench.together)
    longer = max(2 * count, round(1.5 * rate * pool.ready_s[0]))  # so that the worker is back before the end
    with bench.client(bench.urls) as client:
        dispatcher = client.engine
        assert isinstance(dispatcher, Dispatcher)
        bench.count(client, client.at_once(count))
        undisturbed, before = client.answers, len(dispatcher.attempts)
        tables: list[np.ndarray] = []
        sending = threading.Thread(target=lambda: tables.append(client.at_once(longer)))
        began = time.monotonic()
        sending.start()
        time.sleep(KILLED_AT * count / rate)
        pool.signal(0, signal.SIGKILL)
        killed_s = time.monotonic() - began
        pool.start(0)
        pool.wait(0)
        back_s = time.monotonic() - began
        sending.join()
        table = bench.count(client, tables[0])
        attempts = dispatcher.attempts[before:]
        same = sum(client.answers.get(sample) == ids for sample, ids in undisturbed.items())
        bench.recovery = {
            "queries": len(table), "failed": int(table["failed"].sum()), "repeated": client.log.repeated,
            "requeued": sum(row["outcome"] != "ok" for row in attempts), "answers": len(undisturbed), "same_answers": same,
            "killed_s": killed_s, "back_s": back_s, "end_s": float(np.nanmax(table["last_s"])) - began,
            "after_return": sum(row["worker"] == 0 and row["sent_s"] - began > back_s for row in attempts),
        }  # fmt: skip
        bench.losses = losses(dispatcher.events, attempts, began)
        bench.inflight = in_flight(attempts, len(bench.urls), began)
