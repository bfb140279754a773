"""The engine ``http``: sends queries to one or more OpenAI-compatible servers, and loses none with a server that is lost.

An event loop in a thread of its own holds a queue. Each query goes to the worker with a free slot that would be done with it
first, by its tokens per second so far. Whatever goes wrong with an attempt is one case: the query comes back to the front of the
queue, for another worker where there is one, and its worker gets nothing until it answers the next question for its ``/health``.
A query fails, and is counted, at its deadline, when its server refuses it, after ``MAX_ATTEMPTS``, or when no worker was there for
``gone_s``.
"""

import asyncio
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchlib.core.errors import BackendUnavailable
from benchlib.workloads.llm.engines import Query, Settings
from benchlib.workloads.llm.wire import Answer, Job, RefusedQuery, Wire, Worker, addresses

MAX_ATTEMPTS = 8  # of a query: one that ends every worker it meets must not end them all
POINTS = 101  # in time at which the requests in flight are counted
STOPPED = "the dispatcher was stopped"

Row = dict[str, Any]


class Dispatcher:
    """See the module. ``attempts`` and ``events`` are the record; times are those of ``time.monotonic()``."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.policy = settings, settings.policy
        self.counts = Counter[str]()  # tokens of answers in text: as servers state them, as the tokenizer counts them
        self.workers: list[Worker] = []
        self.attempts: list[Row] = []
        self.events: list[Row] = []
        self._again: dict[tuple[int, str], Row] = {}  # queries sent again, by worker and reason
        self.on_send: Callable[[int, int, int], None] | None = None
        self._queue: deque[Job] = deque()
        self._gone = ""  # why everything fails
        self._none_since = math.inf
        self._loop = asyncio.new_event_loop()
        self._wire: Any = None
        self._tasks: list[asyncio.Task[Any]] = []  # that end with the dispatcher
        self._thread = threading.Thread(target=self._loop.run_forever, name="dispatcher", daemon=True)

    # From other threads

    def start(self) -> None:
        """Find the workers, wait until each is healthy, and send each a query to see how it answers.

        Raises ``BackendUnavailable`` for one that is not ready in time or gives no answer; with ``Policy.partial`` only where
        all are so.
        """
        self._thread.start()
        try:
            self._do(self._begin())
        except BaseException:
            self.stop()
            raise

    def _do(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def submit(self, query: Query) -> None:
        """Take a query; only notes it."""
        self._queue.append(Job(**vars(query)))
        self._loop.call_soon_threadsafe(self._pump)

    def counters(self) -> list[Row]:
        """Return the numbers of each worker's ``/metrics`` by name; empty where it has none."""
        return [self._do(self._wire.counters(worker.url, self.policy.probe_limit_s)) for worker in self.workers]

    def cpu_s(self) -> float:
        """Return the processor time of the dispatcher's thread so far."""
        assert self._thread.ident
        return time.clock_gettime(time.pthread_getcpuclockid(self._thread.ident))

    def record(self, began_s: float = 0.0) -> Row:
        """Return rows of the workers, of what was lost when, and of the requests in flight; in seconds from ``began_s``."""
        attempts = [row for row in self.attempts if row["sent_s"] >= began_s]
        record = {"workers": list[Row](), "inflight": in_flight(attempts, len(self.workers), began_s)}
        for worker, counters in zip(self.workers, self.counters(), strict=True):
            errors = [row["error"] for row in attempts if row["worker"] == worker.index]
            row = {"worker": worker.index, "url": worker.url, "sent": len(errors), "answered": errors.count("")}
            record["workers"].append(worker.row(counters) | row | {"down_by": "" if worker.ready else worker.reason})
        return record | {"losses": self.losses(began_s), "counts": self.counts}

    def losses(self, began_s: float) -> list[Row]:
        """Return rows of workers that were lost or came back, and of queries sent again; an event before ``began_s`` is at 0 s."""
        losses = [row | {"t_s": max(0.0, row["t_s"] - began_s)} for row in [*self.events, *self._again.values()]]
        return sorted(losses, key=lambda row: row["t_s"])

    def stop(self) -> None:
        """End the thread; what is left fails."""
        if self._loop.is_closed():
            return
        if self._thread.is_alive():
            self._do(self._end())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        self._loop.close()

    # In the loop

    async def _begin(self) -> None:
        self._wire = Wire(self.settings)
        urls = dict.fromkeys([url for name in self.settings.urls for url in await addresses(name)])
        self.workers = [Worker(url, index) for index, url in enumerate(urls)]
        self._tasks = [self._loop.create_task(self._await(worker)) for worker in self.workers]
        await asyncio.gather(*self._tasks)
        if not any(worker.ready for worker in self.workers):
            raise BackendUnavailable(f"no worker is left: {self.workers[0].reason}")
        self._tasks = [self._loop.create_task(self._watch(worker)) for worker in self.workers]
        self._tasks.append(self._loop.create_task(self._keep_time()))

    async def _await(self, worker: Worker) -> None:
        """Wait until a worker is healthy, and see how it answers; one that does neither is down, with ``Policy.partial``."""
        policy, end = self.policy, time.monotonic() + self.policy.start_s
        try:
            while reason := await self._wire.health(worker.url, policy.probe_limit_s):
                if time.monotonic() > end:
                    late = f"was not ready within {policy.start_s:g} s ({reason})"
                    raise BackendUnavailable(f"worker {worker.url} {late}: start it, or correct workers=")
                await asyncio.sleep(min(policy.probe_s, 0.05))
            await self._wire.meet(worker, policy.stall_s)
            worker.ready = True
        except BackendUnavailable as error:
            if not policy.partial:
                raise
            self._mark(worker, "down", str(error))

    async def _end(self) -> None:
        self._gone = STOPPED
        self._pump()  # before slots get free for what is queued
        tasks = [*self._tasks, *(query.task for worker in self.workers for query in worker.open.values() if query.task)]
        for task in tasks:
            task.cancel(STOPPED)
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._wire:
            await self._wire.close()

    def _pump(self) -> None:
        """Send what is queued as long as a worker has room for it; let fail what has no time or no worker left."""
        while self._queue:
            now, query = time.monotonic(), self._queue[0]
            if self._gone or now > query.deadline:
                self._queue.popleft()
                why = self._gone or f"not answered within {self.policy.deadline_s:g} s"
                query.on_done(query.rid, [], why + f"; before: {query.last_error}" * bool(query.last_error))
                continue
            if not (worker := self._choose(query)):
                return
            self._send(worker, self._queue.popleft(), now)

    def _choose(self, query: Job) -> Worker | None:
        ready = [worker for worker in self.workers if worker.ready]
        ready = [worker for worker in ready if worker.index not in query.lost_at] or ready
        room = [worker for worker in ready if len(worker.open) < self.policy.cap]
        if not room:  # as most often
            return None
        speeds = {worker.index: worker.tokens / worker.busy_s for worker in ready if worker.tokens}
        usual = sum(speeds.values()) / len(speeds) if speeds else 1.0

        def end_s(worker: Worker) -> float:
            return (worker.work + query.max_new) / speeds.get(worker.index, usual)

        chosen = min(room, key=end_s)
        # One of the last queries waits for a worker that is full, where it ends sooner there than with who has room.
        waits = chosen.open and len(self._queue) <= self.policy.cap and end_s(chosen) > min(map(end_s, ready))
        return None if waits else chosen

    def _send(self, worker: Worker, query: Job, now: float) -> None:
        query.attempt += 1
        query.deadline = min(query.deadline, now + self.policy.deadline_s)
        if self.on_send:
            self.on_send(query.rid, worker.index, query.attempt)
        query.content, query.came, query.moved = None, 0, now
        query.task = self._loop.create_task(self._wire.complete(worker, query))
        # However the task ends, also before its first step, this is called.
        query.task.add_done_callback(lambda task: self._ended(worker, query, now, task))
        worker.since = worker.since if worker.open else now
        worker.open[query.rid] = query
        worker.work += query.max_new

    def _ended(self, worker: Worker, query: Job, sent: float, task: "asyncio.Task[Answer]") -> None:
        """Complete a query whose attempt has ended, queue it again or let it fail."""
        now, ids, why, error, blamed = time.monotonic(), list[int](), "", "", False
        try:
            answer = task.result()
            ids = answer.ids
            if worker.text and answer.stated:
                self.counts.update(stated=answer.stated, counted=len(ids))
        except (Exception, asyncio.CancelledError) as reason:
            why = self._wire.reason(reason, self.policy.stall_s)
            error, blamed = f"{worker.url}: {why}", now <= query.deadline and not isinstance(reason, RefusedQuery)
        if blamed and worker.ready:
            self._mark(worker, "down", error)
        del worker.open[query.rid]
        worker.work -= query.max_new
        worker.tokens, worker.busy_s, worker.since = worker.tokens + len(ids), worker.busy_s + now - worker.since, now
        self.attempts.append({"worker": worker.index, "sent_s": sent, "ended_s": now, "error": error})
        if blamed and query.attempt < MAX_ATTEMPTS and not self._gone:
            query.last_error = error
            query.lost_at.add(worker.index)
            self._queue.appendleft(query)
            self._again.setdefault((worker.index, why), _loss(worker, "requeued", why, 0))["times"] += 1
        else:
            query.on_done(query.rid, ids, error and f"{self._gone or error} (attempt {query.attempt})")
        self._pump()

    # Workers that are lost, and come back

    def _mark(self, worker: Worker, event: str, why: str) -> None:
        """Send queries to a worker that is up, and nothing more to one that is down until it is healthy again."""
        worker.ready, worker.reason = event == "up", why
        self.events.append(_loss(worker, event, why))

    async def _watch(self, worker: Worker) -> None:
        """Ask for a worker's health; lose it after two questions without an answer, take it (back) when it answers."""
        policy, missed = self.policy, 0
        while True:
            await asyncio.sleep(policy.probe_s)
            asked = time.monotonic()
            if reason := await self._wire.health(worker.url, policy.probe_limit_s):
                # One that streams is busy, not dead.
                missed += not any(query.came and query.moved > asked for query in worker.open.values())
                if missed >= 2 and worker.ready:
                    self._mark(worker, "down", reason)
                    for query in worker.open.values():  # it hangs: their connections may never break
                        query.task.cancel(reason)  # type: ignore[union-attr]
                continue
            missed = 0
            if not worker.ready:
                try:
                    await self._wire.meet(worker, policy.stall_s)
                except BackendUnavailable as error:
                    worker.reason = str(error)
                    continue
                self._mark(worker, "up", "its /health answers")
                self._none_since, self._gone = math.inf, ""
                self._pump()

    async def _keep_time(self) -> None:
        """End queries that stand still or have no time left; let everything fail when no worker was ready for ``gone_s``.

        A timer for each query would be set again for each of its bytes, which takes as long as to read them.
        """
        policy = self.policy
        while True:
            await asyncio.sleep(min(0.1, policy.gone_s / 4))
            now = time.monotonic()
            for query in [query for worker in self.workers for query in worker.open.values()]:
                came = query.content.total_bytes if query.content else 0
                if came != query.came:
                    query.came, query.moved = came, now
                assert query.task
                if now > query.deadline:
                    query.task.cancel(f"not answered within {policy.deadline_s:g} s")
                elif now - query.moved > policy.stall_s:
                    query.task.cancel(f"nothing came for {policy.stall_s:g} s")
            self._none_since = math.inf if any(worker.ready for worker in self.workers) else min(self._none_since, now)
            if now - self._none_since >= policy.gone_s and not self._gone:
                reasons = "; ".join(f"{worker.url}: {worker.reason}" for worker in self.workers)
                self._gone = f"no worker was left for {policy.gone_s:g} s ({reasons})"
            self._pump()


def _loss(worker: Worker, event: str, why: str, times: int = 1) -> Row:
    return {"t_s": time.monotonic(), "worker": worker.index, "event": event, "because": why, "times": times}


def in_flight(attempts: Sequence[Row], workers: int, began_s: float = 0.0, points: int = POINTS) -> list[Row]:
    """Return how many requests each worker had at equal distances in time, from ``began_s`` to the end of the last."""
    if not attempts:
        return []
    sent, ended, of = (np.array([row[name] for row in attempts]) for name in ("sent_s", "ended_s", "worker"))
    moments = np.linspace(began_s, ended.max(), points)[:, None]
    is_open = (sent <= moments) & (moments < ended)
    return [{"worker": worker, "open": is_open[:, of == worker].sum(1).tolist()} for worker in range(workers)]
